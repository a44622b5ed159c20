"""Writes plain graphs as JSON data and reads them; `load(..., native=False)` compiles them on this machine.

A graph is a list of calls of PyTorch's own ops. :func:`read` looks up each op by its name in a closed set of
namespaces, and refuses ops that read files. PyTorch's own serializer (`torch.export.save`) is not used, since loading
its files evaluates the text of sizes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from desugar.errors import PackageError
from desugar.packages.manifest.codec import KIND, VALUE, Reader, Writer
from subclasses._torch import OpOverload

_NAMESPACES = ("aten", "prims", "subclasses", "desugar")
_REFUSED = frozenset({"from_file", "_test_functorch_fallback"})  # ops that read more than tensors

# Functions of numbers in a graph, by name.
_OPERATORS = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "neg", "pow", "eq", "ne", "lt", "le", "gt", "ge", "getitem",
)  # fmt: skip
_OF_TORCH = ("sym_max", "sym_min", "sym_not", "sym_int", "sym_float", "sym_ite")
_NUMBERS: Mapping[str, Callable[..., Any]] = {name: getattr(operator, name) for name in _OPERATORS} | {
    name: getattr(torch, name) for name in _OF_TORCH
}
_NAMES = {function: name for name, function in _NUMBERS.items()}

# ------------------------------------------------------------------------------------------------- writing


def write(graph: fx.GraphModule) -> Any:
    """Returns a graph as JSON data: the name of each node's op, its arguments and its keywords.

    Raises:
        PackageError: A node is not a call of an op that :func:`read` accepts, such as `cond` or a constant tensor.
    """
    writer, entries = _GraphWriter(), []
    for node in graph.graph.nodes:
        arguments = [] if node.op == "placeholder" else writer.write(node.args)
        keywords = {name: writer.write(argument) for name, argument in node.kwargs.items()}
        entries.append([_name_of(node), arguments, keywords])
        writer.numbers[node] = len(writer.numbers)
    return entries


class _GraphWriter(Writer):
    """Writes the arguments of nodes; an argument that is a node becomes its number.

    Attributes:
        numbers: The number of each node.
    """

    def __init__(self) -> None:
        super().__init__()
        self.numbers: dict[fx.Node, int] = {}

    def write(self, value: Any) -> Any:
        """Returns an argument as JSON data; its lists become tuples."""
        if isinstance(value, fx.Node):
            return {KIND: "node", VALUE: self.numbers[value]}
        return super().write(tuple(value) if isinstance(value, list) else value)


def _name_of(node: fx.Node) -> str:
    target: Any = node.target
    if node.op in ("placeholder", "output"):
        return node.op
    if node.op != "call_function":
        raise PackageError(f"a graph has the node {node.format_node()}")
    if target in _NAMES:
        return f"python.{_NAMES[target]}"
    if not isinstance(target, OpOverload) or _find_op(str(target)) is not target:
        raise PackageError(f"a graph has the op {target}")
    return str(target)


# ------------------------------------------------------------------------------------------------- reading


def read(data: Any, inputs: list[Any]) -> fx.GraphModule:
    """Builds a graph from JSON data; the metadata of each node holds its value on the fake inputs.

    Args:
        data: The graph.
        inputs: Fake tensors and symbolic ints; a fake mode is active.

    Raises:
        PackageError: The data does not describe a graph over these inputs.
    """
    if not isinstance(data, list):
        raise PackageError(
            "this package has no plain graph: the function has parts that are known as machine code only"
        )
    graph, nodes, given = fx.Graph(), list[fx.Node](), iter(inputs)
    reader = Reader({}, {"node": nodes.__getitem__})
    for number, entry in enumerate(data):
        try:
            name, arguments, keywords = entry
            args = reader.read(arguments, tuple[Any, ...])
            kwargs = {key: reader.read(argument, Any) for key, argument in keywords.items()}
            nodes.append(_read_node(graph, name, args, kwargs, given))
        except (LookupError, StopIteration, TypeError, ValueError, AttributeError) as error:
            raise PackageError(
                f"node {number} of a plain graph of this package is damaged: {entry!r:.100}"
            ) from error
    if not nodes or nodes[-1].op != "output":
        raise PackageError("a plain graph of this package has no end")
    return fx.GraphModule(torch.nn.Module(), graph)


def _read_node(
    graph: fx.Graph, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], given: Any
) -> fx.Node:
    if name == "output":
        return graph.output(tuple(args[0]))
    if name == "placeholder":
        node = graph.placeholder(f"arg{len(graph.nodes)}")
        node.meta["val"] = next(given)
        return node
    target = _find_op(name)
    node = graph.call_function(target, args, kwargs)
    value_args, value_kwargs = fx.map_arg((args, kwargs), lambda argument: argument.meta["val"])
    node.meta["val"] = target(*value_args, **value_kwargs)
    return node


def _find_op(name: str) -> Callable[..., Any]:
    space, _, rest = name.partition(".")
    if space == "python" and rest in _NUMBERS:
        return _NUMBERS[rest]
    packet, _, overload = rest.partition(".")
    if space not in _NAMESPACES or packet in _REFUSED or packet.startswith("__") or overload.startswith("__"):
        raise PackageError(
            f"a plain graph of this package has the op {name!r}, which is none that it may call"
        )
    op = getattr(getattr(getattr(torch.ops, space), packet), overload)
    if not isinstance(op, OpOverload):
        raise PackageError(f"a plain graph of this package has {name!r}, which is not an op")
    return op
