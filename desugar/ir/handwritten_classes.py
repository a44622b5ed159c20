"""What can be proved of a tensor subclass written by hand, so that its wrappers pay less.

A declared class carries an interned layout and is built by one known call. A class written by hand has two
methods that may do anything; but often they do very little, and that can be seen.
"""

from __future__ import annotations

import dis
import functools
from typing import Any

from torch import Tensor

from desugar import _torch as private
from subclasses._torch import make_wrapper_subclass

# Instructions that read no argument, no global name and no attribute.
_CONSTANT = frozenset(
    {
        "RESUME",
        "NOP",
        "LOAD_CONST",
        "LOAD_SMALL_INT",
        "RETURN_CONST",
        "BUILD_LIST",
        "BUILD_TUPLE",
        "LIST_EXTEND",
        "RETURN_VALUE",
    }
)


@functools.cache
def flattens_to_constants(cls: type) -> bool:
    """Whether `cls.__tensor_flatten__` gives the same names and context for every instance.

    True where its bytecode only builds constants, as in `return ["a", "b"], None`.
    """
    code = getattr(cls.__tensor_flatten__, "__code__", None)  # type: ignore[attr-defined]
    return code is not None and all(i.opname in _CONSTANT for i in dis.get_instructions(code))


def is_plainly_built(leaf: Any, names: tuple[str, ...], context: Any) -> bool:
    """Whether `__tensor_unflatten__` makes what one `_make_wrapper_subclass` and one store per inner tensor make.

    An instance is its `__dict__` and what C++ holds: size, stride, dtype, device, dispatch keys. If a rebuilt
    `leaf` has nothing in its dictionary but its inner tensors, and the rest is as in a bare wrapper, there is
    nothing else that the method could have done to it.
    """
    cls = type(leaf)
    inner = {name: getattr(leaf, name) for name in names}
    if any(
        hasattr(base, "__slots__") for base in cls.__mro__ if issubclass(base, Tensor) and base is not Tensor
    ):
        return False
    built = cls.__tensor_unflatten__(dict(inner), context, leaf.size(), leaf.stride())
    bare = make_wrapper_subclass(
        cls, leaf.size(), strides=leaf.stride(), dtype=leaf.dtype, device=leaf.device
    )
    same_inner = built.__dict__.keys() == inner.keys() and all(
        built.__dict__[n] is t for n, t in inner.items()
    )
    return same_inner and _facts(built) == _facts(bare)


def _facts(tensor: Tensor) -> tuple[Any, ...]:
    keys = private.dispatch_keys(tensor).raw_repr()
    return type(tensor), tensor.requires_grad, tensor.layout, tensor.storage_offset(), keys
