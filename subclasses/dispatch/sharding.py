"""Cutting values into rows for FSDP2 and distributed checkpoints, which call ops on values and have no hook.

``fully_shard`` splits a Parameter along dim 0, and copies this rank's rows into a padded copy. A class that
materializes would return plain tensors, and FSDP2 would never call its all-gather hooks. If FSDP2 calls those ops, they
cut the inner tensors with as many rows as the value. Other inner tensors, such as the scale of all rows, stay whole.
If a class has rules for these ops, its rules run. If another number of ranks loads a checkpoint, PyTorch narrows the
saved values and the values that it loads into, and needs views of both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import OpOverload
from subclasses._torch_callers import fsdp_ranks, sharding_caller
from subclasses._torch_distributed import undo_refused_sharding
from subclasses.errors import DispatchError, one_of
from subclasses.layout import field_name
from subclasses.spec.values import OF_PARAMETER, SHARD, is_of_parameter, map_inners

aten = torch.ops.aten

Call = Callable[..., Any]

undo_refused_sharding(DispatchError)


def with_sharding(cls: Any, op: OpOverload, run: Call) -> Call:
    """Wraps the callable of an op that FSDP2, a checkpoint or a DTensor calls on a value; others stay unwrapped."""
    tables = _TABLES if cls.__spec__.fallback == "materialize" else {"fsdp": _FSDP}
    answers = {who: table[op] for who, table in tables.items() if op in table}
    if "dtensor" in tables and op.name() in COLLECTIVES:
        answers["dtensor"] = COLLECTIVES[op.name()]
    if not answers:
        return run

    @functools.wraps(run)
    def wrapped(x: Any, *args: Any, **kwargs: Any) -> Any:
        answer = answers.get(sharding_caller()) if isinstance(x, cls) else None
        return run(x, *args, **kwargs) if answer is None else answer(run, x, *args, **kwargs)

    return wrapped


# ---- cutting -----------------------------------------------------------------------------------------------


def _split(x: Any, size: int, dim: int = 0) -> list[Any]:
    """Returns the rows of each rank.

    Raises:
        DispatchError: the value requires grad and its class is not trainable. Also if it is cut along another dim or
            unevenly, or represents other elements than its shards.
    """
    cls, rows = type(x), x.size(0)
    if x.requires_grad and not cls._traits.trainable:
        raise DispatchError(
            f"fully_shard of a Parameter that is {one_of(cls)} and requires grad: the gradients of inner tensors are "
            "summed over the ranks, and its class is not one whose inner tensors are trained",
            code="shard-refused",
            hint="Declare it with trainable=True, or freeze it with requires_grad_(False). Or make the inner tensors "
            f"Parameters of the module, and {one_of(cls)} of them in its forward",
        )
    if name := _handwritten_inside(x):
        raise DispatchError(
            f"fully_shard of {one_of(cls)}: its inner tensor {name} is of a class that is not declared, and cannot be "
            "gathered",
            code="shard-refused",
            hint="declare that class, or pass the Parameter to fully_shard in ignored_params",
        )
    if dim != 0:
        raise DispatchError(
            f"fully_shard of {one_of(cls)} along dim {dim}: values that are not plain tensors are cut into rows",
            code="shard-refused",
            hint="let shard_placement_fn return Shard(0) or None for it, or pass it in ignored_params",
        )
    shards = [rows_of(x, start, start + size) for start in range(0, rows, size)] or [x]
    if (rows and rows % size) or fsdp_ranks() not in (None, len(shards)):
        raise DispatchError(
            f"fully_shard of {one_of(cls)} of size {tuple(x.shape)}: FSDP2 gathers equal numbers of rows of values "
            "that are not plain tensors",
            code="shard-refused",
            hint="pass it to fully_shard in ignored_params, or make dim 0 divisible by the ranks",
        )
    _check_cut(x, size)
    if not (x.is_meta or _are_rows(x, shards)):
        raise DispatchError(
            f"fully_shard of {one_of(cls)}: its rows differ from a value of the same rows of its inner tensors, so it "
            "cannot be cut",
            code="shard-refused",
            hint="pass it to fully_shard in ignored_params, or write rules for torch.ops.aten.split.Tensor, "
            "slice.Tensor, new_zeros and view",
        )
    return shards


def _handwritten_inside(x: Any) -> str:
    """Returns the field of an inner tensor that is a wrapper of a class which is not declared; empty if none is."""
    for name, layout in x._layout.nested:
        declared = hasattr(layout.cls, "__spec__")
        inside = _handwritten_inside(x.__dict__[name]) if declared else ""
        if inside or not declared:
            return f"{field_name(name)}.{inside}" if inside else field_name(name)
    return ""


def _check_cut(x: Any, size: int) -> None:
    """Raises DispatchError if the hooks cannot infer from its rows whether an inner tensor of a shard was cut."""
    for name in x._layout.present:
        t = x.__dict__[name]
        if t.dim() and t.size(0) == size != x.size(0):
            raise DispatchError(
                f"fully_shard of {one_of(type(x))}: the inner tensor {name} of size {tuple(t.shape)} stays whole on "
                "each rank, and has as many rows as the shard of a rank",
                code="shard-refused",
                hint="choose another number of ranks, or pass the Parameter to fully_shard in ignored_params",
            )


def _are_rows(x: Any, shards: list[Any]) -> bool:
    """Whether the shards together represent the same tensor as the whole; True if the class does not materialize."""
    if not any(is_cut(x, x.__dict__[name]) for name in x._layout.present):
        return False
    if not type(x).__spec__.has_materialize:
        return True
    try:
        cut = torch.cat([materialize_apart(shard) for shard in shards])
    except (RuntimeError, IndexError, ValueError):  # of inner tensors that do not fit together any more
        return False
    return _are_same(materialize_apart(x), cut)


def materialize_apart(x: Any) -> Tensor:
    """Returns ``x.materialize()``; :func:`sharding_caller` finds this function by its name."""
    return x.materialize()


def _are_same(whole: Tensor, cut: Tensor) -> bool:
    """Whether two plain tensors are the same but for rounding."""
    if whole.shape != cut.shape:
        return False
    if not whole.is_floating_point():
        return torch.equal(whole, cut)
    close = 16 * torch.finfo(whole.dtype).eps  # a product of parts may be summed in another order
    scale = whole.abs().nan_to_num().amax() if whole.numel() else 1.0
    return torch.allclose(whole, cut, rtol=close, atol=float(close * scale), equal_nan=True)


def rows_of(x: Any, start: int, stop: int) -> Any:
    """Returns these rows of a value, with the same inner tensors as ``x`` where they are not cut."""
    return _map_cut(x, lambda t: t[start:stop], lambda t: t)


def is_cut(x: Any, t: Tensor) -> bool:
    """Whether an inner tensor is cut if its value is cut into rows: it has as many rows as the value."""
    return x.dim() > 0 and t.dim() > 0 and t.size(0) == x.size(0)


# ---- ops of FSDP2 on a shard -------------------------------------------------------------------------------


def _slice(x: Any, dim: int = 0, start: int | None = None, stop: int | None = None, step: int = 1) -> Any:
    rows = x.size(0)
    return rows_of(x, start or 0, rows if stop is None else min(stop, rows))


def new_zeros(x: Any, size: Any, **kwargs: Any) -> Any:
    """Returns a value of ``size[0]`` rows of zeros, with clones of the inner tensors of ``x`` that are not cut."""
    return _map_cut(x, lambda t: t.new_zeros((size[0], *t.shape[1:])), torch.clone)


def _map_cut(x: Any, change: Callable[[Tensor], Tensor], keep: Callable[[Tensor], Tensor]) -> Any:
    """Returns a value with ``change(t)`` in place of inner tensors that are cut, and ``keep(t)`` of the others.

    If the class is trainable, optimizers may update a shard of a Parameter as they update the Parameter.
    """

    def replace(_: Any, t: Any) -> Any:
        if not is_cut(x, t):
            return keep(t)
        return _map_cut(t, change, keep) if hasattr(type(t), "__spec__") else change(t)

    out = map_inners(x, replace)
    out.__dict__[SHARD] = True
    if is_of_parameter(x) and type(x)._traits.trainable:
        out.__dict__[OF_PARAMETER] = True
    return out


def _view(x: Any, size: Any) -> Any:
    """Returns the value itself: FSDP2 keeps a flat view of a shard, and reads it only for plain tensors."""
    return x.detach()


def _as_strided(x: Any, size: Any, stride: Any, storage_offset: int | None = None) -> Any:
    """Returns the gathered value itself; FSDP2 passes the size and stride that it had before sharding."""
    if tuple(size) != tuple(x.shape) or tuple(stride) != x.stride():
        raise DispatchError(
            f"fully_shard of {one_of(type(x))}: fsdp_post_all_gather returned one of size {tuple(x.shape)}, and the "
            f"Parameter has size {tuple(size)}",
            code="shard-refused",
            hint="rebuild the whole Parameter in it",
        )
    return x.detach()


def narrow(x: Any, dim: int = 0, start: int | None = None, stop: int | None = None, step: int = 1) -> Any:
    """Returns the rows that a checkpoint saved or loads, as views.

    Raises:
        DispatchError: the value is not cut into rows, or its rows do not match the rows of its inner tensors.
    """
    cls = type(x)
    refused = (
        f"a distributed checkpoint of {one_of(cls)} of size {tuple(x.shape)}, saved or loaded by another number of "
        f"ranks: "
    )
    if dim != 0:
        raise DispatchError(
            f"{refused}values that are not plain tensors are cut into rows, got a cut of dim {dim}",
            code="shard-refused",
            hint="load it with the placements and as many ranks as it was saved with",
        )
    shard = _slice(x, dim, start, stop)
    inners = [x.__dict__[name] for name in x._layout.present]
    fits = any(is_cut(x, t) for t in inners)
    # A gradient, or an optimizer's state made of gradients, represents no plain tensor to compare.
    if fits and not x._layout.cotangent and not x.is_meta:
        fits = _are_same(materialize_apart(x)[start:stop], materialize_apart(shard))
    if not fits:
        raise DispatchError(
            f"{refused}its rows differ from a value of the same rows of its inner tensors",
            code="shard-refused",
            hint="load it with as many ranks as saved it, or write rules for torch.ops.aten.slice.Tensor and view",
        )
    return shard


# ---- ops of a DTensor on a shard ---------------------------------------------------------------------------


def _gather(run: Call, x: Any, *group: Any) -> Any:
    """Joins the rows of all ranks of a shard that FSDP2 made, or of its gradients; other values run ``run``."""
    if SHARD not in x.__dict__ and not x._layout.cotangent:
        return run(x, *group)
    gather, wait = torch.ops._c10d_functional.all_gather_into_tensor, torch.ops._c10d_functional.wait_tensor
    return _map_cut(x, lambda t: wait(gather(t.contiguous(), *group)), lambda t: t)


def _complete(run: Call, x: Any) -> Any:
    """Returns the result of :func:`_gather`, for which no collective is pending."""
    return x.detach() if SHARD in x.__dict__ or x._layout.cotangent else run(x)


def same_size(run: Call, x: Any, size: Any) -> Any:
    """Returns the local tensor of a DTensor, of which PyTorch takes a view to return it."""
    return x.detach() if tuple(size) == tuple(x.shape) else run(x, size)


def _without_run(answer: Call) -> Call:
    return lambda _, *args, **kwargs: answer(*args, **kwargs)


_FSDP: dict[Any, Call] = {
    aten.as_strided.default: _without_run(_as_strided),
    aten.split.Tensor: _without_run(_split),
    aten.slice.Tensor: _without_run(_slice),
    aten.new_zeros.default: _without_run(new_zeros),
    aten.view.default: _without_run(_view),
}
_TABLES = {
    "fsdp": _FSDP,
    "checkpoint": {aten.slice.Tensor: _without_run(narrow)},
    "dtensor": {aten.view.default: same_size},
}
# By name: PyTorch registers one of them with the first collective.
COLLECTIVES: dict[str, Call] = {
    "_c10d_functional::all_gather_into_tensor": _gather,
    "_c10d_functional::wait_tensor": _complete,
    "_c10d_functional::_wrap_tensor_autograd": _complete,
}
