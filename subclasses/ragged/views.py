"""Views: dimensions of the entries are swapped, split, joined and cut in ``values``; rows stay rows.

Below autograd where PyTorch's formulas only swap and reshape dimensions of a row; above it where the batch or the
ragged dimension is merged or unmerged, which changes the outer size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from subclasses.errors import DispatchError
from subclasses.ragged.jagged import JaggedTensor
from subclasses.ragged.rows import shown
from subclasses.ragged.sharing import sharing

aten = torch.ops.aten

# ---- dimensions ------------------------------------------------------------------------------------------------


def place_of(func: Any, x: JaggedTensor, dim: int, extra: int = 0) -> int:
    """The dimension of ``values`` that an outer one is.

    Raises:
        DispatchError: it is the batch dimension.
        IndexError: there is no such dimension.
    """
    n = x.dim() + extra
    if not -n <= dim < n:
        raise IndexError(f"{func}: expected a dimension from {-n} to {n - 1} of {shown(x)}, got {dim}")
    dim = dim % n
    if x.ragged_dim == 0:
        return dim
    if dim == 0:
        raise DispatchError(
            f"{func}: the batch dimension of {shown(x)} comes first and stays as it is; x.to_dense() gives a tensor "
            f"without this limit"
        )
    return dim - 1


def feature_place(func: Any, x: JaggedTensor, dim: int) -> int:
    """The dimension of ``values`` that an outer one is, which must not be the ragged one."""
    place = place_of(func, x, dim)
    if place == max(x.ragged_dim - 1, 0):
        raise DispatchError(
            f"{func}: dimension {dim} of {shown(x)} is the ragged one; x.to_dense() gives a tensor without this limit"
        )
    return place


# ---- below autograd: dimensions of the entries -----------------------------------------------------------------


@JaggedTensor.implements(aten.transpose.int)
def _(op: Any, x: JaggedTensor, a: int, b: int) -> Any:
    first, second = place_of(op, x, a), place_of(op, x, b)
    if x.ragged_dim == 0 and 0 in (first, second) and first != second:
        raise DispatchError(f"{op}: merged dimensions stay first; unmerge them by x.unflatten(0, (B, T))")
    swapped = {first: second, second: first}
    ragged = 0 if x.ragged_dim == 0 else swapped.get(x.ragged_dim - 1, x.ragged_dim - 1) + 1
    return x.with_values(x.values.transpose(first, second), ragged)


@JaggedTensor.implements(aten.permute.default)
def _(op: Any, x: JaggedTensor, dims: Sequence[int]) -> Any:
    dims = [d % x.dim() for d in dims]
    if dims[0] != 0:
        place_of(op, x, 0)
        raise DispatchError(f"{op}: merged dimensions stay first; unmerge them by x.unflatten(0, (B, T))")
    if x.ragged_dim == 0:
        return x.with_values(x.values.permute(dims))
    return x.with_values(x.values.permute([d - 1 for d in dims[1:]]), dims.index(x.ragged_dim))


@JaggedTensor.implements(aten.unsqueeze.default)
def _(op: Any, x: JaggedTensor, dim: int) -> Any:
    place = place_of(op, x, dim, extra=1)
    if x.ragged_dim == 0 and place == 0:
        raise DispatchError(f"{op}: merged dimensions stay first; unmerge them by x.unflatten(0, (B, T))")
    return x.with_values(x.values.unsqueeze(place), x.ragged_dim + (place < x.ragged_dim))


@JaggedTensor.implements(aten.squeeze.dim, aten.squeeze.dims)
def _(op: Any, x: JaggedTensor, dims: int | Sequence[int]) -> Any:
    dims = [dims] if isinstance(dims, int) else dims
    places = [feature_place(op, x, d) for d in dims]
    gone = [p for p in places if x.values.size(p) == 1]
    return x.with_values(x.values.squeeze(gone), x.ragged_dim - sum(p < x.ragged_dim - 1 for p in gone))


@JaggedTensor.implements(aten.squeeze.default)
def _(op: Any, x: JaggedTensor) -> Any:
    kept = max(x.ragged_dim - 1, 0)
    gone = [p for p in range(x.values.dim()) if p != kept and x.values.size(p) == 1]
    return x.with_values(x.values.squeeze(gone), x.ragged_dim - sum(p < kept for p in gone))


@JaggedTensor.implements(aten.expand.default)
def _(op: Any, x: JaggedTensor, size: Sequence[int], *, implicit: bool = False) -> Any:
    if len(size) != x.dim():
        raise DispatchError(
            f"{op}: {shown(x)} expands along dimensions that it has, got the size {list(size)}"
        )
    kept = {0, x.ragged_dim}
    wanted = [-1 if d in kept else n for d, n in enumerate(size)]
    for d in kept:
        if size[d] != -1 and size[d] != x.size(d):
            raise DispatchError(f"{op}: {shown(x)} cannot expand along its rows, got the size {list(size)}")
    return x.with_values(x.values.expand(wanted[min(x.ragged_dim, 1) :]))


@JaggedTensor.implements(aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default)
def _(op: Any, x: JaggedTensor, size: Sequence[int], stride: Any = None) -> Any:
    place = _ragged_place(x, size)
    if place is None:
        raise _cannot_view(op, x, size)
    total = x.values.size(max(x.ragged_dim - 1, 0))
    wanted = [*size[min(x.ragged_dim, 1) : place], total, *size[place + 1 :]]
    # A view for `view`; elsewhere PyTorch has made sure that one is possible, or that none is expected.
    return x.with_values(
        x.values.view(wanted) if op is aten.view.default else x.values.reshape(wanted), place
    )


def _ragged_place(x: JaggedTensor, size: Sequence[int]) -> int | None:
    """Where the ragged dimension is when a row is viewed with another size; None: nowhere."""
    if x.ragged_dim == 0:
        return 0 if len(size) and size[0] == x.size(0) else None
    if not size or size[0] != x.size(0):
        return None
    before = math.prod(x.shape[1 : x.ragged_dim])
    for place in range(1, len(size)):
        # The extents before it are compared first: comparing other extents with T would become a guard on T.
        if math.prod(size[1:place]) == before and size[place] == x.max_length:
            return place
    return None


def _cannot_view(func: Any, x: JaggedTensor, size: Sequence[int]) -> DispatchError:
    return DispatchError(
        f"{func}: cannot view {shown(x)} as {list(size)}: the batch and ragged extents stay, or are merged by "
        f"flatten(0, 1) or view(-1, ...), and unmerged by unflatten(0, (B, T))"
    )


# ---- cutting -------------------------------------------------------------------------------------------------


@JaggedTensor.implements(aten.select.int)
def _(op: Any, x: JaggedTensor, dim: int, index: int) -> Any:
    place = feature_place(op, x, dim)
    return x.with_values(x.values.select(place, index), x.ragged_dim - (place < x.ragged_dim - 1))


@JaggedTensor.implements(aten.slice.Tensor)
def _(op: Any, x: JaggedTensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    return x.with_values(op(x.values, feature_place(op, x, dim), start, end, step))


@JaggedTensor.implements(aten.split.Tensor, aten.split_with_sizes.default)
def _(op: Any, x: JaggedTensor, size: Any, dim: int = 0) -> Any:
    return [x.with_values(part) for part in op(x.values, size, feature_place(op, x, dim))]


@JaggedTensor.implements(aten.unbind.int)
def _(op: Any, x: JaggedTensor, dim: int = 0) -> Any:
    place = feature_place(op, x, dim)
    ragged = x.ragged_dim - (place < x.ragged_dim - 1)
    return [x.with_values(part, ragged) for part in op(x.values, place)]


# ---- and their derivatives -------------------------------------------------------------------------------------


@JaggedTensor.implements(aten.slice_backward.default)
def _(op: Any, grad: JaggedTensor, size: Sequence[int], dim: int, *cut: Any) -> Any:
    place = feature_place(op, grad, dim)
    wanted = [size[d] if p == place else grad.values.size(p) for p, d in _outer_dims(grad)]
    return grad.with_values(op(grad.values, wanted, place, *cut))


@JaggedTensor.implements(aten.select_backward.default)
def _(op: Any, grad: JaggedTensor, size: Sequence[int], dim: int, index: int) -> Any:
    first = min(grad.ragged_dim, 1)
    place = dim % len(size) - first
    wanted = list(grad.values.shape)
    wanted.insert(place, size[place + first])
    return grad.with_values(
        op(grad.values, wanted, place, index), grad.ragged_dim + (place < grad.ragged_dim)
    )


def _outer_dims(x: JaggedTensor) -> list[tuple[int, int]]:
    """Pairs of a dimension of ``values`` and the outer one that it is."""
    first = min(x.ragged_dim, 1)
    return [(p, p + first) for p in range(x.values.dim())]


# ---- above autograd: merging batch and ragged dimension ---------------------------------------------------------


@JaggedTensor.implements(torch.flatten)
def _(func: Any, x: JaggedTensor, start_dim: int = 0, end_dim: int = -1) -> Any:
    start, end = start_dim % x.dim(), end_dim % x.dim()
    if x.ragged_dim == 0 or start > 0 or end == 0:
        return JaggedTensor.unruled(func, x, start_dim, end_dim)
    joined = math.prod(x.shape[2 : end + 1])
    if x.ragged_dim != 1 or end > 1:
        raise _cannot_view(func, x, [x.shape[0] * x.shape[1] * joined, *x.shape[end + 1 :]])
    return merge(x)


@JaggedTensor.implements(torch.unflatten)
def _(func: Any, x: JaggedTensor, dim: int, sizes: Sequence[int]) -> Any:
    dim = dim % x.dim()
    if x.ragged_dim == 0 and dim == 0:
        return _view(func, x, [*sizes, *x.shape[1:]])
    known = -math.prod(sizes)
    parts = [x.shape[dim] // known if n == -1 else n for n in sizes]
    # Tensor.unflatten asks for the rule again however it is called; splitting a dimension is a view.
    return JaggedTensor.unruled(Tensor.view, x, [*x.shape[:dim], *parts, *x.shape[dim + 1 :]])


@JaggedTensor.implements(torch.Tensor.view, torch.reshape)
def _(func: Any, x: JaggedTensor, *size: Any) -> Any:
    if len(size) == 1 and isinstance(size[0], torch.dtype | Sequence):
        (size,) = size
    return (
        JaggedTensor.unruled(func, x, size) if isinstance(size, torch.dtype) else _view(func, x, list(size))
    )


@JaggedTensor.implements(torch.Tensor.view_as, torch.Tensor.reshape_as)
def _(func: Any, x: Any, other: Tensor) -> Any:
    return x.reshape(other.shape)


def merge(x: JaggedTensor) -> JaggedTensor:
    """Batch and ragged dimension as one, which holds the existing entries."""
    return sharing(x.with_values(x.unwrap("values"), 0), x)


def _view(func: Any, x: JaggedTensor, size: list[Any]) -> Any:
    if x.ragged_dim == 0:
        return _view_merged(func, x, size)
    rest = _entry_size(x)
    if x.ragged_dim == 1 and size and _product(size[1:]) == rest and not _keeps_rows(x, size):
        return (
            merge(x)
            if len(size) == x.dim() - 1 and size[1:] == list(x.shape[2:])
            else _resize(merge(x), size)
        )
    if size and size[0] == -1:
        size = [x.shape[0], *size[1:]]
    if -1 in size:
        unknown = size.index(-1)
        known = _product(size[1:unknown] + size[unknown + 1 :])
        # An unknown extent is that of the ragged dimension if the others make up an entry, and divides an entry else.
        size[unknown] = x.max_length if known == rest else rest * x.max_length // known
    return JaggedTensor.unruled(func, x, size)


def _view_merged(func: Any, x: JaggedTensor, size: list[Any]) -> Any:
    rest, rows = _entry_size(x), x.offsets.shape[0] - 1
    # Rows of one entry look like entries with a dimension more: a size that names the rows means them.
    means_rows = _product(size[2:]) == rest and size[:2] == [rows, x.max_length]
    if size and _product(size[1:]) == rest and not means_rows:
        return _resize(x, size)
    if size and -1 in size[1:] and size[0] is x.shape[0]:
        return _resize(x, size)
    if len(size) > 1 and size[0] in (-1, rows) and size[1] in (-1, x.max_length):
        values = x.unwrap("values")
        return sharing(x.with_values(values.reshape(values.shape[0], *size[2:]), 1), x)
    raise _cannot_view(func, x, size)


def _resize(x: JaggedTensor, size: list[Any]) -> JaggedTensor:
    """Merged entries of another size."""
    values = x.unwrap("values")
    return sharing(x.with_values(values.reshape(values.shape[0], *size[1:]), 0), x)


def _entry_size(x: JaggedTensor) -> Any:
    """The number of elements in one entry."""
    return math.prod(n for p, n in enumerate(x.values.shape) if p != max(x.ragged_dim - 1, 0))


def _keeps_rows(x: JaggedTensor, size: list[Any]) -> bool:
    return (
        len(size) > 1 and (size[0] is x.shape[0] or size[0] == x.shape[0]) and size[1] in (-1, x.max_length)
    )


def _product(extents: list[Any]) -> Any:
    """The product of extents; -1 for one that holds an unknown extent."""
    return -1 if -1 in extents else math.prod(extents)
