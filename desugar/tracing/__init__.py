"""Traces a graph over tensor subclasses into one graph over plain tensors."""
