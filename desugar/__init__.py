"""Desugar: compiles functions over tensor subclasses down to plain tensors."""

from typing import TYPE_CHECKING, Any

from desugar._torch import announce_backend
from desugar.errors import DesugarError, PackageError, SignatureError
from desugar.explain import Explanation, explain  # the function shadows the subpackage of that name
from desugar.store import files as _  # noqa: F401 - registers its files with PyTorch, for `load_cache_artifacts`
from subclasses import __version__ as __version__

if TYPE_CHECKING:
    from desugar.api import compile, trace
    from desugar.cuda_graphs import record
    from desugar.packages.load import Package, load
    from desugar.packages.save import save
    from desugar.packages.saving.capture import call
    from desugar.program import Program

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
    "record",
    "save",
    "trace",
]

# Each of these modules is imported when one of its names is first used. A process that runs a package needs no
# compiler, and a process that compiles needs no packages.
_LAZY = {
    "compile": "api",
    "trace": "api",
    "Program": "program",
    "record": "cuda_graphs",
    "call": "packages.saving.capture",
    "save": "packages.save",
    "load": "packages.load",
    "Package": "packages.load",
}


announce_backend("desugar", "desugar.dynamo.backend:dynamo_backend")


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"desugar.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
