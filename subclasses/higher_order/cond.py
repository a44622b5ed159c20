"""``cond`` with wrappers as operands or results, as a ``cond`` over plain tensors.

Its derivative is another such ``cond``, over two functions that differentiate the branches. These functions work on the
same wrappers that autograd sees in eager mode, so each cotangent has the class that it has in eager mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import HigherOrderOperator, tree_unflatten
from subclasses.higher_order.branches import (
    accept_plain,
    check_not_random,
    clone_aliases,
    infer_results,
    select_leaves,
    trace_graphs,
)
from subclasses.higher_order.gradients import gradients_of, unify_gradients
from subclasses.higher_order.values import Operands, Plain, wrap_value

Call = Callable[..., Any]


def call_cond(op: HigherOrderOperator, pred: Any, fns: Sequence[Call], given: Sequence[Any]) -> Any:
    """Calls ``cond`` on the inner tensors of its operands, and is differentiable in the operands.

    Raises:
        TypeError: the branches return results of different structure, class or metadata.
    """
    operands = Operands(given)
    cond = PlainCond(op, pred, operands, [_on_unique(fn, operands) for fn in fns])
    cond.check_same_structure()
    return cond.run()


def _on_unique(fn: Call, operands: Operands) -> Call:
    return lambda *unique: fn(*operands.repeat(unique))


# ---- the call over plain tensors ---------------------------------------------------------------------------


class PlainCond:
    """A call of ``cond``, with its branches as functions over plain tensors.

    Attributes:
        fns: the branches, as functions of the unique operands.
        results: the results of each branch.
    """

    def __init__(self, op: HigherOrderOperator, pred: Any, operands: Operands, fns: Sequence[Call]) -> None:
        self.op, self.pred, self.operands, self.fns = op, pred, operands, fns
        self._branches = [accept_plain(fn, operands.wrap_unique) for fn in fns]
        self.results = [infer_results(branch, operands.plain) for branch in self._branches]

    def check_same_structure(self) -> None:
        """Raises TypeError unless both branches return the same structure, classes and metadata."""
        true, false = self.results
        if (true.treespec, true.parts) != (false.treespec, false.parts):
            raise TypeError(
                f"the branches of torch.cond give different results: true_fn gives {true}, false_fn gives {false}; "
                f"return the same structure, classes and metadata from both"
            )

    def run(self) -> Any:
        """Returns the results as differentiable functions of the operands."""
        unique = self.operands.unique
        recorded = torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in unique)
        if recorded:
            check_not_random(self.op, self._branches, self.operands.plain)
        values = CondFunction.apply(self, *unique) if recorded else self.call()
        operand_results = self._operand_results()
        results = [
            self.operands.plain[operand_results[n]] if n in operand_results else value
            for n, value in enumerate(values)
        ]
        return tree_unflatten(results, self.results[0].treespec)

    def call(self) -> tuple[Any, ...]:
        """Returns the results below autograd; None for results that are operands."""
        plain, parts, operand_results = self.operands.plain, self.results[0].parts, self._operand_results()
        sources = self._sources()
        computed = [n for n, source in enumerate(sources) if source is None]
        outputs = iter(self._call_plain(computed) if computed else ())
        leaves = iter([next(outputs) if source is None else plain[source] for source in sources])
        values = [wrap_value(part, leaves) for part in parts]
        return tuple([None if n in operand_results else value for n, value in enumerate(values)])

    def _call_plain(self, wanted: Sequence[int]) -> Sequence[Any]:
        pairs = zip(self._branches, self.results, strict=True)
        fns = [select_leaves(branch, results, wanted) for branch, results in pairs]
        plain = self.operands.plain
        if any(results.written for results in self.results):
            return self.op(self.pred, *trace_graphs(fns, plain), tuple(plain))
        return self.op(self.pred, *fns, tuple(clone_aliases(plain)))

    def _sources(self) -> list[int | None]:
        """Returns, for each leaf of the results, the slot of the plain operand that it is in both branches, or None.

        If neither branch writes to an operand, such a leaf stays that very tensor, so that two ragged tensors still
        share their offsets. An inner tensor that is returned on its own is not such a leaf: as a function of the
        wrapper it is a different tensor.
        """
        true, false = self.results
        if true.written | false.written:
            return [None] * len(true.sources)
        sources = [one if one == two else None for one, two in zip(true.sources, false.sources, strict=True)]
        for number, part in enumerate(true.parts):
            for leaf in true.leaves_of(number) if part == Plain() else ():
                source = sources[leaf]
                sources[leaf] = source if source is not None and self.operands.is_operand[source] else None
        return sources

    def _operand_results(self) -> dict[int, int]:
        """Returns the results that are plain operands, mapped to the slots of these operands."""
        true, sources = self.results[0], self._sources()
        firsts = {n: sources[true.leaves_of(n)[0]] for n, part in enumerate(true.parts) if part == Plain()}
        return {n: source for n, source in firsts.items() if source is not None}


# ---- the derivative ----------------------------------------------------------------------------------------


class CondFunction(torch.autograd.Function):
    """``cond`` in the autograd graph; only used under a trace."""

    @staticmethod
    def forward(ctx: Any, cond: PlainCond, *operands: Any) -> Any:
        """Saves the operands, so that the backward detects a later write to one of them."""
        ctx.cond = cond
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*(t for t in operands if isinstance(t, Tensor)))
        return cond.call()

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        """Calls another ``cond``, over the gradients of both branches."""
        cond: PlainCond = ctx.cond
        tensors = iter(ctx.saved_tensors)
        primals = [next(tensors) if isinstance(t, Tensor) else t for t in cond.operands.unique]
        wanted = [n for n, needed in enumerate(ctx.needs_input_grad[1:]) if needed]
        present = [n for n, cotangent in enumerate(cotangents) if cotangent is not None]
        operands = Operands([*primals, *(cotangents[n] for n in present)])
        fns = [gradients_of(fn, len(primals), wanted, present) for fn in cond.fns]
        fns = [_on_unique(fn, operands) for fn in fns]
        gradients = PlainCond(cond.op, cond.pred, operands, fns)
        if gradients.results[0].parts != gradients.results[1].parts:
            filled = unify_gradients(fns, gradients.results, wanted)
            gradients = PlainCond(cond.op, cond.pred, operands, filled)
        gradients.check_same_structure()
        grads = iter(gradients.run())
        return None, *(next(grads) if n in wanted else None for n in range(len(primals)))
