"""The generated ``__tensor_unflatten__`` of an adopted class: one known call, if the class's own method does no more.

The class's own method runs once for each kind of inner tensors and metadata. Its result may be a bare wrapper of the
given size and stride that holds the inner tensors alone. Later calls then build such a wrapper directly.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import make_wrapper_subclass
from subclasses.adoption.contexts import is_constant, thaw
from subclasses.handwritten import is_bare

# A table that holds more kinds of values is emptied.
_MAX_ENTRIES = 512
_STRIDED = torch.strided


def building_unflatten(cls: Any) -> Callable[..., Any]:
    """Returns a method that calls a class's own `__tensor_unflatten__`, or builds the same value directly if proved.

    The class's own method receives metadata with the class's own containers.
    """
    own = inspect.getattr_static(cls, "__tensor_unflatten__")
    proved: dict[Any, tuple[torch.dtype, torch.device] | None] = {}

    def unflatten(cls: Any, inner_tensors: Any, context: Any, outer_size: Any, outer_stride: Any) -> Any:
        given = thaw(context) if is_constant(context) else context
        return own.__get__(None, cls)(inner_tensors, given, outer_size, outer_stride)

    def __tensor_unflatten__(
        cls: Any, inner_tensors: Any, context: Any, outer_size: Any, outer_stride: Any
    ) -> Any:
        key = [cls, context]
        for name, t in inner_tensors.items():
            if t.__class__ is not Tensor or t.requires_grad or t.storage_offset():
                return unflatten(cls, inner_tensors, context, outer_size, outer_stride)
            key += name, t.dtype, t.device
        try:
            known = proved.get(tuple(key), proved)
        except TypeError:  # metadata without a hash
            known = None
        if known is None:
            return unflatten(cls, inner_tensors, context, outer_size, outer_stride)
        if known is proved:
            made = unflatten(cls, inner_tensors, context, outer_size, outer_stride)
            if len(proved) >= _MAX_ENTRIES:
                proved.clear()
            shows = (outer_size, outer_stride) == (made.shape, made.stride())
            is_plain = shows and is_bare(made, cls, inner_tensors)
            proved[tuple(key)] = (made.dtype, made.device) if is_plain else None
            return made
        dtype, device = known
        made = make_wrapper_subclass(cls, outer_size, outer_stride, None, None, dtype, _STRIDED, device)
        made.__dict__.update(inner_tensors)
        return made

    return __tensor_unflatten__
