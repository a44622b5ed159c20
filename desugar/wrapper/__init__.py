"""Builds the runtime wrapper around compiled graphs: the call, the autograd function and the backwards."""
