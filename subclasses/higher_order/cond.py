"""``cond`` over plain tensors, from one whose operands or results are wrappers.

Its derivative is another such ``cond``, over two functions that differentiate the branches. They work on the wrappers
that autograd sees in eager mode, so a cotangent is of the class that it has in eager mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import HigherOrderOperator, tree_unflatten
from subclasses.higher_order.branches import (
    apart,
    as_graphs,
    check_not_random,
    find_results,
    over_plain,
    plain_function,
)
from subclasses.higher_order.gradients import fill_gradients, gradients_of
from subclasses.higher_order.values import Operands, Plain, wrap_value

Call = Callable[..., Any]


def call_cond(op: HigherOrderOperator, pred: Any, fns: Sequence[Call], given: Sequence[Any]) -> Any:
    """Calls ``cond`` on the inner tensors of its operands; differentiable in the operands.

    Raises:
        TypeError: the branches give results of different structure, class or metadata.
    """
    operands = Operands(given)
    split = Split(op, pred, operands, [_of_each_once(fn, operands) for fn in fns])
    split.check_alike()
    return split.run()


def _of_each_once(fn: Call, operands: Operands) -> Call:
    return lambda *once: fn(*operands.repeat(once))


# ---- a cond, taken apart -----------------------------------------------------------------------------------


class Split:
    """A call of ``cond``, with what it comes to over plain tensors.

    Attributes:
        fns: the branches, as functions of each operand once.
        results: what each of them returns.
    """

    def __init__(self, op: HigherOrderOperator, pred: Any, operands: Operands, fns: Sequence[Call]) -> None:
        self.op, self.pred, self.operands, self.fns = op, pred, operands, fns
        self._branches = [over_plain(fn, operands.wrap_once) for fn in fns]
        self.results = [find_results(branch, operands.plain) for branch in self._branches]

    def check_alike(self) -> None:
        """Raises TypeError unless both branches return the same structure, with the same classes and metadata."""
        true, false = self.results
        if (true.treespec, true.parts) != (false.treespec, false.parts):
            raise TypeError(
                f"the branches of torch.cond give different results: true_fn gives {true}, false_fn gives {false}; "
                f"return the same structure, classes and metadata from both"
            )

    def run(self) -> Any:
        """The results, as differentiable functions of the operands."""
        once = self.operands.once
        recorded = torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in once)
        if recorded:
            check_not_random(self.op, self._branches, self.operands.plain)
        values = CondFunction.apply(self, *once) if recorded else self.call()
        kept = self._kept()
        results = [self.operands.plain[kept[n]] if n in kept else value for n, value in enumerate(values)]
        return tree_unflatten(results, self.results[0].treespec)

    def call(self) -> tuple[Any, ...]:
        """The results below autograd; None for those that are operands."""
        plain, parts, kept = self.operands.plain, self.results[0].parts, self._kept()
        sources = self._sources()
        computed = [n for n, source in enumerate(sources) if source is None]
        found = iter(self._call_plain(computed) if computed else ())
        leaves = iter([next(found) if source is None else plain[source] for source in sources])
        values = [wrap_value(part, leaves) for part in parts]
        return tuple([None if n in kept else value for n, value in enumerate(values)])

    def _call_plain(self, wanted: Sequence[int]) -> Sequence[Any]:
        pairs = zip(self._branches, self.results, strict=True)
        fns = [plain_function(branch, results, wanted) for branch, results in pairs]
        plain = self.operands.plain
        if any(results.written for results in self.results):
            return self.op(self.pred, *as_graphs(fns, plain), tuple(plain))
        return self.op(self.pred, *fns, tuple(apart(plain)))

    def _sources(self) -> list[int | None]:
        """Per leaf of the results the operand that it is in both branches, which write to none.

        It stays that very tensor, so that two ragged tensors go on sharing their offsets. An inner tensor that is a
        result of its own is copied, for as a function of the wrapper it is another tensor.
        """
        true, false = self.results
        if true.written | false.written:
            return [None] * len(true.sources)
        sources = [one if one == two else None for one, two in zip(true.sources, false.sources, strict=True)]
        for number, part in enumerate(true.parts):
            for leaf in true.leaves_of(number) if part == Plain() else ():
                source = sources[leaf]
                sources[leaf] = source if source is not None and self.operands.own[source] else None
        return sources

    def _kept(self) -> dict[int, int]:
        """The results that are plain operands, and which."""
        true, sources = self.results[0], self._sources()
        firsts = {n: sources[true.leaves_of(n)[0]] for n, part in enumerate(true.parts) if part == Plain()}
        return {n: source for n, source in firsts.items() if source is not None}


# ---- its derivative ----------------------------------------------------------------------------------------


class CondFunction(torch.autograd.Function):
    """``cond`` in the autograd graph; only a trace records it."""

    @staticmethod
    def forward(ctx: Any, split: Split, *operands: Any) -> Any:
        """Keeps the operands; a write to one of them is noticed in the backward."""
        ctx.split = split
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*(t for t in operands if isinstance(t, Tensor)))
        return split.call()

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        """Another ``cond``, over the gradients of both branches."""
        split: Split = ctx.split
        tensors = iter(ctx.saved_tensors)
        primals = [next(tensors) if isinstance(t, Tensor) else t for t in split.operands.once]
        wanted = [n for n, needed in enumerate(ctx.needs_input_grad[1:]) if needed]
        present = [n for n, cotangent in enumerate(cotangents) if cotangent is not None]
        operands = Operands([*primals, *(cotangents[n] for n in present)])
        fns = [gradients_of(fn, len(primals), wanted, present) for fn in split.fns]
        fns = [_of_each_once(fn, operands) for fn in fns]
        gradients = Split(split.op, split.pred, operands, fns)
        if gradients.results[0].parts != gradients.results[1].parts:
            filled = fill_gradients(fns, gradients.results, wanted)
            gradients = Split(split.op, split.pred, operands, filled)
        gradients.check_alike()
        found = iter(gradients.run())
        return None, *(next(found) if n in wanted else None for n in range(len(primals)))
