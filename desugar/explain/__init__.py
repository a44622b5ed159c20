"""Explains compilations: collects records, and shows them in a terminal, as a page, or as data for tools."""

from desugar.explain.api import Explanation, explain

__all__ = ["Explanation", "explain"]
