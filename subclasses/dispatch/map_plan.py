"""Straight-line plans: one op runs once for each inner tensor.

For an op and a class, the generated text determines which arguments are wrappers, reads their inner tensors by name,
calls the op once for each name, and wraps the results. ``aten.mul.Tensor`` on a pair of ``a`` and ``b`` becomes::
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

import keyword
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from subclasses._torch import OpOverload, cpp_callable, set_storage_of
from subclasses.autograd.plain_operands import sum_gradient
from subclasses.codegen.build import build_functions
from subclasses.codegen.emitter import Emitter
from subclasses.errors import DispatchError, one_of
from subclasses.layout import are_alike, describe_metadata, field_name, with_nested
from subclasses.ops.aliasing import bump_versions
from subclasses.ops.schema import Argument, OpFacts, op_facts
from subclasses.ops.write_checks import differ, is_tried_first, try_first
from subclasses.spec.collect import InnerField, SubclassSpec
from subclasses.spec.values import dynamic_ints


def can_emit(op: OpOverload) -> bool:
    """Whether the plan of an op is straight-line: no lists of tensors, one tensor as result."""
    facts = op_facts(op)
    names = [a.name for a in facts.arguments]
    tensors = [a for a in facts.arguments if a.kind == "tensor"]
    return (
        bool(tensors)
        and facts.returns == ("tensor",)
        and (not facts.written or facts.returned[0] is not None)
        and not facts.changes_metadata
        and torch.Tag.dynamic_output_shape not in op.tags
        and all(a.kind != "tensors" for a in facts.arguments)
        and not any(a.keyword for a in tensors)
        and not any(keyword.iskeyword(n) or n.startswith("_") for n in names)
    )


def build_map_plan(cls: Any, op: OpOverload) -> Callable[..., Any]:
    """Builds the plan that maps an op over the inner tensors of a class."""
    spec: SubclassSpec = cls.__spec__
    e = Emitter()
    name = op.overloadpacket.__name__ + "_" + op._overloadname
    facts = op_facts(op)
    e.reserve(*(a.name for a in facts.arguments))
    emit_map_plan(e, spec, facts, name, is_tried_first(op), beside_values=cls._is_cotangent)
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


def emit_map_plan(
    e: Emitter, spec: SubclassSpec, facts: OpFacts, name: str, tried: bool, *, beside_values: bool = False
) -> None:
    """Emits the plan; the module's docstring shows an example.

    Args:
        e: Receives the text.
        spec: The declaration.
        facts: The op.
        name: The name of the function.
        tried: Whether the op is tried before it writes.
        beside_values: Whether the plan is for cotangents, beside which there may be values of the class.
    """
    tensors = [i for i, a in enumerate(facts.arguments) if a.kind == "tensor"]
    params = facts.arguments[: tensors[-1] + 1]
    wrappers = [a for a in params if a.kind == "tensor"]
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
    args = "".join(f"{part}, " for part in (*(a.name for a in params), *(r for r in rest if r == "*_rest")))
    kwargs = "_kwargs" if "**_kwargs" in rest else "{}"
    names = e.bind(tuple(others), "names_after_first")
    e.writeline(f"    _try(_Cls, _op, {names}, ({args}), {kwargs})")


def _emit_call(e: Emitter, field: InnerField, params: tuple[Argument, ...], rest: list[str]) -> None:
    """Emits the call of the op on the inner tensors of one name."""
    parts, several = [], sum(a.kind == "tensor" for a in params) > 1
    for a in params:
        inner = f"{a.name}.{field.attribute}"
        choice = f"{inner} if _is_{a.name} else {a.name}" if several else inner
        parts.append(choice if a.kind == "tensor" else a.name)
    call = f"_call({', '.join((*parts, *rest))})"
    if field.optional:
        call = f"None if _x.{field.attribute} is None else {call}"
    e.writeline(f"_out_{field.name} = {call}")


def _emit_result(e: Emitter, spec: SubclassSpec, facts: OpFacts) -> None:
    outs = [f"_out_{f.name}" for f in spec.inners]
    if facts.written:
        e.writeline(f"_bump(({', '.join(outs)},))")
        (returned,) = facts.returned
        assert returned is not None, "an op that writes and returns one tensor returns what it wrote"
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


# ---- functions that plans call -----------------------------------------------------------------------------


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
        f"{op} on two {type(x).__name__} with different metadata: {_metadata(x)} and {_metadata(y)}; "
        f"write a rule that says what the result has: @{type(x).__name__}.implements(torch.ops.{op})"
    )


def _metadata(x: Any) -> str:
    dynamics = "".join(f", {f.name}={x.__dict__[f.name]}" for f in type(x).__spec__.dynamics)
    return f"{describe_metadata(x._layout)}{dynamics}"


def raise_dtype(op: OpOverload, x: Any, field: str, expected: Any, got: Any) -> NoReturn:
    """Raises DispatchError: the op returns an inner tensor with a dtype that its field does not allow."""
    raise DispatchError(
        f"{op} makes {type(x).__name__}.{field} {got}, which is declared {expected}; "
        f"write a rule for it: @{type(x).__name__}.implements(torch.ops.{op})"
    )


def raise_writes_plain(op: OpOverload, cls: type) -> NoReturn:
    """Raises DispatchError: an op would write several values, one for each inner tensor, to one plain tensor."""
    cls = cls._value_cls  # type: ignore[attr-defined]
    facts = op_facts(op)
    if any(facts.arguments[i].keyword for i in facts.written):
        raise DispatchError(
            f"{op} would write {one_of(cls)} into a plain tensor, which is passed as out= and holds only one value; "
            f"leave out= out, or pass {one_of(cls)}. A DataLoader with workers passes it where it collates: give it a "
            "collate_fn, such as torch.stack"
        )
    whole = "x.materialize()" if cls.__spec__.has_materialize else "an inner tensor"  # type: ignore[attr-defined]
    fields = ", ".join("t" for _ in cls.__spec__.inners)  # type: ignore[attr-defined]
    of_gradients = (
        f". If it is the gradient of a plain tensor t: an op on t and {one_of(cls)} computed it; t has a plain "
        f"gradient if the op takes {cls.__name__}({fields}) in place of t"
    )
    raise DispatchError(
        f"{op} would write {one_of(cls)} into a plain tensor, which holds only one value; write {whole} there, or "
        f"use the functional op{of_gradients if op.overloadpacket.__name__ in ('add_', 'copy_') else ''}"
    )


def other_size_error(op: OpOverload, x: Any, name: str, why: str) -> DispatchError:
    """Returns the error for an op that would mean other elements of an inner tensor than of the value."""
    cls = type(x)
    return DispatchError(
        f"{op} on {one_of(cls)} of size {tuple(x.shape)}, mapped over its inner tensors, of which {field_name(name)!r} "
        f"of size {tuple(x.__dict__[name].shape)} has other elements {why}; give each the size of the value, or write "
        f"a rule: @{cls.__name__}.implements(torch.ops.{op})"
    )


def further_dims_error(op: OpOverload, x: Any, name: str) -> DispatchError:
    """Returns the error for an op that would change the dims which an inner tensor has beside those of the value."""
    cls = type(x)
    return DispatchError(
        f"{op} on {one_of(cls)} of size {tuple(x.shape)} is mapped over its inner tensors, and it would change the "
        f"further dims of {field_name(name)!r}, whose size is {tuple(x.__dict__[name].shape)}. Name dims of the value, "
        f"as x.sum(dim=0) does, or write a rule: @{cls.__name__}.implements(torch.ops.{op})"
    )


def outer_dims_error(op: OpOverload, x: Any, result: Any, name: str) -> DispatchError:
    """Returns the error for an op that left the further dims of an inner tensor, and whose result shows others."""
    cls, field = type(x), field_name(name)
    count, size = x.__dict__[name].dim() - x.dim(), tuple(result.__dict__[name].shape)
    return DispatchError(
        f"{op} on {one_of(cls)} of size {tuple(x.shape)} is mapped over its inner tensors: {cls.__name__}.outer gives "
        f"size {tuple(result.shape)} for a result whose {field!r} has size {size}, of which "
        f"{size[: len(size) - count]} are dims of the value. Let outer take those alone, as in Outer({field}.shape"
        f"[:-{count}]), or write a rule: "
        f"@{cls.__name__}.implements(torch.ops.{op})"
    )


def check_size(op: OpOverload, x: Any, outs: dict[str, Any]) -> None:
    """Raises DispatchError if an op whose sizes depend on data gives inner tensors of several, further dims aside."""
    sizes = {n: t.shape[: t.dim() - max(x.__dict__[n].dim() - x.dim(), 0)] for n, t in outs.items()}
    first = next(iter(sizes.values()))
    if any(size != first for size in sizes.values()):
        cls, shown = type(x), {field_name(n): tuple(t.shape) for n, t in outs.items()}
        raise DispatchError(
            f"{op}: the inner tensors of {one_of(cls)} give results of sizes {shown}; say what the result has in a "
            f"rule: @{cls.__name__}.implements(torch.ops.{op})"
        )
