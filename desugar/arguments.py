"""Taking the arguments' containers apart: text for tuples, lists and dicts, optree for anything else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import optree

from desugar.text import targets_of
from desugar.trees import flatten, flatten_known
from subclasses.emit import Emitter


@dataclass(frozen=True, slots=True)
class Unpacking:
    """How the leaves of one call's `(args, kwargs)` are found again in another call.

    Attributes:
        example: `(args, kwargs)` with every leaf replaced by its number, if tuples, lists and dicts are all there is.
        treespec: optree's structure of it.
    """

    example: Any
    treespec: optree.PyTreeSpec

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Unpacking, list[Any]]:
        """The unpacking of a call, and its leaves."""
        call: Any = (args, kwargs)
        leaves, treespec = flatten(call)
        is_known = _is_builtin(treespec)  # a class of the user's is not to be built around numbers
        return Unpacking(treespec.unflatten(range(len(leaves))) if is_known else None, treespec), leaves

    def emit(self, out: Emitter, require: Callable[[str], None]) -> list[str]:
        """Writes the unpacking of `args` and `kwargs`; returns the leaves' names."""
        names = [out.fresh_name(f"a{n}") for n in range(self.treespec.num_leaves)]
        if self.example is not None:
            args, kwargs = self.example
            _emit_sequence(out, require, names, "args", args)
            require("not kwargs") if not kwargs else _emit_dict(out, require, names, "kwargs", kwargs)
            return names
        flatten, spec = out.bind(flatten_known, "flatten"), out.bind(self.treespec, "treespec")
        leaves, found = out.fresh_name("leaves"), out.fresh_name("found")
        out.writeline(f"{leaves}, {found} = {flatten}((args, kwargs))")
        require(f"{found} == {spec}")
        if names:
            out.writeline(f"{targets_of(names)} = {leaves}")
        return names


def _is_builtin(spec: optree.PyTreeSpec) -> bool:
    if spec.is_leaf():
        return True
    if spec.type not in (tuple, list, dict):
        return False
    if spec.type is dict and not all(isinstance(key, str | int) for key in spec.entries()):
        return False
    return all(map(_is_builtin, spec.children()))


def _emit_node(out: Emitter, require: Callable[[str], None], names: list[str], text: str, node: Any) -> None:
    if type(node) is int:
        out.writeline(f"{names[node]} = {text}")
        return
    local, kind = out.fresh_name("node"), type(node).__name__
    out.writeline(f"{local} = {text}")
    require(f"type({local}) is {kind}")
    (_emit_dict if kind == "dict" else _emit_sequence)(out, require, names, local, node)


def _emit_sequence(
    out: Emitter, require: Callable[[str], None], names: list[str], text: str, nodes: Any
) -> None:
    require(f"len({text}) == {len(nodes)}")
    if nodes and all(type(node) is int for node in nodes):
        out.writeline(f"{targets_of(names[node] for node in nodes)} = {text}")
        return
    for position, node in enumerate(nodes):
        _emit_node(out, require, names, f"{text}[{position}]", node)


def _emit_dict(
    out: Emitter, require: Callable[[str], None], names: list[str], text: str, nodes: dict[Any, Any]
) -> None:
    require(f"[*{text}] == {[*nodes]!r}")  # in this order, for the function may go through them
    for key, node in nodes.items():
        _emit_node(out, require, names, f"{text}[{key!r}]", node)
