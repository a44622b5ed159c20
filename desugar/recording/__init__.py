"""Records compilations for logs, `explain`, and PyTorch's own tools."""
