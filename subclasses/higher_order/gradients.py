"""The gradients of two branches, as two functions whose results have the same classes.

One branch may lack a gradient that the other has, or have a plain gradient where the other has a gradient of a class.
In eager mode the predicate selects one of them. A ``cond`` needs the same structure from both branches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import autograd_enabled, tree_flatten
from subclasses.autograd.construct import as_cotangent, wrap_cotangent
from subclasses.higher_order.branches import Results
from subclasses.higher_order.values import Constant, Operands, Plain, Wrapper, wrap_value
from subclasses.layout import cotangent_layout
from subclasses.spec.values import is_declared, is_differentiable, map_inners

Call = Callable[..., Any]


def gradients_of(fn: Call, num_primals: int, wanted: Sequence[int], present: Sequence[int]) -> Call:
    """Returns the function that computes the gradients of a function.

    Args:
        fn: maps operands to results.
        num_primals: the number of operands.
        wanted: indices of the operands whose gradients are wanted.
        present: indices of the results that have a cotangent.

    Returns:
        A function from the operands and these cotangents to the wanted gradients, None for an absent gradient.
    """

    def gradients(*values: Any) -> tuple[Any, ...]:
        primals, cotangents = list(values[:num_primals]), values[num_primals:]
        create_graph = torch.is_grad_enabled()
        with autograd_enabled(), torch.enable_grad():
            inputs = [primals[n] if create_graph else _make_leaf(primals[n]) for n in wanted]
            for n, leaf in zip(wanted, inputs, strict=True):
                primals[n] = leaf
            results = tree_flatten(fn(*primals))[0]
            pairs = zip([results[n] for n in present], cotangents, strict=True)
            pairs = [(result, cotangent) for result, cotangent in pairs if result.requires_grad]
            if not pairs:
                return (None,) * len(inputs)
            outputs, given = zip(*pairs, strict=True)
            return torch.autograd.grad(outputs, inputs, given, allow_unused=True, create_graph=create_graph)

    return gradients


def _make_leaf(t: Tensor) -> Tensor:
    """Returns an autograd leaf. A wrapper is new for this call; detaching it would copy its fixed inner tensors."""
    return (t if is_declared(t) else t.detach()).requires_grad_()


# ---- gradients of different classes ------------------------------------------------------------------------


def unify_gradients(fns: Sequence[Call], results: Sequence[Results], wanted: Sequence[int]) -> list[Call]:
    """Returns two gradient functions that return the same gradients, each of the same class in both."""
    return [
        functools.partial(_unified, fn, mine, other, wanted)
        for fn, mine, other in zip(fns, results, reversed(results), strict=True)
    ]


def _unified(fn: Call, mine: Results, other: Results, wanted: Sequence[int], *unique: Any) -> tuple[Any, ...]:
    plain = Operands(unique).plain
    unified = []
    for n, gradient in enumerate(fn(*unique)):
        match mine.parts[n], other.parts[n]:
            case Constant(), Plain() | Wrapper():
                gradient = _zeros(other, n, plain)
            case Plain(), Wrapper(layout) if is_declared(unique[wanted[n]]) and layout is cotangent_layout(
                layout
            ):
                gradient = _wrap_cotangent(unique[wanted[n]], gradient)
            case Plain(), Wrapper():
                gradient = _contiguous(_zeros(other, n, plain) + gradient)
            case Wrapper(layout), Wrapper(expected) if expected is cotangent_layout(layout):
                gradient = as_cotangent(gradient)
        unified.append(gradient)
    return tuple(unified)


def _zeros(results: Results, number: int, plain: Sequence[Any]) -> Any:
    """Returns zeros like a result; leaves that are operands, such as offsets, stay those tensors."""
    leaves = []
    for n in results.leaves_of(number):
        source, like = results.sources[n], results.leaves[n]
        zeros = torch.zeros(like.size(), dtype=like.dtype, device=like.device)
        leaves.append(zeros if source is None else plain[source])
    return wrap_value(results.parts[number], iter(leaves))


def _contiguous(gradient: Any) -> Any:
    """Makes the inner tensors of a gradient contiguous, as they are in the other branch's gradient."""
    return map_inners(gradient, lambda _, t: t.contiguous())


def _wrap_cotangent(primal: Any, cotangent: Tensor) -> Any:
    """Converts a plain cotangent of a wrapper to its class, as the backward of a construction does."""
    cls = type(primal)
    if cls._traits.is_mapped and not cls._traits.pulls_back:
        return map_inners(primal, lambda _, t: cotangent if is_differentiable(t) else t)
    with autograd_enabled():
        return as_cotangent(wrap_cotangent(primal, cotangent))
