"""What index tensors pick from rows that lie back to back: of features, of rows, or places of each row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subclasses.errors import DispatchError
from subclasses.ragged.families import without_out
from subclasses.ragged.jagged import JaggedTensor
from subclasses.ragged.rows import check_rows_match, relaid, shown
from subclasses.ragged.views import feature_place

# ---- by one index for all --------------------------------------------------------------------------------------


@JaggedTensor.implements(torch.index_select)
def _(func: Any, input: Any, dim: int, index: Tensor) -> Any:
    dim = dim % input.dim()
    if dim not in (0, input.ragged_dim) or input.ragged_dim == 0:
        place = feature_place(func.__name__, input, dim)
        return input.with_values(input.unwrap("values").index_select(place, index))
    return input[(*[slice(None)] * dim, index)]


# ---- by an index for each entry --------------------------------------------------------------------------------


@JaggedTensor.implements(torch.gather, torch.take_along_dim)
def _(func: Any, input: Any, dim: int, index: Any, **kwargs: Any) -> Any:
    kwargs = without_out(func, input, kwargs, shown)
    if func.__name__ == "take_along_dim":
        dim, index = index, dim
    if not isinstance(input, JaggedTensor) or not isinstance(index, JaggedTensor):
        raise DispatchError(
            f"{func.__name__}: expected two jagged tensors with the same rows, got {shown(input)} and {shown(index)}"
        )
    dim = dim % input.dim()
    places = (input.dim(), input.ragged_dim)
    if places != (index.dim(), index.ragged_dim) or dim == 0:
        raise DispatchError(
            f"{func.__name__}: {shown(index)} along {dim} of {shown(input)}; rows are taken by x[rows]"
        )
    if dim == input.ragged_dim:
        found, place = _entries_at(func, input, index), dim - 1
    else:
        index, place = relaid(func, input, index), feature_place(func.__name__, input, dim)
        found = index.kept(index.values)
    values = torch.gather(input.unwrap("values"), place, found, **kwargs)
    return index.with_values(index.kept(values))


def _entries_at(func: Any, x: JaggedTensor, index: JaggedTensor) -> Tensor:
    """The entries at places of each row, which it must have."""
    if x.offsets.shape != index.offsets.shape:
        check_rows_match(func, x, index)  # which says how many there are
    rows = index.segments
    shape = [-1, *[1] * (index.values.dim() - 1)]
    first, reach = (
        index.trailing(rows.spread_rows(t).view(shape)) for t in (x.offsets[:-1], x.row_lengths())
    )
    found = index.kept(index.values)
    reached = index.kept((found >= 0) & (found < reach), True)
    message = f"{func.__name__}: an index lies beyond its row of {shown(x)}"
    torch.ops.aten._assert_async.msg(reached.all(), message)
    return index.kept(found + first)


# ---- the largest -----------------------------------------------------------------------------------------------


@JaggedTensor.implements(torch.topk)
def _(func: Any, input: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """Along the rows a row shorter than ``k`` gives all of its entries: a ragged result."""
    dim = dim % input.dim()
    if dim not in (0, input.ragged_dim) or input.ragged_dim == 0:
        found = func(input.unwrap("values"), k, feature_place(func.__name__, input, dim), largest, sorted)
        return type(found)(tuple(input.with_values(part) for part in found))
    if dim == 0:
        raise DispatchError(f"{func.__name__}: takes entries of a row, got dimension {dim} of {shown(input)}")
    order = torch.sort(input, dim=dim, descending=largest, stable=True).indices
    order = order[(*[slice(None)] * dim, slice(0, k))]
    return torch.return_types.topk((torch.gather(input, dim, order), order))
