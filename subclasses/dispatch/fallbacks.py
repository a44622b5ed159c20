"""The three fallbacks: what a class does with an op that nothing else covers.

``"map"`` runs it once per inner tensor, written out where its schema allows it and in a general form where it takes or
gives lists; ``"materialize"`` runs it on what the values stand for; ``"error"`` says how to add a rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from subclasses import strict_mode
from subclasses._torch import OpOverload, seeing_lazy_bits
from subclasses.dispatch.aliasing import bump_versions, follow_resize, with_semantics
from subclasses.dispatch.cotangents import check_materialize
from subclasses.dispatch.map_plan import build_map_plan, can_emit, raise_mixed, raise_writes_plain
from subclasses.dispatch.schema import op_facts, unsaid_writes
from subclasses.dispatch.strided import STRIDED, check_strided_copy, map_strided
from subclasses.errors import DispatchError, one_of

Call = Callable[..., Any]

# Ops that only set a lazy bit. Below dispatch torch does not look at the bits of inner tensors, so none is set there.
_CARRIED_OUT = {
    torch.ops.aten._conj.default: torch.ops.aten.conj_physical.default,
    torch.ops.aten._neg_view.default: torch.ops.aten.neg.default,
}


def fallback_run(cls: Any, op: OpOverload) -> Call:
    """What the class does with an op that nothing else covers."""
    match cls.__spec__.fallback:
        case "map":
            if op in STRIDED:
                return map_strided(cls, op)
            op = _CARRIED_OUT.get(op, op)
            return build_map_plan(cls, op) if can_emit(op) else _map_any(cls, op)
        case "materialize":
            return _materialize(cls, op)
        case _:
            return _error(cls, op)


# ---- map ---------------------------------------------------------------------------------------------------


def _map_any(cls: Any, op: OpOverload) -> Call:
    """The general form of a mapped op: lists of tensors, several results, keyword tensors."""
    facts, spec = op_facts(op), cls.__spec__

    def plan(*args: Any, **kwargs: Any) -> Any:
        found = wrappers_in(cls, (args, kwargs))
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


def wrappers_in(cls: Any, value: Any) -> list[Any]:
    """The values of a class among arguments, in lists and dicts too."""
    if isinstance(value, cls):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [w for part in value for w in wrappers_in(cls, part)]


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
            raise DispatchError(f"{op}: the inner tensors of {one_of(type(x))} give results of sizes {sizes}")
        dynamics = [x.__dict__[f.name] for f in spec.dynamics]
        return type(x)._wrap(x._layout, *(outs.get(n) for n in spec.inner_names), *dynamics)
    if isinstance(first, list | tuple):
        parts = [_rewrap(op, x, spec, {n: o[i] for n, o in outs.items()}) for i in range(len(first))]
        return parts if isinstance(first, list) else tuple(parts)
    if any(_differ(o, first) for o in outs.values()):
        raise DispatchError(f"{op}: the inner tensors of {one_of(type(x))} disagree: {outs}")
    return first


def _differ(one: Any, other: Any) -> bool:
    """Whether two answers are not the same; symbolic truths cannot be compared as they are."""
    return bool(one) != bool(other) if isinstance(one, torch.SymBool) else one != other


# ---- materialize -------------------------------------------------------------------------------------------


def _materialize(cls: Any, op: OpOverload) -> Call:
    facts = op_facts(op)
    filled = (*facts.written, *unsaid_writes(op))
    hint = _hint(cls, op)

    def plan(*args: Any, **kwargs: Any) -> Any:
        strict_mode.check_materialize(cls, op)
        for i in filled:
            written = args[i] if i < len(args) else kwargs.get(facts.arguments[i].name)
            if wrappers_in(cls, written):
                raise DispatchError(
                    f"{op} writes to {one_of(cls)}, and writing to what it materializes to would be lost; "
                    f"use the functional op, or {hint}"
                )
        check_strided_copy(cls, op)
        check_materialize(cls, op, wrappers_in(cls, (args, kwargs)))
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


# ---- error -------------------------------------------------------------------------------------------------


def _error(cls: Any, op: OpOverload) -> Call:
    def plan(*args: Any, **kwargs: Any) -> Any:
        shown = [_kind(a) for a in (*args, *kwargs.values())]
        raise DispatchError(f"{cls.__name__} has no rule for {op}({', '.join(shown)}); {_hint(cls, op)}")

    return plan


def _hint(cls: Any, op: OpOverload) -> str:
    return f"add one with @{cls.__name__}.implements(torch.ops.{op}){cls._instead}"


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{type(value).__name__}{list(value.shape)}"
    return type(value).__name__
