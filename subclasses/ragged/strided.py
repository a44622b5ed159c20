"""``as_strided``, with which ``torch.compile`` makes views of its arguments anew: where the rows are among the strides.

Size and stride are those of an outer tensor. Batch and ragged dimension are found by theirs, and what is stored is
strided alike. Where that leaves a doubt (extents of 1, rows that were cut) it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from subclasses.errors import DispatchError

aten = torch.ops.aten


def implement_strided(
    cls: Any,
    shown: Callable[[Any], str],
    kept: Callable[[Any], tuple[int, ...]],
    stride_stored: Callable[[Any, Tensor, list[int], list[int], int, tuple[int, int]], Any],
) -> None:
    """The rule of ``as_strided`` for a layout.

    Args:
        cls: the layout.
        shown: a value in the words of an error.
        kept: the dimensions of what is stored that a view leaves whole.
        stride_stored: ``(x, stored, size, stride, skipped, rows)``: a value of this outer size and stride, whose first
            element lies ``skipped`` behind that of what is stored, with batch and ragged dimension at ``rows``.
    """
    name = cls.__spec__.inner_names[0]

    @cls.implements(aten.as_strided.default)
    def _(op: Any, x: Any, size: Any, stride: Any, storage_offset: Any = None) -> Any:
        return strided(op, x, x.__dict__[name], size, stride, storage_offset)

    @cls.implements(torch.as_strided)
    def _(func: Any, x: Any, size: Any, stride: Any, storage_offset: Any = None) -> Any:
        if not (x.requires_grad and torch.is_grad_enabled()):
            return cls.unruled(func, x, size, stride, storage_offset)
        return strided(func, x, x.unwrap(name), size, stride, storage_offset)

    def strided(func: Any, x: Any, stored: Tensor, size: Any, stride: Any, offset: Any) -> Any:
        rows = find_rows(x, list(size), list(stride))
        if rows is None:
            raise DispatchError(
                f"{func}: cannot tell where the rows of {shown(x)} of stride {x.stride()} are in one of size "
                f"{tuple(size)} and stride {tuple(stride)}; torch.compile remakes views of its arguments so: return a "
                f"copy by clone(), or use backend='desugar'"
            )
        skipped = 0 if offset is None else _skipped(stored, kept(x), offset, x.storage_offset())
        if skipped is None:
            raise DispatchError(
                f"{func}: {shown(x)} that begins at {x.storage_offset()} of its storage is viewed with the beginning "
                f"{offset}, where no element of a row's first entry is for certain; return a copy by clone(), or use "
                f"backend='desugar'"
            )
        return stride_stored(x, stored, list(size), list(stride), skipped, rows)


def find_rows(x: Any, size: list[int], stride: list[int]) -> tuple[int, int] | None:
    """Where batch and ragged dimension are in a view of ``x``; None where that is not certain."""
    batch, ragged = getattr(x, "batch_dim", 0), x.ragged_dim
    outer = x.stride()
    rows, places = (_matches(size, stride, x.shape[d], outer[d]) for d in (batch, ragged))
    if len(rows) == len(places) == 1:
        return rows[0], places[0]
    if not rows and not places and outer[batch] == x.shape[ragged] * outer[ragged]:  # perhaps merged
        together = _matches(size, stride, x.shape[batch] * x.shape[ragged], outer[ragged])
        if len(together) == 1:
            return together[0], together[0]
    return None


def _skipped(stored: Tensor, kept: tuple[int, ...], offset: int, begin: int) -> int | None:
    """How many elements of features a view leaves out at its beginning; None where that is not certain.

    Releases differ: newer ones add the beginning of the argument once more, since a wrapper made anew has a storage of
    its own.
    """
    found = {n for n in (offset - begin, offset - 2 * begin) if _is_feature(stored, kept, n)}
    return found.pop() if len(found) == 1 else None


def _is_feature(stored: Tensor, kept: tuple[int, ...], skipped: int) -> bool:
    """Whether an element lies so far behind the first one, at the same row and place."""
    dims = sorted(range(stored.dim()), key=stored.stride, reverse=True)
    for d in dims:
        if stored.stride(d) > 0 and stored.size(d) > 1:
            index, skipped = divmod(skipped, stored.stride(d))
            if not 0 <= index < (1 if d in kept else stored.size(d)):
                return False
    return skipped == 0


def _matches(size: Sequence[int], stride: Sequence[int], n: int, step: int) -> list[int]:
    return [d for d, pair in enumerate(zip(size, stride, strict=True)) if pair == (n, step)]
