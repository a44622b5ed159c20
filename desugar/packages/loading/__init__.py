"""Loads packages: generates wrappers from records, reads weights, and checks arguments."""
