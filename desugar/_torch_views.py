"""Private names of PyTorch's conversion to fake tensors: views of wrappers, and the symbols of dynamic ints.

PyTorch makes the fake of a wrapper's view from a fake of its base: it takes the view of the fake base. Each int of the
view becomes a symbol, and PyTorch expects the sizes of the argument to determine these symbols. The end of a slice
occurs in no size, and an assumption about its start keeps that symbol. Then Dynamo raises "only expect to bind basic
symbols".

PyTorch makes a size of 1 a constant, and assumes that a symbol is at least 2. Most ops do not read a dynamic int of a
declared class, such as the longest row. With several arguments, each combination of such constants would be a program.
So this module makes the symbols of dynamic ints, and assumes only that each is at least 1. PyTorch then records a guard
where an op compares such a symbol with 1.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

from subclasses import TensorSubclass
from subclasses._torch_tracing import backend_of
from subclasses.after_import import after_import
from subclasses.spec.values import carrier


def convert_by_inner_tensors(backend: Callable[..., Any]) -> None:
    """Makes the fake of a subclass argument with symbolic sizes from its inner tensors, in the graphs for `backend`.

    `desugar.flatten` flattens each argument to its inner tensors, and finds overlaps among the real inner tensors. A
    dynamic int that is 1 has a symbol, too.
    """
    after_import("torch._subclasses.meta_utils", functools.partial(_patch, backend))


def _patch(backend: Callable[..., Any], meta_utils: Any) -> None:
    convert = meta_utils.MetaConverter.meta_tensor

    @functools.wraps(convert)
    def meta_tensor(self: Any, t: Any, shape_env: Any, callback: Any, source: Any, symbols: Any) -> Any:
        is_wrapper = t.is_traceable_wrapper_subclass and shape_env is not None
        if is_wrapper and _is_dynamic(symbols) and _compiles_for(backend):
            if source is not None:
                _make_symbols(t, shape_env, source, symbols)
            if t.is_view:
                t = dataclasses.replace(t, is_view=False)
        return convert(self, t, shape_env, callback, source, symbols)

    meta_utils.MetaConverter.meta_tensor = meta_tensor


def _make_symbols(t: Any, shape_env: Any, source: Any, symbols: Any) -> None:
    """Makes the symbols of the dynamic ints in a wrapper, and of the outer sizes that follow from them.

    `symbols` keeps the symbols of an argument by source. PyTorch makes the symbols that it does not find there.
    """
    from_attribute = importlib.import_module("torch._dynamo.source").AttrSource
    dynamics = t.type.__spec__.dynamics if issubclass(t.type, TensorSubclass) else ()
    carriers = {carrier(field.name) for field in dynamics}
    for name, inner in t.attrs.items():
        where, context = from_attribute(source, name), symbols.inner_contexts[name]
        if name in carriers:
            _make_sizes(inner, shape_env, where, context)
        elif inner.attrs is not None:
            _make_symbols(inner, shape_env, where, context)
    if dynamics:
        _make_sizes(t, shape_env, source, symbols)


def _make_sizes(t: Any, shape_env: Any, source: Any, symbols: Any) -> None:
    """Makes a positive symbol for each size of a tensor that its symbolic context does not fix or constrain."""
    sources = importlib.import_module("torch._dynamo.source")
    shapes = importlib.import_module("torch.fx.experimental.symbolic_shapes")
    kinds = zip(symbols.dynamic_sizes, symbols.constraint_sizes, strict=True)
    for dim, (extent, (kind, constraint)) in enumerate(zip(t.size, kinds, strict=True)):
        if extent and kind is not shapes.DimDynamic.STATIC and constraint is None:
            made = shape_env.create_symbol(
                extent,
                sources.TensorPropertySource(source, sources.TensorProperty.SIZE, dim),
                shapes.DimDynamic.DYNAMIC,
                do_not_specialize_zero_one=True,
                symbolic_context=symbols,
            )
            if made.is_symbol:  # a package has constants
                shape_env._update_var_to_range(made, shapes.ValueRanges(1, shapes.int_oo))


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
