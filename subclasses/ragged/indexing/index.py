"""Expands an index to one entry for each dimension, and classifies the entries."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subclasses.errors import DispatchError
from subclasses.ragged.base import RaggedTensor, name_of, shown
from subclasses.ragged.data_sizes import true_positions

ALL = slice(None)


def expanded(x: Any, index: Any) -> tuple[Any, ...]:
    """Returns the index with an entry for each dimension, without an ellipsis."""
    index, rank = as_tuple(index), x.rank
    if not _SIMPLE.issuperset(map(type, index)):
        _check_entries(x, index)
    used = len([i for i in index if i is not None and i is not Ellipsis])
    if used > rank:
        raise IndexError(f"too many indices for {shown(x)}: {shown_index(index)}")
    dots = next((p for p, i in enumerate(index) if i is Ellipsis), len(index))
    return (*index[:dots], *[ALL] * (rank - used), *index[dots + 1 :])


_SIMPLE = frozenset({slice, int, type(None), type(Ellipsis)})


def _check_entries(x: Any, index: tuple[Any, ...]) -> None:
    """Raises DispatchError for masks of several dimensions, ragged tensors and bools among others."""
    masks = [i for i in index if isinstance(i, Tensor) and i.dtype == torch.bool and i.dim() > 1]
    if len(index) == len(masks) == 1 and not isinstance(masks[0], RaggedTensor):
        raise DispatchError(
            f"indexing {shown(x)} by {shown(masks[0])}: {mask_of_rows(x, masks[0].dim())}",
            code="argument-refused",
        )
    if any(isinstance(i, RaggedTensor | bool) for i in index):
        raise DispatchError(
            f"indexing {shown(x)}: expected ints, slices, None, lists and dense tensors, got {shown_index(index)}",
            code="argument-refused",
            hint="apply a mask of the same rows alone, x[mask], and index the result",
        )


def as_tuple(index: Any) -> tuple[Any, ...]:
    """Returns an index of one dimension or several as a tuple."""
    return index if isinstance(index, tuple) else (index,)


def outer_positions(index: tuple[Any, ...]) -> list[int]:
    """Returns the position of each dimension's entry in an expanded index."""
    return [p for p, i in enumerate(index) if i is not None]


def replaced(index: tuple[Any, ...], position: int, i: Any) -> tuple[Any, ...]:
    """Returns an index with another entry at one position."""
    return (*index[:position], i, *index[position + 1 :])


def without_position(index: tuple[Any, ...], position: int) -> tuple[Any, ...]:
    """Returns an index for a tensor without one dimension."""
    return (*index[:position], *index[position + 1 :])


def is_all(i: Any) -> bool:
    """Returns whether an entry selects a whole dimension; False for a symbolic bound, whose value is unknown."""
    if not isinstance(i, slice) or i.stop is not None:
        return False
    return (i.start is None or _is(i.start, 0)) and (i.step is None or _is(i.step, 1))


def _is(n: Any, expected: int) -> bool:
    return type(n) is int and n == expected


def is_int(i: Any) -> bool:
    """Returns whether an entry removes its dimension."""
    return isinstance(i, int | torch.SymInt) or (
        isinstance(i, Tensor) and i.dim() == 0 and i.dtype != torch.bool
    )


def is_index(i: Any) -> bool:
    """Returns whether an entry selects several elements, by number or mask."""
    return isinstance(i, list | tuple | range) or (isinstance(i, Tensor) and i.dim() > 0)


# ---- texts of errors -------------------------------------------------------------------------------------------


def doing(func: Any) -> str:
    """Returns the action of a function in an error; the name of a tensor follows it."""
    name = name_of(func)
    return {"__getitem__": "indexing", "__setitem__": "writing into"}.get(name, f"{name} of")


def shown_index(index: Any) -> str:
    """Returns the text of an index, with the sizes of its tensors instead of their data."""
    return f"[{', '.join(map(_shown_entry, as_tuple(index)))}]"


def _shown_entry(i: Any) -> str:
    if isinstance(i, Tensor):
        return shown(i)
    if isinstance(i, slice):
        step = [] if i.step is None else [i.step]
        return ":".join("" if n is None else str(n) for n in (i.start, i.stop, *step))
    if isinstance(i, list | tuple) and (len(i) > 8 or any(isinstance(n, Tensor) for n in i)):
        return f"a {type(i).__name__} of {len(i)}"
    return "..." if i is Ellipsis else repr(i)


def mask_of_rows(x: Any, dims: int = 2) -> str:
    """Returns a hint for errors: a dense mask of ``dims`` dimensions as a mask of the entries of ``x``."""
    mask = f"a mask of entries is a {x.ragged_class.__name__} with the same rows"
    if not max(x.row_dims) < dims <= x.dim():
        return mask
    part = ", ".join(["x[...", *["0"] * (x.dim() - dims)]) + "]" if dims < x.dim() else "x"
    return f"{mask}, such as {part}.like_dense(mask)"


def check_numbers(x: Any, rows: Tensor, entries: Tensor) -> None:
    """Raises if the index of rows or of positions is a mask."""
    if torch.bool in (rows.dtype, entries.dtype):
        raise DispatchError(
            f"indexing {shown(x)}: index by one ragged mask, or by two index tensors of ints",
            code="argument-refused",
            hint=f"{mask_of_rows(x)}",
        )


# ---- index tensors ---------------------------------------------------------------------------------------------


def row_index(x: Any, which: Any) -> Tensor:
    """Returns an index of rows as numbers ``[n]``, or as a mask ``[B]``."""
    which = torch.as_tensor(which, device=x.counts.device)
    if which.dim() != 1 or which.is_floating_point():
        raise DispatchError(
            f"indexing {shown(x)}: expected rows as an int, a slice, a list or a tensor [n] of ints or bools, got "
            f"{which.dtype} of shape {tuple(which.shape)}",
            code="argument-refused",
        )
    if which.dtype == torch.bool and which.shape != x.counts.shape:
        raise IndexError(
            f"indexing {shown(x)}: expected a mask of {x.counts.shape[0]} rows, got one of {which.shape[0]}"
        )
    return which


def row_numbers(x: Any, which: Any) -> Tensor:
    """Returns the numbers of the rows that an index tensor ``[n]``, a list or a mask ``[B]`` selects."""
    which = row_index(x, which)
    return true_positions(which) if which.dtype == torch.bool else which


def common_positions(x: Any, positions: Any) -> Tensor:
    """Returns an index of positions ``[n]`` that applies to every row."""
    positions = torch.as_tensor(positions, device=x.counts.device)
    if positions.dim() != 1 or positions.dtype == torch.bool or positions.is_floating_point():
        raise DispatchError(
            f"indexing {shown(x)}: expected places of every row as an int, a slice, a list or a tensor [n] of ints, "
            f"got {positions.dtype} of shape {tuple(positions.shape)}",
            code="argument-refused",
        )
    return positions


def existing_positions(x: Any, rows: Tensor, positions: Tensor) -> Tensor:
    """Returns positions counted from the front; asserts that the rows have them, asynchronously on a GPU."""
    lengths = x.counts[rows]
    reached = ((positions < lengths) & (positions >= -lengths)).all()
    torch.ops.aten._assert_async.msg(reached, f"indexing {shown(x)}: a row is too short")
    return torch.where(positions < 0, lengths + positions, positions)
