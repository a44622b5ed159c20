"""Sizes, strides and numbers that may differ from call to call.

In a trace they are symbols of a shape environment. The data of a package describes its programs: there they are an
:class:`Unknown`, and a tensor is a :class:`Described`. These have the methods of symbols and fake tensors from which a
wrapper is generated. They need no shape environment, whose import alone takes longer than loading a package.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import SymInt, Tensor

from subclasses._torch import disabled_torch_function_impl, make_wrapper_subclass


class Unknown(int):
    """A number that may differ from call to call; it has the value of the compiled call."""


class Described(Tensor):
    """The description of a plain tensor: its size, stride, storage offset, dtype and device."""

    _extents: tuple[tuple[int, ...], tuple[int, ...], int]

    __torch_function__ = disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, size: Sequence[int], stride: Sequence[int], offset: int, dtype: torch.dtype, device: torch.device
    ) -> Described:
        """Makes a description; a dynamic extent is an :class:`Unknown`."""
        made = make_wrapper_subclass(
            cls, tuple(size), tuple(stride), None, None, dtype, torch.strided, device
        )
        made._extents = tuple(size), tuple(stride), offset
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise NotImplementedError(f"{func} on the description of a tensor, which has no values")

    def size(self, dim: int | None = None) -> Any:
        """Returns the size, or the size of one dimension."""
        return self._extents[0] if dim is None else self._extents[0][dim]

    def stride(self, dim: int | None = None) -> Any:
        """Returns the stride, or the stride of one dimension."""
        return self._extents[1] if dim is None else self._extents[1][dim]

    def storage_offset(self) -> int:
        """Returns the storage offset."""
        return self._extents[2]


def is_unknown(extent: Any) -> bool:
    """Returns whether a size or stride is a symbol, or an :class:`Unknown`."""
    return isinstance(extent, SymInt | Unknown)


def fixed_extents(extents: Sequence[Any]) -> list[int | None]:
    """Returns sizes or strides in the form that the C++ check of tensors expects: None in place of a symbol."""
    return [None if is_unknown(extent) else extent for extent in extents]


def is_symbolic(fake: Any) -> bool:
    """Returns whether an int is a symbol, or a fake tensor has a symbol in its size, stride or storage offset."""
    if isinstance(fake, Tensor):
        extents: Sequence[Any] = (*fake.size(), *fake.stride(), fake.storage_offset())
        return any(map(is_unknown, extents))
    return is_unknown(fake)


def hint(extent: Any) -> int:
    """Returns the value that an int had in the traced call.

    For an unbacked int, which depends on data, every symbol in it counts as 64.
    """
    if not isinstance(extent, SymInt):
        return extent
    known, expression = extent.node.hint, extent.node.expr
    return int(expression.xreplace(dict.fromkeys(expression.free_symbols, 64))) if known is None else known


def same_ints(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Returns whether two sizes or strides have the same expressions; adds no guard."""
    return [_expression(extent) for extent in one] == [_expression(extent) for extent in other]


def _expression(extent: Any) -> Any:
    return extent.node.expr if isinstance(extent, SymInt) else extent
