"""``as_strided``, which ``torch.compile`` calls to recreate views of its arguments.

Size and stride describe the outer tensor. They determine its batch and ragged dimension, and the stored tensor is
strided alike. The rule raises if a size and stride are ambiguous (extents of 1, rows that were cut).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from subclasses.errors import DispatchError
from subclasses.ragged.base import name_of, shown, unruled
from subclasses.ragged.registry import Rules

aten = torch.ops.aten


RULES = Rules()

# ---- the rules -------------------------------------------------------------------------------------------------


@RULES.of(aten.as_strided.default)
def _below(op: Any, x: Any, size: Any, stride: Any, storage_offset: Any = None) -> Any:
    return _strided(op, x, x.stored, size, stride, storage_offset)


@RULES.of(torch.as_strided)
def _above(func: Any, x: Any, size: Any, stride: Any, storage_offset: Any = None) -> Any:
    if not (x.requires_grad and torch.is_grad_enabled()):
        return unruled(func, x, size, stride, storage_offset)
    return _strided(func, x, x.unwrap_stored(), size, stride, storage_offset)


def _strided(func: Any, x: Any, stored: Tensor, size: Any, stride: Any, offset: Any) -> Any:
    rows = find_rows(x, list(size), list(stride))
    if rows is None:
        raise DispatchError(
            f"{name_of(func)}: cannot tell where the rows of {shown(x)} of stride {x.stride()} are in one of size "
            f"{tuple(size)} and stride {tuple(stride)}",
            code="strided-view",
            hint="torch.compile remakes views of its arguments so: return a copy by clone(), or use backend='desugar'",
        )
    lacking = x.dim() - stored.dim()
    row_dims = [x.stored_dim(d) for d in set(x.row_dims) if d >= lacking]
    skipped = 0 if offset is None else _skipped(stored, row_dims, offset, x.storage_offset())
    if skipped is None:
        raise DispatchError(
            f"{name_of(func)}: {shown(x)} that begins at {x.storage_offset()} of its storage is viewed with the "
            f"beginning {offset}, where no element of a row's first entry is for certain",
            code="strided-view",
            hint="return a copy by clone(), or use backend='desugar'",
        )
    batch, ragged = rows
    if x.rows_first and (batch != 0 or (batch == ragged) != x.merged):
        raise DispatchError(
            f"as_strided: the rows of {shown(x)} stay at the first dimension, got the size {list(size)}",
            code="row-dims",
            hint="x.to_dense() gives a tensor without this limit",
        )
    size = list(size)
    if x.rows_first:
        size[ragged] = stored.shape[x.stored_dim(x.ragged_dim)]
    view = stored.as_strided(size[lacking:], list(stride)[lacking:], stored.storage_offset() + skipped)
    return x.with_stored(view, ragged, batch)


def find_rows(x: Any, size: list[int], stride: list[int]) -> tuple[int, int] | None:
    """Returns the batch and the ragged dimension of a view of ``x``; None if they are ambiguous."""
    batch, ragged = x.row_dims
    outer = x.stride()
    batch_dims, ragged_dims = (_matches(size, stride, x.shape[d], outer[d]) for d in (batch, ragged))
    if len(batch_dims) == len(ragged_dims) == 1:
        return batch_dims[0], ragged_dims[0]
    # perhaps merged
    if not batch_dims and not ragged_dims and outer[batch] == x.shape[ragged] * outer[ragged]:
        together = _matches(size, stride, x.shape[batch] * x.shape[ragged], outer[ragged])
        if len(together) == 1:
            return together[0], together[0]
    return None


def _skipped(stored: Tensor, row_dims: Sequence[int], offset: int, begin: int) -> int | None:
    """Returns how many elements of features a view skips at its beginning; None if that is ambiguous.

    Newer releases of PyTorch add the storage offset of the argument once more, since a new wrapper has its own storage.
    """
    candidates = {n for n in (offset - begin, offset - 2 * begin) if _is_feature(stored, row_dims, n)}
    return candidates.pop() if len(candidates) == 1 else None


def _is_feature(stored: Tensor, row_dims: Sequence[int], skipped: int) -> bool:
    """Returns whether the element ``skipped`` after the first one has the same row and position."""
    dims = sorted(range(stored.dim()), key=stored.stride, reverse=True)
    for d in dims:
        if stored.stride(d) > 0 and stored.size(d) > 1:
            index, skipped = divmod(skipped, stored.stride(d))
            if not 0 <= index < (1 if d in row_dims else stored.size(d)):
                return False
    return skipped == 0


def _matches(size: Sequence[int], stride: Sequence[int], n: int, step: int) -> list[int]:
    return [d for d, pair in enumerate(zip(size, stride, strict=True)) if pair == (n, step)]
