"""From a graph over tensor subclasses to one graph over plain tensors."""
