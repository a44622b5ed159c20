"""Checks the invariants of each stage, so that a broken invariant raises instead of returning a wrong result.

Each error names the stage and the broken invariant, and the node if a single node breaks it. The checks run in every
compilation. They visit each node once, which takes little of the time of a trace.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor, fx

from desugar import _torch as torch_private
from desugar.ir.fx_utils import output_nodes
from desugar.ir.stages import FromForward, FromInput, FromTangent, Partitioned, Traced
from subclasses.errors import one_of


class InvariantError(AssertionError):
    """A stage broke an invariant: a bug of this project, not of the user's code."""

    def __init__(self, stage: str, what: str) -> None:
        super().__init__(f"after {stage}: {what} (this is a bug in desugar; please report it)")


RECHECK_VARIABLE = "DESUGAR_RECHECK"


def rechecks_enabled() -> bool:
    """Whether wrappers compiled now have the checks that guards make unnecessary (`desugar.codegen.debug_checks`)."""
    return os.environ.get(RECHECK_VARIABLE, "0") not in ("", "0")


# -------------------------------------------------------------------------------------------------- one graph


def check_plain_graph(graph: fx.GraphModule, stage: str) -> None:
    """Checks that every value is a plain fake tensor, a number or None, and that no op writes to its arguments."""
    graph.graph.lint()
    for node in graph.graph.nodes:
        if node.op == "placeholder" or node.op == "call_function":
            for value in _values(node.meta.get("val")):
                _check_value(value, node, stage)
        if node.op == "call_function":
            _check_functional(node, stage)
        if node.op in ("call_method", "call_module"):
            raise InvariantError(stage, f"node {node.name} is a {node.op}")


def _values(value: Any) -> Sequence[Any]:
    if isinstance(value, dict):  # the tensors that a Triton kernel wrote to, by parameter name
        return tuple(value.values())
    return value if isinstance(value, (tuple, list)) else (value,)


def _check_value(value: Any, node: fx.Node, stage: str) -> None:
    if isinstance(value, Tensor):
        if type(value) is not torch_private.FakeTensor:
            raise InvariantError(stage, f"node {node.name} holds {one_of(type(value))}, not a plain tensor")
    elif value is not None and not isinstance(value, (int, float, bool, SymInt, SymFloat, SymBool)):
        raise InvariantError(stage, f"node {node.name} holds {one_of(type(value))}")


def _check_functional(node: fx.Node, stage: str) -> None:
    schema = getattr(node.target, "_schema", None)
    if schema is not None and schema.is_mutable and node.target not in _ALLOWED_WRITES:
        raise InvariantError(stage, f"node {node.name} ({node.target}) writes to its arguments")


_ALLOWED_WRITES = frozenset({torch.ops.aten._assert_async.msg, torch.ops.aten._assert_async.default})


# ------------------------------------------------------------------------------------------------- stages


def check_traced(traced: Traced, num_primals: int) -> None:
    """Checks after tracing that the graph is plain and functional, and its inputs; that no result is a constant."""
    check_plain_graph(traced.graph, "tracing")
    placeholders = traced.graph.graph.find_nodes(op="placeholder")
    expected = num_primals + len(traced.tangent_items)
    if len(placeholders) != expected:
        raise InvariantError("tracing", f"the graph takes {len(placeholders)} inputs, expected {expected}")
    for node in output_nodes(traced.graph)[: traced.num_forward]:
        if not isinstance(node, fx.Node):
            raise InvariantError("tracing", f"the forward returns the constant {node!r}")


def check_partitioned(partitioned: Partitioned, traced: Traced, num_primals: int) -> None:
    """Checks after partitioning that graphs are plain, backward inputs exist, and the number of gradients is right."""
    check_plain_graph(partitioned.forward, "partitioning (forward)")
    check_plain_graph(partitioned.backward, "partitioning (backward)")
    outputs = len(output_nodes(partitioned.forward))
    limits = {FromInput: num_primals, FromForward: outputs, FromTangent: len(traced.tangent_items)}
    for source in partitioned.backward_inputs:
        if not 0 <= source.index < limits[type(source)]:
            raise InvariantError("partitioning", f"the backward reads {source}, which does not exist")
    gradients = len(output_nodes(partitioned.backward))
    if gradients != len(partitioned.depends):
        raise InvariantError("partitioning", f"{gradients} gradients, expected {len(partitioned.depends)}")
    for node in partitioned.forward.graph.nodes:
        if "tangents" in node.name and node.op == "placeholder":
            raise InvariantError("partitioning", f"the forward takes tangent {node.name}")


def check_stores(graph: fx.GraphModule, slots: Collection[int]) -> None:
    """Checks after storing that each mutated input is written exactly once, and that no node reads it later.

    Args:
        graph: The forward graph.
        slots: Input slots of the mutated inputs.
    """
    placeholders = graph.graph.find_nodes(op="placeholder")
    expected = {placeholders[slot] for slot in slots}
    written: set[fx.Node] = set()
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        is_store = node.target is torch.ops.aten.copy_.default
        read_late = written.intersection(node.all_input_nodes[1:] if is_store else node.all_input_nodes)
        if read_late:
            raise InvariantError(
                "storing", f"node {node.name} reads {read_late.pop().name}, which is written already"
            )
        if not is_store:
            _check_functional(node, "storing")
        elif node.args[0] not in expected or node.args[0] in written:
            raise InvariantError("storing", f"node {node.name} writes to {node.args[0]}")
        else:
            written.add(node.args[0])
    if written != expected:
        names = sorted(node.name for node in expected - written)
        raise InvariantError("storing", f"nothing is stored in {', '.join(names)}")


def check_pruned(graph: fx.GraphModule, known: Collection[str]) -> None:
    """Checks after pruning that the graph is plain and has no input that the backward for all tangents lacks.

    Args:
        graph: The pruned graph.
        known: Names of the placeholders of the backward for all tangents.
    """
    check_plain_graph(graph, "pruning")
    for node in graph.graph.find_nodes(op="placeholder"):
        if node.name not in known:
            raise InvariantError(
                "pruning", f"the backward takes {node.name}, which the backward for all tangents did not"
            )
