"""Builds the gradients in a joint graph: the tangent of each result, and the gradients of Parameters.

It also finds custom autograd functions whose backward may not be linear in the incoming gradients.

An op that materializes a Parameter of a trainable class returns a plain gradient. In eager mode, a hook of the
Parameter converts it to a gradient of the class. The hook reads the Parameter's inner tensors, which may have been
written to since the forward. In a program, the backward graph converts the gradient with the forward's inner tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.function import BackwardCFunction

from desugar import _torch as torch_private
from desugar.errors import DesugarError
from desugar.ir.fx_utils import autograd_nodes, output_nodes, set_outputs, tangent_dependencies, tangent_slots
from desugar.ir.stages import GradientCall, Outputs
from desugar.ir.values import (
    Constant,
    Flat,
    Plain,
    Value,
    Wrapper,
    plain_parts,
    read_int,
    renumber,
    slots_of,
    unwrap_value,
    wrap_value,
)
from desugar.tracing.captured_tensors import NonLeaf
from desugar.tracing.run import from_functional, identity
from subclasses import TensorSubclass
from subclasses.autograd.construct import as_cotangent, wrap_cotangent
from subclasses.handwritten import DTensorContext
from subclasses.layout import Layout, cotangent_layout, intern_layout
from subclasses.spec.values import is_differentiable


def make_tangents(
    results: Sequence[tuple[int, Value]], outputs: Outputs
) -> tuple[tuple[tuple[int, Value], ...], tuple[Tensor, ...]]:
    """Returns values and fake tensors of the tangents of output leaves.

    The tangent of a declared subclass shares the output's non-differentiable inner tensors (offsets, int8 data). Only
    the differentiable inner tensors are inputs of the backward; the value refers to the others by output slot. If an
    output represents a plain tensor and holds no differentiable inner tensor, its tangent is plain, as in eager mode.

    Args:
        results: (output leaf, value) of each result that requires grad.
        outputs: The outputs of the function.

    Returns:
        (output leaf, value) of each tangent, and the fake tensors by tangent slot.

    Raises:
        DesugarError: The tangent would hold a value without a gradient.
    """
    flat = Flat()
    tangents = [(number, _tangent_value(value, outputs, flat, all_inner=False)) for number, value in results]
    return tuple((number, _mark_tangent(value)) for number, value in tangents), tuple(flat.items)


def _mark_tangent(value: Value) -> Value:
    """Marks a tangent as a cotangent, like the gradients that autograd makes.

    Eager mode adds and scales cotangents one inner tensor at a time, whatever rules the class has.
    """
    if not (isinstance(value, Wrapper) and issubclass(value.cls, TensorSubclass)):
        return value
    inner = tuple((name, _mark_tangent(part)) for name, part in value.inner)
    layout = cotangent_layout(value.context)  # type: ignore[arg-type]
    marked = {name: part.context for name, part in inner if isinstance(part, Wrapper)}
    nested = tuple(
        (name, marked_layout if isinstance(marked_layout := marked[name], Layout) else inside)
        for name, inside in layout.nested
    )
    layout = intern_layout(layout.cls, layout.statics, layout.present, nested)
    return replace(value, cls=layout.cls, context=layout, inner=inner)


def _tangent_value(value: Value, outputs: Outputs, flat: Flat, *, all_inner: bool) -> Value:
    match value:
        case Plain(index):
            fake = outputs.items[index]
            if not all_inner and not is_differentiable(fake):
                return Constant(None, index)
            return Plain(flat.tensor(tangent_like(fake)))
        case Wrapper() if _has_plain_tangents(value, outputs):
            size = [read_int(n, outputs.items) for n in value.size]
            fake = torch.empty(size, dtype=value.dtype, device=value.device)
            return Plain(flat.tensor(from_functional(fake)))
        case Wrapper():
            is_handwritten = not issubclass(value.cls, TensorSubclass)
            inner = tuple(
                (name, _tangent_value(part, outputs, flat, all_inner=is_handwritten))
                for name, part in value.inner
            )
            context = value.context
            if isinstance(context, DTensorContext):
                context = context.of_tangent()
            return replace(value, inner=inner, context=context, requires_grad=False)
        case _:
            raise DesugarError(
                f"a tensor subclass that requires grad holds {value!r}, which has no gradient",
                instead="detach the result, or return its inner tensors",
            )


def _has_plain_tangents(value: Wrapper, outputs: Outputs) -> bool:
    """Whether the gradient of a value that represents a plain tensor is plain.

    It is plain if a rule for an op made the value, or if no inner tensor has a gradient.
    """
    return value.by_formula or (
        issubclass(value.cls, TensorSubclass)
        and not any(is_differentiable(outputs.items[slot]) for slot in slots_of(value))
        and value.cls._traits.is_representation  # type: ignore[attr-defined]
    )


def tangent_like(fake: Tensor) -> Tensor:
    """Returns a fake tangent: with the output's strides if the output is dense, else contiguous."""
    with torch.no_grad():
        tangent = torch.empty_like(fake)
    return from_functional(tangent)


def build_tangent(value: Value, items: Sequence[Any], output: Any, output_items: Sequence[Any]) -> Any:
    """Builds the traced tangent of an output leaf.

    Args:
        value: The value of the tangent.
        items: The tangent inputs, by tangent slot.
        output: The output leaf, which provides the sizes and the dynamic ints.
        output_items: The tensors of the outputs by output slot, which provide the non-differentiable inner tensors.
    """
    if isinstance(value, Plain):
        return items[value.index]
    if isinstance(value, Constant):
        assert value.index is not None
        return output_items[value.index]
    assert isinstance(value, Wrapper)
    inner = {
        name: build_tangent(part, items, getattr(output, name), output_items) for name, part in value.inner
    }
    live = replace(
        value,
        inner=tuple((name, Plain(n)) for n, name in enumerate(inner)),
        size=tuple(output.size()),
        stride=tuple(output.stride()),
        dynamics=tuple((name, getattr(output, name)) for name, _ in value.dynamics),
    )
    return wrap_value(live, [*inner.values()])


def meets_plain_gradients(value: Value | None) -> bool:
    """Returns whether a result may get a plain gradient where a gradient of its class was traced."""
    is_declared = isinstance(value, Wrapper) and issubclass(value.cls, TensorSubclass)
    return is_declared and value.cls._traits.meets_plain_cotangents  # type: ignore[union-attr]


def as_gradient_of_parameter(leaf: Any, gradient: Tensor | None) -> Any:
    """Converts the plain gradient of a Parameter to its class, if the class supports it; else returns it unchanged.

    Args:
        leaf: The Parameter, in the trace.
        gradient: Its gradient; None if it has none.
    """
    cls: Any = type(leaf)
    converts = issubclass(cls, TensorSubclass) and cls._traits.trainable and cls._traits.pulls_back
    if gradient is None or not converts or not isinstance(gradient, torch_private.FunctionalTensor):
        return gradient
    return as_cotangent(wrap_cotangent(leaf, gradient))


def unwrap_gradient(gradient: Tensor, flat: Flat, in_use: set[int]) -> Value:
    """Unwraps a gradient; clones an inner tensor that another tensor in use shares.

    The autograd engine detects that one tensor is the gradient of two inputs or belongs to the caller, and copies it
    before it accumulates. The engine does not detect that two wrappers share an inner tensor.

    Args:
        gradient: The gradient of one input.
        flat: Receives the plain tensors of the gradient.
        in_use: Identities of tensors that an input, a tangent or another gradient holds; this gradient's are added.
    """
    unwrapped = Flat()
    value = unwrap_value(gradient, unwrapped)
    slots = []
    for item in unwrapped.items:
        if not isinstance(item, Tensor):
            slots.append(flat.number(item).index)  # type: ignore[union-attr]
            continue
        is_shared = isinstance(value, Wrapper) and is_differentiable(item) and identity(item) in in_use
        in_use.add(identity(item))
        slots.append(flat.tensor(item.clone() if is_shared else item))
    return renumber(value, slots)


# ---- custom autograd functions -----------------------------------------------------------------------------
# Autograd's own formulas are linear. So the backward graph for all incoming gradients also determines the result for a
# subset of them. The backward of a `torch.autograd.Function` may compute anything:
#
# - An auxiliary loss is often implemented as a function whose `backward` returns a constant. The constant counts only
#   where that `backward` runs.
# - A function with several results may test which of their gradients arrive. A graph traced with all gradients does
#   not contain its computation for fewer gradients.


@contextlib.contextmanager
def record_backward_calls(results: Sequence[Tensor]) -> Iterator[list[GradientCall]]:
    """Records each call of a Python autograd function's backward, with the plain tensors of its gradients.

    For a single result it records nothing: without that result's gradient no backward runs.

    Args:
        results: The tensors whose autograd graph is watched.
    """
    calls: list[GradientCall] = []
    nodes = autograd_nodes(results) if len(results) > 1 else ()
    handles = []
    for node in nodes:
        # The node of an argument that is not a leaf returns the gradient that it receives.
        if isinstance(node, BackwardCFunction) and node._forward_cls is not NonLeaf:  # type: ignore[attr-defined]
            is_linear = node._forward_cls.__module__.startswith("subclasses.")  # type: ignore[attr-defined]

            def record(given: Any, arriving: Any, is_linear: bool = is_linear) -> None:
                arriving_parts = () if is_linear else _plain_tensors(arriving)
                calls.append(GradientCall(arriving_parts, _plain_tensors(given)))

            handles.append(node.register_hook(record))  # type: ignore[attr-defined]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _plain_tensors(gradients: Sequence[Tensor | None]) -> tuple[list[Tensor], ...]:
    """Returns the plain tensors of each gradient that is not None."""
    return tuple(
        [from_functional(part) for part in plain_parts(gradient)]
        for gradient in gradients
        if gradient is not None
    )


def recorded_tensors(calls: Sequence[GradientCall]) -> list[Tensor]:
    """Returns all plain tensors of the recorded calls as one flat list."""
    return [tensor for call in calls for part in (*call.received, *call.returned) for tensor in part]


def resolve_calls(graph: fx.GraphModule, calls: Sequence[GradientCall]) -> tuple[GradientCall, ...]:
    """Returns the recorded calls with the tangent slots that each gradient depends on in place of its tensors.

    Args:
        graph: The joint graph. Its last outputs are the recorded tensors; they are removed from it.
        calls: The recorded calls, with plain tensors.
    """
    count = len(recorded_tensors(calls))
    if count == 0:
        return ()
    outputs, behind = output_nodes(graph), tangent_dependencies(graph, tangent_slots(graph))
    recorded = iter(outputs[-count:])

    def slots(parts: Sequence[Sequence[Tensor]]) -> tuple[frozenset[int], ...]:
        return tuple(
            frozenset().union(*(behind.get(next(recorded), frozenset()) for _ in part)) for part in parts
        )

    resolved = tuple(GradientCall(slots(call.received), slots(call.returned)) for call in calls)
    set_outputs(graph, outputs[:-count])
    return resolved


def may_differ_without(calls: Sequence[GradientCall], missing: frozenset[int]) -> bool:
    """Returns whether a recorded backward may compute other gradients when the tangent slots `missing` do not arrive.

    True if an output of a call depends on no tangent, or if only some of a call's incoming gradients are missing.
    """
    has_constant_output = any(not slots for call in calls for slots in call.returned)
    return has_constant_output or any(
        len({slots <= missing for slots in call.received if slots}) > 1 for call in calls
    )
