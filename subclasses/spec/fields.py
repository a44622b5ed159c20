"""The words of a declaration: ``inner``, ``static``, ``dynamic`` and ``Outer``.

The three functions return markers that :func:`subclasses.spec.collect.collect_spec` reads and removes again. They
check nothing themselves: a wrong declaration is reported at the class statement, with the class's name. The
parameter ``kw_only`` of two of them is there for type checkers: metadata is given by keyword.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

# What a field without a default holds; None is a default like any other.
MISSING: Any = type("MISSING", (), {"__repr__": lambda self: "MISSING"})()


@dataclass(frozen=True)
class InnerMarker:
    """What ``inner(...)`` was called with."""

    dtype: torch.dtype | None
    optional: bool
    device: str | None
    default: Any = MISSING


@dataclass(frozen=True)
class StaticMarker:
    """What ``static(...)`` was called with."""

    default: Any


@dataclass(frozen=True)
class DynamicMarker:
    """What ``dynamic(...)`` was called with."""

    default: Any


Marker = InnerMarker | StaticMarker | DynamicMarker


def inner(
    *,
    dtype: torch.dtype | None = None,
    optional: bool = False,
    device: str | None = None,
    default: Any = MISSING,
) -> Any:
    """Declares an inner tensor.

    Args:
        dtype: the only dtype the inner tensor may have; ``None`` allows any.
        optional: the inner tensor may be ``None``; the annotation then is ``Tensor | None``.
        device: ``"any"`` lets the inner tensor live on another device than the rest.
        default: ``None`` may be written beside ``optional=True``, where it changes nothing but what type checkers
            know: that the argument may be left out.
    """
    return InnerMarker(dtype, optional, device, default)


def static(*, default: Any = MISSING, kw_only: Literal[True] = True) -> Any:
    """Declares constant metadata: hashable, picklable, no tensor. Another value means another program."""
    return StaticMarker(default)


def dynamic(*, default: Any = MISSING, kw_only: Literal[True] = True) -> Any:
    """Declares a non-negative int that may change without a recompile."""
    return DynamicMarker(default)


class Outer(NamedTuple):
    """What the outside of a wrapper looks like, where no single inner tensor says it.

    Attributes:
        size: the outer size.
        stride: the outer stride; ``None`` means contiguous.
        dtype: the outer dtype; ``None`` means that of the inner tensor that ``dtype_from`` names.
        device: the outer device; ``None`` means that of the inner tensor that ``size_from`` names.
        storage_offset: where the first element would be, with a stride; ``None`` means 0. A class with views says
            it as its inner tensors do: ``torch.compile`` remakes a view of an argument by ``as_strided`` with it.
    """

    size: Sequence[int]
    stride: Sequence[int] | None = None
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    storage_offset: int | None = None
