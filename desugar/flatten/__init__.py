"""Flattens the arguments of a captured graph into plain tensors, and makes fake tensors of them."""
