"""The file name of runtime wrappers, and the removal of the source text of graphs."""

from __future__ import annotations

import linecache
import os
import weakref
from collections.abc import Iterable

import torch

from desugar import _torch as torch_private

# In a directory of torch that Dynamo skips, so that Dynamo does not trace a runtime wrapper. The file need not exist.
WRAPPER_FILE = os.path.join(os.path.dirname(torch.__file__), "_dynamo", "desugar_wrapper.py")


def graph_texts() -> set[str]:
    """Returns the file names of the graph sources that torch.fx has put into linecache; torch.fx never removes them."""
    return {name for name in list(linecache.cache) if name.startswith("<eval_with_key>")}


def forget_texts(names: Iterable[str]) -> None:
    """Removes the source text of graphs from linecache and torch.fx."""
    for name in names:
        linecache.cache.pop(name, None)
        torch_private.graph_text_loader.eval_cache.pop(name, None)


def forget_with(owner: object, names: Iterable[str]) -> None:
    """Removes the source text of graphs when their owner is garbage collected."""
    weakref.finalize(owner, forget_texts, tuple(names)).atexit = False
