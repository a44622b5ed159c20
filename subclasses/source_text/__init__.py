"""Generated source text, and the functions compiled from it."""
