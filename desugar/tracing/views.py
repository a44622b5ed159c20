"""Results that are views of a caller's tensors, which are taken again at run time.

One kind is a view of an inner tensor of an argument, such as `x.values[1:3]`. The graph could compute such a result,
but PyTorch would not treat it as a view. A write to the result would change the argument, and neither its version
counter nor autograd would record the write. So the runtime wrapper takes the view again, on the inner tensor that
`unwrap()` returns, or on the attribute that holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from desugar import _torch as torch_private
from desugar.ir.stages import Outputs
from desugar.ir.storage import base_of
from desugar.ir.values import View, Wrapper, is_wrapper, paths_of
from desugar.tracing.run import InputLeaf, Run, assigned_inners, identity
from subclasses import TensorSubclass
from subclasses.autograd.construct import Unwrap, unwrap_one

Replay = Callable[[Any, Sequence[int]], Any]


@dataclass(frozen=True, slots=True)
class InnerReplay:
    """Takes the view of an inner tensor of a wrapper again.

    Attributes:
        leaf: The number of the input leaf that is the wrapper.
        path: The attributes that lead to the inner tensor.
        differentiable: Whether it is read with `unwrap()`, so that it has a gradient.
        replay: Takes the view of the inner tensor.
    """

    leaf: int
    path: tuple[str, ...]
    differentiable: bool
    replay: Replay

    def __reduce__(self) -> Any:
        return self.replay.__reduce__()  # the process that loads it finds the view again, like any other view

    def __call__(self, base: Any, ints: Sequence[int]) -> Any:
        """Takes the view of an inner tensor of `base`, with these sizes, strides and indices."""
        for name in self.path:
            is_unwrapped = self.differentiable and isinstance(base, TensorSubclass)
            base = unwrap_one(base, name) if is_unwrapped else getattr(base, name)
        return self.replay(base, ints)


def find_inner(run: Run, tensor: Tensor) -> InnerReplay | None:
    """Returns the inner tensor of an input leaf that a result is a view of; None if there is none."""
    if is_wrapper(tensor) or not tensor._is_view():
        return None
    wanted, node = identity(base_of(tensor)), tensor.grad_fn
    for number, source in enumerate(run.input_leaves):
        path = _path_to(run, source, wanted)
        if path is not None and (node is None or _is_unwrapped(node, source, len(path))):
            return InnerReplay(number, path, node is not None, return_base)
    return None


def _path_to(run: Run, source: InputLeaf, wanted: int) -> tuple[str, ...] | None:
    """Returns the attributes that lead from an input wrapper to a tensor; None if the function assigned attributes."""
    if not isinstance(source.value, Wrapper) or assigned_inners(source, run.items):
        return None
    paths = (path for slot, path in paths_of(source.value) if identity(run.items[slot]) == wanted)
    return next(paths, None)


def _is_unwrapped(node: Any, source: InputLeaf, times: int) -> bool:
    """Returns whether a node of autograd leads back to an input leaf through views and `unwrap()` alone.

    Another Python autograd function may return a view, too, with a gradient of its own.
    """
    for _ in range(times):
        while node is not None and not hasattr(node, "_forward_cls"):
            following = [one for one, _ in node.next_functions if one is not None]
            node = following[0] if len(following) == 1 else None
        if node is None or not issubclass(node._forward_cls, Unwrap):
            return False
        node = node.next_functions[0][0]
    return (
        node is source.grad_fn
        if source.grad_fn is not None
        else getattr(node, "variable", None) is source.argument
    )


# ---- views of arguments ------------------------------------------------------------------------------------


def return_base(base: Any, ints: Sequence[int]) -> Any:
    """Returns the base itself as the view."""
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
        # The traced view cannot be stored. The process that loads it runs the function on fake tensors, for its views.
        return _get_unknown_view, ()

    def extents(self) -> tuple[tuple[Any, ...], tuple[Any, ...], Any] | None:
        """Returns the size, stride and offset of the view in its base; None if these do not determine the view."""
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
        with torch_private.DisableTorchFunctionSubclass():
            view = self.traced._view_func_unsafe(base, lambda extent: next(next_ints))
        if hasattr(base, "took_view"):  # a class's hook for views taken above autograd
            base.took_view(view)
        return view


class DetachedReplay:
    """Takes a view, detaches it, and takes a view of the detached tensor: `x[1:].detach()`, or a view of it.

    Attributes:
        replay: Takes the view that is detached.
        num_ints: The number of sizes, strides and indices of this view.
        following: Takes the view of the detached tensor; None for the whole tensor.
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
