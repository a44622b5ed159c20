"""The user's line at which something came about that only the end of a run shows.

A container that has changed, an input of another size, a backward that was run: each is found when the function has
returned. Then it is run once more, on the same fakes, and watched line by line.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import linecache
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import optree
import torch
from torch import Tensor, nn

from desugar import _torch as private
from desugar.errors import DesugarError, is_library_file
from desugar.runs import identity
from desugar.trees import flatten
from desugar.values import inner_names, is_wrapper


class Faults:
    """Looks for the line of an error while the function runs again.

    Attributes:
        fn: The user's function.
    """

    def __init__(self, fn: Any) -> None:
        self.fn = fn
        self._error: DesugarError | None = None
        self._found: str | None = None

    def locate(self, error: Exception, run: Callable[[], object]) -> None:
        """Gives an error of the end of a run the line that is to blame, if another run shows it."""
        if not isinstance(error, DesugarError) or error.late is None:
            return
        self._error = error
        try:
            run()
        except Exception:  # noqa: BLE001 - the run fails as before, or elsewhere; the error is there already
            pass
        finally:
            self._error = None
        if found := self._found or definition(self.fn):
            error.move(found)

    @contextlib.contextmanager
    def watching(self, call: Any, leaves: list[Any], treespec: optree.PyTreeSpec) -> Iterator[None]:
        """For the time that the function runs; nothing unless a line is looked for."""
        if self._error is None or sys.gettrace() is not None:  # a debugger goes first
            yield
            return
        watch = _Watch(_sign_of(self._error.late, call, leaves, treespec))
        with _without_collections():
            sys.settrace(watch.enter)
            try:
                yield
            finally:
                sys.settrace(None)
                self._found = watch.blamed


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Keeps the garbage collector from running: what it calls, at any line, is no part of the function."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# ---------------------------------------------------------------------------------------------------- signs


def _sign_of(
    late: str | None, call: Any, leaves: list[Any], treespec: optree.PyTreeSpec
) -> Callable[[], object]:
    """What becomes true at the line that is to blame; of a result that is what returns it."""
    match late:
        case "container":
            return lambda: _has_changed(call, leaves, treespec)
        case "backward":
            return lambda: any(leaf.is_leaf and leaf.grad is not None for leaf in _tensors(leaves))
        case "metadata":
            before = [_metadata(leaf) for leaf in _tensors(leaves)]
            return lambda: [_metadata(leaf) for leaf in _tensors(leaves)] != before
        case "grad mode":
            mode = torch.is_grad_enabled()
            return lambda: torch.is_grad_enabled() is not mode
    return lambda: False


def _has_changed(call: Any, leaves: list[Any], treespec: optree.PyTreeSpec) -> bool:
    found, structure = flatten(call)
    return structure != treespec or any(new is not old for new, old in zip(found, leaves, strict=True))


def _tensors(leaves: list[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _metadata(leaf: Tensor) -> Any:
    names = inner_names(leaf)[0] if is_wrapper(leaf) else ()
    inner = [identity(getattr(leaf, name)) for name in names]
    return tuple(map(str, leaf.size())), tuple(map(str, leaf.stride())), leaf.requires_grad, inner


# ----------------------------------------------------------------------------------------------------- lines


class _Watch:
    """A trace function: which line of the user's was the last before the sign showed, and which returned."""

    def __init__(self, has_happened: Callable[[], object]) -> None:
        self.has_happened = has_happened
        self.last: tuple[str, int] | None = None
        self.changed: tuple[str, int] | None = None
        self.returned: tuple[str, int] | None = None

    @property
    def blamed(self) -> str | None:
        """The line, as errors name it."""
        found = self.changed or self.returned
        return None if found is None else _shown(*found)

    def enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Follows the user's own functions alone."""
        return None if _is_library(frame.f_code.co_filename) else self.follow

    def follow(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Looks for the sign after each line; a line that called a function is the last again when that returns."""
        if self.changed is None and self.last is not None:
            with private.DisableTorchFunction():
                self.changed = self.last if self.has_happened() else None
        here = frame.f_code.co_filename, frame.f_lineno
        if event == "line":
            self.last = here
        elif event == "return":
            self.returned, caller = here, frame.f_back
            if caller is not None and not _is_library(caller.f_code.co_filename):
                self.last = caller.f_code.co_filename, caller.f_lineno
        return self.follow


_is_library = functools.cache(is_library_file)  # asked at every call while lines are watched


def definition(fn: Any) -> str | None:
    """The line on which a function begins."""
    found = code_of(fn)
    return None if found is None or is_library_file(found[0]) else _shown(*found[:2])


def code_of(fn: Any) -> tuple[str, int, str] | None:
    """The file, first line and name of a function or of a module's forward, if it is written in Python."""
    code = getattr(inspect.unwrap(fn.forward if isinstance(fn, nn.Module) else fn), "__code__", None)
    return (
        None
        if code is None
        else (code.co_filename, code.co_firstlineno, getattr(code, "co_qualname", code.co_name))
    )


def _shown(file: str, line: int) -> str:
    return f"{file}:{line}: {linecache.getline(file, line).strip()}".rstrip(": ")
