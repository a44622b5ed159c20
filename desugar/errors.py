"""The one error of the pass, and how it names the user's line."""

from __future__ import annotations

import os
import sysconfig
import traceback
from pathlib import Path

import optree
import torch

_STDLIB = os.path.join(sysconfig.get_path("stdlib"), "")
_PACKAGES = [Path(__file__).resolve().parents[1] / name for name in ("desugar", "subclasses")]
_PACKAGES += [Path(module.__file__).resolve().parent for module in (torch, optree)]  # type: ignore[arg-type]
_LIBRARIES = ("<", *(f"{folder}{os.sep}" for folder in _PACKAGES))


class DesugarError(RuntimeError):
    """A function cannot be desugared as it stands.

    The message says what was met, where in the user's code (`where`, else the innermost line on the stack that
    is the user's), and what to do instead. Arguments are untouched when it is raised.

    Attributes:
        what, where, instead: The parts of the message.
        late: What a whole run showed ("container", "metadata", "backward", "grad mode", "result"), so that no line is
            known yet.
        stock_is_wrong: PyTorch's own AOTAutograd gives a wrong result here, so it is no way out.
    """

    def __init__(
        self,
        what: str,
        *,
        instead: str,
        where: str | None = None,
        stock_is_wrong: bool = False,
        late: str | None = None,
    ) -> None:
        self.what, self.instead, self.stock_is_wrong, self.late = what, instead, stock_is_wrong, late
        super().__init__()
        self.move(where or user_line())

    def move(self, where: str | None) -> None:
        """Names another line of the user's."""
        self.where = where
        place = f"\n  where: {where}" if where else ""
        self.args = (f"{self.what}{place}\n  instead: {self.instead}",)


class StateKept(DesugarError):
    """The function keeps a tensor that it computes for later calls."""


def user_line(stack: traceback.StackSummary | None = None) -> str | None:
    """The innermost stack line that belongs neither to this project nor to torch, as `file:line: code`."""
    frames = stack if stack is not None else traceback.extract_stack()
    for frame in reversed(frames):
        if not is_library_file(frame.filename):
            return f"{frame.filename}:{frame.lineno}: {frame.line or ''}".rstrip(": ")
    return None


def is_library_file(filename: str) -> bool:
    """Whether a stack frame's file is torch, optree, the standard library or this project."""
    return (
        filename.startswith(_LIBRARIES)
        or (filename.startswith(_STDLIB) and "site-packages" not in filename)
        or os.path.realpath(filename).startswith(_LIBRARIES)
    )
