"""What is recorded during a compilation, for logs, `explain`, and PyTorch's own tools."""
