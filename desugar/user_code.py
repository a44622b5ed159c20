"""Lines of the user's code: which files are the user's, and the line that runs at the moment."""

from __future__ import annotations

import linecache
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optree
import torch
from torch import fx

_STDLIB = os.path.join(sysconfig.get_path("stdlib"), "")
_PACKAGES = [Path(__file__).resolve().parents[1] / name for name in ("desugar", "subclasses")]
_PACKAGES += [Path(module.__file__).resolve().parent for module in (torch, optree)]  # type: ignore[arg-type]
_LIBRARIES = ("<", *(f"{folder}{os.sep}" for folder in _PACKAGES))
_TYPED_IN = ("<stdin>", "<python-input", "<ipython-input", "<doctest", "<console>")

_GRAPH_LINE = re.compile(r"^\s*(?:\w+\[.*\] = .*;\s+)?(\w+)(?: : [^=]+)? = ")  # x[0] = 1;  setitem = x
_TRACE_LINE = re.compile(r'File "(.+)", line (\d+), in (\S+)')


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the user's code: the file, the number, the function around it and that function's first line."""

    filename: str
    number: int
    function: str = ""
    first: int = 0

    @property
    def text(self) -> str:
        """The line itself."""
        return linecache.getline(self.filename, self.number).strip()

    def __str__(self) -> str:
        return f"{self.filename}:{self.number}: {self.text}".rstrip(": ")


def is_library_file(filename: str) -> bool:
    """Whether a stack frame's file is torch, optree, the standard library or this project."""
    return (
        filename.startswith(_LIBRARIES)
        or (filename.startswith(_STDLIB) and "site-packages" not in filename)
        or os.path.realpath(filename).startswith(_LIBRARIES)
    )


def is_users_file(filename: str) -> bool:
    """Whether a stack frame's file is the user's, or was typed in by the user."""
    return filename.startswith(_TYPED_IN) or not is_library_file(filename)


def find_line() -> Line | None:
    """The innermost line on the stack that is the user's; of a graph of Dynamo's, the line that it was made from."""
    return _innermost(_frames(sys._getframe(1)))


def find_line_of(error: BaseException) -> Line | None:
    """The innermost line of the user's in which an error was raised."""
    traceback, raised = error.__traceback__, []
    while traceback is not None:
        raised.append((traceback.tb_frame, traceback.tb_lineno))
        traceback = traceback.tb_next
    outside = _frames(raised[0][0].f_back) if raised else iter(())
    return _innermost(iter(raised[::-1])) or _innermost(outside)


def stack_of_node(node: fx.Node) -> list[Line]:
    """The lines that a node of Dynamo's graph was made from, outermost first."""
    found = _TRACE_LINE.findall(node.stack_trace or "")
    return [Line(file, int(number), function) for file, number, function in found]


def line_of_node(node: fx.Node) -> Line | None:
    """The innermost of those lines that is the user's."""
    return next((line for line in reversed(stack_of_node(node)) if is_users_file(line.filename)), None)


def _frames(frame: Any) -> Iterator[tuple[Any, int]]:
    while frame is not None:
        yield frame, frame.f_lineno
        frame = frame.f_back


def _innermost(frames: Iterator[tuple[Any, int]]) -> Line | None:
    for frame, number in frames:
        code = frame.f_code
        if (
            code.co_filename.startswith("<eval_with_key>")
            and (line := _line_of_graph(frame, number)) is not None
        ):
            return line
        if is_users_file(code.co_filename):
            return Line(code.co_filename, number, code.co_qualname, code.co_firstlineno)
    return None


def _line_of_graph(frame: Any, number: int) -> Line | None:
    """What the node that a frame of a graph's code is at says of its origin."""
    graph = frame.f_locals.get("self")
    found = _GRAPH_LINE.match(linecache.getline(frame.f_code.co_filename, number))
    if found is None or not isinstance(graph, fx.GraphModule):
        return None
    node = next((node for node in graph.graph.nodes if node.name == found[1]), None)
    return None if node is None else line_of_node(node)
