"""The gradients of two branches, as two functions that give results of the same classes.

One branch may have no gradient where the other has one, or a plain one where the other has one of the class. In eager
mode the predicate decides which it is; a ``cond`` gives one of them always.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import autograd_enabled, tree_flatten
from subclasses.autograd.construct import as_cotangent, is_differentiable
from subclasses.higher_order.branches import Results
from subclasses.higher_order.values import Constant, Operands, Plain, Wrapper, is_declared, wrap_value
from subclasses.layout import cotangent_layout
from subclasses.spec.values import map_inners

Call = Callable[..., Any]


def gradients_of(fn: Call, num_primals: int, wanted: Sequence[int], present: Sequence[int]) -> Call:
    """The gradients of a function.

    Args:
        fn: from operands to results.
        num_primals: how many operands it has.
        wanted: the operands with a gradient.
        present: the results with a cotangent.

    Returns:
        From the operands and those cotangents to those gradients, None where there is none.
    """

    def gradients(*values: Any) -> tuple[Any, ...]:
        primals, cotangents = list(values[:num_primals]), values[num_primals:]
        again = torch.is_grad_enabled()
        with autograd_enabled(), torch.enable_grad():
            inputs = [primals[n] if again else _leaf(primals[n]) for n in wanted]
            for n, leaf in zip(wanted, inputs, strict=True):
                primals[n] = leaf
            results = tree_flatten(fn(*primals))[0]
            pairs = zip([results[n] for n in present], cotangents, strict=True)
            pairs = [(result, cotangent) for result, cotangent in pairs if result.requires_grad]
            if not pairs:
                return (None,) * len(inputs)
            outputs, given = zip(*pairs, strict=True)
            return torch.autograd.grad(outputs, inputs, given, allow_unused=True, create_graph=again)

    return gradients


def _leaf(t: Tensor) -> Tensor:
    """Something to differentiate by; a wrapper was made for this call, and detaching would copy its fixed parts."""
    return (t if is_declared(t) else t.detach()).requires_grad_()


# ---- gradients that differ ---------------------------------------------------------------------------------


def fill_gradients(fns: Sequence[Call], results: Sequence[Results], wanted: Sequence[int]) -> list[Call]:
    """Two gradient functions such that each gives every gradient that the other gives, and as what it gives it."""
    return [
        functools.partial(_filled, fn, mine, other, wanted)
        for fn, mine, other in zip(fns, results, reversed(results), strict=True)
    ]


def _filled(fn: Call, mine: Results, other: Results, wanted: Sequence[int], *once: Any) -> tuple[Any, ...]:
    plain = Operands(once).plain
    found = []
    for n, gradient in enumerate(fn(*once)):
        match mine.parts[n], other.parts[n]:
            case Constant(), Plain() | Wrapper():
                gradient = _zeros(other, n, plain)
            case Plain(), Wrapper(layout) if is_declared(once[wanted[n]]) and layout is cotangent_layout(
                layout
            ):
                gradient = _of_class(once[wanted[n]], gradient)
            case Plain(), Wrapper():
                gradient = _contiguous(_zeros(other, n, plain) + gradient)
            case Wrapper(layout), Wrapper(expected) if expected is cotangent_layout(layout):
                gradient = as_cotangent(gradient)
        found.append(gradient)
    return tuple(found)


def _zeros(results: Results, number: int, plain: Sequence[Any]) -> Any:
    """Zeros like a result; what it has of an operand (offsets) stays that."""
    leaves = []
    for n in results.leaves_of(number):
        source, like = results.sources[n], results.leaves[n]
        zeros = torch.zeros(like.size(), dtype=like.dtype, device=like.device)
        leaves.append(zeros if source is None else plain[source])
    return wrap_value(results.parts[number], iter(leaves))


def _contiguous(gradient: Any) -> Any:
    """A gradient of a class, with the strides that the same one of the other branch has."""
    return map_inners(gradient, lambda _, t: t.contiguous())


def _of_class(primal: Any, cotangent: Tensor) -> Any:
    """A plain cotangent of a wrapper as one of its class, as the backward of a construction makes it."""
    cls = type(primal)
    if cls.__spec__.fallback == "map" and not cls._saves_inners:
        return map_inners(primal, lambda _, t: cotangent if is_differentiable(t) else t)
    with autograd_enabled():
        return as_cotangent(primal.wrap_cotangent(cotangent))
