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

from subclasses._torch import (
    DisableTorchFunctionSubclass,
    HigherOrderOperator,
    OpOverload,
    is_composite,
    is_traceable_wrapper_subclass_type,
    python_decomposition,
)
from subclasses.dispatch import structural
from subclasses.dispatch.aliasing import with_normal_views, with_semantics, write_into
from subclasses.dispatch.cotangents import with_arithmetic
from subclasses.dispatch.fallbacks import fallback_run, wrappers_in
from subclasses.dispatch.map_plan import raise_writes_plain
from subclasses.dispatch.rules import find_op_rule, find_tag_rule
from subclasses.dispatch.schema import functional_counterpart, op_facts
from subclasses.errors import DispatchError
from subclasses.higher_order.dispatch import higher_order_run

aten = torch.ops.aten

Call = Callable[..., Any]


class Plan(NamedTuple):
    """How an op runs: the step of the resolution that applies, and the callable."""

    step: str
    run: Call


# ---- the order ---------------------------------------------------------------------------------------------


def choose_plan(cls: Any, op: OpOverload | HigherOrderOperator) -> Plan:
    """The first step of the resolution that applies to an op; the last one always does."""
    if isinstance(op, HigherOrderOperator):
        return Plan("higher-order", higher_order_run(cls, op))
    plan = _own_plan(cls, op) or Plan(cls.__spec__.fallback, fallback_run(cls, op))
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
    if spec.stands_for_plain or spec.fallback != "error":
        return spec.stands_for_plain
    try:
        return find_step(cls, torch.ops.aten.add.Tensor) == "error"
    except DispatchError:
        return False  # two rules for it, which is an error of its own once they are needed


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
    other = functools.cache(functools.partial(fallback_run, cls, op))

    def plan(*args: Any, **kwargs: Any) -> Any:
        if structural.applies(cls, op, args, kwargs):
            return run(*args, **kwargs)
        return other()(*args, **kwargs)

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


def _decompose(op: OpOverload) -> Call:
    """A composite op, reached in inference mode, as the ops that it is made of."""

    def plan(*args: Any, **kwargs: Any) -> Any:
        # The kernel is called past the dispatcher, but not past __torch_function__, which would call the op itself.
        with DisableTorchFunctionSubclass():
            return op.decompose(*args, **kwargs)

    return plan


# ---- the steps ---------------------------------------------------------------------------------------------


def _written_from(cls: Any, op: OpOverload, run: Call) -> Call:
    facts, ruled = op_facts(op), find_op_rule(cls, aten.copy_.default)
    # A class that says how it is written to has said it for every op.
    write = write_into if ruled is None else lambda _, x, value: ruled(aten.copy_.default, x, value)
    # An in-place op names what it writes as its counterpart does; an out= op takes it besides.
    out = [facts.arguments[i].name for i in facts.written if facts.arguments[i].keyword]

    def plan(*args: Any, **kwargs: Any) -> Any:
        targets = [kwargs.pop(n) for n in out] or [args[i] for i in facts.written]
        value = run(*args, **kwargs)
        for target, one in zip(targets, value if len(targets) > 1 else [value], strict=True):
            if not isinstance(target, cls):
                raise_writes_plain(op, cls)
            write(op, target, one)
        return None if not facts.returns else targets[0] if len(targets) == 1 else tuple(targets)

    return plan


# ---- other subclasses in the same call ---------------------------------------------------------------------


def is_foreign(cls: Any, op: OpOverload, types: Any, args: Any) -> bool:
    """Whether another subclass in the call should be asked first: one that a rule here knows nothing about."""
    others: list[type] = [
        t for t in types if not issubclass(t, cls) and is_traceable_wrapper_subclass_type(t)
    ]
    if not others or find_op_rule(cls, op) is not None or any(issubclass(cls, t) for t in others):
        return False
    inside = {layout.cls for x in wrappers_in(cls, args) for _, layout in x._layout.nested}
    return not inside.issuperset(others)
