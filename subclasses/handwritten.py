"""How a value of a handwritten class is flattened: to the names of its inner tensors, and a constant that rebuilds it.

The constant is the context that ``__tensor_flatten__`` returns, with two changes:

- Parts that are not tensors, such as a device mesh, join the context; ``__tensor_unflatten__`` gets them back.
- The context of a ``DTensor`` has neither sizes nor ``requires_grad``, so that it is the same for other sizes, and for
  tangents.

Often ``__tensor_unflatten__`` only makes a bare wrapper; ``is_bare`` detects that from its result.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import TorchDispatchMode, dispatch_keys, make_wrapper_subclass
from subclasses._torch_distributed import distributed_types, dtensor_spec, tensor_meta

LOCAL = "_local_tensor"  # the attribute of a DTensor that holds the tensor of this rank


@dataclass(frozen=True, slots=True)
class OpaqueContext:
    """The context of a handwritten class whose ``__tensor_flatten__`` names parts that are not tensors.

    Attributes:
        parts: (attribute name, object) of each such part.
        context: the class's own context.
    """

    parts: tuple[tuple[str, Any], ...]
    context: Any


@dataclass(frozen=True, slots=True)
class DTensorContext:
    """The context of a ``DTensor``.

    Attributes:
        spec: its ``DTensorSpec`` without sizes: the mesh, and the placement of the tensor on each of its dimensions.
        dtype: its dtype.
    """

    spec: Any
    dtype: torch.dtype

    def spec_of(self, size: Sequence[Any], stride: Sequence[Any]) -> Any:
        """Returns the spec of a tensor with an outer size and stride."""
        return replace(self.spec, tensor_meta=tensor_meta(size, stride, self.dtype))

    def of_tangent(self) -> DTensorContext:
        """Returns the placement of a gradient: partial sums of it are summed."""
        if not any(placement.is_partial() for placement in self.spec.placements):
            return self
        replicate = sys.modules["torch.distributed.tensor"].Replicate()
        placements = tuple(replicate if p.is_partial() else p for p in self.spec.placements)
        return DTensorContext(replace(self.spec, placements=placements), self.dtype)


def flatten_handwritten(wrapper: Any) -> tuple[tuple[str, ...], Any]:
    """Returns the names of the attributes that hold the inner tensors, and the constant that rebuilds the wrapper."""
    if is_dtensor(wrapper):
        return (LOCAL,), DTensorContext(replace(dtensor_spec(wrapper), tensor_meta=None), wrapper.dtype)
    names, context = wrapper.__tensor_flatten__()
    parts = tuple((name, part) for name in names if not isinstance(part := getattr(wrapper, name), Tensor))
    if not parts:
        return tuple(names), context
    opaque = {name for name, _ in parts}
    return tuple(name for name in names if name not in opaque), OpaqueContext(parts, context)


def unflatten(cls: Any, inner: Mapping[str, Any], context: Any, size: Any, stride: Any) -> Any:
    """Rebuilds a wrapper around other tensors, as ``flatten_handwritten`` named them."""
    match context:
        case DTensorContext():
            return cls(inner[LOCAL], context.spec_of(size, stride), requires_grad=False)
        case OpaqueContext(parts, own):
            return cls.__tensor_unflatten__({**inner, **dict(parts)}, own, size, stride)
        case _:
            return cls.__tensor_unflatten__(inner, context, size, stride)


def is_bare(made: Any, cls: type, inner: Mapping[str, Any]) -> bool:
    """Whether the result of a class's ``__tensor_unflatten__`` is a bare wrapper that holds the inner tensors alone.

    The state of an instance is its ``__dict__`` and its C++ state: size, stride, dtype, device, dispatch keys. If the
    former holds the inner tensors alone, and the latter equals a bare wrapper's, the method did nothing else to the
    instance. False for a class with ``__slots__``, which hold state too. Also False if the class's
    ``__torch_dispatch__`` computes the size, device or layout of the value.
    """
    attributes = made.__dict__
    if type(made) is not cls or attributes.keys() != inner.keys():
        return False
    if not all(attributes[name] is t for name, t in inner.items()) or _has_slots(cls) or _asks_class(made):
        return False
    bare = make_wrapper_subclass(
        cls, made.size(), strides=made.stride(), dtype=made.dtype, device=made.device
    )
    return _cpp_state(made) == _cpp_state(bare)


def _cpp_state(x: Any) -> tuple[Any, ...]:
    return x.requires_grad, x.layout, x.storage_offset(), dispatch_keys(x).raw_repr()


def _has_slots(cls: type) -> bool:
    return any("__slots__" in vars(base) for base in cls.__mro__ if base not in Tensor.__mro__)


class _DispatchRecorder(TorchDispatchMode):
    """Records whether any op is dispatched."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen = True
        return func(*args, **(kwargs or {}))


def _asks_class(x: Any) -> bool:
    """Whether reading one of the attributes that a wrapper may compute dispatches an op."""
    with _DispatchRecorder() as recorder:
        _ = x.size(), x.stride(), x.device, x.layout
    return recorder.seen


def is_dtensor(value: object) -> bool:
    """Returns whether a value is a ``DTensor`` itself; a class that inherits from it may have other methods."""
    module = sys.modules.get("torch.distributed.tensor")  # importing it takes longer than all of this library
    return module is not None and type(value) is getattr(module, "DTensor", None)


def is_mesh(value: object) -> bool:
    """Returns whether a value is a device mesh."""
    types = distributed_types()
    return types is not None and type(value) is types.mesh
