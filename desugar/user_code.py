"""Finds lines of the user's code: separates the user's files from library files, and finds the running line."""

from __future__ import annotations

import functools
import importlib.util
import linecache
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import fx

_TYPED_IN = ("<stdin>", "<python-input", "<ipython-input", "<doctest", "<console>")

_GRAPH_LINE = re.compile(r"^\s*(?:\w+\[.*\] = .*;\s+)?(\w+)(?: : [^=]+)? = ")  # x[0] = 1;  setitem = x
_TRACE_LINE = re.compile(r'File "(.+)", line (\d+), in (\S+)')
_RESUMED = re.compile(r"^torch_dynamo_resume_in_(\w+?)_at_\d+$")  # the rest of a function after a graph break


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the user's code.

    Attributes:
        filename: The file.
        number: The line number.
        function: The qualified name of the function around the line; empty if unknown.
        first: The first line of that function; 0 if unknown.
    """

    filename: str
    number: int
    function: str = ""
    first: int = 0

    @property
    def text(self) -> str:
        """The source text of the line."""
        return linecache.getline(self.filename, self.number).strip()

    def __str__(self) -> str:
        return f"{self.filename}:{self.number}: {self.text}".rstrip(": ")


def is_library_file(filename: str) -> bool:
    """Returns whether a stack frame's file belongs to torch, optree, the standard library or this project."""
    libraries, standard_library = _library_folders()
    return (
        filename.startswith(libraries)
        or (filename.startswith(standard_library) and "site-packages" not in filename)
        or os.path.realpath(filename).startswith(libraries)
    )


@functools.cache
def _library_folders() -> tuple[tuple[str, ...], str]:
    """Returns the path prefixes of torch, optree and this project, and the path prefix of the standard library."""
    folders = [Path(__file__).resolve().parents[1] / name for name in ("desugar", "subclasses")]
    specs = [importlib.util.find_spec(name) for name in ("torch", "optree")]
    folders += [Path(spec.origin).resolve().parent for spec in specs if spec is not None and spec.origin]
    return ("<", *(f"{folder}{os.sep}" for folder in folders)), os.path.join(sysconfig.get_path("stdlib"), "")


def is_users_file(filename: str) -> bool:
    """Returns whether a stack frame's file is the user's, or the frame runs code that the user typed in."""
    return filename.startswith(_TYPED_IN) or not is_library_file(filename)


def find_line() -> Line | None:
    """Returns the innermost line of the user's code on the stack; None if there is none.

    For the frame of a Dynamo graph, it is the line that the running node was captured from.
    """
    return _innermost(traceback.walk_stack(sys._getframe(1)))


def find_line_of(error: BaseException) -> Line | None:
    """Returns the innermost line of the user's code in an error's traceback, else among the frames that called it."""
    raised = [*traceback.walk_tb(error.__traceback__)]
    caller = raised[0][0].f_back if raised else None
    return _innermost(raised[::-1]) or (_innermost(traceback.walk_stack(caller)) if caller else None)


def stack_of_node(node: fx.Node) -> list[Line]:
    """Returns the lines of the stack that a node of a Dynamo graph was captured from, outermost first."""
    matches = _TRACE_LINE.findall(node.stack_trace or "")
    return [Line(file, int(number), _RESUMED.sub(r"\1", function)) for file, number, function in matches]


def line_of_node(node: fx.Node) -> Line | None:
    """Returns the innermost line of the user's code that a node of a Dynamo graph was captured from."""
    return next((line for line in reversed(stack_of_node(node)) if is_users_file(line.filename)), None)


def _innermost(frames: Iterable[tuple[Any, int]]) -> Line | None:
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
    """Returns the user's line that the running node of a graph was captured from, for a frame of the graph's code."""
    graph = frame.f_locals.get("self")
    match = _GRAPH_LINE.match(linecache.getline(frame.f_code.co_filename, number))
    if match is None or not isinstance(graph, fx.GraphModule):
        return None
    node = next((node for node in graph.graph.nodes if node.name == match[1]), None)
    return None if node is None else line_of_node(node)
