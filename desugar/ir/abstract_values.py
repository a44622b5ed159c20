"""Descriptions of tensors and numbers, from which a wrapper is generated without symbols.

The data of a package describes its programs. The wrapper of a program is generated from descriptions with the methods
of fake tensors and symbolic numbers. They need no shape environment, whose import alone takes longer than loading a
package.
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
