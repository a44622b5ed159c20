"""Private names of PyTorch's conversion to fake tensors: arguments that are views of tensor subclass instances.

PyTorch makes the fake of such a view by taking the view again, of a fake of its base, with a symbol for each int of the
view. It expects the sizes of the argument to determine these symbols. The end of a slice occurs in no size, and an
assumption about its start keeps that symbol. Then Dynamo raises "only expect to bind basic symbols".
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

from subclasses._torch_tracing import backend_of
from subclasses.after_import import after_import


def take_views_as_they_are(backend: Callable[..., Any]) -> None:
    """Makes the fake of a subclass argument with symbolic sizes from its inner tensors, in the graphs for `backend`.

    The pass takes each argument by its inner tensors, and finds overlaps among the real ones.
    """
    after_import("torch._subclasses.meta_utils", functools.partial(_patch, backend))


def _patch(backend: Callable[..., Any], meta_utils: Any) -> None:
    convert = meta_utils.MetaConverter.meta_tensor

    @functools.wraps(convert)
    def meta_tensor(self: Any, t: Any, shape_env: Any, callback: Any, source: Any, symbols: Any) -> Any:
        is_wrapper_view = t.is_view and t.is_traceable_wrapper_subclass
        if is_wrapper_view and shape_env is not None and _is_dynamic(symbols) and _compiles_for(backend):
            t = dataclasses.replace(t, is_view=False)
        return convert(self, t, shape_env, callback, source, symbols)

    meta_utils.MetaConverter.meta_tensor = meta_tensor


def _is_dynamic(symbols: Any) -> bool:
    """Returns whether a symbolic context has a size that is a symbol."""
    static = importlib.import_module("torch.fx.experimental.symbolic_shapes").DimDynamic.STATIC
    inner = getattr(symbols, "inner_contexts", {}).values()
    return symbols is not None and (
        any(size is not static for size in symbols.dynamic_sizes) or any(map(_is_dynamic, inner))
    )


def _compiles_for(backend: Callable[..., Any]) -> bool:
    tx = getattr(importlib.import_module("torch._dynamo.symbolic_convert").tls, "current_tx", None)
    return tx is not None and backend_of(tx.output) is backend
