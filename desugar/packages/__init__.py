"""Packages: compiled programs in a file, which runs where neither the model's source nor a compiler is."""
