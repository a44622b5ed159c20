"""The backwards of a program: what its forward saves, one variant for each set of gradients that arrive."""
