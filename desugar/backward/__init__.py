"""The backwards of a program: the values that its forward saves, and a variant for each set of arriving gradients."""
