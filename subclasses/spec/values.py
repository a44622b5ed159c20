"""Parts of a value of a declared class: its inner tensors, and the carriers of its dynamic ints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from subclasses._torch import is_traceable_wrapper_subclass, mark_dim_dynamic, storage_key
from subclasses.layout import with_nested

if TYPE_CHECKING:
    from subclasses.spec.collect import InnerField

# Marks: attributes of values besides their fields. OF_PARAMETER marks a detached copy of a Parameter of a trainable
# class. HOOKS is a weak reference to the hooks of a Parameter. SHARD marks a shard of a Parameter that was cut for
# several ranks. RANKS, on the gradient of a shard, holds the number of ranks and the inner tensors that each rank has
# whole.
OF_PARAMETER, HOOKS = "_of_parameter", "_gradient_hooks"
SHARD, RANKS = "_part", "_ranks"
# The attribute of a value that keeps its derived tensors.
DERIVED = "_derived"

# The classes of tensors that hold their own memory.
PLAIN = frozenset({Tensor, torch.nn.Parameter})


def is_declared(value: Any) -> bool:
    """Whether a value is a tensor of a declared class."""
    return isinstance(value, Tensor) and hasattr(type(value), "__spec__")


def is_differentiable(t: Tensor | None) -> bool:
    """Whether gradients can flow to an inner tensor: it is present and has a floating or complex dtype."""
    return t is not None and (t.is_floating_point() or t.is_complex())


def is_of_parameter(x: Any) -> bool:
    """Whether a value is an ``nn.Parameter``, or a detached alias or copy of one."""
    stored = x.__dict__
    return stored.get("_is_param", False) or OF_PARAMETER in stored


def known_to_differ(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two sizes differ in the number of dims or in ints; comparing symbols would guard on them."""
    return len(one) != len(other) or any(
        m != n for m, n in zip(one, other, strict=True) if type(m) is int and type(n) is int
    )


def may_differ(one: Any, other: Any) -> bool:
    """Whether two sizes may differ; symbols are compared without a guard."""
    return not holds_always(one == other)


def holds_always(condition: Any) -> bool:
    """Whether a condition on sizes holds; for symbols, whether it holds for all values, without a guard."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # as in `differ`

    return statically_known_true(condition)


def differ(one: Any, other: Any) -> bool:
    """Whether two sizes or ints differ; symbols are compared with a guard, and unknown ones count as equal."""
    differs = one != other
    if isinstance(differs, bool):
        return differs
    # Imported here because it imports sympy; a symbolic size exists in a trace only, which has imported it.
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(differs)


def dynamic_ints(x: Any) -> tuple[Any, ...]:
    """Returns the values of the dynamic ints in order of declaration."""
    fields = type(x).__spec__.dynamics
    return tuple([x.__dict__[f.name] for f in fields]) if fields else ()


def inner_tensors(x: Any) -> list[Any]:
    """Returns the inner tensors that a value holds, in order of declaration; None for each that is absent."""
    stored = x.__dict__
    return [stored[n] for n in type(x).__spec__.attributes]


def with_inners(x: Any, inners: Iterable[Tensor | None], layout: Any = None) -> Any:
    """Returns a value with other inner tensors, in order of declaration, and the metadata of ``x``, or of a layout."""
    layout = layout or x._layout
    if layout.nested:
        layout = with_nested(layout, *(inners := tuple(inners)))
    cls = layout.cls
    return (
        cls._wrap(layout, *inners, *dynamic_ints(x)) if cls.__spec__.dynamics else cls._wrap(layout, *inners)
    )


def map_inners(x: Any, change: Callable[[InnerField, Any], Any]) -> Any:
    """Returns a copy of a value with ``change(field, tensor)`` in place of each inner tensor that is present."""
    spec, values = type(x).__spec__, x.__dict__
    return with_inners(
        x, [None if values[f.attribute] is None else change(f, values[f.attribute]) for f in spec.inners]
    )


def float_fields(x: Any) -> list[str]:
    """Returns the names of the fields that hold an inner tensor of floating-point numbers."""
    inners = {f.name: x.__dict__[f.attribute] for f in x.__spec__.inners}
    return [name for name, t in inners.items() if t is not None and t.is_floating_point()]


def carrier(name: str) -> str:
    """Returns the attribute name of a carrier: a zero-element tensor whose extent is a dynamic int."""
    return f"_{name}_carrier"


def make_carrier(x: Any, count: int) -> Tensor:
    """Creates a carrier: a zero-element tensor whose extent passes a dynamic int where PyTorch accepts tensors only."""
    like = next((x.__dict__[n] for n in x._layout.present), None)
    while like is not None and is_traceable_wrapper_subclass(like):
        like = getattr(like, like.__tensor_flatten__()[0][0])
    if like is None:
        return torch.empty((count, 0), dtype=torch.uint8, device=x.device)
    tensor = like.new_empty((count, 0), dtype=torch.uint8)
    if type(tensor) is Tensor:
        mark_dim_dynamic(tensor, 0)
    return tensor


def add_carriers(x: Any) -> None:
    """Gives a value its carriers, and marks the dims of its inner tensors that vary, before a compiler reads them."""
    for field in type(x).__spec__.dynamics:
        x.__dict__[carrier(field.name)] = make_carrier(x, x.__dict__[field.name])
    mark_varying_dims(x)


def mark_varying_dims(x: Any) -> Any:
    """Marks the dims of plain inner tensors that vary by the class's ``_varying_dims``; returns the value."""
    varying = {} if x._varying_dims is None else x._varying_dims()
    for field in type(x).__spec__.inners:
        if field.name in varying and type(t := x.__dict__[field.attribute]) is Tensor:
            mark_dim_dynamic(t, *varying[field.name])
    return x


# ---- arguments -----------------------------------------------------------------------------------------------


def tensors_in(args: Any, kwargs: Any) -> list[Any]:
    """Returns the tensors among arguments, also inside of lists."""
    tensors: list[Any] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors += tensors_in(value, None)
    return tensors


def map_tensors(value: Any, change: Callable[[Any], Any]) -> Any:
    """Returns an argument with ``change(t)`` in place of each tensor in it, also inside of lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return change(value)
    container = type(value)
    if container is tuple or container is list:
        return container([change(v) if isinstance(v, Tensor) else map_tensors(v, change) for v in value])
    return {k: map_tensors(v, change) for k, v in value.items()} if isinstance(value, dict) else value


# ---- inner tensors of other sizes --------------------------------------------------------------------------


def fits_by_ones(size: Any, outer: Any) -> bool:
    """Whether a size has as many dims as another, each of the same extent or 1; symbols count as equal."""
    return len(size) == len(outer) and not any(
        n.__class__ is m.__class__ is int and n not in (m, 1) for n, m in zip(size, outer, strict=True)
    )


def has_one_size(cls: Any) -> bool:
    """Whether each value has the size of its one inner tensor."""
    return len(cls.__spec__.inners) == 1 and not cls.__spec__.has_outer


def expands(size: Any, to: Any) -> bool:
    """Whether a tensor of a size expands to another size; symbols count as equal."""
    if len(size) > len(to):
        return all(type(n) is int and n == 1 for n in size)  # as a number does
    return fits_by_ones(size, to[len(to) - len(size) :])


# ---- memory ----------------------------------------------------------------------------------------------------


def memory_of(x: Any) -> set[Any]:
    """Returns keys that identify the storages of the plain tensors inside of a value."""
    return {storage_key(t) for t in innermost(x)}


def lies_within(view: Any, whole: Any) -> bool:
    """Whether a tensor, or all differentiable inner tensors of a value, lie in the memory of another value."""
    inners = list(innermost(view))
    keys = (storage_key(t) for t in [t for t in inners if t.is_floating_point() or t.is_complex()] or inners)
    return memory_of(whole).issuperset(keys)


def innermost(x: Any) -> Iterable[Tensor]:
    """Yields the plain tensors inside of a value of a declared class, or the tensor itself."""
    layout = x.__dict__.get("_layout")
    if layout is None:
        yield x
        return
    for name in layout.present:
        yield from innermost(x.__dict__[name])
