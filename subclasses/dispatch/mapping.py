"""Ops that run once for each inner tensor: their choice, their callables, and the checks of sizes.

``fallback="map"`` maps every op without a rule. ``"views"``, and leading dims, map the ops that compute nothing: a
view, a copy, a conversion or a factory selects, moves or allocates elements, according to the op's schema.

A view names dims and indices of the outer tensor. They mean the same elements of an inner tensor only if that tensor
has the outer size. A view of a value with another inner tensor, such as a scale of size ``[out, 1]``, needs a rule.
:func:`with_outer_dims` maps named dims to an inner tensor with further dims.

Where the schema allows it, the callable of an op is straight-line text. It determines which arguments are wrappers,
reads their inner tensors by name, calls the op once for each name, and wraps the results. ``aten.mul.Tensor`` on
a pair of ``a`` and ``b`` becomes::
    def mul_Tensor(self, other):
        _is_self = isinstance(self, _Cls)
        if not _is_self:
            _sum_gradient(self)
        _is_other = isinstance(other, _Cls)
        if not _is_other:
            _sum_gradient(other)
        _x = self if _is_self else other
        _layout = _x._layout
        if _is_other and (other._layout is not _layout):
            _check_alike(_op, _x, other)
        _out_a = _call(self.a if _is_self else self, other.a if _is_other else other)
        _out_b = _call(self.b if _is_self else self, other.b if _is_other else other)
        if _layout.nested:
            _layout = _with_nested(_layout, _out_a, _out_b)
        return _wrap(_layout, _out_a, _out_b)
"""

from __future__ import annotations

import functools
import keyword
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import resolve_name

from subclasses._torch import (
    OpOverload,
    canonicalize_dim,
    cpp_callable,
    in_backward,
    is_composed,
    is_composite,
    set_storage_of,
    with_lazy_bits,
)
from subclasses._torch_distributed import is_work, joint_work
from subclasses.autograd.calling import CALLING
from subclasses.autograd.engine_ops import NO_DERIVATIVE
from subclasses.autograd.plain_operands import sum_gradient
from subclasses.autograd.python_functions import registering
from subclasses.dispatch.per_inner import inner_of
from subclasses.dispatch.strided import STRIDED_OPS, map_strided, strided_advice
from subclasses.errors import DispatchError, one_of, way_out
from subclasses.layout import are_alike, describe_metadata, field_name, with_nested
from subclasses.op_schemas.aliasing import (
    argument,
    bump_versions,
    for_optimizers,
    resize_outer,
    with_aliasing,
)
from subclasses.op_schemas.schema import (
    Argument,
    OpFacts,
    functional_counterpart_of_view,
    op_facts,
    undeclared_writes,
)
from subclasses.op_schemas.tangents import IN_FORWARD_MODE, is_of_tangents
from subclasses.op_schemas.write_checks import differ, is_tried_first, try_first
from subclasses.source_text.build import build_functions
from subclasses.source_text.emitter import Emitter
from subclasses.spec.collect import InnerField, SubclassSpec
from subclasses.spec.values import (
    dynamic_ints,
    expands,
    fits_by_ones,
    has_one_size,
    known_to_differ,
    map_tensors,
    may_differ,
    tensors_in,
    with_inners,
)

aten = torch.ops.aten

Call = Callable[..., Any]

# ---- which ops map -----------------------------------------------------------------------------------------

# Views by their schema that interpret the elements anew, or that are views of other layouts than the strided one.
_REINTERPRETING = frozenset(
    """_conj _neg_view _sparse_broadcast_to _indices _nested_get_values _nested_view_from_buffer
    _nested_view_from_jagged _values ccol_indices coalesce col_indices crow_indices indices row_indices values
    view_as_complex view_as_real""".split()
)
# Copies of views without the tag, which torch itself calls in place of views.
_UNTAGGED_COPIES = frozenset({"_unsafe_view", "unsafe_split", "unsafe_split_with_sizes"})
# The offset of as_strided_ counts in the storage of the outer tensor, and it has no callable of its own.
_UNMAPPED = frozenset({aten.as_strided_.default})

# The arguments of a factory besides the size and the fill value.
_FACTORY_OPTIONS = frozenset({"dtype", "layout", "device", "pin_memory"})
# Factories that leave the elements undefined. Any other factory fills the elements.
_NOT_FILLING = frozenset({"new_empty", "new_empty_strided"})
# Conversions that preserve the structure of a value; here come those to a dtype that the class cannot change to.
_CONVERSIONS = frozenset({"_to_copy", "empty_like"})


def maps_as_view(spec: SubclassSpec, op: OpOverload) -> bool:
    """Whether an op without a rule maps over the inner tensors of a class with ``fallback="views"``.

    A factory that fills its result (``zeros_like``, ``new_full``) maps only if the class has no ``materialize``: with
    it the value is known, and inner tensors of zeros are in general not a value of zeros.
    """
    if is_factory(op):
        if _name(op) in _CONVERSIONS:
            return False
        return _name(op) in _NOT_FILLING or not spec.has_materialize
    return is_view(op)


# Ops that select and join elements along dims, and are not views.
_ALONG_DIMS = frozenset(
    {
        *(aten.cat.default, aten.stack.default, aten.index_select.default, aten.index.Tensor),
        *(aten.flip.default, aten.roll.default, aten.repeat.default, aten.as_strided.default),
    }
)


def maps_leading_dims(spec: SubclassSpec, op: OpOverload) -> bool:
    """Whether an op maps over the inner tensors of a class that declares leading dims, as ``shape="... 4"``."""
    return spec.leads and (op in _ALONG_DIMS or maps_as_view(spec, op))


def with_joined_zeros(cls: Any, op: OpOverload, run: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the callable of an op that joins cotangents: PyTorch passes plain zeros in place of an absent gradient."""
    if op not in (aten.cat.default, aten.stack.default) or not cls._is_cotangent:
        return run

    def wrapped(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        like = next(t for t in tensors if isinstance(t, cls))
        return run(
            [t if isinstance(t, cls) else _with_further_dims_of(like, t) for t in tensors], *args, **kwargs
        )

    return wrapped


def _with_further_dims_of(x: Any, plain: Tensor) -> Any:
    """Returns a plain tensor as a value like another one: each inner tensor holds it, along its further dims."""
    stored, inners = x.__dict__, []
    for name in type(x).__spec__.attributes:
        further = () if stored[name] is None else stored[name].shape[x.dim() :]
        t = plain.reshape([*plain.shape, *(1 for _ in further)]).expand([*plain.shape, *further])
        inners.append(None if stored[name] is None else t)
    return with_inners(x, inners)


def is_view(op: OpOverload) -> bool:
    """Whether an op takes a view, copies one, turns its argument into one, or is the derivative of one."""
    if op in _UNMAPPED:
        return False
    if torch.Tag.inplace_view in op.tags:
        viewing = functional_counterpart_of_view(op)
        return viewing is not None and is_view(viewing)
    facts, name = op_facts(op), _name(op)
    if sum(a.role != "other" and not a.written for a in facts.arguments) != 1:
        return False
    if torch.Tag.view_copy in op.tags:
        return _keeps_elements(name.removesuffix("_copy"), op)
    if facts.written:
        return False
    if facts.viewed:
        return _keeps_elements(name, op)
    return name in _UNTAGGED_COPIES or _is_derivative_of_view(name)


def _keeps_elements(name: str, op: OpOverload) -> bool:
    # view.dtype reinterprets the bytes, whichever class it is called on.
    return name not in _REINTERPRETING and not any(a.name == "dtype" for a in op_facts(op).arguments)


def _is_derivative_of_view(name: str) -> bool:
    """Whether a name names the derivative of a view, which writes a gradient into zeros, as ``slice_backward`` does."""
    if not name.endswith("_backward"):
        return False
    packet = getattr(aten, name.removesuffix("_backward"), None)
    return packet is not None and any(op_facts(getattr(packet, o)).viewed for o in packet.overloads())


def is_factory(op: OpOverload) -> bool:
    """Whether an op makes a tensor like its only tensor argument, with a dtype, a device and a layout to choose."""
    facts = op_facts(op)
    tensors = [a.name for a in facts.arguments if a.role != "other"]
    return tensors == ["self"] and not facts.viewed and {a.name for a in facts.arguments} >= _FACTORY_OPTIONS


def _name(op: OpOverload) -> str:
    return op.overloadpacket.__name__


# ---- straight-line functions -----------------------------------------------------------------------------------


def can_emit(op: OpOverload) -> bool:
    """Whether the callable of an op is straight-line: no lists of tensors, one tensor as result."""
    facts = op_facts(op)
    names = [a.name for a in facts.arguments]
    tensors = [a for a in facts.arguments if a.role == "tensor"]
    return (
        bool(tensors)
        and facts.returns == ("tensor",)
        and (not facts.written or facts.returned[0] is not None)
        and not facts.changes_metadata
        and torch.Tag.dynamic_output_shape not in op.tags
        and all(a.role != "tensors" for a in facts.arguments)
        and not any(a.keyword for a in tensors)
        and not any(keyword.iskeyword(n) or n.startswith("_") for n in names)
    )


def build_map_function(cls: Any, op: OpOverload) -> Callable[..., Any]:
    """Builds the callable that maps an op over the inner tensors of a class."""
    spec: SubclassSpec = cls.__spec__
    e = Emitter()
    name = op.overloadpacket.__name__ + "_" + op._overloadname
    facts = op_facts(op)
    e.reserve(*(a.name for a in facts.arguments))
    emit_map_function(e, spec, facts, name, is_tried_first(op), beside_values=cls._is_cotangent)
    supplied = {
        "_op": op,
        "_call": cpp_callable(op),
        "_Cls": cls._value_cls,
        "_Cotangent": cls,
        "_wrap": cls._wrap,
        "_check_alike": check_alike,
    }
    supplied |= {"_raise_dtype": raise_dtype, "_raise_plain": raise_writes_plain, "_bump": bump_versions}
    supplied |= {"_sum_gradient": sum_gradient}
    supplied |= {"_alias": _alias, "_differ": differ, "_try": try_first}
    supplied |= {"_with_nested": with_nested}
    made = build_functions(e.source, e.namespace | supplied, filename=f"<{spec.name} {op}>", owner=cls)
    return made[name]  # type: ignore[return-value]


def emit_map_function(
    e: Emitter, spec: SubclassSpec, facts: OpFacts, name: str, tried: bool, *, beside_values: bool = False
) -> None:
    """Emits the callable; the module's docstring shows an example.

    Args:
        e: Receives the text.
        spec: The declaration.
        facts: The op.
        name: The name of the function.
        tried: Whether the op is tried before it writes.
        beside_values: Whether the callable is for cotangents, and other operands may be values of the class.
    """
    tensors = [i for i, a in enumerate(facts.arguments) if a.role == "tensor"]
    params = facts.arguments[: tensors[-1] + 1]
    wrappers = [a for a in params if a.role == "tensor"]
    signature = [a.name + "".join(f"={e.bind(d, f'{a.name}_default')}" for d in a.default) for a in params]
    remaining = facts.arguments[len(params) :]
    rest = ["*_rest"] * any(not a.keyword for a in remaining) + ["**_kwargs"] * any(
        a.keyword for a in remaining
    )
    e.writeline(f"def {name}({', '.join((*signature, *rest))}):")
    with e.indent():
        _emit_find_wrappers(e, spec, wrappers, beside_values)
        for index in facts.written:
            _emit_check_written(e, facts.arguments[index], len(wrappers) > 1)
        if tried:
            _emit_try(e, spec, params, rest)
        for field in spec.inners:
            _emit_call(e, field, params, rest)
        _emit_result(e, spec, facts)


def _emit_find_wrappers(
    e: Emitter, spec: SubclassSpec, wrappers: list[Argument], beside_values: bool
) -> None:
    """Emits which arguments are wrappers, and the check that all of them have the same metadata."""
    first, *others = [a.name for a in wrappers]
    if not others:
        e.writeline(f"_x = {first}")
        e.writeline("_layout = _x._layout")
        return
    for name in (first, *others):
        e.writeline(f"_is_{name} = isinstance({name}, _Cls)")
        e.writeline(f"if not _is_{name}:")
        e.writeline(f"    _sum_gradient({name})")
    is_one = "type({0}) is _Cotangent" if beside_values else "_is_{0}"
    chain = "".join(f"{n} if {is_one.format(n)} else " for n in (first, *others[:-1])) + others[-1]
    e.writeline(f"_x = {chain}")
    e.writeline("_layout = _x._layout")
    same = "_layout"
    if beside_values:
        e.writeline("_values = _layout.values")
        same = "_layout and {0}._layout is not _values"
    for name in (first, *others) if beside_values else others:
        differs = [f"{name}._layout is not {same.format(name)}"]
        differs += [f"{name}.{f.name} != _x.{f.name}" for f in spec.dynamics]
        e.writeline(f"if _is_{name} and ({' or '.join(differs)}):")
        e.writeline(f"    _check_alike(_op, _x, {name})")


def _emit_check_written(e: Emitter, written: Argument, several: bool) -> None:
    if several:
        e.writeline(f"if not _is_{written.name}:")
        e.writeline("    _raise_plain(_op, _Cls)")


def _emit_try(e: Emitter, spec: SubclassSpec, params: tuple[Argument, ...], rest: list[str]) -> None:
    """Emits a try of the op on inner tensors unlike the first, so that it raises before it writes to that one."""
    first, *others = spec.attributes
    if not others:
        return
    e.writeline(f"if {' or '.join(f'_differ(_x.{first}, _x.{name})' for name in others)}:")
    args = "".join(
        f"{argument}, " for argument in (*(a.name for a in params), *(r for r in rest if r == "*_rest"))
    )
    kwargs = "_kwargs" if "**_kwargs" in rest else "{}"
    names = e.bind(tuple(others), "names_after_first")
    e.writeline(f"    _try(_Cls, _op, {names}, ({args}), {kwargs})")


def _emit_call(e: Emitter, field: InnerField, params: tuple[Argument, ...], rest: list[str]) -> None:
    """Emits the call of the op on the inner tensors of one name."""
    arguments, several = [], sum(a.role == "tensor" for a in params) > 1
    for a in params:
        inner = f"{a.name}.{field.attribute}"
        choice = f"{inner} if _is_{a.name} else {a.name}" if several else inner
        arguments.append(choice if a.role == "tensor" else a.name)
    call = f"_call({', '.join((*arguments, *rest))})"
    if field.optional:
        call = f"None if _x.{field.attribute} is None else {call}"
    e.writeline(f"_out_{field.name} = {call}")


def _emit_result(e: Emitter, spec: SubclassSpec, facts: OpFacts) -> None:
    outs = [f"_out_{f.name}" for f in spec.inners]
    if facts.written:
        e.writeline(f"_bump(({', '.join(outs)},))")
        (returned,) = facts.returned
        assert returned is not None, "an op that writes and returns one tensor returns its argument"
        e.writeline(f"return {facts.arguments[returned].name}")
        return
    for field in spec.inners:
        if field.dtype is not None:
            dtype, out = e.bind(field.dtype, str(field.dtype).removeprefix("torch.")), f"_out_{field.name}"
            maybe = f"{out} is not None and " if field.optional else ""
            e.writeline(f"if {maybe}{out}.dtype is not {dtype}:")
            e.writeline(f"    _raise_dtype(_op, _x, {field.name!r}, {dtype}, {out}.dtype)")
    e.writeline("if _layout.nested:")
    e.writeline(f"    _layout = _with_nested(_layout, {', '.join(outs)})")
    dynamics = [f"_x.{f.name}" for f in spec.dynamics]
    wrap = f"_wrap(_layout, {', '.join((*outs, *dynamics))})"
    if not facts.viewed:
        e.writeline(f"return {wrap}")
        return
    base = facts.arguments[facts.viewed[0][0]].name
    e.writeline(f"return _alias({wrap}, {base})")


# ---- functions that generated text calls -------------------------------------------------------------------------


def _alias(view: Any, base: Any) -> Any:
    if type(view) is type(base):
        set_storage_of(view, base)
    return view


def check_alike(op: OpOverload, x: Any, y: Any) -> None:
    """Raises DispatchError if an op cannot be mapped over two wrappers, which have different metadata.

    Whether a wrapper is a cotangent is not compared.
    """
    if are_alike(x._layout, y._layout) and dynamic_ints(x) == dynamic_ints(y):
        return
    raise DispatchError(
        f"{op} on two {type(x).__name__} with different metadata: {_metadata(x)} and {_metadata(y)}",
        code="metadata-differs",
        hint=f"write a rule that makes the result: @{type(x).__name__}.implements(torch.ops.{op})",
    )


def _metadata(x: Any) -> str:
    dynamics = "".join(f", {f.name}={x.__dict__[f.name]}" for f in type(x).__spec__.dynamics)
    return f"{describe_metadata(x._layout)}{dynamics}"


def raise_dtype(op: OpOverload, x: Any, field: str, expected: Any, got: Any) -> NoReturn:
    """Raises DispatchError: the op returns an inner tensor with a dtype that its field does not allow."""
    raise DispatchError(
        f"{op} makes {type(x).__name__}.{field} {got}, which is declared {expected}",
        code="dtype-misfit",
        hint=f"write a rule for it: @{type(x).__name__}.implements(torch.ops.{op})",
    )


def raise_writes_plain(op: OpOverload, cls: type) -> NoReturn:
    """Raises DispatchError: an op would write several values, one for each inner tensor, to one plain tensor."""
    cls = cls._value_cls  # type: ignore[attr-defined]
    facts = op_facts(op)
    if any(facts.arguments[i].keyword for i in facts.written):
        raise DispatchError(
            f"{op} would write {one_of(cls)} into a plain tensor, which is passed as out= and holds only one value",
            code="write-to-plain",
            hint=f"leave out= out, or pass {one_of(cls)}. A DataLoader with workers passes it where it collates: give "
            "it a collate_fn, such as torch.stack",
        )
    whole = "x.materialize()" if cls.__spec__.has_materialize else "an inner tensor"  # type: ignore[attr-defined]
    fields = ", ".join("t" for _ in cls.__spec__.inners)  # type: ignore[attr-defined]
    of_gradients = (
        f". If it is the gradient of a plain tensor t: an op on t and {one_of(cls)} computed it; t has a plain "
        f"gradient if the op takes {cls.__name__}({fields}) in place of t"
    )
    raise DispatchError(
        f"{op} would write {one_of(cls)} into a plain tensor, which holds only one value",
        code="write-to-plain",
        hint=f"write {whole} there, or use the functional "
        f"op{of_gradients if op.overloadpacket.__name__ in ('add_', 'copy_') else ''}",
    )


def other_size_error(op: OpOverload, x: Any, name: str, why: str) -> DispatchError:
    """Returns the error for an op that would select other elements of an inner tensor than of the value."""
    cls = type(x)
    return DispatchError(
        f"{op} on {one_of(cls)} of size {tuple(x.shape)}, mapped over its inner tensors, of which {field_name(name)!r} "
        f"of size {tuple(x.__dict__[name].shape)} has other elements {why}",
        code="inner-size",
        hint=f"give each the size of the value, or write a rule: @{cls.__name__}.implements(torch.ops.{op})",
    )


def further_dims_error(op: OpOverload, x: Any, name: str) -> DispatchError:
    """Returns the error for an op that would change an inner tensor's further dims, which the value does not have."""
    cls = type(x)
    return DispatchError(
        f"{op} on {one_of(cls)} of size {tuple(x.shape)} is mapped over its inner tensors, and it would change the "
        f"further dims of {field_name(name)!r}, whose size is {tuple(x.__dict__[name].shape)}",
        code="inner-size",
        hint="Name dims of the value, as x.sum(dim=0) does, or write a rule: "
        f"@{cls.__name__}.implements(torch.ops.{op})",
    )


def outer_dims_error(op: OpOverload, x: Any, result: Any, name: str) -> DispatchError:
    """Returns the error for an op that left the further dims of an inner tensor, and whose result shows others."""
    cls, field = type(x), field_name(name)
    count, size = x.__dict__[name].dim() - x.dim(), tuple(result.__dict__[name].shape)
    return DispatchError(
        f"{op} on {one_of(cls)} of size {tuple(x.shape)} is mapped over its inner tensors: {cls.__name__}.outer gives "
        f"size {tuple(result.shape)} for a result whose {field!r} has size {size}, of which "
        f"{size[: len(size) - count]} are dims of the value",
        code="inner-size",
        hint=f"Let outer take those alone, as in Outer({field}.shape[:-{count}]), or write a rule: "
        f"@{cls.__name__}.implements(torch.ops.{op})",
    )


def check_size(op: OpOverload, x: Any, outs: dict[str, Any]) -> None:
    """Raises DispatchError if an op whose sizes depend on data gives inner tensors of several, further dims aside."""
    sizes = {n: t.shape[: t.dim() - max(x.__dict__[n].dim() - x.dim(), 0)] for n, t in outs.items()}
    first = next(iter(sizes.values()))
    if any(size != first for size in sizes.values()):
        cls, shown = type(x), {field_name(n): tuple(t.shape) for n, t in outs.items()}
        raise DispatchError(
            f"{op}: the inner tensors of {one_of(cls)} give results of sizes {shown}",
            code="inners-disagree",
            hint=f"make the result in a rule: @{cls.__name__}.implements(torch.ops.{op})",
        )


# ---- the general form -----------------------------------------------------------------------------------------

# Ops that only set a conjugate or negative bit (a lazy bit), and the ops that compute the result. Below dispatch torch
# ignores the lazy bits of inner tensors, so they must not be set there.
_WITHOUT_LAZY_BITS = {
    torch.ops.aten._conj.default: torch.ops.aten.conj_physical.default,
    torch.ops.aten._neg_view.default: torch.ops.aten.neg.default,
}


def map_run(cls: Any, op: OpOverload) -> Call:
    """Returns the callable that runs an op once for each inner tensor."""
    if op in STRIDED_OPS:
        return map_strided(cls, op)
    if op is torch.ops.aten.set_.source_Tensor:
        return _check_source(cls, op, _map_general(cls, op))
    op = _WITHOUT_LAZY_BITS.get(op, op)
    run = build_map_function(cls, op) if can_emit(op) else _map_general(cls, op)
    if _may_set_lazy_bits(op):
        run = with_lazy_bits(run)
    return _with_note(cls, op, run) if any(f.dtype is not None for f in cls.__spec__.inners) else run


def _check_source(cls: Any, op: OpOverload, run: Call) -> Call:
    """Wraps ``set_``: if the source is plain, all inner tensors would share its memory."""

    def wrapped(x: Any, source: Any) -> Any:
        if isinstance(source, cls):
            return run(x, source)
        name = cls.__spec__.inners[0].name
        raise DispatchError(
            f"{op} of a plain tensor to {one_of(cls)} would let its inner tensors share memory",
            code="write-to-plain",
            hint=f"pass {one_of(cls)}, or set one inner tensor, as x.{name}.set_(source) does",
        )

    return wrapped


def _may_set_lazy_bits(op: OpOverload) -> bool:
    """Whether a kernel is composed of other ops, and may set conjugate bits for those."""
    name = op.overloadpacket.__name__
    if torch.Tag.pointwise in op.tags:
        return False
    return name.startswith(("linalg_", "_linalg", "_fft")) or is_composed(op)


def _with_note(cls: Any, op: OpOverload, run: Call) -> Call:
    """Adds the tensors on which an op ran to an error of torch, since a caller sees the outer dtype."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except RuntimeError as error:
            if not isinstance(error, DispatchError):
                x = wrappers_in(cls, args, kwargs)[0]
                dtypes = ", ".join(f"{field_name(n)} ({x.__dict__[n].dtype})" for n in x._layout.present)
                error.add_note(
                    f"{op} ran on each inner tensor of {one_of(cls)}: {dtypes}; {hint_for(cls, op)}"
                )
            raise

    return wrapped


def _map_general(cls: Any, op: OpOverload) -> Call:
    """Returns the general form of a mapped op: lists of tensors, several results, keyword tensors."""
    facts, spec, fills = op_facts(op), cls.__spec__, undeclared_writes(op)
    sends_or_receives, tried = is_send_or_recv(op), is_tried_first(op)

    def run(*args: Any, **kwargs: Any) -> Any:
        wrappers = wrappers_in(cls, args, kwargs)
        x = wrappers[0]
        for t in tensors_in(args, kwargs):
            sum_gradient(t)
        if sends_or_receives:
            raise send_or_recv_error(cls, op)
        for other in wrappers[1:]:
            check_alike(op, x, other)
        for i in facts.written:
            _check_not_plain(cls, op, argument(facts, args, kwargs, i))
        first, *others = x._layout.present
        if tried and any(differ(x.__dict__[first], x.__dict__[n]) for n in others):
            try_first(cls, op, tuple(others), args, kwargs)
        outs = {
            n: run_replaced(cls, op, lambda w, n=n: w.__dict__[n], args, kwargs) for n in x._layout.present
        }
        for i in fills:
            filled = wrappers_in(cls, [argument(facts, args, kwargs, i)])
            bump_versions([w.__dict__[n] for w in filled for n in x._layout.present])
        if facts.written:
            bump_versions([w.__dict__[n] for w in wrappers for n in x._layout.present])
            # An op that changes metadata itself is replayed on the outer tensor instead.
            for i in () if facts.changes_metadata else facts.written:
                resize_outer(argument(facts, args, kwargs, i), cls)
        return _wrap_results(op, x, spec, outs)

    return with_aliasing(op, run)


def is_send_or_recv(op: OpOverload) -> bool:
    """Whether an op sends to or receives from one rank.

    Both ranks refuse it before either waits. A value is several messages, and its receiver does not have their sizes; a
    handle for one message does not cover the others.
    """
    return op.namespace == "c10d" and op.overloadpacket.__name__ in ("send", "recv_", "recv_any_source_")


def send_or_recv_error(cls: Any, op: OpOverload) -> DispatchError:
    """Returns the error for an op that sends or receives one plain tensor."""
    return DispatchError(
        f"{op} takes one plain tensor, and {one_of(cls)} is more than that",
        code="message-refused",
        hint=f"send and receive its inner tensors, or {hint_for(cls, op)}",
    )


def _check_not_plain(cls: Any, op: OpOverload, written: Any) -> None:
    for t in written if isinstance(written, list | tuple) else (written,):
        if isinstance(t, Tensor) and not isinstance(t, cls):
            raise_writes_plain(op, cls)


def wrappers_in(cls: Any, args: Any, kwargs: Any = None) -> list[Any]:
    """Returns the values of a class among arguments, also inside lists."""
    return [t for t in tensors_in(args, kwargs) if isinstance(t, cls)]


def run_replaced(cls: Any, op: OpOverload, replace: Call, args: Any, kwargs: Any) -> Any:
    """Runs an op with every value of a class in its arguments replaced."""
    args, kwargs = (map_tensors(v, lambda t: replace(t) if isinstance(t, cls) else t) for v in (args, kwargs))
    return op(*args, **kwargs)


def _wrap_results(op: OpOverload, x: Any, spec: Any, outs: dict[str, Any]) -> Any:
    """Combines the results for all inner tensors into one result: wrappers, sequences of them, or equal values.

    Raises:
        DispatchError: result sizes that depend on data differ, or the inner tensors give different values.
    """
    first = next(iter(outs.values()))
    if isinstance(first, Tensor):
        if torch.Tag.dynamic_output_shape in op.tags:
            check_size(op, x, outs)
        return with_inners(x, [outs.get(n) for n in spec.attributes])
    if isinstance(first, list | tuple):
        results = [_wrap_results(op, x, spec, {n: o[i] for n, o in outs.items()}) for i in range(len(first))]
        return results if isinstance(first, list) else tuple(results)
    if is_work(first):
        return joint_work(list(outs.values()))
    if any(_differ(o, first) for o in outs.values()):
        by_field = {field_name(n): o for n, o in outs.items()}
        raise DispatchError(
            f"{op}: inner tensors of {one_of(type(x))} disagree: {by_field}",
            code="inners-disagree",
            hint="read one of them",
        )
    return first


def _differ(one: Any, other: Any) -> bool:
    """Whether two results differ; symbolic bools have to be converted before they can be compared."""
    return bool(one) != bool(other) if isinstance(one, torch.SymBool) else one != other


# ---- checks of sizes ---------------------------------------------------------------------------------------


def with_equal_sizes(cls: Any, op: OpOverload, run: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the callable of a mapped op that names dims or sizes of the outer tensor.

    Raises:
        DispatchError: from the callable, if an inner tensor of the argument or of the result has another size than the
            outer tensor.
    """
    facts = op_facts(op)
    if is_factory(op) and not any(a.name == "size" for a in facts.arguments):
        return run
    (index,) = (i for i, a in enumerate(facts.arguments) if a.role == "tensor" and not a.keyword)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        x = argument(facts, args, kwargs, index)
        _check_sizes(op, x, "argument")
        out = run(*args, **kwargs)
        if cls.__spec__.has_outer:
            for result in out if isinstance(out, list | tuple) else (out,):
                _check_sizes(op, result, "result")
        return out

    return wrapped


def _check_sizes(op: OpOverload, x: Tensor, which: str) -> None:
    cls: Any = type(x)
    for field in cls.__spec__.inners:
        t = x.__dict__[field.attribute]
        if t is not None and t.shape != x.shape:
            if op in STRIDED_OPS:
                raise DispatchError(
                    f"{op}, with which torch.compile remakes views of its arguments, on {one_of(cls)} of size "
                    f"{tuple(x.shape)}, whose inner tensor {field.name!r} has size {tuple(t.shape)}",
                    code="strided-view",
                    hint=strided_advice(cls, op),
                )
            raise DispatchError(
                f"{op}: the {which} is {one_of(cls)} of size {tuple(x.shape)}, and its inner tensor {field.name!r} "
                f'has size {tuple(t.shape)}. fallback="views" maps an op that names dims or sizes only over inner '
                f"tensors of the outer size",
                code="inners-disagree",
                hint=f"where a rule that broadcasts made the value, let it broadcast {field.name!r} too; else make "
                f"the result in a rule: @{cls.__name__}.implements(torch.ops.{op})",
            )


def with_alias_of_whole_slice(
    run: Callable[..., Any], make_alias: Callable[[], Callable[..., Any]]
) -> Callable[..., Any]:
    """Wraps the callable of a slice: the slice of a whole dimension is an alias of the value.

    PyTorch does not call such a slice if the size is an int, as in ``x[:, 1]``. It calls it if the size is a symbol.

    Raises:
        DispatchError: from the callable, if an inner tensor that is shorter than the value has fewer of the elements.
    """
    alias = functools.cache(make_alias)

    def wrapped(x: Any, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> Any:
        is_whole = _is_default(start, 0) and _is_default(end, sys.maxsize) and _is_default(step, 1)
        if is_whole:
            return alias()(x)
        out = run(x, dim, start, end, step)
        _check_not_cut(x, out, dim)
        return out

    return wrapped


def _check_not_cut(x: Any, out: Any, dim: int) -> None:
    cls = type(x)
    for field in cls.__spec__.inners if type(out) is cls else ():  # not for a materialized result
        t, cut = x.__dict__[field.attribute], out.__dict__[field.attribute]
        if t is None or cut is None or t.dim() != x.dim() or type(out.shape[dim]) is not int:
            continue
        if (
            known_to_differ(t.shape[dim : dim + 1], x.shape[dim : dim + 1])
            and cut.shape[dim] < out.shape[dim]
        ):
            raise DispatchError(
                f"aten.slice on {one_of(cls)} of size {tuple(x.shape)}, mapped over its inner tensors: "
                f"{field.name!r} of size {tuple(t.shape)} has fewer of these elements along dim {dim}",
                code="inner-size",
                hint=f"write a rule: @{cls.__name__}.implements(torch.ops.aten.slice)",
            )


def with_alias_of_same_size(
    run: Callable[..., Any], make_alias: Callable[[], Callable[..., Any]]
) -> Callable[..., Any]:
    """Wraps the callable of ``view``: the view by a value's own size is an alias of the value.

    An autograd function calls it to return an argument, as PyTorch's function for the backward hooks of a module does.
    """
    alias = functools.cache(make_alias)

    def wrapped(x: Any, size: Any) -> Any:
        is_same = len(size) == x.dim() and not any(map(may_differ, size, x.shape))
        return alias()(x) if is_same else run(x, size)

    return wrapped


# Ops that may return an alias of a value.
ALIASING_IF_SAME = {aten.slice.Tensor: with_alias_of_whole_slice, aten.view.default: with_alias_of_same_size}


def _is_default(given: Any, number: int) -> bool:
    return given is None or (type(given) is int and given == number)


# ---- dims --------------------------------------------------------------------------------------------------

_DIMS = frozenset(
    {"dim", "dimension", "dims", "dim0", "dim1", "dim2", "start_dim", "end_dim", "source", "destination"}
)
_SIZES = frozenset({"size", "input_sizes", "repeats"})
_ADDING_A_DIM = frozenset({aten.unsqueeze.default, aten.unsqueeze_.default, aten.stack.default})
# The last two dims, which their arguments do not name.
_OF_LAST_DIMS = frozenset({aten.tril.default, aten.triu.default, aten.tril_.default, aten.triu_.default})
# Their result has one more dim, the last.
_APPENDING = frozenset(
    {aten.diagonal.default, aten.diagonal_copy.default, aten.unfold.default, aten.unfold_copy.default}
)


def with_outer_dims(cls: Any, op: OpOverload, run: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the callable of a mapped op: the first dims of an inner tensor with further dims are the outer dims.

    A negative dim counts from the last outer dim, which is not the last dim of such an inner tensor. Sizes, and
    repeats, apply to the first dims too.

    Raises:
        DispatchError: from the callable, if the op changes the further dims, as a sum over all dims does. Also if it
            selects other elements of an inner tensor of another size than of the value.
    """
    facts, cls = op_facts(op), cls._value_cls
    is_sized = any(a.name in _SIZES for a in facts.arguments)
    if torch.Tag.pointwise in op.tags:
        return _with_plain_operands(cls, op, run)
    if (is_factory(op) and not is_sized) or op in STRIDED_OPS or has_one_size(cls):
        return run
    attributes = cls.__spec__.attributes
    # A scale of size [out, 1] has the dims of the value, which a view moves with them.
    keeps_ones = (is_view(op) and not is_sized) or op is aten.expand.default

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        x: Any = args[0]
        if not isinstance(x, cls):
            x = next(t for t in tensors_in(args, kwargs) if isinstance(t, cls))
        others = _of_other_sizes(x, attributes)
        further = _with_further_dims(op, x, others, keeps_ones) if others else ()
        if not further:
            return run(*args, **kwargs)
        rolls_as_one_row = op is aten.roll.default and len(args) < 3
        if op in _OF_LAST_DIMS or op in _APPENDING or rolls_as_one_row:
            raise further_dims_error(op, x, further[0])
        if any(
            t.is_floating_point() and t.dim() and not isinstance(t, cls) for t in tensors_in(args, kwargs)
        ):
            raise other_size_error(op, x, further[0], "than a plain operand")
        out = _run_from_front(op, run, x, [*args], kwargs)
        for result in out if isinstance(out, list | tuple) else (out,):
            if isinstance(result, cls):
                _check_further_dims(op, x, result, further)
        return out

    return wrapped


def _with_further_dims(op: OpOverload, x: Any, others: list[str], keeps_ones: bool) -> list[str]:
    """Returns which inner tensors of another size have the dims of a value, and further ones.

    Raises:
        DispatchError: the op would select other elements of such an inner tensor than of the value.
    """
    stored, size = x.__dict__, x.shape
    further = [n for n in others if not known_to_differ(stored[n].shape[: len(size)], size)]
    for n in others:
        if n not in further and not (keeps_ones and fits_by_ones(stored[n].shape, size)):
            raise other_size_error(op, x, n, "where the op names dims, sizes or all of them")
    return further


def _with_plain_operands(cls: Any, op: OpOverload, run: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the callable of a pointwise op: the elements of a plain operand match the elements of the value.

    Raises:
        DispatchError: from the callable, if an inner tensor's elements do not match. An inner tensor of the value's
            size matches. So does one that expands to it, as one row for all does, if the operand would not expand it.
    """
    if sum(a.role != "other" for a in op_facts(op).arguments) < 2 or has_one_size(cls):
        return run
    attributes = cls.__spec__.attributes

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        plain, x = None, None
        for t in args:
            if isinstance(t, cls):
                x = t
            elif isinstance(t, Tensor):
                plain = t
        if plain is not None and x is not None and (others := _of_other_sizes(x, attributes)):
            _check_same_elements(
                op, x, others, [t for t in tensors_in(args, kwargs) if not isinstance(t, cls)]
            )
        return run(*args, **kwargs)

    return wrapped


def _of_other_sizes(x: Any, attributes: tuple[str, ...]) -> list[str]:
    """Returns the names of inner tensors with another size than the value; each call of a mapped op calls this."""
    stored, size, names = x.__dict__, x.shape, []
    for name in attributes:
        t = stored[name]
        if t is None:
            continue
        if t.__class__ is Tensor or all(n.__class__ is int for n in (*size, *t.shape)):
            if t.shape != size:
                names.append(name)
        elif known_to_differ(t.shape, size):  # a comparison of symbols would guard on them
            names.append(name)
    return names


def _check_same_elements(op: OpOverload, x: Any, others: list[str], plains: list[Tensor]) -> None:
    for name in others:
        size = x.__dict__[name].shape
        if not all(expands(size, x.shape) and expands(t.shape, size) for t in plains if t.dim()):
            raise other_size_error(op, x, name, "than a plain operand")


def _run_from_front(
    op: OpOverload, run: Callable[..., Any], x: Any, args: list[Any], kwargs: dict[str, Any]
) -> Any:
    """Runs the callable of an op with dims that are counted from the front."""
    arguments = op_facts(op).arguments
    named = [i for i, a in enumerate(arguments) if a.name in _DIMS and a.role == "other"]
    while named and len(args) <= named[-1] and (default := arguments[len(args)].default):
        args += default
    is_sized = op is not aten.unfold.default and not op_facts(op).written  # the size of `unfold` is a window
    sized = next((i for i, a in enumerate(arguments) if a.name in _SIZES), None) if is_sized else None
    if op is aten.permute.default:
        sized = 1  # it names all dims
    count = x.dim() + (op in _ADDING_A_DIM)
    if sized is not None and arguments[sized].name == "input_sizes":  # the derivative of a view
        count = len(args[sized])
    for i in (i for i in named if i < len(args)):
        args[i] = _from_front(count, args[i])
    return run(*args, **kwargs) if sized is None else _run_sized(op, x, sized, args, kwargs)


def _run_sized(op: OpOverload, x: Any, index: int, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Runs an op on each inner tensor, with the sizes of the further dims after the sizes that the op names."""
    facts, results = op_facts(op), {}
    for name in x._layout.present:
        t = x.__dict__[name]
        further = t.shape[x.dim() :]
        match facts.arguments[index].name:
            case "repeats":
                further = [1 for _ in further]
            case "dims":
                further = range(x.dim(), t.dim())
        given = [inner_of(type(x), v, name) for v in args]
        given[index] = [*args[index], *further]
        results[name] = op(*given, **kwargs)
    out = with_inners(x, [results.get(name) for name in type(x).__spec__.attributes])
    return set_storage_of(out, x) or out if facts.viewed else out


def _from_front(count: int, dims: Any) -> Any:
    if isinstance(dims, list | tuple):
        return [canonicalize_dim(count, d) for d in dims]
    return dims if dims is None else canonicalize_dim(count, dims)


def _check_further_dims(op: OpOverload, x: Any, result: Any, further: list[str]) -> None:
    for name in further:
        before, after = x.__dict__[name].shape, result.__dict__[name].shape
        count = len(before) - x.dim()
        if len(after) < count or known_to_differ(after[len(after) - count :], before[len(before) - count :]):
            raise further_dims_error(op, x, name)
        if len(after) - result.dim() != count:
            raise outer_dims_error(op, x, result, name)


_OF_TWO_DIMS = {
    torch.ops.aten.t.default: torch.ops.aten.transpose.int,
    torch.ops.aten.t_.default: torch.ops.aten.transpose_.default,
}


def leading_run(cls: Any, op: OpOverload) -> Call:
    """Returns the callable that runs an op along the leading dims of each inner tensor."""
    if op in _OF_TWO_DIMS:  # which a tensor of more dims does not have
        run = leading_run(cls, _OF_TWO_DIMS[op])
        return lambda x: run(x, 0, int(x.dim() > 1))
    return with_joined_zeros(cls, op, with_outer_dims(cls, op, map_run(cls, op)))


# ---- errors ------------------------------------------------------------------------------------------------


def hint_for(cls: Any, op: OpOverload, first: Any = ()) -> str:
    """Returns a phrase that tells an author or a user how to continue if a class does not run an op."""
    if is_of_tangents(op):
        return IN_FORWARD_MODE
    if op in STRIDED_OPS:
        return f"torch.compile remakes views of its arguments with it: {strided_advice(cls, op)}"
    return way_out(cls, registering(cls, op) + _of_author(cls, op, first))


def _of_author(cls: Any, op: OpOverload, first: Any) -> str:
    """Returns the further advice for an author about a missing rule."""
    name = op.overloadpacket.__name__
    advice = NO_DERIVATIVE if name.endswith("_backward") else _OF_A_DERIVATIVE if in_backward() else ""
    instead = advice and f"; {advice}"
    if name in _OF_OPTIMIZERS and (not first or isinstance(first[0], cls | list | tuple)):
        instead += for_optimizers(cls)
    if op is torch.ops.aten.ones_like.default and not cls._traits.is_representation:
        instead += _OF_BACKWARD
    if whole := _whole_of(op):
        instead = f"; or for {whole}, of which it is a part: @{cls.__name__}.implements({whole}){instead}"
    return instead


def _whole_of(op: OpOverload) -> str:
    """Returns the name of the called function if it runs several ops, of which ``op`` is one; else an empty string."""
    func: Any = CALLING.func
    name = getattr(func, "__name__", "").strip("_")
    if name == "get" and not in_backward():  # of a property
        return f"torch.Tensor.{func.__self__.__name__}.__get__"
    packet = getattr(torch.ops.aten, name, None) if name else None
    if packet is None or packet is op.overloadpacket or in_backward():
        return ""
    if not any(is_composite(getattr(packet, overload)) for overload in packet.overloads()):
        return ""
    whole = resolve_name(func) or ""
    if whole.startswith("torch.Tensor."):
        whole = f"torch.{name}" if hasattr(torch, name) else ""
    return whole


_OF_OPTIMIZERS = frozenset({"add_", "lerp_", "addcmul_", "addcdiv_"})


_OF_BACKWARD = (
    "; where backward() of a value calls it, start from a plain tensor that x.unwrap() or a method returns"
)
_OF_A_DERIVATIVE = (
    "autograd calls it in a derivative: expand calls a sum, split a cat, unbind a stack. No rule for a function, such "
    "as torch.sum, runs there. Write a rule for the op, which works on each inner tensor"
)
