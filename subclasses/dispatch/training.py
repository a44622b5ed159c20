"""Steps of optimizers on a trainable class, which update the inner tensors as if they were the parameters.

An optimizer computes with Parameters, which include detached aliases and copies here. It also computes with
*cotangents*: gradients, and the states that are made like them. :mod:`subclasses.dispatch.cotangents` runs ops on
cotangents. This module has the ops on Parameters alone, which run once for each differentiable inner tensor:

- a pointwise op that writes to a Parameter,
- ``zeros_like`` and the like of a Parameter, which make a state of the optimizer: a cotangent,
- ops on lists of tensors, one element at a time, since a model has plain parameters and other classes' parameters too.

Ops on any other value run as usual. With ``fallback="map"`` every op without a rule runs on the inner tensors anyway.

In a compiler's trace, cotangents have their own type, and Parameters do not. Some ops belong to an optimizer only
because an operand is a Parameter. They raise where Dynamo, which has a record of Parameters, first runs them; eager
mode runs them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import OpOverload
from subclasses.dispatch.lists import run_lists
from subclasses.dispatch.per_inner import (
    check_not_traced,
    check_operands,
    records,
    remade,
    run_per_inner,
)
from subclasses.errors import DispatchError, one_of
from subclasses.layout import cotangent_layout
from subclasses.op_schemas.aliasing import argument, bump_versions
from subclasses.op_schemas.schema import functional_counterpart, op_facts
from subclasses.rules.registry import find_op_rule, has_op_rules
from subclasses.spec.values import float_fields, is_of_parameter

aten = torch.ops.aten

Call = Callable[..., Any]

# Ops without the tag `pointwise` that treat elements separately.
WRITING_OPS = frozenset({aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor})
LIKE_OPS = frozenset({aten.zeros_like.default, aten.ones_like.default, aten.full_like.default})
# The result is the first operand, updated by the others.
MOVING_OPS = frozenset({aten.add.Tensor, aten.sub.Tensor, aten.addcmul.default, aten.addcdiv.default})


def takes_lists(op: OpOverload) -> bool:
    """Whether an op treats the elements of lists of tensors separately, as optimizers call it."""
    if not op.overloadpacket.__name__.startswith(("_foreach_", "_fused_", "_amp_foreach_")):
        return False
    facts = op_facts(op)
    return (
        facts.arguments[0].role == "tensors"
        and facts.returns in ((), ("tensors",))
        and not any(facts.arguments[i].keyword for i in facts.written)
    )


def with_training(cls: Any, op: OpOverload, run: Call) -> Call:
    """Wraps the callable of an op that optimizers call on a trainable class, to act on inner tensors."""
    if takes_lists(op):
        return functools.partial(run_lists, op, run)
    if op is aten.copy_.default:
        return _with_copies(cls, run)
    if op in LIKE_OPS:
        return _with_states(cls, op, run)
    if cls._traits.is_mapped and not has_op_rules(cls):
        return run  # acts on inner tensors anyway
    functional = functional_counterpart(op)
    is_step = functional is not None and torch.Tag.pointwise in functional.tags
    return _with_steps(cls, op, run) if is_step or op in WRITING_OPS else run


# ---- pointwise ops -----------------------------------------------------------------------------------------


def _with_steps(cls: Any, op: OpOverload, run: Call) -> Call:
    """Wraps a pointwise op that writes to a Parameter, as ``p.mul_(1 - lr * decay)``: on inner tensors."""
    facts = op_facts(op)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        for i in facts.written:
            x = argument(facts, args, kwargs, i)
            if isinstance(x, cls) and is_of_parameter(x) and not records((*args, *kwargs.values())):
                check_not_traced(cls, op)
                check_operands(cls, op, [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)])
                bump_versions(list(run_per_inner(cls, op, x, args, kwargs).values()))
                return x
        return run(*args, **kwargs)

    return wrapped


def _with_copies(cls: Any, run: Call) -> Call:
    """Wraps ``copy_`` of a plain tensor to a Parameter, which raises with a hint."""
    op = aten.copy_.default
    ruled, mapped = find_op_rule(cls, op) is not None, cls._traits.is_mapped

    def wrapped(x: Any, source: Any, *args: Any) -> Any:
        if (
            not (ruled or mapped)
            and isinstance(x, cls)
            and is_of_parameter(x)
            and not isinstance(source, cls)
        ):
            fills = " and ".join(f"torch.nn.init.orthogonal_(x.{name})" for name in float_fields(x))
            raise DispatchError(
                f"{op} of {one_of(type(source))} to a Parameter of {one_of(cls)}: a plain tensor, as a checkpoint may "
                "hold and as arithmetic on values gives, has no inner tensors",
                code="write-misfit",
                hint=f"Make {one_of(cls)} of it first, or update in place, as average.lerp_(p, 0.1) does. For an "
                "AveragedModel pass multi_avg_fn=get_ema_multi_avg_fn() or get_swa_multi_avg_fn(). To initialize it, "
                f"call the function on its inner tensors, as in {fills}",
            )
        return run(x, source, *args)

    return wrapped


# ---- states ------------------------------------------------------------------------------------------------


def _with_states(cls: Any, op: OpOverload, run: Call) -> Call:
    def wrapped(x: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_of_parameter(x):
            return run(x, *args, **kwargs)
        return remade(x, run_per_inner(cls, op, x, (x, *args), kwargs), cotangent_layout(x._layout))

    return wrapped
