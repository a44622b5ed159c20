"""The four fallbacks: what a class does with an op that no earlier resolution step covers.

``"map"`` runs the op once for each inner tensor, as straight-line code if the schema allows it, and in a general form
for ops with lists of tensors. ``"views"`` does the same for ops that compute nothing, and no other op.
``"materialize"`` runs the op on materialized values. ``"error"`` raises an error that says how to add a rule.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import resolve_name

from subclasses import strict_mode
from subclasses._torch import (
    DisableTorchFunctionSubclass,
    OpOverload,
    in_backward,
    is_composed,
    is_composite,
    with_lazy_bits,
)
from subclasses._torch_distributed import is_work, joint_work
from subclasses.autograd.calling import CALLING
from subclasses.autograd.engine_ops import NO_DERIVATIVE, check_no_cotangents
from subclasses.autograd.plain_operands import sum_gradient
from subclasses.autograd.python_functions import registering
from subclasses.dispatch.map_plan import build_map_plan, can_emit, check_alike, check_size, raise_writes_plain
from subclasses.dispatch.map_views import (
    joining_parts,
    maps_as_view,
    maps_leading_dims,
    with_equal_sizes,
    with_outer_dims,
)
from subclasses.dispatch.strided import STRIDED_OPS, check_strided_copy, map_strided, strided_advice
from subclasses.dispatch.structural import resolved
from subclasses.errors import DispatchError, one_of, way_out
from subclasses.layout import describe_metadata, field_name
from subclasses.ops.aliasing import argument, bump_versions, for_optimizers, resize_outer, with_aliasing
from subclasses.ops.schema import op_facts, undeclared_writes
from subclasses.ops.tangents import IN_FORWARD_MODE, is_of_tangents
from subclasses.ops.write_checks import differ, is_tried_first, try_first
from subclasses.spec.values import float_fields, tensors_in, with_inners

Call = Callable[..., Any]

# Ops that only set a lazy bit, and the ops that compute the result. Below dispatch torch ignores the lazy bits of inner
# tensors, so they must not be set there.
_WITHOUT_LAZY_BITS = {
    torch.ops.aten._conj.default: torch.ops.aten.conj_physical.default,
    torch.ops.aten._neg_view.default: torch.ops.aten.neg.default,
}


def fallback_run(cls: Any, op: OpOverload) -> Call:
    """Returns the callable that runs an op by the fallback of the class."""
    if maps_leading_dims(cls.__spec__, op):
        return leading_run(cls, op)
    match cls.__spec__.fallback:
        case "map":
            return with_outer_dims(cls, op, map_run(cls, op))
        case "views" if maps_as_view(cls.__spec__, op):
            return with_equal_sizes(cls, op, map_run(cls, op))
        case "materialize":
            return _materialize(cls, op)
        case _:
            return _error(cls, op)


_OF_TWO_DIMS = {
    torch.ops.aten.t.default: torch.ops.aten.transpose.int,
    torch.ops.aten.t_.default: torch.ops.aten.transpose_.default,
}


def leading_run(cls: Any, op: OpOverload) -> Call:
    """Returns the callable that runs an op along the leading dims of each inner tensor."""
    if op in _OF_TWO_DIMS:  # which a tensor of more dims does not have
        run = leading_run(cls, _OF_TWO_DIMS[op])
        return lambda x: run(x, 0, int(x.dim() > 1))
    return joining_parts(cls, op, with_outer_dims(cls, op, map_run(cls, op)))


def decompose_run(op: OpOverload) -> Call:
    """Returns a plan that decomposes a composite op, which is dispatched in inference mode only."""

    def plan(*args: Any, **kwargs: Any) -> Any:
        # decompose() calls the kernel directly, but __torch_function__ would intercept it and call the op again.
        with DisableTorchFunctionSubclass():
            return op.decompose(*args, **kwargs)

    return with_lazy_bits(plan)


# ---- map ---------------------------------------------------------------------------------------------------


def map_run(cls: Any, op: OpOverload) -> Call:
    """Returns the callable that runs an op once for each inner tensor."""
    if op in STRIDED_OPS:
        return map_strided(cls, op)
    if op is torch.ops.aten.set_.source_Tensor:
        return _check_source(cls, op, _map_general(cls, op))
    op = _WITHOUT_LAZY_BITS.get(op, op)
    run = build_map_plan(cls, op) if can_emit(op) else _map_general(cls, op)
    if _may_set_lazy_bits(op):
        run = with_lazy_bits(run)
    return _with_note(cls, op, run) if any(f.dtype is not None for f in cls.__spec__.inners) else run


def _check_source(cls: Any, op: OpOverload, run: Call) -> Call:
    """Wraps ``set_``: of a plain tensor, all inner tensors would take over the one memory."""

    def plan(x: Any, source: Any) -> Any:
        if isinstance(source, cls):
            return run(x, source)
        name = cls.__spec__.inners[0].name
        raise DispatchError(
            f"{op} of a plain tensor to {one_of(cls)} would let its inner tensors share memory; pass {one_of(cls)}, or "
            f"set one inner tensor, as x.{name}.set_(source) does"
        )

    return plan


def _may_set_lazy_bits(op: OpOverload) -> bool:
    """Whether a kernel is composed of other ops, and may set conjugate bits for those."""
    name = op.overloadpacket.__name__
    if torch.Tag.pointwise in op.tags:
        return False
    return name.startswith(("linalg_", "_linalg", "_fft")) or is_composed(op)


def _with_note(cls: Any, op: OpOverload, run: Call) -> Call:
    """Wraps a plan so that an error of torch says on which tensors the op ran; a caller knows the outer dtype alone."""

    def plan(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except RuntimeError as error:
            if not isinstance(error, DispatchError):
                x = wrappers_in(cls, (args, kwargs))[0]
                held = ", ".join(f"{field_name(n)} ({x.__dict__[n].dtype})" for n in x._layout.present)
                error.add_note(f"{op} ran on each inner tensor of {one_of(cls)}: {held}; {_hint(cls, op)}")
            raise

    return plan


def fallback_step(cls: Any, op: OpOverload) -> str:
    """Returns the name of the fallback that runs an op: ``"error"`` where ``"views"`` does not map it."""
    fallback = cls.__spec__.fallback
    if fallback != "map" and maps_leading_dims(cls.__spec__, op):
        return "views"
    return "error" if fallback == "views" and not maps_as_view(cls.__spec__, op) else fallback


def _map_general(cls: Any, op: OpOverload) -> Call:
    """Returns the general form of a mapped op: lists of tensors, several results, keyword tensors."""
    facts, spec, fills = op_facts(op), cls.__spec__, undeclared_writes(op)
    is_message, tried = _is_message(op), is_tried_first(op)

    def plan(*args: Any, **kwargs: Any) -> Any:
        found = wrappers_in(cls, (args, kwargs))
        x = found[0]
        for t in tensors_in(args, kwargs):
            sum_gradient(t)
        if is_message:
            raise _message_error(cls, op)
        for other in found[1:]:
            check_alike(op, x, other)
        for i in facts.written:
            _check_not_plain(cls, op, argument(facts, args, kwargs, i))
        first, *others = x._layout.present
        if tried and any(differ(x.__dict__[first], x.__dict__[n]) for n in others):
            try_first(cls, op, tuple(others), args, kwargs)
        outs = {
            n: _run_replaced(cls, op, lambda w, n=n: w.__dict__[n], args, kwargs) for n in x._layout.present
        }
        for i in fills:
            filled = wrappers_in(cls, argument(facts, args, kwargs, i))
            bump_versions([w.__dict__[n] for w in filled for n in x._layout.present])
        if facts.written:
            bump_versions([w.__dict__[n] for w in found for n in x._layout.present])
            # An op that changes metadata itself is replayed on the outer tensor instead.
            for i in () if facts.changes_metadata else facts.written:
                resize_outer(argument(facts, args, kwargs, i), cls)
        return _wrap_results(op, x, spec, outs)

    return with_aliasing(op, plan)


def _is_message(op: OpOverload) -> bool:
    """Whether an op sends to or receives from one rank.

    It is refused on both, before either waits: a value is several messages, and its receiver would have to know their
    sizes; a handle for one of them says nothing of the others.
    """
    return op.namespace == "c10d" and op.overloadpacket.__name__ in ("send", "recv_", "recv_any_source_")


def _message_error(cls: Any, op: OpOverload) -> DispatchError:
    return DispatchError(
        f"{op} takes one plain tensor, and {one_of(cls)} is more than that; send and receive its inner tensors, or "
        f"{_hint(cls, op)}"
    )


def _check_not_plain(cls: Any, op: OpOverload, written: Any) -> None:
    for t in written if isinstance(written, list | tuple) else (written,):
        if isinstance(t, Tensor) and not isinstance(t, cls):
            raise_writes_plain(op, cls)


def wrappers_in(cls: Any, value: Any) -> list[Any]:
    """Returns the values of a class among arguments, also inside lists and dicts."""
    if isinstance(value, cls):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [w for part in value for w in wrappers_in(cls, part)]


def _run_replaced(cls: Any, op: OpOverload, replace: Call, args: Any, kwargs: Any) -> Any:
    """Runs an op with every value of a class in its arguments replaced."""
    return op(*_replace_wrappers(cls, replace, args), **_replace_wrappers(cls, replace, kwargs))


def _replace_wrappers(cls: Any, replace: Call, value: Any) -> Any:
    """Replaces the values of a class among arguments, also inside lists and dicts."""
    if isinstance(value, cls):
        return replace(value)
    if isinstance(value, dict):
        return {k: _replace_wrappers(cls, replace, v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_replace_wrappers(cls, replace, v) for v in value)
    return value


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
        parts = [_wrap_results(op, x, spec, {n: o[i] for n, o in outs.items()}) for i in range(len(first))]
        return parts if isinstance(first, list) else tuple(parts)
    if is_work(first):
        return joint_work(list(outs.values()))
    if any(_differ(o, first) for o in outs.values()):
        found = {field_name(n): o for n, o in outs.items()}
        raise DispatchError(f"{op}: inner tensors of {one_of(type(x))} disagree: {found}; read one of them")
    return first


def _differ(one: Any, other: Any) -> bool:
    """Whether two results differ; symbolic bools have to be converted before they can be compared."""
    return bool(one) != bool(other) if isinstance(one, torch.SymBool) else one != other


# ---- materialize -------------------------------------------------------------------------------------------


def _strided_like(x: Any, plain: Tensor) -> Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=plain.dtype, device=plain.device)


# Ops whose arguments follow from the strides that the outer tensor shows; `reshape` asks for `view` by them.
_BY_STRIDES = frozenset(
    {
        torch.ops.aten.view.default,
        torch.ops.aten.view_copy.default,
        torch.ops.aten._unsafe_view.default,
        torch.ops.aten._reshape_alias.default,
        *STRIDED_OPS,
    }
)


def _materialize(cls: Any, op: OpOverload) -> Call:
    facts, is_message = op_facts(op), _is_message(op)
    written_indices = (*facts.written, *undeclared_writes(op))
    represented = _in_shown_order if op in _BY_STRIDES else resolved
    run = with_lazy_bits(functools.partial(_run_replaced, cls, op, represented))

    def plan(*args: Any, **kwargs: Any) -> Any:
        strict_mode.check_materialize(cls, op)
        if is_message:
            raise _message_error(cls, op)
        for i in written_indices:
            for x in wrappers_in(cls, argument(facts, args, kwargs, i)):
                _check_same_metadata(cls, op, args)
                raise DispatchError(_of_lost_write(cls, op, x))
        check_strided_copy(cls, op)
        check_no_cotangents(cls, op, wrappers_in(cls, (args, kwargs)))
        return run(args, kwargs)

    return plan


def _of_lost_write(cls: Any, op: OpOverload, x: Any) -> str:
    lost = f"{op} writes to {one_of(cls)}, and writing to what it materializes to would be lost"
    name = f"{op.overloadpacket.__name__.rstrip('_')}_"
    if torch.Tag.nondeterministic_seeded not in op.tags and name not in _FILLS:
        return f"{lost}; use the functional op, or {_hint(cls, op)}"
    if name not in _FILLS:
        return (
            f"{lost}; a function that draws random numbers, such as F.dropout, writes so: call it on x.materialize(), "
            f"or add a rule for it, @{cls.__name__}.implements(torch.dropout)"
        )
    call = "torch.nn.init.{1}(x.{0})" if hasattr(torch.nn.init, name) else "x.{0}.{1}(...)"
    fills = " and ".join(call.format(field, name) for field in float_fields(x))
    return (
        f"{lost}; {f'fill its inner tensors under torch.no_grad(), as in {fills}, or ' if fills else ''}add a rule "
        f"that fills them and returns the value, @{cls.__name__}.implements(torch.ops.{op})"
    )


# With these nn.init fills a Parameter.
_FILLS = frozenset("cauchy_ exponential_ geometric_ log_normal_ normal_ random_ uniform_ eye_".split())


def _in_shown_order(x: Any) -> Tensor:
    """Returns what a value represents, with the strides and the offset that the value shows to who asks for a view."""
    plain = resolved(x)
    if plain.stride() == x.stride() and plain.storage_offset() == x.storage_offset():
        return plain
    if x.is_contiguous():
        return plain.clone(memory_format=torch.contiguous_format)
    return plain if any(s == 0 for s in x.stride()) else _strided_like(x, plain).copy_(plain)


def _check_same_metadata(cls: Any, op: OpOverload, args: Any) -> None:
    """Raises DispatchError with what differs, for a copy between values of the class."""
    if op is torch.ops.aten.copy_.default and all(isinstance(x, cls) for x in args[:2]):
        x, source = args[:2]
        if x._layout is not source._layout and not (x._layout.cotangent or source._layout.cotangent):
            names = f"{describe_metadata(source._layout)} to {describe_metadata(x._layout)}"
            raise DispatchError(
                f"{op} of {names}: metadata, and which inner tensors there are, do not change; put the other value in "
                f"its place, as load_state_dict(..., assign=True) does, or {_hint(cls, op)}"
            )


# ---- error -------------------------------------------------------------------------------------------------


class _NoRuleForPartError(DispatchError):
    """There is no rule for a part (prim) to which PyTorch's decomposition of an op leads."""


def _error(cls: Any, op: OpOverload) -> Call:
    def plan(*args: Any, **kwargs: Any) -> Any:
        _check_same_metadata(cls, op, args)
        kind = _NoRuleForPartError if op.namespace == "prims" else DispatchError
        raise kind(_no_rule(cls, op, args, kwargs))

    return plan


def naming_whole(cls: Any, op: OpOverload, decomposed: Call) -> Call:
    """Wraps the decomposition of an op: where a part has no rule, it is the op that has none."""

    def plan(*args: Any, **kwargs: Any) -> Any:
        try:
            return decomposed(*args, **kwargs)
        except _NoRuleForPartError:
            raise DispatchError(_no_rule(cls, op, args, kwargs)) from None

    return plan


def _no_rule(cls: Any, op: OpOverload, args: Any, kwargs: Any) -> str:
    shown = [_describe(a) for a in (*args, *kwargs.values())]
    return f"{cls.__name__} has no rule for {op}({', '.join(shown)}); {_hint(cls, op, args[:1])}"


def _hint(cls: Any, op: OpOverload, first: Any = ()) -> str:
    if is_of_tangents(op):
        return IN_FORWARD_MODE
    if op in STRIDED_OPS:
        return f"torch.compile remakes views of its arguments with it: {strided_advice(cls, op)}"
    return way_out(cls, registering(cls, op) + _of_author(cls, op, first))


def _of_author(cls: Any, op: OpOverload, first: Any) -> str:
    """Returns what more an author is told of a missing rule."""
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
    """Returns the name of the function of several ops that is called and asks for an op; empty if there is none."""
    func: Any = CALLING.func
    name = getattr(func, "__name__", "").strip("_")
    if name == "get" and not in_backward():  # of a property
        return f"torch.Tensor.{func.__self__.__name__}.__get__"
    packet = getattr(torch.ops.aten, name, None) if name else None
    if packet is None or packet is op.overloadpacket or in_backward():
        return ""
    if not any(is_composite(getattr(packet, overload)) for overload in packet.overloads()):
        return ""
    found = resolve_name(func) or ""
    if found.startswith("torch.Tensor."):
        found = f"torch.{name}" if hasattr(torch, name) else ""
    return found


_OF_OPTIMIZERS = frozenset({"add_", "lerp_", "addcmul_", "addcdiv_"})


_OF_BACKWARD = (
    "; but if backward() of a value asks, call it on a plain tensor that x.unwrap() or a method gives"
)
_OF_A_DERIVATIVE = (
    "autograd asks for it in a derivative, as for a sum in that of expand, a cat in that of split, a stack in that of "
    "unbind; a rule for a function, such as torch.sum, is not asked there, so the op needs one, which works on each "
    "inner tensor"
)


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{type(value).__name__}{list(value.shape)}"
    return type(value).__name__
