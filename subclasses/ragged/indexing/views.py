"""Views of the dimensions of entries: the same view of the stored tensor, with the rows at their new dimensions.

They run below autograd, so that autograd records a view. ``view``, ``flatten`` and ``unflatten`` are in ``merging.py``
of each layout, since they may merge the batch and the ragged dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from subclasses.errors import DispatchError
from subclasses.ragged.base import outer_dims, shown, without
from subclasses.ragged.registry import Rules

RULES = Rules()
aten = torch.ops.aten

# ---- dimensions ------------------------------------------------------------------------------------------------


@RULES.of(aten.transpose.int)
def _transpose(op: Any, x: Any, a: int, b: int) -> Any:
    (a,), (b,) = outer_dims(op, x, a), outer_dims(op, x, b)
    if a != b and 0 in (a, b):
        x.check_first(op)
    stored = x.stored.transpose(x.stored_dim(a), x.stored_dim(b))
    return x.with_stored(stored, *[b if d == a else a if d == b else d for d in (x.ragged_dim, x.batch_dim)])


@RULES.of(aten.permute.default)
def _permute(op: Any, x: Any, dims: Sequence[int]) -> Any:
    dims, lacking = outer_dims(op, x, dims), x.rank - x.stored.dim()
    if dims[0] != 0:
        x.check_first(op)
    stored = x.stored.permute([x.stored_dim(d) for d in dims[lacking:]])
    return x.with_stored(stored, dims.index(x.ragged_dim), dims.index(x.batch_dim))


@RULES.of(aten.unsqueeze.default)
def _unsqueeze(op: Any, x: Any, dim: int) -> Any:
    dim = new_dim(op, x, dim)
    return x.with_stored(x.stored.unsqueeze(x.stored_dim(dim)), *dims_after_new(x, dim))


@RULES.of(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(op: Any, x: Any, dims: int | Sequence[int] | None = None) -> Any:
    """Keeps the dimensions of rows for any extent; raises for them in a layout whose batch comes first."""
    outer = outer_dims(op, x, dims)
    if x.rows_first and dims is not None:
        outer = [x.feature_dim(op, d) for d in outer]
    gone = [d for d in outer if x.size(d) == 1 and d not in x.row_dims]
    return without(x, x.stored.squeeze([x.stored_dim(d) for d in gone]), gone)


@RULES.of(aten.expand.default)
def _expand(op: Any, x: Any, size: Sequence[int], *, implicit: bool = False) -> Any:
    new = len(size) - x.rank
    if new < 0 or (new and x.rows_first):
        raise DispatchError(
            f"{op}: {shown(x)} expands along dimensions that it has, got the size {list(size)}",
            code="row-dims",
        )
    rows = [d + new for d in x.row_dims]
    if any(size[d] != -1 and size[d] != x.size(d - new) for d in rows):
        raise DispatchError(
            f"{op}: {shown(x)} cannot expand along its rows, got the size {list(size)}", code="row-dims"
        )
    wanted = [-1 if d in rows else n for d, n in enumerate(size)][x.rank - x.stored.dim() :]
    return x.with_stored(x.stored.expand(wanted), x.ragged_dim + new, x.batch_dim + new)


# ---- cutting ---------------------------------------------------------------------------------------------------


@RULES.of(aten.select.int)
def _select(op: Any, x: Any, dim: int, index: int) -> Any:
    dim = x.feature_dim(op, dim)
    return without(x, x.stored.select(x.stored_dim(dim), index), [dim])


@RULES.of(aten.slice.Tensor)
def _slice(op: Any, x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    of_rows = x.slice_below(op, dim, start, end, step)
    if of_rows is not None:
        return of_rows
    stored_dim = x.stored_dim(x.feature_dim(op, dim))
    return x.with_stored(op(x.stored, stored_dim, start, end, step))


@RULES.of(aten.split.Tensor, aten.split_with_sizes.default)
def _split(op: Any, x: Any, size: Any, dim: int = 0) -> Any:
    stored_dim = x.stored_dim(x.feature_dim(op, dim))
    return [x.with_stored(part) for part in op(x.stored, size, stored_dim)]


@RULES.of(aten.unbind.int)
def _unbind(op: Any, x: Any, dim: int = 0) -> Any:
    dim = x.feature_dim(op, dim)
    return [without(x, part, [dim]) for part in op(x.stored, x.stored_dim(dim))]


# ---- derivatives of cutting ------------------------------------------------------------------------------------


@RULES.of(aten.slice_backward.default)
def _slice_backward(op: Any, grad: Any, size: Sequence[int], dim: int, *cut: Any) -> Any:
    """For a slice of rows returns a plain cotangent, 0 where there is no entry, since other rows may be longer."""
    if not grad.rows_first and dim % grad.dim() in grad.row_dims:
        return op(grad.kept(grad.stored), size, dim, *cut)
    stored_dim = grad.stored_dim(grad.feature_dim(op, dim))
    wanted = list(grad.stored.shape)
    wanted[stored_dim] = size[dim]
    return grad.with_stored(op(grad.stored, wanted, stored_dim, *cut))


@RULES.of(aten.select_backward.default)
def _select_backward(op: Any, grad: Any, size: Sequence[int], dim: int, index: int) -> Any:
    dim = dim % len(size)
    stored_dim, wanted = dim - (grad.dim() - grad.stored.dim()), list(grad.stored.shape)
    wanted.insert(stored_dim, size[dim])
    return grad.with_stored(op(grad.stored, wanted, stored_dim, index), *dims_after_new(grad, dim))


# ---- added dimensions ------------------------------------------------------------------------------------------


def new_dim(op: Any, x: Any, dim: int) -> int:
    """Returns the index of an added dimension, counted from the front; the op raises if it is out of range."""
    n = x.rank + 1
    dim = dim % n if -n <= dim < n else dim
    if dim == 0:
        x.check_first(op)
    return dim


def dims_after_new(x: Any, dim: int) -> tuple[int, int]:
    """Returns the ragged and the batch dimension after another dimension is added."""
    ragged, batch = (d + (d >= dim) for d in (x.ragged_dim, x.batch_dim))
    return ragged, batch
