"""The sizes of views and reductions: what a rule for one returns has the size that the op names.

PyTorch takes what a rule returns as it is. A rule that forgets the dim, or the step, of a view, or the dim of a sum,
would give a value of another size, and no error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

aten = torch.ops.aten

Size = Sequence[int]


def _select(size: Size, dim: int, index: int) -> Size:
    return _without(size, {dim % len(size)})


def _slice(size: Size, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Size:
    found = [*size]
    found[dim] = len(range(size[dim])[start:end:step])
    return found


def _transpose(size: Size, dim0: int, dim1: int) -> Size:
    found = list(size)
    if found:
        found[dim0], found[dim1] = found[dim1], found[dim0]
    return found


def _permute(size: Size, dims: Sequence[int]) -> Size:
    return [size[d] for d in dims]


def _unsqueeze(size: Size, dim: int) -> Size:
    dim %= len(size) + 1
    return (*size[:dim], 1, *size[dim:])


def _squeeze(size: Size, dims: int | Sequence[int] | None = None) -> Size:
    named = range(len(size)) if dims is None else [dims] if isinstance(dims, int) else dims
    return _without(size, {d % len(size) for d in named if size and size[d] == 1})


def _expand(size: Size, sizes: Sequence[int]) -> Size:
    old = (*(1 for _ in range(len(sizes) - len(size))), *size)
    return [n if m == -1 else m for n, m in zip(old, sizes, strict=True)]


def _view(size: Size, sizes: Sequence[int]) -> Size:
    known = math.prod(n for n in sizes if n != -1)
    return [math.prod(size) // max(known, 1) if n == -1 else n for n in sizes]


def _reduced(size: Size, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Size:
    named = [] if dim is None else [dim] if isinstance(dim, int) else dim
    dims = {d % len(size) for d in named if size} or {*range(len(size))}
    return [1 if d in dims else n for d, n in enumerate(size)] if keepdim else _without(size, dims)


def _normed(size: Size, p: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Size:
    return _reduced(size, dim, keepdim)


def _without(size: Size, dims: set[int]) -> Size:
    return [n for d, n in enumerate(size) if d not in dims]


_SIZES: dict[Any, Callable[..., Size]] = {
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.t.default: lambda size: size[::-1],
    aten.transpose.int: _transpose,
    aten.permute.default: _permute,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.expand.default: _expand,
    aten.view.default: _view,
    aten.alias.default: lambda size: size,
}
_SIZES |= dict.fromkeys(
    (
        aten.sum.default,
        aten.sum.dim_IntList,
        aten.mean.default,
        aten.mean.dim,
        aten.prod.default,
        aten.prod.dim_int,
        aten.amax.default,
        aten.amin.default,
        aten.argmax.default,
        aten.argmin.default,
        aten.logsumexp.default,
        aten.any.default,
        aten.any.dim,
        aten.all.default,
        aten.all.dim,
        aten.max.default,
        aten.min.default,
    ),
    _reduced,
)
_SIZES |= dict.fromkeys((aten.norm.ScalarOpt_dim, aten.linalg_vector_norm.default), _normed)


def size_of(op: Any) -> Callable[..., Size] | None:
    """Returns the function from the size of a tensor, and the other arguments of a view or a reduction, to its size."""
    return _SIZES.get(op)


_PLAIN_KINDS = frozenset({int, bool, float, type(None)})


def are_numbers(values: Iterable[Any]) -> bool:
    """Whether sizes and arguments of a view are numbers, and none a symbol, as in a trace."""
    for value in values:
        kind = value.__class__
        if kind not in _PLAIN_KINDS and not (kind in (list, tuple) and are_numbers(value)):
            return False
    return True
