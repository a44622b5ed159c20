"""Proves a property of handwritten tensor subclasses, so that call wrappers may skip work for them.

One known call builds an instance of a declared class. The `__tensor_unflatten__` of a handwritten class may run any
code. Often it does very little, which this module detects from a rebuilt instance.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from desugar import _torch as private
from subclasses._torch import make_wrapper_subclass
from subclasses.handwritten import DTensorContext, OpaqueContext


def is_plainly_built(leaf: Any, names: tuple[str, ...], context: Any) -> bool:
    """Returns whether one `_make_wrapper_subclass` and one store per inner tensor replace `__tensor_unflatten__`.

    The state of an instance is its `__dict__` and what C++ holds: size, stride, dtype, device, dispatch keys. The
    function rebuilds `leaf` with `__tensor_unflatten__`. If the `__dict__` of the result holds the inner tensors alone,
    and its C++ state equals that of a bare wrapper, the method did nothing else to the instance. False for a class
    with `__slots__`, which hold state too.
    """
    cls = type(leaf)
    if isinstance(context, DTensorContext | OpaqueContext):
        return False
    inner = {name: getattr(leaf, name) for name in names}
    if any(
        hasattr(base, "__slots__") for base in cls.__mro__ if issubclass(base, Tensor) and base is not Tensor
    ):
        return False
    rebuilt = cls.__tensor_unflatten__(dict(inner), context, leaf.size(), leaf.stride())
    bare = make_wrapper_subclass(
        cls, leaf.size(), strides=leaf.stride(), dtype=leaf.dtype, device=leaf.device
    )
    same_inner = rebuilt.__dict__.keys() == inner.keys() and all(
        rebuilt.__dict__[n] is t for n, t in inner.items()
    )
    return same_inner and _cpp_state(rebuilt) == _cpp_state(bare)


def _cpp_state(tensor: Tensor) -> tuple[Any, ...]:
    keys = private.dispatch_keys(tensor).raw_repr()
    return type(tensor), tensor.requires_grad, tensor.layout, tensor.storage_offset(), keys
