"""Indexing by tensors of one number: eager mode reads the number, a trace takes it as a symbol of the graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from desugar import _torch as private
from subclasses._torch import disabled_torch_function_impl

_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)


def index_by_numbers(func: Any, args: Any) -> tuple[Any, Any]:
    """`x[i]`, `x[1:i]` and `x[i] = y` with the number in `i` in its place; any other call as it is.

    `x[...]` itself takes no symbol that depends on data, so there is a `select` for each such number.
    """
    if func is not Tensor.__getitem__ and func is not Tensor.__setitem__:
        return func, args
    x, index, *value = args
    parts = index if type(index) is tuple else (index,)
    if not value and any(map(_is_old_mask, parts)):
        parts = tuple(part != 0 if _is_old_mask(part) else part for part in parts)
        args = (x, parts, *value)
    if not any(map(_has_number, parts)) or not all(map(_is_basic, parts)) or not _follows_torch(x):
        return func, args
    return (_write if value else _read), (x, parts, *value)


def _read(x: Tensor, parts: tuple[Any, ...]) -> Tensor:
    for dim, part in reversed([*enumerate(parts)]):
        x = x.select(dim, part.item()) if _is_number(part) else x  # type: ignore[arg-type]
    return x[tuple(_with_numbers(part) for part in parts if not _is_number(part))]


def _write(x: Tensor, parts: tuple[Any, ...], value: Any) -> None:
    _read(x, parts)[...] = value


def _follows_torch(x: Any) -> bool:
    """Whether indexing means what it means for a plain tensor: the class has no rule of its own for it."""
    return isinstance(x, private.FunctionalTensor) or (
        type(x).__torch_function__ is disabled_torch_function_impl
    )


def _is_old_mask(part: Any) -> bool:
    """Whether a part is a mask of bytes, which fake tensors do not take."""
    return isinstance(part, Tensor) and part.dtype is torch.uint8


def _is_number(part: Any) -> bool:
    return isinstance(part, private.FunctionalTensor) and part.dim() == 0 and part.dtype in _INTEGERS


def _has_number(part: Any) -> bool:
    if isinstance(part, slice):
        return any(map(_is_number, (part.start, part.stop, part.step)))
    return _is_number(part)


def _is_basic(part: Any) -> bool:
    return isinstance(part, int | slice) or _is_number(part)


def _with_numbers(part: Any) -> Any:
    if isinstance(part, slice):
        return slice(*map(_with_numbers, (part.start, part.stop, part.step)))
    return part.item() if _is_number(part) else part
