"""Functions that a higher-order op is given, desugared on their own.

The operands of such a branch are the arguments of a function like any other, so it goes through the same two runs
as the whole (`desugar.trace`), nested in the trace that met it. What it touches besides its operands, outside
tensors and those of the trace around it, becomes an operand too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from desugar import _torch as private, trace
from desugar.capture import Capture
from desugar.errors import DesugarError
from desugar.fakes import Fakes
from desugar.inputs import Inputs
from desugar.memory import storage_of
from desugar.outputs import Outputs
from desugar.runs import identity
from desugar.trees import flatten
from desugar.values import (
    Constant,
    Flat,
    Plain,
    Same,
    Value,
    Wrapper,
    describe,
    is_wrapper,
    paths_of,
    unwrap_value,
    wrap_value,
)
from desugar.watching import plain_parts

# ------------------------------------------------------------------------------------------- inputs of a branch


class Touched(Exception):
    """A branch touches a tensor that is no operand."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tuple(tensor.shape))
        self.tensor = tensor


class BranchInputs(Inputs):
    """The inputs of a branch: tensors of the trace around it, each with a fake of its own.

    A fake mode of their own tells what belongs to the branch from what it reaches around itself.
    """

    def __init__(self, outer: Capture, operands: Sequence[Any]) -> None:
        env = outer.inputs.fakes.env
        fakes = Fakes(env, private.FakeTensorMode(shape_env=env))
        super().__init__(fakes, is_dynamic=True, are_apart=True)
        self.outer, self.leaves = outer, []
        for operand in operands:
            self._add_leaf(operand)
        self.num_arguments = len(operands)

    def add_captured(self, tensor: Tensor) -> Value:
        """The operand that a tensor is which a branch reaches around itself.

        Raises:
            Touched: It is none yet.
        """
        known = self.outer.leaves.get(id(tensor))
        number = self.first_leaf.get(id(tensor if known is None else known.leaf))
        if number is None:
            raise Touched(tensor)
        self.captured.append(tensor)
        self.values.append(Same("input", number))
        return self.values[-1]

    def is_foreign(self, tensor: Tensor) -> bool:
        """Whether a traced tensor belongs to the trace around this one."""
        parts = plain_parts(tensor)
        fakes = [
            private.from_functional_tensor(p.elem) for p in parts if isinstance(p, private.FunctionalTensor)
        ]
        return bool(fakes) and all(fake.fake_mode is not self.fakes.mode for fake in fakes)

    def place_of(self, slot: int) -> tuple[int, tuple[str, ...]]:
        """An operand, and the path in it to the plain tensor in a slot."""
        found = ((n, path) for n, value in enumerate(self.values) for s, path in paths_of(value) if s == slot)
        return next(found)

    def _add_leaf(self, leaf: Any) -> Value:
        first = self.first_leaf.setdefault(id(leaf), len(self.values))
        if isinstance(leaf, Tensor) and first != len(self.values):
            value: Value = Same("input", first)
        else:
            value = unwrap_value(leaf, self.flat)
        self.leaves.append(leaf)
        self.values.append(value)
        while (slot := len(self.fake_items)) < len(self.flat.items):
            self.fake_items[slot] = self._fake(self.flat.items[slot])  # may add slots for its symbols
        return value

    def _fake(self, item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        for extent in (*item.size(), *item.stride()):
            self.flat.integer(extent)  # a symbol needs a slot: graphs read sizes from their arguments
        with private.disable_current_modes(), self.fakes.mode:
            return torch.empty_strided(item.size(), item.stride(), dtype=item.dtype, device=item.device)


# --------------------------------------------------------------------------------------------------- a branch


@dataclass(frozen=True, slots=True)
class Branch:
    """A traced branch: its graph over plain tensors, and what its results are made of."""

    graph: fx.GraphModule
    outputs: Outputs


def trace_branch(fn: Callable[..., Any], inputs: BranchInputs) -> Branch:
    """Traces a branch on its inputs.

    Raises:
        DesugarError: It writes to an operand, or is what the pass does not take.
    """

    def call(leaves: list[Any]) -> Any:
        leaves = leaves[: inputs.num_arguments]
        versions = [leaf._version if isinstance(leaf, Tensor) else 0 for leaf in leaves]
        results, treespec = flatten(fn(*leaves))
        if versions != [leaf._version if isinstance(leaf, Tensor) else 0 for leaf in leaves]:
            raise DesugarError(
                "a branch of torch.cond writes to an operand in place",
                instead="return the new value from the branch, and write it outside",
            )
        return treespec.unflatten(own_results(results, leaves))

    with private.disable_current_modes(), torch.no_grad():
        outputs = trace.discover(call, inputs)
        if outputs.has_effects:
            raise DesugarError(
                "a branch of torch.cond writes to a tensor from outside of it",
                instead="return the new value from the branch, and write it outside",
            )
        traced = trace.trace_graph(call, inputs, outputs, {})
    return Branch(traced.graph, traced.outputs)


def trace_on_operands(
    outer: Capture, fns: Sequence[Callable[..., Any]], operands: Sequence[Any]
) -> tuple[list[Branch], BranchInputs]:
    """Traces functions on the same operands, with whatever either touches besides as further operands of both."""
    while True:
        inputs = [BranchInputs(outer, operands) for _ in fns]
        try:
            return [trace_branch(fn, ins) for fn, ins in zip(fns, inputs, strict=True)], inputs[0]
        except Touched as touched:
            operands = [*operands, outer.replace(touched.tensor)]


def own_results(results: list[Any], leaves: list[Any]) -> list[Any]:
    """Results that are no operands, and share no memory with one or one another, as those of `torch.cond`.

    An inner tensor that is one of an operand's stays: lengths and offsets are known again by that.
    """
    parts = [part for leaf in leaves if isinstance(leaf, Tensor) for part in plain_parts(leaf)]
    given, seen = {identity(part) for part in parts}, {storage_of(part) for part in parts}
    own = []
    for leaf in results:
        if isinstance(leaf, Tensor):
            flat = Flat()
            value = unwrap_value(leaf, flat)
            for slot, part in enumerate(flat.items):
                if not isinstance(part, Tensor) or (identity(part) in given and is_wrapper(leaf)):
                    continue
                if storage_of(part) in seen:
                    flat.items[slot] = part.clone()
                seen.add(storage_of(part))
            leaf = wrap_value(value, flat.items)
        own.append(leaf)
    return own


# ------------------------------------------------------------------------------------------- plain graphs


def describe_results(branch: Branch) -> str:
    """What a branch gives, as readable text."""
    return ", ".join(describe(value, "", branch.outputs.items) for value in branch.outputs.visible)


def kind_of(value: Value, items: Sequence[Any]) -> Any:
    """Type, metadata, size, stride and dtype of a value, in a form that can be compared."""
    match value:
        case Wrapper():
            return value.cls, value.context, tuple((name, kind_of(part, items)) for name, part in value.inner)
        case Plain(index):
            item = items[index]
            return "tensor", tuple(map(str, item.size())), tuple(map(str, item.stride())), item.dtype
        case Constant(constant, index):
            return constant if index is None else str(items[index])
        case _:
            return value


def plain_graph(
    branch: Branch, slots: Sequence[int], order: Sequence[int], *, alone: bool = False
) -> fx.GraphModule:
    """A branch's graph that takes its input slots in this order, and returns the given slots of its results.

    A single result may stand `alone`, in no tuple.
    """
    outputs, old = branch.outputs, branch.graph.graph
    new = fx.Graph()
    inputs = {slot: new.placeholder(f"operand_{n}") for n, slot in enumerate(order)}
    placeholders = enumerate(old.find_nodes(op="placeholder"))
    returned = new.graph_copy(old, {node: inputs[slot] for slot, node in placeholders})
    positions = {slot: position for position, slot in enumerate(outputs.returned)}
    results = []
    for slot in slots:
        if slot in outputs.inputs:
            results.append(new.call_function(torch.ops.aten.clone.default, (inputs[outputs.inputs[slot]],)))
        else:
            results.append(returned[positions[slot]])  # type: ignore[index]
    new.output(results[0] if alone else tuple(results))
    return fx.GraphModule(branch.graph, new)
