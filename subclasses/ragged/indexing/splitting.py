"""``split``, ``chunk`` and ``tensor_split``: groups of rows, or parts of each row as in a loop over the rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from subclasses.errors import DispatchError
from subclasses.ragged.base import outer_dims, shown, unruled
from subclasses.ragged.checks import check_reached
from subclasses.ragged.registry import Rules

RULES = Rules()

# ---- split and chunk -------------------------------------------------------------------------------------------


@RULES.of(torch.chunk)
def _chunk(func: Any, input: Any, chunks: int, dim: int = 0) -> Any:
    (dim,) = outer_dims(func, input, dim)
    along_rows = dim == input.ragged_dim and not input.merged
    if chunks < 1 and (along_rows or not input.rows_first):
        raise RuntimeError(f"{func.__name__}: expected at least 1 chunk, got {chunks}")
    if not along_rows:
        return _split_equally(func, input, chunks, dim)
    counts, width = input.counts, -(-input.width // chunks)
    size = (counts + chunks - 1) // chunks
    firsts = [(size * i).minimum(counts) for i in range(chunks)]  # the last parts of a row may be empty
    return tuple(input.cut(n, (counts - n).clamp(min=0).minimum(size), width) for n in firsts)


@RULES.of(torch.split)
def _split(func: Any, tensor: Any, split_size_or_sections: Any, dim: int = 0) -> Any:
    (dim,) = outer_dims(func, tensor, dim)
    if dim == tensor.ragged_dim and not tensor.merged and not isinstance(split_size_or_sections, int):
        return _sections_of_rows(tensor, list(split_size_or_sections))
    return _split_equally(func, tensor, split_size_or_sections, dim)


def _sections_of_rows(x: Any, sections: list[Any]) -> tuple[Any, ...]:
    """Returns sections that every row has; the last section is the rest of each row."""
    stops = list(accumulate(sections[:-1], initial=0))
    if stops[-1] + sections[-1] != x.width:
        raise RuntimeError(
            f"split: expected sections of {x.width} places together for {shown(x)}, got {sections}"
        )
    message = f"split: a row has fewer entries than the sections {sections[:-1]} before its last one"
    check_reached(x, stops[-1], message)
    return tuple(x.slice_rows(slice(a, b)) for a, b in zip(stops, [*stops[1:], None], strict=True))


def _split_equally(func: Any, x: Any, size: Any, dim: int) -> Any:
    """Returns groups of rows, or equal parts of each row; runs the op itself along another dimension."""
    if x.merged or dim not in ((x.batch_dim,) if x.rows_first else x.row_dims):
        return unruled(func, x, size, dim)
    parts, stop = [], 0
    for part in func(torch.empty(x.shape[dim], device="meta"), size):
        parts.append(_part(x, dim, slice(stop, stop + part.shape[0])))
        stop += part.shape[0]
    return tuple(parts)


def _part(x: Any, dim: int, part: slice) -> Any:
    return x.take_rows(part) if dim == x.batch_dim else x.slice_rows(part)


# ---- tensor_split ----------------------------------------------------------------------------------------------


@RULES.of(torch.tensor_split)
def _tensor_split(func: Any, x: Any, indices_or_sections: Any, dim: int = 0) -> Any:
    where = indices_or_sections
    if isinstance(where, Tensor):
        where = where.tolist()
    if not -x.dim() <= dim < x.dim():
        raise IndexError(f"tensor_split: {shown(x)} has no dimension {dim}")
    dim = dim % x.dim()
    if dim not in x.row_dims:
        return unruled(func, x, where, dim)
    if x.merged:
        raise DispatchError(
            f"tensor_split: merged dimensions of {shown(x)} stay whole",
            code="row-dims",
            hint="unmerge them by unflatten",
        )
    if isinstance(where, int) and where < 1:
        raise RuntimeError(f"tensor_split: expected 1 section or more, got {where}")
    if dim == x.ragged_dim and isinstance(where, int):
        return _in_sections(x, where)
    stops = _section_stops(x.shape[dim], where) if isinstance(where, int) else list(where)
    bounds = zip([0, *stops], [*stops, None], strict=True)
    return tuple(_part(x, dim, slice(a, b)) for a, b in bounds)


@RULES.of(torch.vsplit, torch.hsplit, torch.dsplit)
def _split_along(func: Any, x: Any, where: Any) -> Any:
    name = func.__name__
    dim = {"vsplit": 0, "hsplit": 1, "dsplit": 2}[name]
    if isinstance(where, int) and x.shape[dim] % where and dim not in x.row_dims:
        raise RuntimeError(f"{name}: dimension {dim} of {shown(x)} is not a multiple of {where}")
    return torch.tensor_split(x, where, dim)


def _in_sections(x: Any, sections: int) -> tuple[Any, ...]:
    """Splits every row into ``sections`` parts; the first parts are longer by one if the length is not divisible."""
    size, more, width = x.counts // sections, x.counts % sections, -(-x.width // sections)
    return tuple(x.cut(size * i + more.clamp(max=i), size + (more > i), width) for i in range(sections))


def _section_stops(count: int, sections: int) -> Sequence[int]:
    """Returns the ends of the sections of a batch, without the last."""
    size, more = divmod(count, sections)
    return [size * i + min(i, more) for i in range(1, sections)]


def bound_in_rows(bound: int, lengths: Tensor) -> Tensor:
    """Returns the position ``[B]`` in each row of the bound of a slice."""
    return (lengths + bound if bound < 0 else torch.full_like(lengths, bound)).clamp(min=0).minimum(lengths)


def extent_of_slice(extent: Any, part: slice) -> Any:
    """Returns the length of a slice with step 1 of an extent, which may be symbolic in a compiler."""
    first, last = (
        extent if bound > extent else bound if bound >= 0 else 0 if -bound > extent else extent + bound
        for bound in (part.start or 0, extent if part.stop is None else part.stop)
    )
    return last - first if last > first else 0
