"""Calls that a script compiled, made again after it has ended, for reports: eager, stock and here."""
