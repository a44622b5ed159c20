"""``tensor_split`` for both layouts, and ``chunk`` of rows: each row is cut as it would be in a loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from subclasses.errors import DispatchError

Part = Callable[[Any, Tensor, Tensor, Any], Any]


def chunk_rows(part: Part, x: Any, counts: Tensor, width: Any, chunks: int) -> tuple[Any, ...]:
    """Every row in as many parts; the last ones of a row may be empty."""
    size = (counts + chunks - 1) // chunks
    firsts = [size * i for i in range(chunks)]
    parts = [(first, (counts - first).clamp(min=0).minimum(size)) for first in firsts]
    return tuple(part(x, first, lengths, -(-width // chunks)) for first, lengths in parts)


def implement_tensor_split(
    cls: Any,
    part: Part,
    rows_of: Callable[[Any], tuple[int, int, Tensor]],
    shown: Callable[[Any], str],
) -> None:
    """The rule of ``tensor_split``, and of the functions that are one along a certain dimension.

    Args:
        cls: the layout.
        part: ``(x, first, lengths, width)``: the entries of each row from ``first [B]`` on, ``lengths [B]`` of them.
        rows_of: ``(x)``: its batch and its ragged dimension, and ``[B]`` the lengths.
        shown: a value in the words of an error.
    """

    @cls.implements(torch.tensor_split)
    def _(func: Any, x: Any, indices_or_sections: Any, dim: int = 0) -> Any:
        where = indices_or_sections
        if isinstance(where, Tensor):
            where = where.tolist()
        batch, ragged, counts = rows_of(x)
        if not -x.dim() <= dim < x.dim():
            raise IndexError(f"tensor_split: {shown(x)} has no dimension {dim}")
        dim = dim % x.dim()
        if dim not in (batch, ragged):
            return cls.unruled(func, x, where, dim)
        if batch == ragged:
            raise DispatchError(
                f"tensor_split: merged dimensions of {shown(x)} stay whole; unmerge them by unflatten"
            )
        if isinstance(where, int) and where < 1:
            raise RuntimeError(f"tensor_split: expected 1 section or more, got {where}")
        if dim == ragged and isinstance(where, int):
            return _in_sections(part, x, counts, x.shape[ragged], where)
        stops = _section_stops(x.shape[batch], where) if isinstance(where, int) else list(where)
        before = [slice(None)] * dim
        pairs = zip([0, *stops], [*stops, None], strict=True)
        return tuple(x[(*before, slice(a, b))] for a, b in pairs)

    def split(func: Any, x: Any, where: Any) -> Any:
        name = func.__name__
        dim = {"vsplit": 0, "hsplit": 1, "dsplit": 2}[name]
        if isinstance(where, int) and x.shape[dim] % where and dim not in rows_of(x)[:2]:
            raise RuntimeError(f"{name}: dimension {dim} of {shown(x)} is no multiple of {where}")
        return torch.tensor_split(x, where, dim)

    cls.implements(torch.vsplit, torch.hsplit, torch.dsplit)(split)


def _in_sections(part: Part, x: Any, counts: Tensor, width: Any, sections: int) -> tuple[Any, ...]:
    """Every row in as many parts, the first ones longer by one where they do not come out even."""
    size, more = counts // sections, counts % sections
    return tuple(
        part(x, size * i + more.clamp(max=i), size + (more > i), -(-width // sections))
        for i in range(sections)
    )


def _section_stops(count: int, sections: int) -> Sequence[int]:
    """Where sections of a batch end, but for the last."""
    size, more = divmod(count, sections)
    return [size * i + min(i, more) for i in range(1, sections)]
