"""Desugar: compiles functions over tensor subclasses down to plain tensors."""

from desugar.errors import DesugarError
from desugar.pipeline import compile, trace
from desugar.program import Program

__all__ = ["DesugarError", "Program", "compile", "trace"]
