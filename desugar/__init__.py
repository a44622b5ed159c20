"""Desugar: compiles functions over tensor subclasses down to plain tensors."""

from desugar.api import compile, trace
from desugar.errors import DesugarError
from desugar.explain import Explanation, explain  # the function shadows the subpackage of that name
from desugar.program import Program
from subclasses import __version__ as __version__

__all__ = ["DesugarError", "Explanation", "Program", "compile", "explain", "trace"]
