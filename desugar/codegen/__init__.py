"""Emits the text of runtime wrappers, and defines the functions that this text calls."""
