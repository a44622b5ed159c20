"""Builds the runtime wrapper around compiled graphs: the call and the autograd function."""
