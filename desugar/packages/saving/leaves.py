"""Describes tensors, plain ones and wrappers, as leaves of a manifest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from desugar.errors import PackageError
from desugar.ir.values import dynamic_names as names_of_dynamics, inner_names, is_wrapper, take_apart
from desugar.packages.manifest.expressions import Symbol
from desugar.packages.manifest.records import (
    IntLeaf,
    LayoutRecord,
    Leaf,
    TensorLeaf,
    WeightRecord,
    WrapperLeaf,
)
from desugar.packages.saving.tensor_facts import Symbols
from subclasses.handwritten import DTensorContext, OpaqueContext
from subclasses.layout import Layout


def describe_weight(name: str, aliases: tuple[str, ...], tensor: Tensor) -> WeightRecord:
    """Describes a weight; where its bytes are is filled in when they are written."""
    leaf = describe_tensor(tensor, tensor, Symbols())
    return WeightRecord(name, aliases, leaf, isinstance(tensor, nn.Parameter), ())


def describe_tensor(leaf: Any, fake: Any, symbols: Symbols, grads: bool = True) -> TensorLeaf | WrapperLeaf:
    """Describes a tensor by the sizes of its fake."""
    requires_grad = grads and leaf.requires_grad
    if not is_wrapper(leaf):
        return TensorLeaf(symbols.facts(fake), requires_grad)
    names, context = take_apart(leaf)
    return WrapperLeaf(
        type(leaf),
        context_record(context),
        tuple((n, describe_tensor(getattr(leaf, n), getattr(fake, n), symbols, grads)) for n in names),
        tuple((n, symbols.extent(getattr(fake, n))) for n in names_of_dynamics(type(leaf))),
        symbols.extents(fake.size()),
        symbols.extents(fake.stride()),
        leaf.dtype,
        requires_grad,
    )


def with_fixed(described: Any, leaf: Any, fixed: Iterable[tuple[str, ...]]) -> Any:
    """Returns a described wrapper with the values of those ints that are constants."""
    for path in fixed:
        if len(path) == 1:
            ints = tuple((n, int(getattr(leaf, n)) if n == path[0] else e) for n, e in described.dynamics)
            described = replace(described, dynamics=ints)
        else:
            parts = tuple(
                (n, with_fixed(part, getattr(leaf, n), [path[1:]]) if n == path[0] else part)
                for n, part in described.inner
            )
            described = replace(described, inner=parts)
    return described


def declared_names(owner: Any) -> tuple[str, ...]:
    """Returns the names of what a declared class keeps on its values."""
    spec = getattr(type(owner), "__spec__", None)
    return () if spec is None else (*spec.names, *spec.attributes, "_layout")


def context_record(context: Any) -> Any:
    """Returns what rebuilds a wrapper as data; the constant of a handwritten class stays as it is."""
    if isinstance(context, DTensorContext | OpaqueContext):
        raise PackageError("a package holds neither DTensors nor wrappers of process groups and meshes")
    if not isinstance(context, Layout):
        return context
    nested = tuple((name, context_record(layout)) for name, layout in context.nested)
    cls: Any = context.cls
    value_cls = cls._value_cls if context.cotangent else cls
    return LayoutRecord(value_cls, context.statics, context.present, nested, context.cotangent)


def symbols_read(leaves: Iterable[Leaf | TensorLeaf | WrapperLeaf]) -> Iterator[int]:
    """Yields the symbols that are a size, stride or int of a leaf themselves."""
    for leaf in leaves:
        match leaf:
            case IntLeaf(Symbol(index)):
                yield index
            case TensorLeaf(facts):
                yield from (e.index for e in (*facts.size, *facts.stride) if isinstance(e, Symbol))
            case WrapperLeaf():
                extents = (*(extent for _, extent in leaf.dynamics), *leaf.size)
                yield from (e.index for e in extents if isinstance(e, Symbol))
                yield from symbols_read(part for _, part in leaf.inner)


def inner_tensors(leaf: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Yields (attribute path, tensor) of the inner tensors of a leaf, at any depth."""
    if is_wrapper(leaf):
        for name in inner_names(leaf):
            inner = getattr(leaf, name)
            yield (*path, name), inner
            yield from inner_tensors(inner, (*path, name))
