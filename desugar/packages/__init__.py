"""Packages: files of compiled programs that run without the model's source and without a compiler."""
