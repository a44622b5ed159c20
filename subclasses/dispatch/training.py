"""Arithmetic of optimizers on a trainable class: on the inner tensors, as if they were the parameters.

An optimizer computes with *points* (Parameters, and detached aliases and copies of them) and *cotangents* (gradients,
and the states that are made like them). For a trainable class these ops run once for each differentiable inner tensor:

- a pointwise op with a cotangent among its operands; the result is a cotangent, or a point where one is moved,
- a pointwise op that writes to a point,
- ``zeros_like`` and the like of a point or cotangent, which make a state of the optimizer: a cotangent,
- the norm of a cotangent: that of all its inner tensors together,
- ops on lists of tensors, one element at a time, since a model has plain parameters and those of other classes too.

Any other value keeps its meaning. With ``fallback="map"`` every op without a rule runs on the inner tensors anyway.
Cotangents are not marked there, but gradients of Parameters are: as cotangents in a class with rules, which an
optimizer does not ask, and else by an attribute, which says that their norm is one number.

A compiler's trace knows cotangents, which their layout marks, and not points. An op that only its point makes one of an
optimizer is refused where Dynamo, which knows them, first runs it: it is left to eager mode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import OpOverload, foreach_norm
from subclasses.autograd.construct import PRIMAL
from subclasses.autograd.nodes import call_and_settle
from subclasses.dispatch.lists import run_lists
from subclasses.dispatch.per_inner import (
    check_not_traced,
    check_operands,
    differentiable_names,
    is_gradient,
    joint_norm,
    records,
    remade,
    run_per_inner,
)
from subclasses.errors import DispatchError, one_of
from subclasses.layout import cotangent_layout
from subclasses.ops.aliasing import argument, bump_versions
from subclasses.ops.cotangents import is_cotangent, wrap_plain_cotangent
from subclasses.ops.schema import functional_counterpart, op_facts
from subclasses.rules.registry import find_op_rule, is_named
from subclasses.spec.values import POINT, float_fields, is_point

aten = torch.ops.aten

Call = Callable[..., Any]

# Ops without the tag `pointwise` that treat elements separately.
_WRITING_OPS = frozenset({aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor})
_LIKE_OPS = frozenset({aten.zeros_like.default, aten.ones_like.default, aten.full_like.default})
_NORMS = frozenset({torch.norm, Tensor.norm, torch.linalg.norm, torch.linalg.vector_norm})
# Functions that multiply by what a value represents, by name; a cotangent represents nothing.
_PRODUCTS = frozenset(
    """addbmm addmm addmv baddbmm bilinear bmm chain_matmul conv1d conv2d conv3d dot einsum embedding embedding_bag
    inner kron linear matmul mm multi_dot mv outer tensordot vdot vecdot __matmul__ __rmatmul__""".split()
)
# A result is where the first operand was, moved by the others.
_MOVING_OPS = frozenset({aten.add.Tensor, aten.sub.Tensor, aten.addcmul.default, aten.addcdiv.default})


def takes_lists(op: OpOverload) -> bool:
    """Whether an op treats the elements of lists of tensors separately, as optimizers call it."""
    if not op.overloadpacket.__name__.startswith(("_foreach_", "_fused_", "_amp_foreach_")):
        return False
    facts = op_facts(op)
    return (
        facts.arguments[0].kind == "tensors"
        and facts.returns in ((), ("tensors",))
        and not any(facts.arguments[i].keyword for i in facts.written)
    )


def with_training(cls: Any, op: OpOverload, run: Call) -> Call:
    """Wraps the plan of an op on a trainable class so that optimizers act on inner tensors; others stay unwrapped."""
    if takes_lists(op):
        return functools.partial(run_lists, op, run)
    if op is aten.linalg_vector_norm.default:
        return _with_joint_norm(cls, run)
    if not cls._marks_gradients:
        return run
    if op is aten.copy_.default:
        return _with_copies(cls, run)
    if op in _LIKE_OPS:
        return _with_states(cls, op, run)
    functional = functional_counterpart(op) or op
    if torch.Tag.pointwise in (*op.tags, *functional.tags) or op in _WRITING_OPS:
        return _with_arithmetic(cls, op, run)
    return run


def beside_training(cls: Any, rules: dict[Any, Call]) -> dict[Any, Call]:
    """Returns the rules for Python-level functions of a class, which leave the arithmetic of optimizers alone.

    A rule says what a pointwise function, or the norm, means for values. It is not asked where an operand is a
    cotangent, unless it names an in-place function. A class with a rule for norms of lists, for which gradients alone
    are asked, says what the norm of a gradient is: then its rules for norms are asked too.
    """
    if not cls.__spec__.trainable:
        return rules
    norms = frozenset() if foreach_norm in rules else _NORMS
    return {f: _beside_training(cls, f, rule, norms) for f, rule in rules.items()}


def _beside_training(cls: Any, function: Any, rule: Call, norms: frozenset[Any]) -> Call:
    name = getattr(function, "__name__", "")
    packet: Any = getattr(aten, name, None)
    in_place = name.endswith("_") and not name.startswith("__")
    pointwise = packet is not None and any(
        torch.Tag.pointwise in getattr(packet, o).tags for o in packet.overloads()
    )
    if name in _PRODUCTS and cls.__spec__.stands_for_plain:
        return _refusing_cotangents(cls, function, rule)
    if function not in norms and (not pointwise or (in_place and is_named(cls, function))):
        return rule
    belongs_to_training = is_gradient if function in norms else is_cotangent

    @functools.wraps(rule)
    def ruled(func: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(x, Tensor) and belongs_to_training(x) for x in (*args, *kwargs.values())):
            return call_and_settle(func, (cls,), args, kwargs)
        return rule(func, *args, **kwargs)

    return ruled


def _refusing_cotangents(cls: Any, function: Any, rule: Call) -> Call:
    """Returns the rule for a product as an error for cotangents; a formula of PyTorch's calls rules for ops alone."""

    @functools.wraps(rule)
    def ruled(func: Any, *args: Any, **kwargs: Any) -> Any:
        for x in (*args, *kwargs.values()):
            if isinstance(x, cls) and is_cotangent(x):
                raise DispatchError(
                    f"{function.__name__} on a cotangent of {cls.__name__}, which does not represent a plain tensor: a "
                    f"gradient, or what zeros_like, ones_like and full_like make of a Parameter, for an optimizer. For "
                    f"a tensor like the one that a Parameter p represents, call them on p.materialize()"
                )
        return rule(func, *args, **kwargs)

    return ruled


# ---- pointwise ops -----------------------------------------------------------------------------------------


def _with_arithmetic(cls: Any, op: OpOverload, run: Call) -> Call:
    facts = op_facts(op)

    def plan(*args: Any, **kwargs: Any) -> Any:
        for x in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(x, cls) and x.__dict__["_layout"].cotangent:
                return _run_arithmetic(cls, op, run, args, kwargs)
        for i in facts.written:
            x = argument(facts, args, kwargs, i)
            if isinstance(x, cls) and is_point(x) and not records((*args, *kwargs.values())):
                check_not_traced(cls, op)
                return _run_arithmetic(cls, op, run, args, kwargs)
        return run(*args, **kwargs)

    return plan


def _with_copies(cls: Any, run: Call) -> Call:
    """Wraps ``copy_``: between points and cotangents, whose layouts differ, and refused with a way out for others."""
    op = aten.copy_.default
    ruled, mapped = find_op_rule(cls, op) is not None, cls.__spec__.fallback == "map"

    def plan(x: Any, source: Any, *args: Any) -> Any:
        if is_cotangent(x) is not is_cotangent(source):
            return _run_arithmetic(cls, op, run, (x, source, *args), {})
        if not (ruled or mapped) and isinstance(x, cls) and is_point(x) and not isinstance(source, cls):
            fills = " and ".join(f"torch.nn.init.orthogonal_(x.{name})" for name in float_fields(x))
            raise DispatchError(
                f"{op} of {one_of(type(source))} to a Parameter of {one_of(cls)}: a plain tensor, as a "
                f"checkpoint may hold and as arithmetic on values gives, has no inner tensors. Make {one_of(cls)} of "
                f"it first; or update in place, as average.lerp_(p, 0.1) does; for an AveragedModel pass "
                f"multi_avg_fn=get_ema_multi_avg_fn() or get_swa_multi_avg_fn(); to initialize it, call the function "
                f"on its inner tensors, as in {fills}"
            )
        return run(x, source, *args)

    return plan


def _run_arithmetic(cls: Any, op: OpOverload, run: Call, args: Any, kwargs: Any) -> Any:
    if op is aten.add.Tensor and not kwargs:
        args = wrap_plain_cotangent(*args)
    operands: list[Any] = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)]
    wrappers = [v for v in operands if isinstance(v, cls)]
    check_operands(cls, op, operands)
    # Of a comparison with a mask, which is a cotangent of bools, the other operand has the inner tensors to run on.
    x = next((w for w in wrappers if differentiable_names(w)), wrappers[0])
    results = run_per_inner(cls, op, x, args, kwargs)
    facts = op_facts(op)
    if facts.written:
        bump_versions(list(results.values()))
        return argument(facts, args, kwargs, facts.written[0])
    first = args[0]
    if op in _MOVING_OPS and isinstance(first, cls) and is_point(first):
        return remade(first, results, first._layout, POINT)
    out = remade(x, results, cotangent_layout(x._layout))
    primal = next((w.__dict__[PRIMAL] for w in wrappers if PRIMAL in w.__dict__), None)
    if primal is not None:
        out.__dict__[PRIMAL] = primal
    return out


# ---- states, copies, norms ---------------------------------------------------------------------------------


def _with_states(cls: Any, op: OpOverload, run: Call) -> Call:
    def plan(x: Any, *args: Any, **kwargs: Any) -> Any:
        if not (is_cotangent(x) or is_point(x)):
            return run(x, *args, **kwargs)
        return remade(x, run_per_inner(cls, op, x, (x, *args), kwargs), cotangent_layout(x._layout))

    return plan


def _with_joint_norm(cls: Any, run: Call) -> Call:
    op = aten.linalg_vector_norm.default

    def plan(x: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
        if dim or keepdim or not is_gradient(x):
            return run(x, ord, dim, keepdim, **kwargs)
        return joint_norm(x, run_per_inner(cls, op, x, (x, ord), kwargs), ord)

    return plan
