"""Plain graphs as data, from which they are compiled where the machine code of a package is not to be run.

A graph is a list of calls of PyTorch's own ops. Reading one looks each op up among them, by a name of a closed form; an
op that reads files is none of them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from desugar.errors import PackageError
from desugar.packages.manifest.codec import Writer
from desugar.packages.manifest.reading import Reader
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

_WRITER, _READER = Writer((), {}), Reader((), {})

# ------------------------------------------------------------------------------------------------- writing


def write(graph: fx.GraphModule) -> Any:
    """Returns a graph as JSON data.

    Raises:
        PackageError: It has a node that is no call of a known op (`cond`, a constant tensor).
    """
    numbers: dict[fx.Node, int] = {}
    return [_write_node(node, numbers) for node in graph.graph.nodes]


def _write_node(node: fx.Node, numbers: dict[fx.Node, int]) -> Any:
    numbers[node] = len(numbers)
    if node.op == "placeholder":
        return ["input"]
    if node.op == "output":
        return ["output", _write_argument(node.args[0], numbers)]
    if node.op != "call_function":
        raise PackageError(f"a graph has the node {node.format_node()}")
    arguments = [_write_argument(argument, numbers) for argument in node.args]
    keywords = {name: _write_argument(argument, numbers) for name, argument in node.kwargs.items()}
    return ["call", _name_of(node.target), arguments, keywords]


def _name_of(target: Any) -> str:
    if target in _NAMES:
        return f"python.{_NAMES[target]}"
    name = str(target)
    if not isinstance(target, OpOverload) or _find_op(name) is not target:
        raise PackageError(f"a graph has the op {name}")
    return name


def _write_argument(argument: Any, numbers: dict[fx.Node, int]) -> Any:
    if isinstance(argument, fx.Node):
        return {"node": numbers[argument]}
    if isinstance(argument, list | tuple):
        return [_write_argument(item, numbers) for item in argument]
    return {"constant": _WRITER.write(argument, Any)}


# ------------------------------------------------------------------------------------------------- reading


def read(data: Any, inputs: list[Any]) -> fx.GraphModule:
    """Returns the graph of JSON data, each node with its value on fake inputs.

    Args:
        data: The graph.
        inputs: Fake tensors and symbolic ints; a fake mode is active.

    Raises:
        PackageError: The data is no graph over such inputs.
    """
    if not isinstance(data, list):
        raise PackageError(
            "this package has no plain graph: the function has parts that are known as machine code only"
        )
    graph, nodes, given = fx.Graph(), list[fx.Node](), iter(inputs)
    for number, entry in enumerate(data):
        if not isinstance(entry, list) or not entry:
            raise _damaged(number, entry)
        try:
            nodes.append(_read_node(graph, entry, nodes, given))
        except (IndexError, KeyError, StopIteration, TypeError, ValueError, AttributeError) as error:
            raise _damaged(number, entry) from error
    if not nodes or nodes[-1].op != "output":
        raise PackageError("a plain graph of this package has no end")
    return fx.GraphModule(torch.nn.Module(), graph)


def _read_node(graph: fx.Graph, entry: list[Any], nodes: list[fx.Node], given: Any) -> fx.Node:
    match entry:
        case ["input"]:
            node = graph.placeholder(f"arg{len(nodes)}")
            node.meta["val"] = next(given)
            return node
        case ["output", results]:
            return graph.output(tuple(_read_argument(results, nodes)))
        case ["call", str(name), list(arguments), dict(keywords)]:
            target = _find_op(name)
            args = tuple(_read_argument(argument, nodes) for argument in arguments)
            kwargs = {key: _read_argument(argument, nodes) for key, argument in keywords.items()}
            node = graph.call_function(target, args, kwargs)
            value_args, value_kwargs = fx.map_arg((args, kwargs), lambda argument: argument.meta["val"])
            node.meta["val"] = target(*value_args, **value_kwargs)
            return node
    raise ValueError(entry)


def _find_op(name: str) -> Callable[..., Any]:
    space, _, rest = name.partition(".")
    if space == "python" and rest in _NUMBERS:
        return _NUMBERS[rest]
    packet, _, overload = rest.partition(".")
    if space not in _NAMESPACES or packet in _REFUSED or packet.startswith("__") or overload.startswith("__"):
        raise PackageError(
            f"a plain graph of this package has the op {name!r}, which is none that it may call"
        )
    found = getattr(getattr(getattr(torch.ops, space), packet), overload)
    if not isinstance(found, OpOverload):
        raise PackageError(f"a plain graph of this package has {name!r}, which is no op")
    return found


def _read_argument(data: Any, nodes: list[fx.Node]) -> Any:
    match data:
        case {"node": int(number)} if 0 <= number < len(nodes):
            return nodes[number]
        case {"constant": constant}:
            return _READER.read(constant, Any)
        case list(items):
            return [_read_argument(item, nodes) for item in items]
    raise ValueError(data)


def _damaged(number: int, entry: Any) -> PackageError:
    return PackageError(f"node {number} of a plain graph of this package is damaged: {entry!r:.100}")
