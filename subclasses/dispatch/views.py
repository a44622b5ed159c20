"""View functions on classes with ``fallback="materialize"``: they return copies instead of views.

The op runs on the materialized tensor, so its result shares no memory with the wrapper. But above dispatch, PyTorch's
kernel of a view op marks any result as a view of the argument. A write to the result would count as a write to the
wrapper. Only code above autograd can undo this: the functions that may return views are intercepted, and a plain result
that is marked as a view is cloned. Gradients flow through the clone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import DisableTorchFunctionSubclass, is_traceable_wrapper_subclass
from subclasses.autograd.above import call
from subclasses.dispatch.resolution import find_step
from subclasses.errors import DispatchError, one_of

# Functions of torch, and methods and attributes of Tensor, that may return a view of an argument. Functions that
# preserve a value's structure (detach, to, contiguous, ...) return a wrapper or the argument itself.
VIEW_NAMES = frozenset(
    """T H mT mH __getitem__ adjoint as_strided atleast_1d atleast_2d atleast_3d broadcast_tensors broadcast_to
    chunk conj diagonal dsplit expand expand_as flatten hsplit imag meshgrid moveaxis movedim narrow permute ravel
    real reshape reshape_as select split split_with_sizes squeeze swapaxes swapdims t tensor_split transpose
    unbind unflatten unfold unsqueeze view view_as view_as_complex view_as_real vsplit""".split()
)


# Ops with a different name than the function or attribute that calls them.
_ONLY_OPS = frozenset({"numpy_T", "matrix_H", "slice"})


def _collect_view_functions() -> dict[Any, Callable[..., Any]]:
    functions = {}
    for name in sorted(VIEW_NAMES):
        for home in (torch, Tensor):
            function = getattr(home, name, None)
            if function is not None:
                # __torch_function__ receives an attribute such as Tensor.T as its getter.
                functions[function if callable(function) else function.__get__] = clone_views
    for name in sorted(VIEW_NAMES | _ONLY_OPS):
        packet = getattr(torch.ops.aten, name, None)
        if packet is not None:
            # The op may be called directly, as Dynamo does for x.T on newer releases.
            functions |= dict.fromkeys(
                [packet, *(getattr(packet, o) for o in packet.overloads())], clone_views
            )
    return functions


def clone_views(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs a function and clones plain results that are marked as views."""
    out = call(func, (), args, kwargs)
    if isinstance(out, list | tuple):
        return type(out)(map(_clone_view, out)) if type(out) in (list, tuple) else out
    return _clone_view(out)


def unflatten(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs ``Tensor.unflatten``, which is written in Python and calls torch's method of the same name.

    Interception is off during the call, since the inner method would be intercepted under the same name without end.
    """
    with DisableTorchFunctionSubclass():
        return _clone_view(func(*args, **kwargs))


def _clone_view(out: Any) -> Any:
    if isinstance(out, Tensor) and not is_traceable_wrapper_subclass(out) and out._is_view():
        return out.clone()
    return out


def set_item(func: Any, x: Any, index: Any, value: Any) -> None:
    """Runs ``x[index] = value``, which torch implements as a write to a view of ``x``.

    Raises:
        DispatchError: the class materializes ``select`` or ``slice``, so the write would go to a copy.
    """
    cls = type(x)
    if getattr(getattr(cls, "__spec__", None), "fallback", None) == "materialize":
        for op in (torch.ops.aten.select.int, torch.ops.aten.slice.Tensor):
            if find_step(cls, op) == "materialize":
                raise DispatchError(
                    f"x[...] = value writes to {one_of(cls)}, and a write to its materialized tensor would be lost",
                    code="write-refused",
                    hint="use a functional op such as torch.where, or add rules for select, slice, copy_ and, for a "
                    "number, fill_",
                )
    return call(func, (), (x, index, value), {})


view_functions = _collect_view_functions() | {Tensor.__setitem__: set_item, Tensor.unflatten: unflatten}
