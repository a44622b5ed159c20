"""Compilers of plain graphs: Inductor, graphs that run as they are, the user's own."""
