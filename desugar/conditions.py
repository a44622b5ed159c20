"""`torch.cond` over tensor subclasses: each branch is desugared on its own, and what is left is a plain `cond`.

The backward is another `cond`, over two functions that differentiate the branches, traced for the cotangents that
arrive; it is a `cond` over tensor subclasses itself, so it can be differentiated again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from desugar import _torch as private
from desugar.branches import (
    Branch,
    BranchInputs,
    describe_results,
    kind_of,
    plain_graph,
    trace_on_operands,
)
from desugar.capture import HIGHER_ORDER, Capture
from desugar.errors import DesugarError
from desugar.outputs import Outputs
from desugar.trees import flatten
from desugar.values import (
    Constant,
    Plain,
    Value,
    Wrapper,
    is_wrapper,
    slots_of,
    wrap_value,
)

# ----------------------------------------------------------------------------------------------------- a cond


def call_cond(outer: Capture, pred: Any, true_fn: Any, false_fn: Any, operands: Any = ()) -> Any:
    """`torch.cond` in a trace.

    Raises:
        DesugarError: The branches' results differ in structure, type or size; or what a branch does is not taken.
    """
    pred = outer.replace(pred)
    if is_wrapper(pred):
        raise DesugarError(
            f"the predicate of torch.cond is a {type(pred).__name__}",
            instead="give a plain bool tensor of one element",
        )
    leaves, treespec = flatten(operands)
    leaves = [outer.replace(leaf) for leaf in leaves]
    once = list({id(leaf): leaf for leaf in leaves}.values())
    places = [next(n for n, other in enumerate(once) if other is leaf) for leaf in leaves]

    def on_leaves(fn: Any) -> Callable[..., Any]:
        return lambda *operands: fn(*treespec.unflatten([operands[n] for n in places]))

    return _cond(outer, pred, (on_leaves(true_fn), on_leaves(false_fn)), once)


HIGHER_ORDER["cond"] = call_cond


def _cond(
    outer: Capture,
    pred: Any,
    fns: Sequence[Callable[..., Any]],
    operands: list[Any],
    *,
    are_gradients: bool = False,
) -> Any:
    """Traces both branches, with every tensor that either touches as an operand, and calls plain `cond`."""
    branches, inputs = trace_on_operands(outer, fns, operands)
    if are_gradients:
        fillers = [find_fillers(one, other, inputs) for one, other in (branches, branches[::-1])]
        if any(fillers):
            filled = [_filling(fn, filler) for fn, filler in zip(fns, fillers, strict=True)]
            branches, inputs = trace_on_operands(outer, filled, inputs.leaves)
    check_branches(*branches)
    record = Record(outer, pred, fns, branches, inputs)
    treespec = branches[0].outputs.treespec
    if torch.is_grad_enabled() and any(
        isinstance(leaf, Tensor) and leaf.requires_grad for leaf in inputs.leaves
    ):
        _check_not_random(branches)
        return treespec.unflatten(CondFunction.apply(record, *inputs.leaves))
    return treespec.unflatten(record.run())


def _check_not_random(branches: Sequence[Branch]) -> None:
    """The backward computes the branch again."""
    ops = [node.target for branch in branches for node in branch.graph.graph.nodes]
    for op in ops:
        if torch.Tag.nondeterministic_seeded in getattr(op, "tags", ()):
            raise DesugarError(
                f"a branch of torch.cond draws random numbers ({op}), and its backward would draw others",
                instead="draw them outside and pass them as operands",
                stock_is_wrong=True,
            )


@dataclass(frozen=True, slots=True)
class Record:
    """Everything about one `cond`."""

    outer: Capture
    pred: Any
    fns: Sequence[Callable[..., Any]]
    branches: Sequence[Branch]
    inputs: BranchInputs

    def run(self) -> tuple[Any, ...]:
        """The results, built around what plain `cond` gives."""
        items = self.inputs.flat.items
        graphs, places = plain_graphs(self.branches, len(items))
        found: Any = iter(())
        if any(place is None for place in places.values()):
            with private.BelowAutograd():
                found = iter(private.cond_op(self.pred, *graphs, tuple(items)))
        outputs = self.branches[0].outputs
        slots = [
            next(found) if (place := places.get(slot, slot)) is None else items[place] for slot in places
        ]
        by_slot = dict(zip(places, slots, strict=True))
        flat = [by_slot.get(slot, item) for slot, item in enumerate(outputs.items)]
        return tuple(wrap_value(value, flat) for value in outputs.visible)


class CondFunction(torch.autograd.Function):
    """`cond` in the autograd graph of the trace."""

    @staticmethod
    def forward(ctx: Any, record: Record, *operands: Any) -> Any:
        """Keeps the operands; a write to one of them is noticed in the backward."""
        ctx.record = record
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*(leaf for leaf in operands if isinstance(leaf, Tensor)))
        return record.run()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Another `cond`, over the gradients of the two branches."""
        _ = ctx.saved_tensors
        record: Record = ctx.record
        operands = record.inputs.leaves
        wanted = [n for n, leaf in enumerate(operands) if isinstance(leaf, Tensor) and leaf.requires_grad]
        present = [n for n, gradient in enumerate(gradients) if gradient is not None]
        given = [gradients[n] for n in present]
        fns = [_gradients_of(fn, len(operands), wanted, present) for fn in record.fns]
        found = iter(_cond(record.outer, record.pred, fns, [*operands, *given], are_gradients=True))
        return None, *(next(found) if n in wanted else None for n in range(len(operands)))


def _gradients_of(
    fn: Callable[..., Any], num_operands: int, wanted: list[int], present: list[int]
) -> Callable[..., Any]:
    """From a branch's operands and the gradients of its results to those of its operands, None included."""

    def gradients(*leaves: Any) -> tuple[Any, ...]:
        operands, given = leaves[:num_operands], leaves[num_operands:]
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            results = flatten(fn(*operands))[0]
            pairs = [(results[n], g) for n, g in zip(present, given, strict=True) if results[n].requires_grad]
            inputs = [operands[n] for n in wanted]
            if not pairs:
                return (None,) * len(inputs)
            return torch.autograd.grad(
                [result for result, _ in pairs],
                inputs,
                [gradient for _, gradient in pairs],
                allow_unused=True,
                create_graph=again,
            )

    return gradients


Filler = Callable[[Any, Sequence[Any]], Any]


def find_fillers(branch: Branch, other: Branch, inputs: BranchInputs) -> dict[int, Filler]:
    """Gradients of a branch that are None, or plain, where the other's are tensors, or wrappers: what to do.

    A filler takes the gradient and the operands. A plain gradient becomes a wrapper as the engine's sum makes it one.
    """
    fillers: dict[int, Filler] = {}
    pairs = zip(branch.outputs.visible, other.outputs.visible, strict=True)
    for number, (mine, wanted) in enumerate(pairs):
        zeros = functools.partial(_zeros, wanted, other.outputs, inputs)
        if mine == Constant(None) and isinstance(wanted, Plain | Wrapper):
            fillers[number] = lambda _, operands, zeros=zeros: zeros(operands)
        elif isinstance(mine, Plain) and isinstance(wanted, Wrapper):
            fillers[number] = lambda plain, operands, zeros=zeros: zeros(operands) + plain
    return fillers


def _zeros(value: Value, outputs: Outputs, inputs: BranchInputs, operands: Sequence[Any]) -> Any:
    """Zeros like a result; what it has of an operand (offsets) is taken from the operand."""
    items: list[Any] = []
    for slot, example in enumerate(outputs.items):
        if slot in outputs.inputs and isinstance(example, Tensor):
            leaf, path = inputs.place_of(outputs.inputs[slot])
            items.append(functools.reduce(getattr, path, operands[leaf]))
        elif isinstance(example, Tensor):
            items.append(torch.zeros(example.size(), dtype=example.dtype, device=example.device))
        else:
            items.append(example)
    return wrap_value(value, items)


def _filling(fn: Callable[..., Any], fillers: Mapping[int, Filler]) -> Callable[..., Any]:
    def filled(*operands: Any) -> Any:
        found = enumerate(fn(*operands))
        return tuple(fillers[n](result, operands) if n in fillers else result for n, result in found)

    return filled


# ------------------------------------------------------------------------------------------- what must agree


def check_branches(one: Branch, other: Branch) -> None:
    """Raises `DesugarError` unless both branches give results of one structure, type, size and dtype."""
    kinds = [
        (branch.outputs.treespec, [kind_of(value, branch.outputs.items) for value in branch.outputs.visible])
        for branch in (one, other)
    ]
    if kinds[0] != kinds[1]:
        texts = [describe_results(branch) for branch in (one, other)]
        raise DesugarError(
            f"the branches of torch.cond give different results:\n  {texts[0]}\n  {texts[1]}",
            instead="return the same structure, types, sizes and dtypes from both",
        )


def plain_graphs(
    branches: Sequence[Branch], num_inputs: int
) -> tuple[list[fx.GraphModule], dict[int, int | None]]:
    """Graphs with the same inputs and results, and where each tensor of the results comes from.

    Returns:
        The graphs, and per slot of the first branch's results that is a tensor: the input that it is, or None
        where the graphs compute it, in their order.
    """
    pairs = [
        pair
        for values in zip(*(branch.outputs.visible for branch in branches), strict=True)
        for pair in zip(*map(slots_of, values), strict=True)
    ]
    places: dict[int, int | None] = {}
    computed = []
    for pair in dict.fromkeys(pairs):
        same = [branch.outputs.inputs.get(slot) for branch, slot in zip(branches, pair, strict=True)]
        places[pair[0]] = same[0] if same[0] is not None and same[0] == same[1] else None
        if places[pair[0]] is None:
            computed.append(pair)
    columns = zip(*computed, strict=True) if computed else [()] * len(branches)
    order = range(num_inputs)
    return [plain_graph(b, list(slots), order) for b, slots in zip(branches, columns, strict=True)], places
