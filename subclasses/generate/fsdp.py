"""The hooks with which FSDP2 all-gathers a sharded parameter of a declared class.

Parameters are sharded along dim 0. An inner tensor with as many rows as the outer tensor is gathered. Any other, such
as the scale of the whole tensor, is the same on every rank and is not gathered.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subclasses._torch import preserve_version_counter
from subclasses.dispatch.sharding import is_cut
from subclasses.dispatch.structural import follows_dtype
from subclasses.spec.values import dynamic_ints

Gathered = tuple[Any, tuple[Tensor, ...]]


def pre_all_gather(x: Any, mesh: Any, outer_size: Any, mp_policy: Any) -> tuple[tuple[Tensor, ...], Any]:
    """Returns the inner tensors to gather, in the policy's parameter dtype, and the metadata to rebuild from."""
    dtype = None if mp_policy is None else mp_policy.param_dtype
    gathered, inners = [], {}
    for field in type(x).__spec__.inners:
        t = x.__dict__[field.attribute]
        if t is not None and dtype is not None and follows_dtype(x, field, t):
            t = t.to(dtype)
        inners[field.attribute] = t
        if t is not None and is_sharded(x, t, outer_size):
            gathered.append(field.attribute)
    if mesh is not None and mesh.size() == 1:
        # FSDP gathers nothing on one rank and returns the first tensor alone; the other tensors are complete.
        del gathered[1:]
    return tuple(inners[n] for n in gathered), (x._layout, tuple(gathered), inners, dynamic_ints(x))


def is_sharded(x: Any, t: Tensor, outer_size: Any) -> bool:
    """Whether an inner tensor is sharded: it has as many rows as the shard."""
    return is_cut(x, t) and len(outer_size) == x.dim()


def post_all_gather(outputs: tuple[Tensor, ...], metadata: Any, out: Any) -> Gathered | None:
    """Rebuilds the whole parameter from the gathered inner tensors.

    With ``out``, the function updates ``out`` and returns None. FSDP refilled the gathered storages, which the inner
    tensors of ``out`` usually share; an inner tensor with another storage is copied into.
    """
    layout, gathered, inners, dynamics = metadata
    whole = inners | dict(zip(gathered, outputs, strict=True))
    if out is None:
        new = layout.cls._wrap(layout, *whole.values(), *dynamics)
        return new, outputs
    target = out if isinstance(out, layout.cls) else out._local_tensor
    with torch.no_grad():
        for name, t in whole.items():
            held = target.__dict__[name]
            if t is not None and held.untyped_storage().data_ptr() != t.untyped_storage().data_ptr():
                # The values are those of the first gather, which autograd saved, so the version stays.
                with preserve_version_counter(held):
                    held.copy_(t)
    return None
