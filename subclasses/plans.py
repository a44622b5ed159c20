"""Op resolution: how a class runs an op, decided once and kept as one callable.

The order is that of the design: an exact rule; what follows from the schema; a rule for a tag; PyTorch's
decomposition, where the class allows it; the class's fallback; a :class:`DispatchError`. ``choose_plan`` says
which and hands back the callable; the generated ``__torch_dispatch__`` keeps it in a dict.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subclasses import strictness, structural
from subclasses._torch import (
    DisableTorchFunctionSubclass,
    OpOverload,
    is_composite,
    is_traceable_wrapper_subclass_type,
    python_decomposition,
    seeing_lazy_bits,
)
from subclasses.cotangents import check_materialize, with_arithmetic
from subclasses.emit_plan import build_map_plan, can_emit, raise_mixed, raise_writes_plain
from subclasses.errors import DispatchError
from subclasses.rules import find_op_rule, find_tag_rule
from subclasses.schema import functional_counterpart, op_facts
from subclasses.semantics import bump_versions, follow_resize, with_normal_views, with_semantics, write_into
from subclasses.strided import STRIDED, check_strided_copy, map_strided

Call = Callable[..., Any]


class Plan(NamedTuple):
    """How an op runs: the step of the resolution that applies, and the callable."""

    step: str
    run: Call


# ---- the order ---------------------------------------------------------------------------------------------


def choose_plan(cls: Any, op: OpOverload) -> Plan:
    """The first step of the resolution that applies to an op; the last one always does."""
    plan = _own_plan(cls, op) or fallback_plan(cls, op)
    if cls.__spec__.fallback != "map":
        plan = plan._replace(run=with_arithmetic(cls, op, plan.run))
    return plan._replace(run=with_normal_views(op, plan.run)) if op_facts(op).viewed else plan


def find_step(cls: Any, op: OpOverload) -> str:
    """The name of the step that applies, with no plan made for a fallback."""
    plan = _own_plan(cls, op)
    return plan.step if plan is not None else cls.__spec__.fallback


def marks_cotangents(cls: Any) -> bool:
    """Whether cotangents of a class are marked, because its own ``+`` is no sum of inner tensors or is missing."""
    spec = cls.__spec__
    return spec.stands_for_plain or (
        spec.fallback == "error" and find_step(cls, torch.ops.aten.add.Tensor) in ("error", "materialize")
    )


def _own_plan(cls: Any, op: OpOverload) -> Plan | None:
    plans = (step(cls, op) for step in (_exact, _derived, _structural, _tagged, _decomposed))
    return next((plan for plan in plans if plan is not None), None)


def _exact(cls: Any, op: OpOverload) -> Plan | None:
    rule = find_op_rule(cls, op)
    return None if rule is None else Plan("rule", with_semantics(op, functools.partial(rule, op)))


def _derived(cls: Any, op: OpOverload) -> Plan | None:
    """An in-place or ``out=`` op from the rule for the op that computes what it writes."""
    functional = functional_counterpart(op)
    if functional is None:
        return None
    for step in (_exact, _tagged, _decomposed):
        plan = step(cls, functional)
        if plan is not None:
            return Plan(f"derived from {functional} ({plan.step})", _written_from(cls, op, plan.run))
    return None


def _structural(cls: Any, op: OpOverload) -> Plan | None:
    run = structural.find_structural(op)
    if run is None:
        return None
    other = functools.cache(functools.partial(fallback_plan, cls, op))

    def plan(*args: Any, **kwargs: Any) -> Any:
        if structural.applies(cls, op, args, kwargs):
            return run(*args, **kwargs)
        return other().run(*args, **kwargs)

    return Plan("structure", plan)


def _tagged(cls: Any, op: OpOverload) -> Plan | None:
    if op_facts(op).written:
        return None
    rule = find_tag_rule(cls, op)
    return None if rule is None else Plan("tag rule", with_semantics(op, functools.partial(rule, op)))


def _decomposed(cls: Any, op: OpOverload) -> Plan | None:
    if is_composite(op):
        return Plan("decomposition", _decompose(op))
    allowed = cls.__spec__.decompose
    if allowed is True or (allowed and op in allowed):
        function = python_decomposition(op)
        if function is not None:
            return Plan("decomposition", with_semantics(op, function))
    return None


# Ops that only set a lazy bit. Below dispatch torch does not look at the bits of inner tensors, so none is set there.
_CARRIED_OUT = {
    torch.ops.aten._conj.default: torch.ops.aten.conj_physical.default,
    torch.ops.aten._neg_view.default: torch.ops.aten.neg.default,
}


def fallback_plan(cls: Any, op: OpOverload) -> Plan:
    """What the class does with an op that nothing else covers."""
    match cls.__spec__.fallback:
        case "map":
            if op in STRIDED:
                return Plan("map", map_strided(cls, op))
            op = _CARRIED_OUT.get(op, op)
            return Plan("map", build_map_plan(cls, op) if can_emit(op) else _map_any(cls, op))
        case "materialize":
            return Plan("materialize", _materialize(cls, op))
        case _:
            return Plan("error", _error(cls, op))


def _decompose(op: OpOverload) -> Call:
    """A composite op, reached in inference mode, as the ops that it is made of."""

    def plan(*args: Any, **kwargs: Any) -> Any:
        # The kernel is called past the dispatcher, but not past __torch_function__, which would call the op itself.
        with DisableTorchFunctionSubclass():
            return op.decompose(*args, **kwargs)

    return plan


# ---- the steps ---------------------------------------------------------------------------------------------


def _written_from(cls: Any, op: OpOverload, run: Call) -> Call:
    facts = op_facts(op)
    # An in-place op names what it writes as its counterpart does; an out= op takes it besides.
    out = [facts.arguments[i].name for i in facts.written if facts.arguments[i].keyword]

    def plan(*args: Any, **kwargs: Any) -> Any:
        targets = [kwargs.pop(n) for n in out] or [args[i] for i in facts.written]
        value = run(*args, **kwargs)
        for target, one in zip(targets, value if len(targets) > 1 else [value], strict=True):
            if not isinstance(target, cls):
                raise_writes_plain(op, cls)
            write_into(op, target, one)
        return None if not facts.returns else targets[0] if len(targets) == 1 else tuple(targets)

    return plan


def _map_any(cls: Any, op: OpOverload) -> Call:
    """The general form of a mapped op: lists of tensors, several results, keyword tensors."""
    facts, spec = op_facts(op), cls.__spec__

    def plan(*args: Any, **kwargs: Any) -> Any:
        found = _wrappers(cls, (args, kwargs))
        x = found[0]
        for other in found[1:]:
            if other._layout is not x._layout or any(
                other.__dict__[f.name] != x.__dict__[f.name] for f in spec.dynamics
            ):
                raise_mixed(op, x, other)
        for i in facts.written:
            written = args[i] if i < len(args) else kwargs.get(facts.arguments[i].name)
            _check_written(cls, op, written)
        outs = {n: op(*_pick(cls, n, args), **_pick(cls, n, kwargs)) for n in x._layout.present}
        if facts.written:
            bump_versions([w.__dict__[n] for w in found for n in x._layout.present])
            # An op that changes metadata by itself is replayed on the outer tensor instead.
            for i in () if facts.changes_metadata else facts.written:
                follow_resize(args[i] if i < len(args) else kwargs.get(facts.arguments[i].name), cls)
        return _rewrap(op, x, spec, outs)

    return with_semantics(op, plan)


def _check_written(cls: Any, op: OpOverload, written: Any) -> None:
    for t in written if isinstance(written, list | tuple) else (written,):
        if isinstance(t, Tensor) and not isinstance(t, cls):
            raise_writes_plain(op, cls)


def _wrappers(cls: Any, value: Any) -> list[Any]:
    if isinstance(value, cls):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [w for part in value for w in _wrappers(cls, part)]


def _pick(cls: Any, name: str, value: Any) -> Any:
    """The arguments with each wrapper replaced by its inner tensor of one name."""
    if isinstance(value, cls):
        return value.__dict__[name]
    if isinstance(value, dict):
        return {k: _pick(cls, name, v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_pick(cls, name, v) for v in value)
    return value


def _rewrap(op: OpOverload, x: Any, spec: Any, outs: dict[str, Any]) -> Any:
    """One result from the results of all inner tensors."""
    first = next(iter(outs.values()))
    if isinstance(first, Tensor):
        if torch.Tag.dynamic_output_shape in op.tags and any(o.shape != first.shape for o in outs.values()):
            sizes = {n: tuple(o.shape) for n, o in outs.items()}
            raise DispatchError(
                f"{op}: the inner tensors of a {type(x).__name__} give results of sizes {sizes}"
            )
        dynamics = [x.__dict__[f.name] for f in spec.dynamics]
        return type(x)._wrap(x._layout, *(outs.get(n) for n in spec.inner_names), *dynamics)
    if isinstance(first, list | tuple):
        parts = [_rewrap(op, x, spec, {n: o[i] for n, o in outs.items()}) for i in range(len(first))]
        return parts if isinstance(first, list) else tuple(parts)
    if any(o != first for o in outs.values()):
        raise DispatchError(f"{op}: the inner tensors of a {type(x).__name__} disagree: {outs}")
    return first


def _materialize(cls: Any, op: OpOverload) -> Call:
    facts = op_facts(op)
    hint = _hint(cls, op)

    def plan(*args: Any, **kwargs: Any) -> Any:
        strictness.check_materialize(cls, op)
        for i in facts.written:
            written = args[i] if i < len(args) else kwargs.get(facts.arguments[i].name)
            if _wrappers(cls, written):
                raise DispatchError(
                    f"{op} writes to a {cls.__name__}, and writing to what it materializes to would be lost; "
                    f"use the functional op, or {hint}"
                )
        check_strided_copy(cls, op)
        check_materialize(cls, op, _wrappers(cls, (args, kwargs)))
        with seeing_lazy_bits():
            return op(*_plain(cls, args), **_plain(cls, kwargs))

    return plan


def _plain(cls: Any, value: Any) -> Any:
    if isinstance(value, cls):
        return value.materialize()
    if isinstance(value, dict):
        return {k: _plain(cls, v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(cls, v) for v in value)
    return value


def _error(cls: Any, op: OpOverload) -> Call:
    def plan(*args: Any, **kwargs: Any) -> Any:
        shown = [_kind(a) for a in (*args, *kwargs.values())]
        raise DispatchError(f"{cls.__name__} has no rule for {op}({', '.join(shown)}); {_hint(cls, op)}")

    return plan


def _hint(cls: Any, op: OpOverload) -> str:
    return f"add one with @{cls.__name__}.implements(torch.ops.{op})"


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{type(value).__name__}{list(value.shape)}"
    return type(value).__name__


# ---- other subclasses in the same call ---------------------------------------------------------------------


def is_foreign(cls: Any, op: OpOverload, types: Any, args: Any) -> bool:
    """Whether another subclass in the call should be asked first: one that a rule here knows nothing about."""
    others: list[type] = [
        t for t in types if not issubclass(t, cls) and is_traceable_wrapper_subclass_type(t)
    ]
    if not others or find_op_rule(cls, op) is not None or any(issubclass(cls, t) for t in others):
        return False
    inside = {layout.cls for x in _wrappers(cls, args) for _, layout in x._layout.nested}
    return not inside.issuperset(others)
