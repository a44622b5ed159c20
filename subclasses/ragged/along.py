"""Ops along dimensions of rows that lie back to back: on the values within entries, on a padded table across them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subclasses.ragged.families import (
    Fill,
    Ways,
    each,
    implement_along,
    implement_means,
    implement_reductions,
    keepdim_of,
)
from subclasses.ragged.jagged import JaggedTensor
from subclasses.ragged.ordered import implement_ordered
from subclasses.ragged.reductions import Dims, count, dims_of, outer_dims, ragged_dim_after
from subclasses.ragged.rows import shown

# ---- reductions ------------------------------------------------------------------------------------------------


def of_features(func: Any, x: JaggedTensor, dim: Any, keepdim: bool, **kwargs: Any) -> Any:
    """A reduction within each entry; None where rows or the batch are reduced."""
    dims = dims_of(func, x, dim)
    if not dims.rows_stay:
        return None
    kwargs |= keepdim_of(func, keepdim)
    result = func(x.unwrap("values"), _as_given(dim, dims.features), **kwargs)
    return each(result, lambda part: x.with_values(part, ragged_dim_after(x, dims.features, keepdim)))


def reduce(
    func: Any, x: JaggedTensor, dim: Any, keepdim: bool, fill: Fill, needs_entry: bool, **kwargs: Any
) -> Any:
    """A reduction on values, or on a padded table where the padding changes no result."""
    within = of_features(func, x, dim, keepdim, **kwargs)
    if within is not None:
        return within
    dims = dims_of(func.__name__, x, dim)
    if needs_entry:
        _check_entries(func, x, dims)
    if dim is None and not keepdim:  # no table is needed where all is reduced
        stored = x.kept(x.unwrap("values"), fill(x.dtype))
        listed = func in (torch.amax, torch.amin, torch.logsumexp)
        return func(stored, tuple(range(stored.dim()))) if listed else func(stored)
    dense = x.to_dense(fill(x.dtype))
    return func(dense, _as_given(dim, outer_dims(x, dims)), **kwargs, **keepdim_of(func, keepdim))


def _as_given(dim: Any, dims: Any) -> Any:
    """One dimension where one was given: some ops take no list."""
    return dims[0] if isinstance(dim, int) else tuple(dims)


def _check_entries(func: Any, x: JaggedTensor, dims: Dims) -> None:
    """Raises where there is no entry to take a result from."""
    if dims.batch and dims.ragged:
        return
    counts = x.row_lengths() if dims.ragged else x.segments.mask().sum(0)
    if torch.compiler.is_compiling() or type(counts) is not Tensor or counts.is_cuda:
        torch.ops.aten._assert_async.msg(
            (counts > 0).all(), f"{func.__name__}: a row of a ragged tensor is empty"
        )
    elif not bool((counts > 0).all()):
        where = (counts == 0).nonzero().squeeze(1).tolist()
        raise IndexError(
            f"{func.__name__}: {shown(x)} has no entries in {'rows' if dims.ragged else 'positions'} {where}"
        )


# ---- ops that keep the size ------------------------------------------------------------------------------------


def run_along(func: Any, x: JaggedTensor, dim: int, fill: Fill, *args: Any, **kwargs: Any) -> Any:
    """An op along one dimension, on values or on a padded table."""
    dims = dims_of(func.__name__, x, dim)
    if dims.rows_stay:
        return each(func(x.unwrap("values"), *args, dim=dims.features[0], **kwargs), x.with_values)
    dense = x.to_dense(fill(x.dtype))
    return each(func(dense, *args, dim=outer_dims(x, dims)[0], **kwargs), x.like_dense)


# ---- the rules -------------------------------------------------------------------------------------------------

WAYS = Ways(reduce, run_along, of_features, count, shown)
implement_means(JaggedTensor, WAYS)
implement_reductions(JaggedTensor, WAYS)
implement_along(JaggedTensor, WAYS)
implement_ordered(JaggedTensor, WAYS)
