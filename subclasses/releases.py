"""``lacking()``: the error for a name of PyTorch that this project uses and the installed release does not have."""

from __future__ import annotations

from types import ModuleType

import torch

RELEASES = "2.13, 2.14 and 2.15"  # on which the tests pass


def lacking(error: AttributeError | ImportError) -> ImportError | None:
    """Returns an error that names the release, if an error is about a name that PyTorch lacks; else None."""
    if isinstance(error, ImportError):
        owner = error.name or ""
    elif isinstance(error.obj, ModuleType):
        owner = error.obj.__name__
    else:
        kind = error.obj if isinstance(error.obj, type) else type(error.obj)
        owner = kind.__module__
    if owner.partition(".")[0] != torch.__name__:
        return None
    return ImportError(
        f"PyTorch {torch.__version__} lacks a name that subclasses and desugar use: {error}. They are for PyTorch "
        f"{RELEASES}: install one of these, or a newer release of torch-desugar"
    )
