"""The ways to run a function, and Dynamo's compilations for each."""

from __future__ import annotations

import contextlib
import logging.handlers
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from desugar.api import compile as desugar_compile
from desugar.compare.records import Programs
from desugar.dynamo.guard_failures import in_words
from desugar.recording.frames import Frames, unique, watch_frames
from subclasses import slow_paths

EAGER, STOCK, TUNED = "eager", "torch.compile", "stock, tuned"
BACKEND, DIRECT = 'backend="desugar"', "desugar.compile"
WAYS = (EAGER, STOCK, TUNED, BACKEND, DIRECT)
OURS = (BACKEND, DIRECT)


def stock_backend(backend: str) -> str:
    """Returns the backend of `torch.compile` with the same compiler; "aot_eager" for "eager"."""
    return "aot_eager" if backend == "eager" else backend


def tuned_settings(backend: str) -> dict[str, Any]:
    """Returns the options by which `torch.compile` trades compile time for speed: constant sizes, and tuned kernels.

    On a GPU, its mode records CUDA graphs. A compiler other than Inductor has no modes.
    """
    if backend != "inductor":
        return {"dynamic": False}
    graphs = "" if torch.cuda.is_available() else "-no-cudagraphs"
    return {"dynamic": False, "mode": f"max-autotune{graphs}"}


def compile_way(way: str, fn: Any, backend: str, **more: Any) -> Any:
    """Returns the function to call; nothing is compiled before it is called.

    Args:
        way: One of `WAYS`.
        fn: The function or module.
        backend: The compiler of graphs: "inductor" or "eager".
        **more: Options that `torch.compile` and `desugar.compile` share: `dynamic`, `mode`, `options`.
    """
    match way:
        case "eager":
            return fn
        case "torch.compile":
            return torch.compile(fn, backend=stock_backend(backend), **more)
        case "stock, tuned":
            return torch.compile(fn, backend=stock_backend(backend), **tuned_settings(backend))
        case 'backend="desugar"':
            compiler = {} if backend == "inductor" else {"backend": backend}
            options = {**(more.pop("options", None) or {}), **compiler} or None  # none beside a mode
            return torch.compile(fn, backend="desugar", options=options, **more)
        case _:
            return desugar_compile(fn, backend=backend, **more)


# -------------------------------------------------------------------------------------------- compiled programs


@contextlib.contextmanager
def watch_programs(what: Any = None) -> Iterator[Callable[[], Programs]]:
    """Yields a function that returns the compilations inside the context, also after the context ends.

    Args:
        what: The compiled function or module, whose parameters name the arguments.
    """
    handler, slow = logging.handlers.BufferingHandler(sys.maxsize), list[str]()
    handler.setLevel(logging.WARNING)
    log = logging.getLogger("desugar")  # with the warnings of the fallback
    log.addHandler(handler)
    slow_paths.watchers.append(slow.append)
    try:
        with watch_frames() as watch:
            yield lambda: _describe(watch.frames(), handler.buffer, slow, what)
    finally:
        slow_paths.watchers.remove(slow.append)
        log.removeHandler(handler)


def _describe(
    frames: Frames, warnings: Iterable[logging.LogRecord], slow: Iterable[str], what: Any
) -> Programs:
    messages = (record.getMessage().strip() for record in warnings)
    notes = unique([*frames.eager, *(text for text in messages if not text.startswith("slow: ")), *slow])
    recompiles = tuple(_recompile_in_words(text, what) for text in frames.recompiles)
    return Programs(frames.graphs, recompiles, frames.breaks, notes)


def _recompile_in_words(text: str, what: Any) -> str:
    """Returns Dynamo's text `function: guard` in the words of a report."""
    function, _, guard = text.partition(": ")
    if function == "call" and isinstance(
        what, nn.Module
    ):  # the function by which `desugar.compile` calls a module
        function = f"{type(what).__name__}.forward"
    return f"{function}: {in_words(guard, what)}"
