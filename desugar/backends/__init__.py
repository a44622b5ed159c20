"""Compilers of plain graphs: Inductor, eager execution, and the user's own backend."""
