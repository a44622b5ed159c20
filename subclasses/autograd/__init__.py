"""Differentiable construction, and rules that run above autograd."""
