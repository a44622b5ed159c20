"""Where the generated wrappers claim to live, and what becomes of the text of graphs."""

from __future__ import annotations

import linecache
import os
import weakref
from collections.abc import Iterable

import torch

from desugar import _torch as private

# Below a directory of torch's, so that Dynamo does not trace a wrapper; the file need not exist.
WRAPPER_FILE = os.path.join(os.path.dirname(torch.__file__), "_dynamo", "desugar_wrapper.py")


def graph_texts() -> set[str]:
    """The file names under which torch.fx has put the text of graphs into linecache, where it stays for ever."""
    return {name for name in list(linecache.cache) if name.startswith("<eval_with_key>")}


def forget_texts(names: Iterable[str]) -> None:
    """Drops the text of graphs."""
    for name in names:
        linecache.cache.pop(name, None)
        private.graph_text_loader.eval_cache.pop(name, None)


def forget_with(owner: object, names: Iterable[str]) -> None:
    """Drops the text of graphs when their owner is collected."""
    weakref.finalize(owner, forget_texts, tuple(names)).atexit = False
