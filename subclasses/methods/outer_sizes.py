"""Outer sizes that a class computes from several sizes, where a compiler makes symbols of them.

Dynamo makes a symbol of each size of an argument, and binds it at its first use, which is in the outer size. It cannot
bind two symbols from one number such as ``a.shape[0] + b.shape[0]``. So a value that is made of an argument's fake
inner tensors has the outer size that the compiler passes, a symbol of its own. Each further value with this sum has
that symbol too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from subclasses.spec.fields import Outer

# An attribute of a compiler's set of symbols: a dict from expressions to given sizes.
_GIVEN = "_subclasses_outer_sizes"


def with_given_sizes(outer: Outer, given: tuple[Sequence[Any], Sequence[Any]] | None) -> Outer:
    """Returns an ``Outer`` with the symbol that a compiler has for each size and stride made of several symbols.

    Args:
        outer: the outer properties that the class computes.
        given: the outer size and stride that ``__tensor_unflatten__`` received, or ``None`` if it was not called.
    """
    size = _as_given(outer.size, None if given is None else given[0])
    stride = outer.stride and _as_given(outer.stride, None if given is None else given[1])
    return outer._replace(size=size, stride=stride)


def _as_given(numbers: Sequence[Any], given: Sequence[Any] | None) -> list[Any]:
    result = list(numbers)
    for i, number in enumerate(numbers):
        if not _has_several_symbols(number):
            continue
        node = number.node
        known = node.shape_env.__dict__.setdefault(_GIVEN, {})
        # PyTorch passes the numbers of the example in place of symbols if the value is inside of another wrapper.
        if given is not None and isinstance(given[i], torch.SymInt):
            known[node.expr] = given[i]
        result[i] = known.get(node.expr, number)
    return result


def _has_several_symbols(number: Any) -> bool:
    return isinstance(number, torch.SymInt) and len(number.node.expr.free_symbols) > 1
