"""Describes graphs as self-contained Python functions, the outer ops, and the user's functions."""

from __future__ import annotations

import inspect
import linecache
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, fx

from desugar.explain.records import Graph, Node, OuterOp, Source, SourceLine
from desugar.recording.listeners import Op
from desugar.recording.ops import BACKWARD, OP
from desugar.user_code import Line
from subclasses._torch import OpOverload

# ----------------------------------------------------------------------------------------------------- graphs

_INSTALLED = (
    f"{Path(__file__).resolve().parents[2]}{os.sep}"  # files of this project's rules are named relative to it
)
_HEADER = ["import torch", "from torch import device, inf, nan", "", ""]
_FREED = re.compile(r";\s+\w+(?: = \w+)* = None$")
_INSIDE = re.compile(r"^    (\w+) = self\.\1(?:;.*)?$")
_NAMELESS = re.compile(
    r": _(?= \()|\.<locals>\._(?= \()|(?<=: )_(?=\w)"
)  # a rule named `_`; the underscore of a name
_TARGET = re.compile(r"^    (\w+)(?:\s*:\s*[^=]+)? = ")


def describe_graph(name: str, module: fx.GraphModule, arguments: Sequence[str]) -> Graph:
    """Describes a graph: its text, and the line and the outer op of each node.

    Args:
        name: The name of the graph.
        module: The graph.
        arguments: The user's name of each argument.
    """
    lines = [*_HEADER, *_function(name, module, arguments)]
    at = {match[1]: n for n, line in enumerate(lines) if (match := _TARGET.match(line))}
    nodes = [node for node in module.graph.nodes if node.name in at]
    for node in nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            lines[at[node.name]] += f"  # {tensor_text(value)}"
    return Graph(
        name,
        "\n".join(lines) + "\n",
        tuple(Node(node.name, _shown(node), at[node.name], node.meta.get(OP)) for node in nodes),
        tuple(name for name, value in _attributes(module).items() if not isinstance(value, fx.GraphModule)),
    )


def _attributes(module: fx.GraphModule) -> dict[str, Any]:
    names = [str(node.target) for node in module.graph.find_nodes(op="get_attr")]
    return {name: getattr(module, name) for name in names}


def _function(name: str, module: fx.GraphModule, arguments: Sequence[str] = ()) -> Iterator[str]:
    """Yields the lines of a graph as a function; the graphs that higher-order ops call are nested functions.

    With `arguments`, each parameter is on a line with the user's name of it.
    """
    inside = _attributes(module)
    takes_self = not all(isinstance(attribute, fx.GraphModule) for attribute in inside.values())
    parameters = [str(node.target) for node in module.graph.find_nodes(op="placeholder")]
    if parameters and arguments:
        named = zip(parameters, arguments, strict=False)
        own = [f"    {parameter},  # {argument}" for parameter, argument in named]
        yield from [f"def {name}(", *["    self,"] * takes_self, *own, "):"]
    else:
        yield f"def {name}({', '.join(['self'] * takes_self + parameters)}):"
    for line in module.code.strip("\n").splitlines():
        if not line.strip() or line.startswith(("import ", "from ", "def forward(")):
            continue
        match = _INSIDE.match(line)
        if match is not None and isinstance(inside.get(match[1]), fx.GraphModule):
            yield from (f"    {nested}" for nested in _function(match[1], inside[match[1]]))
        else:
            yield _FREED.sub("", line)


def tensor_text(value: Tensor) -> str:
    """Returns a tensor's dtype and size, as `float32[2, 3]`."""
    return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.size()))}]"


def _shown(node: fx.Node) -> str:
    if node.op == "call_function" and isinstance(node.target, OpOverload):
        return str(node.target)
    return getattr(node.target, "__name__", str(node.target))


# ---------------------------------------------------------------------------------------------------- the ops


def describe_ops(ops: Sequence[Op], joint: fx.GraphModule) -> tuple[OuterOp, ...]:
    """Returns the ops that the function ran, each with its plain ops; drops ops without plain ops or ops inside."""
    plain: dict[tuple[int, bool], list[str]] = {}
    for node in joint.graph.nodes:
        if OP in node.meta and node.op == "call_function":
            plain.setdefault((node.meta[OP], node.meta[BACKWARD]), []).append(_shown(node))
    parents = {op.parent for op in ops}
    return tuple(
        OuterOp(
            op.number,
            op.name.removesuffix(".__get__"),
            "inside" if not op.how else kind_of(op.how),
            _NAMELESS.sub("", op.how.replace(_INSTALLED, "")),
            op.operands,
            describe_place(op.line),
            op.parent,
            tuple(plain.get((op.number, False), ())),
            tuple(plain.get((op.number, True), ())),
        )
        for op in ops
        if (op.number, False) in plain or (op.number, True) in plain or op.number in parents
    )


def kind_of(how: str) -> str:
    """Returns the kind of an op from the description of how it ran."""
    word = how.split()[0]
    return "class" if word == "__torch_dispatch__" else "rule" if word == "two" else word


def describe_place(line: Line | None) -> SourceLine | None:
    """Returns a line with its text."""
    if line is None:
        return None
    return SourceLine(line.filename, line.number, linecache.getline(line.filename, line.number).strip())


# ------------------------------------------------------------------------------------------------ the sources


def describe_sources(lines: Iterable[Line | None]) -> tuple[Source, ...]:
    """Returns the user's functions that contain the lines."""
    spans: dict[tuple[str, str, int], int] = {}
    for line in lines:
        if line is not None:
            every = linecache.getlines(line.filename)  # two methods of one name in a file are two functions
            first = line.first or _definition(every, line.function, line.number)
            key = (line.filename, line.function, first)
            spans[key] = max(spans.get(key, 0), line.number)
    return tuple(_source(*key, last) for key, last in spans.items())


def _source(filename: str, function: str, first: int, last: int) -> Source:
    """Returns a function's text; for a module, lambda or comprehension, the lines up to the last that ran."""
    every, end = linecache.getlines(filename), last
    if function.endswith(">"):
        first = max(first, last - 20)
    else:
        end = max(last, first - 1 + len(inspect.getblock(every[first - 1 :])))
    return Source(filename, function, first, tuple(line.rstrip("\n") for line in every[first - 1 : end]))


def _definition(lines: list[str], function: str, last: int) -> int:
    """Returns the nearest line up to `last` that defines a function of that name; `last` for a lambda and the like."""
    head = re.compile(rf"\s*(?:async )?def {re.escape(function.rpartition('.')[2])}\b")
    return next((n for n in range(min(last, len(lines)), 0, -1) if head.match(lines[n - 1])), last)
