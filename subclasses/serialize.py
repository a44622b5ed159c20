"""Serialization and copies: pickle, ``torch.save``, ``copy.deepcopy``, shared memory.

A value is pickled as its class, its inner tensors and its metadata by name. A class may therefore gain a field with a
default later, and old files still load. torch pickles the inner tensors itself, so shared storages stay shared.
:mod:`subclasses.spec.load_checks` checks the contents of a file.
"""

from __future__ import annotations

import copy
import enum
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import warn_if_has_hooks

from subclasses._torch import dims_marked_dynamic, mark_dim_dynamic
from subclasses._torch_tracing import is_compiling_here
from subclasses.layout import cotangent_layout
from subclasses.spec import load_checks
from subclasses.spec.collect import SubclassSpec
from subclasses.spec.values import inner_tensors, with_inners

# ---- state -------------------------------------------------------------------------------------------------


def _present_inners(x: Any) -> dict[str, Tensor]:
    """Returns the inner tensors that are present by the name of their field."""
    inners = {f.name: x.__dict__[f.attribute] for f in type(x).__spec__.inners}
    return {name: t for name, t in inners.items() if t is not None}


def _metadata(x: Any) -> dict[str, Any]:
    spec: SubclassSpec = type(x).__spec__
    statics = dict(zip((f.name for f in spec.statics), x._layout.statics, strict=True))
    return statics | {f.name: x.__dict__[f.name] for f in spec.dynamics}


def _extra_attributes(x: Any) -> dict[str, Any]:
    """Returns attributes that the user or torch set on the value, such as the mark of an ``nn.Parameter``."""
    own = load_checks.own_attributes(type(x).__spec__)
    return {k: v for k, v in x.__dict__.items() if k not in own and not k.startswith(load_checks.OF_DYNAMO)}


def _dynamic_dims(x: Any) -> dict[str, list[int]]:
    """Returns the dims that are marked dynamic for compilers, of the value (key "") and of its inner tensors.

    torch stores the marks of inner tensors in files, but loses them when it sends a tensor to another process.
    """
    marked = {name: dims_marked_dynamic(t) for name, t in {"": x, **_present_inners(x)}.items()}
    return {name: dims for name, dims in marked.items() if dims}


def _mark_dynamic_dims(x: Any, marked: dict[str, list[int]]) -> None:
    for name, dims in marked.items():
        t = _present_inners(x)[name] if name else x
        mark_dim_dynamic(t, *dims)


def _restore_parameter(x: Any) -> None:
    """Registers the hook of an ``nn.Parameter`` on its copy, by the assignment that torch makes for a new one."""
    if x.__dict__.get("_is_param"):
        x._is_param = True


# ---- pickling ----------------------------------------------------------------------------------------------


def reduce(x: Any) -> tuple[Any, ...]:
    """Implements ``__reduce_ex__``; :func:`rebuild` is the inverse.

    Raises:
        ValueError: the user set an attribute on the value that no file may set.
    """
    warn_if_has_hooks(x)
    extras = _extra_attributes(x)
    if extras and not is_compiling_here():
        load_checks.check_extras(type(x), extras)
    flags = {"requires_grad": x.requires_grad, "cotangent": x._layout.cotangent}
    flags["dynamic_dims"] = _dynamic_dims(x)
    return rebuild, (type(x)._value_cls, _present_inners(x), _metadata(x), flags, extras)


def rebuild(
    cls: Any,
    inners: dict[str, Tensor],
    metadata: dict[str, Any],
    flags: dict[str, Any],
    extras: dict[str, Any],
) -> Any:
    """Constructs a value from the arguments that :func:`reduce` returned, which a file may hold in any form.

    Their types and names are checked. Then the ``check_loaded`` of the class and the generated constructor check them.

    Raises:
        TypeError: an argument, a field or a flag is of another type than :func:`reduce` writes.
        ValueError: the class has no field of a name, an attribute may not be set, or the fields do not match.
    """
    checked = not is_compiling_here()  # Dynamo traces copy.copy, of a value that exists
    if checked:
        load_checks.check_arguments(cls, inners, metadata, flags, extras)
    with torch.no_grad():
        if checked:
            load_checks.check_fields(cls, inners, metadata)
        x = cls._new(cls, *(inners.get(n) for n in cls.__spec__.inner_names), **metadata)
    if checked:
        load_checks.check_dynamic_dims(x, flags.get("dynamic_dims", {}))
    if flags["cotangent"] and not cls._is_cotangent:
        x = with_inners(x, inner_tensors(x), cotangent_layout(x._layout))
    if extras:  # Dynamo traces copy.copy and rejects an update with an empty dict
        x.__dict__.update(extras)
        _restore_parameter(x)
    _mark_dynamic_dims(x, flags.get("dynamic_dims", {}))
    return Tensor.requires_grad_(x) if flags["requires_grad"] else x


def allow_loading(cls: type) -> None:
    """Allows ``torch.load(weights_only=True)`` to load values of a class; declaring a class counts as consent.

    The type of an ``Enum`` default of static metadata is allowed too. The user allows other types of metadata with
    :func:`torch.serialization.add_safe_globals`.
    """
    spec: SubclassSpec = cls.__spec__  # type: ignore[attr-defined]
    enums = {type(f.default) for f in spec.statics if isinstance(f.default, enum.Enum)}
    allow_class(cls, rebuild, *enums)


def allow_class(cls: type, *others: Any) -> None:
    """Adds a class, and other objects that its files name, to the list of ``torch.load(weights_only=True)``."""
    if "<locals>" in cls.__qualname__:
        return  # a local class cannot be imported by name, and torch's list must not keep it alive
    _remove_same_named(cls)
    torch.serialization.add_safe_globals([cls, *others])


def _remove_same_named(cls: type) -> None:
    """Removes older classes of the same name from torch's list, as from a notebook cell that runs again.

    torch looks a class up by name and could return any of them.
    """
    known = torch.serialization.get_safe_globals()
    stale: list[Any] = [
        old
        for old in known
        if isinstance(old, type) and (old.__module__, old.__qualname__) == (cls.__module__, cls.__qualname__)
    ]
    with torch.serialization.safe_globals(stale):
        pass  # on exit, torch removes these from its list


# ---- copying -----------------------------------------------------------------------------------------------


def deepcopy(x: Any, memo: dict[int, Any]) -> Any:
    """Implements ``copy.deepcopy``: inner tensors are copied with the same memo, so shared tensors stay shared.

    Raises:
        RuntimeError: the value is not an autograd leaf.
    """
    if id(x) in memo:
        return memo[id(x)]
    if not x.is_leaf:
        raise RuntimeError(
            f"Only a leaf can be deep-copied, and this {type(x).__name__} is the result of an op that records "
            f"gradients; copy x.detach() instead"
        )
    inners = {name: copy.deepcopy(t, memo) for name, t in _present_inners(x).items()}
    new = with_inners(x, [inners.get(n) for n in type(x).__spec__.inner_names])
    new.__dict__.update(copy.deepcopy(_extra_attributes(x), memo))
    _restore_parameter(new)
    _mark_dynamic_dims(new, _dynamic_dims(x))
    if x.requires_grad:
        new.requires_grad_()
    if x.grad is not None:
        new.grad = copy.deepcopy(x.grad, memo)
    memo[id(x)] = new
    return new


# ---- shared memory -----------------------------------------------------------------------------------------


def share_memory(x: Any) -> Any:
    """Moves every inner tensor to shared memory in place, and returns the value."""
    for t in _present_inners(x).values():
        t.share_memory_()
    return x


def is_shared(x: Any) -> bool:
    """Whether every inner tensor is in shared memory."""
    return all(t.is_shared() for t in _present_inners(x).values())
