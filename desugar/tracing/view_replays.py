"""Views among the results of a traced function, which are taken again of the caller's tensors at run time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from desugar import _torch as private
from desugar.ir.outputs import Outputs
from desugar.ir.storage import base_of
from desugar.ir.values import View, is_wrapper

Replay = Callable[[Any, Sequence[int]], Any]


def return_base(base: Any, ints: Sequence[int]) -> Any:
    """Takes all of a base."""
    return base


def view_as(base: Any, dtype: torch.dtype | None) -> Any:
    """Returns the memory of a base as another dtype; the base itself for None."""
    return base if dtype is None else base.detach().view(dtype)


class ViewReplay:
    """Takes the view of a traced tensor again, on another base.

    Attributes:
        traced: The traced view.
        dtype: The dtype as which the base's memory is read first; None for the base's own.
    """

    __slots__ = ("dtype", "traced")

    def __init__(self, traced: Tensor, dtype: torch.dtype | None) -> None:
        self.traced, self.dtype = traced, dtype

    def __reduce__(self) -> tuple[Any, ...]:
        # The traced view cannot be stored. Whoever reads this runs the function on fake tensors, and takes its views.
        return _get_unknown_view, ()

    def extents(self) -> tuple[tuple[Any, ...], tuple[Any, ...], Any] | None:
        """Returns the size, stride and offset of the view in its base; None if these do not make it."""
        if self.dtype is not None or is_wrapper(self.traced):
            return None
        start = self.traced.storage_offset() - base_of(self.traced).storage_offset()
        return tuple(self.traced.size()), tuple(self.traced.stride()), start

    def __call__(self, base: Any, ints: Sequence[int]) -> Any:
        """Takes the view of `base`, with these sizes, strides and indices."""
        next_ints = iter(ints)
        base = view_as(base, self.dtype)
        if not self.traced._is_view():
            return base
        with private.DisableTorchFunctionSubclass():
            view = self.traced._view_func_unsafe(base, lambda extent: next(next_ints))
        if hasattr(base, "took_view"):  # a class's hook for views taken above autograd
            base.took_view(view)
        return view


class DetachedReplay:
    """Takes a view, detaches it, and takes a view of that: `x[1:].detach()`, and what is a view of it.

    Attributes:
        replay: Takes the view that is detached.
        num_ints: How many sizes, strides and indices are its own.
        following: Takes the view of what is detached; None for all of it.
    """

    __slots__ = ("following", "num_ints", "replay")

    def __init__(self, replay: Replay, num_ints: int, following: ViewReplay | None) -> None:
        self.replay, self.num_ints, self.following = replay, num_ints, following

    def __reduce__(self) -> tuple[Any, ...]:
        return _get_unknown_view, ()

    def __call__(self, base: Any, ints: Sequence[int]) -> Any:
        """Takes the view of `base`, with these sizes, strides and indices."""
        detached = self.replay(base, ints[: self.num_ints]).detach()
        return detached if self.following is None else self.following(detached, ints[self.num_ints :])


def _unknown_view(base: Any, ints: Sequence[int]) -> Any:
    raise RuntimeError("the views of this program have not been traced")


def _get_unknown_view() -> Any:
    return _unknown_view


def has_unknown_views(outputs: Outputs) -> bool:
    """Returns whether views among stored results have to be found again."""
    return any(isinstance(value, View) and value.replay is _unknown_view for value in outputs.values)
