"""Values outside one process and one moment: pickle, ``torch.save``, ``copy.deepcopy``, shared memory.

A value is pickled as its class, its inner tensors and its metadata by name, so that a field with a default may be
added later and old files still load. Inner tensors are pickled by torch itself, which keeps shared storages shared.
"""

from __future__ import annotations

import copy
import enum
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import warn_if_has_hooks

from subclasses._torch import dims_marked_dynamic, mark_dim_dynamic
from subclasses.layout import cotangent_layout
from subclasses.spec.collect import SubclassSpec
from subclasses.spec.values import carrier

# ---- what there is to keep ---------------------------------------------------------------------------------


def _inners(x: Any) -> dict[str, Tensor]:
    return {name: x.__dict__[name] for name in x._layout.present}


def _metadata(x: Any) -> dict[str, Any]:
    spec: SubclassSpec = type(x).__spec__
    statics = dict(zip((f.name for f in spec.statics), x._layout.statics, strict=True))
    return statics | {f.name: x.__dict__[f.name] for f in spec.dynamics}


def _extras(x: Any) -> dict[str, Any]:
    """Attributes that the user or torch set on the value, such as the mark of an ``nn.Parameter``."""
    own = {*type(x).__spec__.names, "_layout", *(carrier(f.name) for f in type(x).__spec__.dynamics)}
    return {k: v for k, v in x.__dict__.items() if k not in own and not k.startswith("_dynamo_")}


def _marked_dims(x: Any) -> dict[str, list[int]]:
    """Which dims compilers take as dynamic, of the value ("") and its inner tensors.

    torch keeps those of inner tensors in files, and loses them on the way to another process.
    """
    marked = {name: dims_marked_dynamic(t) for name, t in {"": x, **_inners(x)}.items()}
    return {name: dims for name, dims in marked.items() if dims}


def _mark_dims(x: Any, marked: dict[str, list[int]]) -> None:
    for name, dims in marked.items():
        for dim in dims:
            mark_dim_dynamic(x.__dict__[name] if name else x, dim)


# ---- pickling ----------------------------------------------------------------------------------------------


def reduce(x: Any) -> tuple[Any, ...]:
    """What ``__reduce_ex__`` returns."""
    warn_if_has_hooks(x)
    flags = {"requires_grad": x.requires_grad, "cotangent": x._layout.cotangent}
    flags["dynamic_dims"] = _marked_dims(x)
    return rebuild, (type(x), _inners(x), _metadata(x), flags, _extras(x))


def rebuild(
    cls: Any,
    inners: dict[str, Tensor],
    metadata: dict[str, Any],
    flags: dict[str, Any],
    extras: dict[str, Any],
) -> Any:
    """Makes a value from what :func:`reduce` gave; checked as at construction."""
    with torch.no_grad():
        x = cls._new(cls, *(inners.get(n) for n in cls.__spec__.inner_names), **metadata)
    if flags["cotangent"]:
        x.__dict__["_layout"] = cotangent_layout(x._layout)
    if extras:  # Dynamo, which traces copy.copy, takes no update of nothing
        x.__dict__.update(extras)
    _mark_dims(x, flags.get("dynamic_dims", {}))
    return x.requires_grad_() if flags["requires_grad"] else x


def allow_loading(cls: type) -> None:
    """Lets ``torch.load(weights_only=True)`` load values of a class: declaring one is the consent.

    An ``Enum`` that is the default of static metadata comes with it; other types of metadata that torch does not
    know have to be allowed with :func:`torch.serialization.add_safe_globals`.
    """
    if "<locals>" in cls.__qualname__:
        return  # cannot be found again by name, and must not be kept alive by torch's list
    spec: SubclassSpec = cls.__spec__  # type: ignore[attr-defined]
    enums = {type(f.default) for f in spec.statics if isinstance(f.default, enum.Enum)}
    _forget_namesakes(cls)
    torch.serialization.add_safe_globals([rebuild, cls, *enums])


def _forget_namesakes(cls: type) -> None:
    """Takes classes off torch's list that had this name before, as where a notebook's cell runs again.

    torch finds a class by its name, and would take any of them.
    """
    known = torch.serialization.get_safe_globals()
    stale: list[Any] = [
        old
        for old in known
        if isinstance(old, type) and (old.__module__, old.__qualname__) == (cls.__module__, cls.__qualname__)
    ]
    with torch.serialization.safe_globals(stale):
        pass  # on leaving, these are no longer on the list


# ---- copying -----------------------------------------------------------------------------------------------


def deepcopy(x: Any, memo: dict[int, Any]) -> Any:
    """``copy.deepcopy``: inner tensors are copied with the same memo, so that what was shared stays shared."""
    if id(x) in memo:
        return memo[id(x)]
    if not x.is_leaf:
        raise RuntimeError(
            f"Only a leaf can be deep-copied, and this {type(x).__name__} is the result of an op that records "
            f"gradients; copy x.detach() instead"
        )
    inners = {name: copy.deepcopy(t, memo) for name, t in _inners(x).items()}
    dynamics = [x.__dict__[f.name] for f in type(x).__spec__.dynamics]
    new = type(x)._wrap(x._layout, *(inners.get(n) for n in type(x).__spec__.inner_names), *dynamics)
    new.__dict__.update(copy.deepcopy(_extras(x), memo))
    _mark_dims(new, _marked_dims(x))
    if x.requires_grad:
        new.requires_grad_()
    if x.grad is not None:
        new.grad = copy.deepcopy(x.grad, memo)
    memo[id(x)] = new
    return new


# ---- shared memory -----------------------------------------------------------------------------------------


def share_memory(x: Any) -> Any:
    """Moves every inner tensor to shared memory, in place."""
    for t in _inners(x).values():
        t.share_memory_()
    return x


def is_shared(x: Any) -> bool:
    """Whether every inner tensor lives in shared memory."""
    return all(t.is_shared() for t in _inners(x).values())
