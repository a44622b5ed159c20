"""Differentiable construction and unwrapping, and rules that run above autograd."""
