"""Functions whose result depends on the caller of an op, by frames and reference counts, each with the reason.

No other module of ``subclasses`` reads frames or reference counts to choose how an op or a gradient runs.

*FSDP2, checkpoints and DTensors* cut and join the rows of a value by ``view``, ``slice`` and ``split``. They have no
hook that a class could define. A user's call of the same op has another meaning: it materializes the value, or raises.

*The memory of a gradient.* Autograd keeps a plain gradient as ``.grad`` without a copy if no other object refers to it.
It decides in C++, by reference counts of the tensor alone; this module compares the inner tensors of a gradient.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch


def sharding_caller() -> str:
    """Returns "fsdp", "checkpoint" or "dtensor" if it calls an op itself, to cut, pad or join a value; else ""."""
    # Each view of any class calls this: the common case returns here.
    if sys.modules.keys().isdisjoint(_MODULES):
        return ""
    for frame in _frames():
        name = frame.f_code.co_name
        if name in _OF_CLASSES:
            return ""
        module = frame.f_globals.get("__name__")
        if module == _FSDP:
            return "fsdp"
        if name in _SHARDING and module == _SHARDING[name][0]:
            return _SHARDING[name][1]
    return ""


# Functions of a class, and our function that calls its `materialize`: ops inside of them have their usual meaning.
_OF_CLASSES = ("fsdp_pre_all_gather", "fsdp_post_all_gather", "materialize_apart")
# These functions take the rows that another rank saved or needs, join the parts of a DTensor, and return its local
# tensor.
_SHARDING = {
    "narrow_tensor_by_index": ("torch.distributed._shard._utils", "checkpoint"),
    "_to_replicate_tensor": ("torch.distributed.tensor.placement_types", "dtensor"),
    "forward": ("torch.distributed.tensor._api", "dtensor"),
}
_FSDP = "torch.distributed.fsdp._fully_shard._fsdp_param"
_MODULES = (_FSDP, *(module for module, _ in _SHARDING.values()))


def fsdp_ranks() -> int | None:
    """Returns the number of ranks for which FSDP2 is cutting a Parameter; None if it is not."""
    # The arguments of `split` do not determine the number if there are fewer parts than ranks.
    cutting = (frame for frame in _frames() if frame.f_code.co_name == "_chunk_with_empty")
    frame = next(cutting, None)
    return None if frame is None else frame.f_locals.get("num_chunks")


def _frames() -> Iterator[Any]:
    """Yields the frames around an op, from the innermost, as many as lie between FSDP2 and the callable for an op."""
    frame = sys._getframe(2)
    for _ in range(16):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


# How many references C++ holds to a storage.
_storage_references = torch._C._storage_Use_Count  # type: ignore[attr-defined]


def _count_references(x: object) -> int:
    return sys.getrefcount(x)


def owns_memory(t: torch.Tensor, references: int, tensors: int) -> bool:
    """Whether a tensor and its memory have no other references than the caller's.

    Args:
        t: A plain tensor.
        references: The number of references to the Python object that the caller has.
        tensors: The number of tensors with this memory that the caller has.
    """
    # Two more: the parameter, and the argument of getrefcount. While Dynamo inspects frames, a caller keeps its own.
    probe = object()
    others = 2 + _count_references(probe) - 3
    if sys.getrefcount(t) > references + others or t._use_count() > 1:  # type: ignore[attr-defined]
        return False
    # One more: the storage that `untyped_storage` returns.
    return _storage_references(t.untyped_storage()._cdata) <= tensors + 1
