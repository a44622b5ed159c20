"""The callable around the compiled graphs: the call, the autograd function, the backwards."""
