"""Proves properties of handwritten tensor subclasses, so that call wrappers may skip work for them.

An instance of a declared class carries an interned layout, and one known call builds it. The `__tensor_flatten__` and
`__tensor_unflatten__` of a handwritten class may run any code. Often they do very little, which this module detects:
the first from its bytecode, the second from a rebuilt instance.
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
    """Returns whether `cls.__tensor_flatten__` returns the same names and context for every instance.

    True if its bytecode only builds constants, as in `return ["a", "b"], None`.
    """
    code = getattr(cls.__tensor_flatten__, "__code__", None)  # type: ignore[attr-defined]
    return code is not None and all(i.opname in _CONSTANT for i in dis.get_instructions(code))


def is_plainly_built(leaf: Any, names: tuple[str, ...], context: Any) -> bool:
    """Returns whether one `_make_wrapper_subclass` and one store per inner tensor replace `__tensor_unflatten__`.

    The state of an instance is its `__dict__` and what C++ holds: size, stride, dtype, device, dispatch keys. The
    function rebuilds `leaf` with `__tensor_unflatten__`. If the `__dict__` of the result holds the inner tensors alone,
    and its C++ state equals that of a bare wrapper, the method did nothing else to the instance. False for a class
    with `__slots__`, which hold state too.
    """
    cls = type(leaf)
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
