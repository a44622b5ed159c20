"""Text of the generated wrappers, and the functions that this text calls."""
