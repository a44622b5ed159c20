"""Desugar: compiles functions over tensor subclasses down to plain tensors."""

from desugar.api import compile, trace
from desugar.errors import DesugarError, PackageError, SignatureError
from desugar.explain import Explanation, explain  # the function shadows the subpackage of that name
from desugar.packages.capture import call
from desugar.packages.load import load
from desugar.packages.save import save
from desugar.program import Program
from subclasses import __version__ as __version__

__all__ = [
    "DesugarError",
    "Explanation",
    "PackageError",
    "Program",
    "SignatureError",
    "call",
    "compile",
    "explain",
    "load",
    "save",
    "trace",
]
