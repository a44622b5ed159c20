"""What a class that materializes gives where a plain tensor would give a view: an honest copy.

The op runs on the materialized tensor, so its result shares nothing with the wrapper. But torch's own kernel above
dispatch marks the result of a view op as a view of its argument whatever came back, and a write to it would then
count as a write to the wrapper. Only above autograd can that be undone: the functions that may return views are
intercepted, and a plain result is copied off its base. Gradients flow through the copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import DisableTorchFunctionSubclass, call_unruled, is_traceable_wrapper_subclass
from subclasses.dispatch.resolution import find_step
from subclasses.errors import DispatchError, one_of

# Functions of torch, and methods and attributes of Tensor, that may return a view of an argument. Those that keep a
# value's structure (detach, to, contiguous, ...) return a wrapper or the argument itself.
VIEW_NAMES = frozenset(
    """T H mT mH __getitem__ adjoint as_strided atleast_1d atleast_2d atleast_3d broadcast_tensors broadcast_to
    chunk conj diagonal dsplit expand expand_as flatten hsplit imag meshgrid moveaxis movedim narrow permute ravel
    real reshape reshape_as select split split_with_sizes squeeze swapaxes swapdims t tensor_split transpose
    unbind unflatten unfold unsqueeze view view_as view_as_complex view_as_real vsplit""".split()
)


# Ops with another name than the function or attribute that reaches them.
_ONLY_OPS = frozenset({"numpy_T", "matrix_H", "slice"})


def _collect_view_functions() -> dict[Any, Callable[..., Any]]:
    functions = {}
    for name in sorted(VIEW_NAMES):
        for home in (torch, Tensor):
            found = getattr(home, name, None)
            if found is not None:
                # An attribute such as Tensor.T reaches __torch_function__ as its getter.
                functions[found if callable(found) else found.__get__] = without_view
    for name in sorted(VIEW_NAMES | _ONLY_OPS):
        packet = getattr(torch.ops.aten, name, None)
        if packet is not None:
            # An op that is called itself, as Dynamo does for x.T on newer releases.
            functions |= dict.fromkeys(
                [packet, *(getattr(packet, o) for o in packet.overloads())], without_view
            )
    return functions


def without_view(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs a function and copies what claims to be a view without being one."""
    out = call_unruled(func, (), args, kwargs)
    if isinstance(out, list | tuple):
        return type(out)(map(_copy, out)) if type(out) in (list, tuple) else out
    return _copy(out)


def unflatten(func: Any, *args: Any, **kwargs: Any) -> Any:
    """``Tensor.unflatten``, which is written in Python and calls torch's method of the same name.

    That one would be intercepted under this one's name, and so without end, were interception not off meanwhile.
    """
    with DisableTorchFunctionSubclass():
        return _copy(func(*args, **kwargs))


def _copy(out: Any) -> Any:
    if isinstance(out, Tensor) and not is_traceable_wrapper_subclass(out) and out._is_view():
        return out.clone()
    return out


def set_item(func: Any, x: Any, index: Any, value: Any) -> None:
    """``x[index] = value``, which torch carries out as a write to a view of ``x``: refused where that is a copy."""
    cls = type(x)
    if getattr(getattr(cls, "__spec__", None), "fallback", None) == "materialize":
        for op in (torch.ops.aten.select.int, torch.ops.aten.slice.Tensor):
            if find_step(cls, op) == "materialize":
                raise DispatchError(
                    f"x[...] = value writes to {one_of(cls)}, and writing to what it materializes to would be "
                    f"lost; use a functional op such as torch.where, or add rules for select, slice and copy_"
                )
    return call_unruled(func, (), (x, index, value), {})


view_functions = _collect_view_functions() | {Tensor.__setitem__: set_item, Tensor.unflatten: unflatten}
