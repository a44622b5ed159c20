"""The commands of `python -m desugar`."""
