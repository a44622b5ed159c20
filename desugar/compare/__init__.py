"""Runs one function in several ways and compares them: `python -m desugar compare`."""
