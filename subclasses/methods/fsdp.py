"""The hooks with which FSDP2 all-gathers a sharded parameter of a declared class.

Parameters are sharded along dim 0. An inner tensor with as many rows as the outer tensor is gathered. Any other, such
as the scale of the whole tensor, is the same on every rank and is not gathered. If an inner tensor is of a declared
class itself, its own inner tensors are gathered.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subclasses._torch import preserve_version_counter
from subclasses._torch_distributed import reduce_packed_gradients
from subclasses.dispatch.sharding import is_cut
from subclasses.dispatch.structural import follows_dtype
from subclasses.methods.sharded_gradients import pack, unpack
from subclasses.spec.values import dynamic_ints

Gathered = tuple[Any, tuple[Tensor, ...]]

reduce_packed_gradients(pack, unpack)


class ShardState(NamedTuple):
    """The state from which a Parameter is rebuilt, besides the tensors that are gathered.

    Attributes:
        layout: the layout of the value.
        inners: the inner tensors by attribute, in order of declaration; a ShardState in place of a declared class.
        gathered: the attributes whose inner tensors are replaced by gathered tensors.
        dynamics: the values of the dynamic ints.
    """

    layout: Any
    inners: dict[str, Any]
    gathered: tuple[str, ...]
    dynamics: tuple[Any, ...]


def pre_all_gather(
    x: Any, mesh: Any, outer_size: Any, mp_policy: Any
) -> tuple[tuple[Tensor, ...], ShardState]:
    """Returns the inner tensors to gather, in the policy's parameter dtype, and the metadata to rebuild from."""
    tensors: list[Tensor] = []
    # FSDP gathers nothing on one rank and returns the first tensor alone; the other tensors are complete.
    most = 1 if mesh is not None and mesh.size() == 1 else None
    state = _shard_state(
        x, len(outer_size), None if mp_policy is None else mp_policy.param_dtype, tensors, most
    )
    return tuple(tensors), state


def _shard_state(x: Any, dims: int, dtype: Any, tensors: list[Tensor], most: int | None) -> ShardState:
    """Appends at most ``most`` inner tensors to gather, and returns the metadata."""
    gathered: list[str] = []
    inners: dict[str, Any] = {}
    for field in type(x).__spec__.inners:
        t = inners[field.attribute] = x.__dict__[field.attribute]
        if t is None:
            continue
        cut = is_cut(x, t) and dims == x.dim()
        if dtype is not None and follows_dtype(x, field, t):
            t = t.to(dtype)
        if cut and hasattr(type(t), "__spec__"):
            t = _shard_state(t, t.dim(), None, tensors, most)
        elif cut and len(tensors) != most:
            tensors.append(t)
            gathered.append(field.attribute)
        inners[field.attribute] = t
    return ShardState(x._layout, inners, tuple(gathered), dynamic_ints(x))


def post_all_gather(outputs: tuple[Tensor, ...], metadata: ShardState, out: Any) -> Gathered | None:
    """Rebuilds the whole parameter from the gathered inner tensors.

    With ``out``, the function updates ``out`` and returns None. FSDP refilled the gathered storages, which the inner
    tensors of ``out`` usually share; an inner tensor with another storage is copied into.
    """
    left = iter(outputs)
    if out is None:
        return _rebuild(metadata, left), outputs
    with torch.no_grad():
        _refill(out if isinstance(out, metadata.layout.cls) else out._local_tensor, metadata, left)
    return None


def _rebuild(state: ShardState, left: Iterator[Tensor]) -> Any:
    """Returns a value with the next gathered tensors."""
    inners = [
        _rebuild(t, left) if isinstance(t, ShardState) else next(left) if name in state.gathered else t
        for name, t in state.inners.items()
    ]
    return state.layout.cls._wrap(state.layout, *inners, *state.dynamics)


def _refill(target: Any, state: ShardState, left: Iterator[Tensor]) -> None:
    """Copies the next gathered tensors into a value, where it has storages of its own."""
    for name, t in state.inners.items():
        inner = target.__dict__[name]
        if isinstance(t, ShardState):
            _refill(inner, t, left)
            continue
        whole = next(left) if name in state.gathered else t
        if whole is not None and inner.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
            # The numbers equal the first gather's, which autograd saved, so the version stays.
            with preserve_version_counter(inner):
                inner.copy_(whole)
