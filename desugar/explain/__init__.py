"""What a compilation did: collected as records, shown in a terminal, as a page, or as data for tools."""

from desugar.explain.api import Explanation, explain

__all__ = ["Explanation", "explain"]
