"""Cutting Parameters into rows for FSDP2, which asks a class for ops on its values and not for a hook.

``fully_shard`` splits a Parameter along dim 0, and copies this rank's rows into a padded copy. A class that
materializes would answer with plain tensors, and its own all-gather hooks would never be called. While FSDP2 asks,
those ops cut the inner tensors with as many rows as the value; the others, such as the scale of all rows, stay whole.
A class with rules for these ops of its own is asked as always.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import OpOverload
from subclasses._torch_distributed import fsdp_ranks, in_fsdp_parameter, undo_refused_sharding
from subclasses.errors import DispatchError, one_of
from subclasses.spec.values import map_inners

aten = torch.ops.aten

Call = Callable[..., Any]

undo_refused_sharding(DispatchError)


def with_sharding(cls: Any, op: OpOverload, run: Call) -> Call:
    """Wraps the plan of an op that FSDP2 calls on a Parameter; others stay unwrapped."""
    shard = _OPS.get(op)
    if shard is None:
        return run

    @functools.wraps(run)
    def plan(x: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(x, cls) and in_fsdp_parameter():
            return shard(x, *args, **kwargs)
        return run(x, *args, **kwargs)

    return plan


# ---- cutting -----------------------------------------------------------------------------------------------


def _split(x: Any, size: int, dim: int = 0) -> list[Any]:
    """Returns the rows of each rank.

    Raises:
        DispatchError: the value requires grad, is cut along another dim or unevenly, or is not the same as its parts.
    """
    cls, rows = type(x), x.size(0)
    if x.requires_grad:
        raise DispatchError(
            f"fully_shard of a Parameter that is {one_of(cls)} and requires grad: FSDP2 sums one plain gradient of the "
            f"size of the Parameter, and that of {one_of(cls)} is its inner tensors. Freeze it with "
            f"requires_grad_(False), or make the inner tensors Parameters of the module, and {one_of(cls)} of them in "
            f"its forward"
        )
    if dim != 0:
        raise DispatchError(
            f"fully_shard of {one_of(cls)} along dim {dim}: values that are no plain tensors are cut into rows; let "
            f"shard_placement_fn return Shard(0) or None for it, or pass it in ignored_params"
        )
    parts = [_rows(x, start, start + size) for start in range(0, rows, size)] or [x]
    if (rows and rows % size) or fsdp_ranks() not in (None, len(parts)):
        raise DispatchError(
            f"fully_shard of {one_of(cls)} of size {tuple(x.shape)}: FSDP2 gathers equal numbers of rows of values "
            f"that are no plain tensors; pass it to fully_shard in ignored_params, or make dim 0 divisible by the ranks"
        )
    _check_cut(x, size)
    if not (x.is_meta or _are_rows(x, parts)):
        raise DispatchError(
            f"fully_shard of {one_of(cls)}: its rows are not what the same rows of its inner tensors stand for, so it "
            f"cannot be cut; pass it to fully_shard in ignored_params, or write rules for torch.ops.aten.split.Tensor, "
            f"slice.Tensor, new_zeros and view"
        )
    return parts


def _check_cut(x: Any, size: int) -> None:
    """Raises DispatchError if the hooks could not tell from its rows whether an inner tensor of a part was cut."""
    for name in x._layout.present:
        t = x.__dict__[name]
        if t.dim() and t.size(0) == size != x.size(0):
            raise DispatchError(
                f"fully_shard of {one_of(type(x))}: the inner tensor {name} of size {tuple(t.shape)} stays whole on "
                f"each rank, and has as many rows as the part of a rank; choose another number of ranks, or pass the "
                f"Parameter to fully_shard in ignored_params"
            )


def _are_rows(x: Any, parts: list[Any]) -> bool:
    """Whether the parts together stand for what the whole stands for, as far as the class says what that is."""
    if not any(is_cut(x, x.__dict__[name]) for name in x._layout.present):
        return False
    if not type(x).__spec__.has_materialize:
        return True
    whole = x.materialize()
    try:
        cut = torch.cat([part.materialize() for part in parts])
    except (RuntimeError, IndexError, ValueError):  # of inner tensors that do not fit together any more
        return False
    if whole.shape != cut.shape:
        return False
    if not whole.is_floating_point():
        return torch.equal(whole, cut)
    close = 16 * torch.finfo(whole.dtype).eps  # a product of parts may be summed in another order
    scale = whole.abs().nan_to_num().amax() if whole.numel() else 1.0
    return torch.allclose(whole, cut, rtol=close, atol=float(close * scale), equal_nan=True)


def _rows(x: Any, start: int, stop: int) -> Any:
    return map_inners(x, lambda _, t: t[start:stop] if is_cut(x, t) else t)


def is_cut(x: Any, t: Tensor) -> bool:
    """Whether an inner tensor is cut where its value is cut into rows: it has as many."""
    return x.dim() > 0 and t.dim() > 0 and t.size(0) == x.size(0)


# ---- what FSDP2 does with a part ---------------------------------------------------------------------------


def _slice(x: Any, dim: int = 0, start: int | None = None, stop: int | None = None, step: int = 1) -> Any:
    rows = x.size(0)
    return _rows(x, start or 0, rows if stop is None else min(stop, rows))


def _new_zeros(x: Any, size: Any, **kwargs: Any) -> Any:
    """Returns a value of so many rows, to be filled; inner tensors that are not cut are those of ``x``."""
    return map_inners(x, lambda _, t: t.new_zeros((size[0], *t.shape[1:])) if is_cut(x, t) else t.clone())


def _view(x: Any, size: Any) -> Any:
    """Returns the value itself: FSDP2 keeps a flat view of a part, which it reads of plain tensors alone."""
    return x.detach()


def _as_strided(x: Any, size: Any, stride: Any, storage_offset: int | None = None) -> Any:
    """Returns the gathered value itself, which FSDP2 gives its first size."""
    if tuple(size) != tuple(x.shape) or tuple(stride) != x.stride():
        raise DispatchError(
            f"fully_shard of {one_of(type(x))}: fsdp_post_all_gather returned one of size {tuple(x.shape)}, and the "
            f"Parameter has size {tuple(size)}; rebuild the whole Parameter in it"
        )
    return x.detach()


_OPS: dict[Any, Call] = {
    aten.as_strided.default: _as_strided,
    aten.split.Tensor: _split,
    aten.slice.Tensor: _slice,
    aten.new_zeros.default: _new_zeros,
    aten.view.default: _view,
}
