"""Desugar: compiles functions over tensor subclasses down to plain tensors."""

from typing import TYPE_CHECKING, Any

from desugar.api import compile, trace
from desugar.errors import DesugarError, PackageError, SignatureError
from desugar.explain import Explanation, explain  # the function shadows the subpackage of that name
from desugar.program import Program
from subclasses import __version__ as __version__

if TYPE_CHECKING:
    from desugar.packages.capture import call
    from desugar.packages.load import Package, load
    from desugar.packages.save import save

__all__ = [
    "DesugarError",
    "Explanation",
    "Package",
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

# What packages need is imported when it is first used: their records take as long to import as all the rest.
_LAZY = {"call": "capture", "save": "save", "load": "load", "Package": "load"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"desugar.packages.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
