"""Indexing and writing by ints, slices, index tensors and masks; a loop over the rows returns the same results.

An index is applied in three steps: rows, then entries of every row, then features of the entries. Each layout
implements the first two steps in its ``selection.py``; features are views of the stored tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from subclasses.errors import DispatchError
from subclasses.ragged.base import first_ragged, is_ragged, outer_dims, rows_stay, shown, unruled
from subclasses.ragged.data_sizes import true_positions
from subclasses.ragged.indexing.index import (
    ALL,
    as_tuple,
    expanded,
    is_all,
    is_index,
    is_int,
    outer_positions,
    replaced,
    shown_index,
    without_position,
)
from subclasses.ragged.registry import Rules
from subclasses.ragged.rules.reducing import without_out

RULES = Rules()
aten = torch.ops.aten

# ---- x[index] --------------------------------------------------------------------------------------------------


@RULES.of(torch.Tensor.__getitem__)
def _getitem(func: Any, x: Any, index: Any) -> Any:
    if not is_ragged(x):
        by = first_ragged(as_tuple(index))
        raise DispatchError(
            f"indexing {shown(x)} by {shown(by)}", code="argument-refused", hint=by.index_hint
        )
    if isinstance(index, x.ragged_class):
        return x.pick(func, index)
    index = expanded(x, index)
    positions = outer_positions(index)
    at_rows, at_entries = positions[x.batch_dim], positions[x.ragged_dim]
    if x.merged:
        _check_whole(x, index[at_rows])
        return _take_features(x, index)
    if x.rows_first and at_rows:
        raise DispatchError(
            f"indexing {shown(x)}: the batch dimension stays first, got {shown_index(index)}", code="row-dims"
        )
    rows, entries = index[at_rows], index[at_entries]
    if is_index(rows) and is_index(entries):
        return x.take_pairs(rows, entries, index)
    if is_int(rows):
        return x.select_row(rows)[without_position(index, at_rows)]
    x = x if is_all(rows) else x.take_rows(rows)
    index = replaced(index, at_rows, ALL)
    if is_int(entries):
        return x.select_position(entries)[without_position(index, at_entries)]
    index = replaced(index, at_entries, ALL)
    if isinstance(entries, slice):
        return _take_features(x if is_all(entries) else x.slice_rows(entries), index)
    return x.take_places(entries)[index]


def _check_whole(x: Any, i: Any) -> None:
    """Raises if an index cuts merged dimensions; `feature_dim` raises later for a layout with rows first."""
    if not (x.rows_first or is_all(i)):
        raise DispatchError(
            f"indexing {shown(x)}: merged dimensions stay whole",
            code="row-dims",
            hint="unmerge them by x.unflatten(0, (B, T))",
        )


def _take_features(x: Any, index: tuple[Any, ...]) -> Any:
    """Applies slices, ints, None and index tensors to dimensions of the entries, one after the other."""
    if sum(map(is_index, index)) > 1:
        if not x.rows_first:
            raise DispatchError(
                f"indexing {shown(x)}: expected one index tensor [n] for the features, got {shown_index(index)}",
                code="argument-refused",
                hint="x.to_jagged() takes several",
            )
        return x.pick_together(index)
    result, dim = x, 0
    for i in index:
        if i is None:
            result = result.unsqueeze(dim)
        elif is_all(i):
            pass
        elif is_int(i):
            result, dim = aten.select.int(result, dim, int(i) if isinstance(i, Tensor) else i), dim - 1
        elif not isinstance(i, slice):
            result = _pick_features(result, dim, i)
        else:
            step = 1 if i.step is None else i.step
            result = unruled(aten.slice.Tensor, result, dim, i.start, i.stop, step)
        dim += 1
    return aten.alias.default(x) if result is x else result


def _pick_features(x: Any, dim: int, which: Any) -> Any:
    which = torch.as_tensor(which, device=x.device)
    if which.dim() != 1:
        raise DispatchError(
            f"indexing {shown(x)}: expected one index tensor [n] for the features, got {which.dtype} of shape "
            f"{tuple(which.shape)}",
            code="argument-refused",
        )
    which = true_positions(which) if which.dtype == torch.bool else which
    return x.index_select(dim, torch.where(which < 0, which + x.shape[dim], which))


# ---- along one dimension ---------------------------------------------------------------------------------------


def take_along(x: Any, dim: int, i: Any) -> Any:
    """Indexes ``x`` at one dimension."""
    return _getitem(torch.Tensor.__getitem__, x, (*[ALL] * dim, i))


@RULES.of(torch.select)
def _select(func: Any, x: Any, dim: int, index: int) -> Any:
    (dim,) = outer_dims(func, x, dim)
    if rows_stay(x, [dim]):
        return unruled(func, x, dim, index)
    if x.merged:
        return take_along(x, dim, index)
    return x.select_row(index) if dim == x.batch_dim else x.select_position(index)


@RULES.of(torch.narrow)
def _narrow(func: Any, x: Any, dim: int, start: int, length: int) -> Any:
    (dim,) = outer_dims(func, x, dim)
    stop = None if start < 0 and start + length == 0 else start + length
    return take_along(x, dim, slice(start, stop))


@RULES.of(torch.index_select)
def _index_select(func: Any, input: Any, dim: int, index: Tensor) -> Any:
    (dim,) = outer_dims(func, input, dim)
    if rows_stay(input, [dim]) or (input.merged and input.rows_first):
        stored_dim = input.stored_dim(input.feature_dim(func.__name__, dim))
        return input.with_stored(func(input.unwrap_stored(), stored_dim, index))
    return take_along(input, dim, index)


@RULES.of(torch.unbind)
def _unbind(func: Any, x: Any, dim: int = 0) -> Any:
    (dim,) = outer_dims(func, x, dim)
    return unruled(func, x, dim) if dim != x.batch_dim or x.merged else tuple(x.to_tensors())


@RULES.of(torch.Tensor.__iter__)
def _iter(func: Any, x: Any) -> Any:
    return iter(x.entries() if x.merged and x.rows_first else x.unbind(0))


# ---- by an index or a mask of the same rows ---------------------------------------------------------------------


@RULES.of(torch.masked_select)
def _masked_select(func: Any, input: Any, mask: Any) -> Any:
    x = first_ragged((input, mask))
    input, mask = (
        t if isinstance(t, x.ragged_class) else x.from_table(t.expand(x.shape)) for t in (input, mask)
    )
    return input.pick(func, mask)


@RULES.of(torch.take_along_dim)
def _take_along_dim(func: Any, input: Any, indices: Any, dim: int | None = None, **kwargs: Any) -> Any:
    if dim is None:
        x = first_ragged((input, indices))
        raise DispatchError(
            f"{func.__name__}: without dim= it takes entries of the flattened tensor, and rows of {shown(x)} do not "
            "flatten to one",
            code="row-dims",
            hint="pass dim=",
        )
    return _gather(func, input, dim, indices, **kwargs)


@RULES.of(torch.gather)
def _gather(func: Any, input: Any, dim: int, index: Any, **kwargs: Any) -> Any:
    kwargs = without_out(func, input, kwargs)
    x = first_ragged((input, index))
    if not is_ragged(input) and input.dim() == x.dim() and x.row_dims == (0, 1):
        input = x.ragged_class.of_dense(input)
    if not isinstance(input, x.ragged_class) or not isinstance(index, x.ragged_class):
        raise DispatchError(
            f"{func.__name__}: expected two {x.kind} tensors with the same rows, got {shown(input)} and {shown(index)}",
            code="rows-apart",
        )
    (dim,) = outer_dims(func, input, dim)
    if (input.dim(), input.row_dims) != (index.dim(), index.row_dims) or dim == input.batch_dim:  # type: ignore[attr-defined]
        raise DispatchError(
            f"{func.__name__}: {shown(index)} along {dim} of {shown(input)}",
            code="argument-refused",
            hint="rows are taken by x[rows]",
        )
    if rows_stay(input, [dim]):
        index = input.relaid(func, index)
        indices = index.clean()
    else:
        indices = input.gather_index(func, index)
    return index.with_kept(torch.gather(input.clean(), input.stored_dim(dim), indices, **kwargs))


@RULES.of(torch.scatter, torch.scatter_add, torch.scatter_reduce)
def _scatter(func: Any, input: Any, dim: int, index: Any, *args: Any, **kwargs: Any) -> Any:
    """Scatters along a dimension of the entries; the index and the values have the same rows."""
    kwargs = without_out(func, input, kwargs)
    tensors = [a for a in (input, index, *args, *kwargs.values()) if isinstance(a, Tensor)]
    x = first_ragged(tensors)
    kinds = {(isinstance(t, x.ragged_class), t.dim(), getattr(t, "row_dims", None)) for t in tensors}
    if len(kinds) > 1:
        raise DispatchError(
            f"{func.__name__}: expected {x.kind} tensors with the same rows, got {' and '.join(map(shown, tensors))}",
            code="rows-apart",
            hint="torch.zeros_like(x) and the like have the rows of x",
        )
    stored_dim = input.stored_dim(input.feature_dim(func.__name__, dim))
    args = tuple(_clean_beside(func, input, a) for a in (index, *args))
    kwargs = {k: _clean_beside(func, input, a) for k, a in kwargs.items()}
    return input.with_kept(func(input.clean(), stored_dim, *args, **kwargs))


def _clean_beside(func: Any, x: Any, a: Any) -> Any:
    """Returns the stored tensor of an operand, with its entries at the positions of ``x``'s entries and 0 in gaps."""
    return x.alongside(func, a).clean() if isinstance(a, Tensor) else a


@RULES.of(torch.Tensor.scatter_, torch.Tensor.scatter_add_, torch.Tensor.scatter_reduce_)
def _scatter_(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    result = _scatter(getattr(torch, func.__name__[:-1]), input, *args, **kwargs)
    return input.copy_(result)


@RULES.of(torch.topk)
def _topk(func: Any, input: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """Along the rows the result is ragged: a row shorter than ``k`` returns all of its entries."""
    (dim,) = outer_dims(func, input, dim)
    if rows_stay(input, [dim]):
        result = func(input.unwrap_stored(), k, input.stored_dim(dim), largest, sorted)
        return type(result)(tuple(input.with_stored(part) for part in result))
    if dim != input.ragged_dim or input.merged:
        raise DispatchError(
            f"{func.__name__}: takes entries of a row, got dimension {dim} of {shown(input)}",
            code="argument-refused",
        )
    order = torch.sort(input, dim=dim, descending=largest, stable=True).indices
    order = order[(*[slice(None)] * dim, slice(0, k))]
    return torch.return_types.topk((torch.gather(input, dim, order), order))


# ---- writing ---------------------------------------------------------------------------------------------------


@RULES.of(torch.Tensor.__setitem__)
def _setitem(func: Any, x: Any, index: Any, value: Any) -> None:
    _check_ragged(func, x, value)
    dense = isinstance(value, Tensor) and value.numel() != 1
    if isinstance(index, x.ragged_class) and not (dense or is_ragged(value)):
        for _ in range(x.dim() - index.dim()):
            index = index.unsqueeze(-1)
        x.copy_(torch.where(index, value, x))  # type: ignore[arg-type]
    else:
        x.copy_(x.with_written(func, index, value))


@RULES.of(torch.index_put)
def _index_put(func: Any, input: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    _check_ragged(func, input, values)
    return input.with_put(func, indices, values, accumulate)


@RULES.of(torch.Tensor.index_put_)
def _index_put_(func: Any, input: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    return input.copy_(_index_put(func, input, indices, values, accumulate))


def _check_ragged(func: Any, x: Any, value: Any) -> None:
    if not is_ragged(x):
        raise DispatchError(
            f"{func.__name__}: cannot write {shown(value)} into {shown(x)}",
            code="write-misfit",
            hint="use to_dense()",
        )
