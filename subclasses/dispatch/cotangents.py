"""How ops run on cotangents: one inner tensor at a time, for every class.

The sum of two cotangents is the sum of their inner tensors, while ``x + y`` adds the tensors that two values represent.
This module runs the ops of a vector space, and the ops that autograd, optimizers, gradient clipping and checkpoints
call on gradients. PyTorch's derivative formulas call others: a mapped class runs them on inner tensors, and another
class by its rules for values. Any other op raises, since a cotangent represents no plain tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import OpOverload, in_backward, is_composite, is_tracing
from subclasses.autograd.calling import is_called_by_engine
from subclasses.autograd.cotangent_class import is_cotangent
from subclasses.autograd.detach import in_one_step
from subclasses.autograd.engine_ops import (
    ADDITIVE_OPS,
    SCALING_OPS,
    check_no_cotangents,
    inside_error,
    mixed_error,
    with_engine_sums,
)
from subclasses.autograd.plain_operands import with_noted_summands
from subclasses.dispatch import sharding, structural
from subclasses.dispatch.fallbacks import decompose_run, fallback_run
from subclasses.dispatch.lists import run_lists
from subclasses.dispatch.mapping import can_emit, leading_run, maps_as_view, maps_leading_dims
from subclasses.dispatch.per_inner import differentiable_names, joint_norm, remade, run_per_inner
from subclasses.dispatch.structural import COPYING_OPS, with_marks
from subclasses.dispatch.training import LIKE_OPS, MOVING_OPS, WRITING_OPS, takes_lists
from subclasses.layout import are_alike, cotangent_layout
from subclasses.op_schemas.aliasing import argument, bump_versions
from subclasses.op_schemas.schema import functional_counterpart, op_facts
from subclasses.rules.registry import find_op_rule
from subclasses.spec.values import (
    OF_PARAMETER,
    dynamic_ints,
    inner_tensors,
    is_differentiable,
    is_of_parameter,
    map_tensors,
    with_inners,
)

aten = torch.ops.aten

Call = Callable[..., Any]

# Formulas call these to reduce the gradient of an operand that was broadcast.
_SUMS = frozenset({aten.sum.default, aten.sum.dim_IntList})
# Formulas call these to join the gradients of parts.
_JOINING = frozenset({aten.cat.default, aten.stack.default})
# Formulas call these to scale the gradient of a result. No formula is the derivative of an op of a class with rules.
_PRODUCTS = SCALING_OPS - {aten.zero_.default, aten.zeros_like.default}
_OF_ANOMALY_CHECK = frozenset({aten.isnan.default, aten._is_any_true.default})


def cotangent_run(
    cot: Any,
    op: OpOverload,
    find_own: Callable[[Any], Call | None],
) -> tuple[bool, Call]:
    """Returns whether an op keeps the structure of a cotangent, and its callable.

    Args:
        cot: The class of the cotangents.
        op: The op.
        find_own: Returns the callable by a rule of a class, if it has one.
    """
    value = cot._value_cls
    other = functools.cache(functools.partial(_of_formula, cot, op, find_own))
    by_formula = lambda *args, **kwargs: other()(*args, **kwargs)  # noqa: E731 - resolved where it is called
    if (own := find_own(cot)) is not None:
        return False, own
    if value.__spec__.fallback == "materialize" and find_op_rule(value, op) is None:
        run = _on_rows(op, by_formula)
        if run is not None:
            return False, run
    if (run := _of_gradients(value, op, by_formula)) is not None:
        return False, run
    is_ruled = find_op_rule(value, op) is not None and op is not aten.copy_.default
    if (run := structural.find_structural(op)) is not None and not is_ruled:
        return True, _structural(cot, op, run, by_formula)
    if _is_arithmetic(value, op):
        run = _arithmetic(value, op, by_formula)
        if _maps_formulas(value, op) and not value._traits.pulls_back:
            mapped = _of_formula(cot, op, find_own)
            run = _moving(value, mapped, run) if op in MOVING_OPS else mapped
        if value._traits.is_mapped and op is aten.add.Tensor:
            run = with_noted_summands(run)
        return False, with_engine_sums(value, run) if op is aten.add.Tensor else run
    return False, by_formula


def _is_arithmetic(value: Any, op: OpOverload) -> bool:
    """Whether an op is one of a vector space, or, for a trainable class, one that an optimizer may call in a step."""
    if not value._traits.trainable:
        return op in ADDITIVE_OPS or op in SCALING_OPS
    tags = (*op.tags, *(functional_counterpart(op) or op).tags)
    return torch.Tag.pointwise in tags or op in WRITING_OPS


def _of_gradients(value: Any, op: OpOverload, by_formula: Call) -> Call | None:
    """Returns the callable of an op that optimizers, clipping, autograd and anomaly mode call on gradients."""
    if takes_lists(op):
        return functools.partial(run_lists, op, by_formula)
    if op in _OF_ANOMALY_CHECK:
        return functools.partial(_anomaly, op)
    if op is aten.linalg_vector_norm.default:
        return _norm
    if op in LIKE_OPS:
        return functools.partial(_like, value, op)
    if op in _SUMS and not value._traits.is_mapped:
        return functools.partial(_sum, op, by_formula)
    return None


# ---- one function per kind of op ---------------------------------------------------------------------------


def _on_rows(op: OpOverload, by_formula: Call) -> Call | None:
    """Returns the callable of an op that FSDP2, a checkpoint or a DTensor calls to cut or join a cotangent by rows."""
    if op is aten.view.default:
        return functools.partial(sharding.same_size, by_formula)
    if op is aten.slice.Tensor:
        return sharding.narrow
    if op is aten.new_zeros.default:
        return sharding.new_zeros
    answer = sharding.COLLECTIVES.get(op.name())
    return None if answer is None else functools.partial(answer, by_formula)


def _structural(cot: Any, op: OpOverload, run: Call, by_formula: Call) -> Call:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if structural.preserves_structure(cot, op, args, kwargs):
            return run(*args, **kwargs)
        return by_formula(*args, **kwargs)

    if op is aten.copy_.default:
        return functools.partial(_copy, cot._value_cls, wrapped)
    if op in COPYING_OPS:
        marked = with_marks(cot, op, wrapped)
        return in_one_step(cot, marked) if op is aten.detach.default else marked
    return wrapped


def _copy(value: Any, run: Call, x: Any, source: Any, *args: Any) -> Any:
    """Copies between a value and a cotangent, as an optimizer does if its state has the class of a Parameter."""
    both = isinstance(x, value) and isinstance(source, value)
    if not both or x._layout is source._layout or not are_alike(x._layout, source._layout):
        return run(x, source, *args)
    results = run_per_inner(value, aten.copy_.default, x, (x, source, *args), {})
    bump_versions(list(results.values()))
    return x


def _like(value: Any, op: OpOverload, x: Any, *args: Any, **kwargs: Any) -> Any:
    return remade(x, run_per_inner(value, op, x, (x, *args), kwargs), x._layout)


def _anomaly(op: OpOverload, x: Any) -> Any:
    """Answers ``detect_anomaly``, which looks for NaNs: one answer for all inner tensors."""
    checked = [
        t for t in inner_tensors(x) if t is not None and (is_differentiable(t) or t.dtype is torch.bool)
    ]
    flags = [op(t).any() for t in checked]
    return torch.stack(flags).any() if flags else torch.zeros((), dtype=torch.bool, device=x.device)


def _norm(x: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    op = aten.linalg_vector_norm.default
    if dim or keepdim:
        check_no_cotangents(type(x)._value_cls, op, [x])
    return joint_norm(x, run_per_inner(type(x)._value_cls, op, x, (x, ord), kwargs), ord)


def _sum(op: OpOverload, by_formula: Call, x: Any, *args: Any, **kwargs: Any) -> Any:
    inners = inner_tensors(x)
    if not all(t is None or t.shape == x.shape for t in inners):
        return by_formula(x, *args, **kwargs)
    return with_inners(x, [None if t is None else op(t, *args, **kwargs).to(t.dtype) for t in inners])


def _arithmetic(value: Any, op: OpOverload, by_formula: Call) -> Call:
    """Returns the callable of a pointwise op, and of one that fills: between cotangents, Parameters and numbers."""
    facts, is_product = op_facts(op), op in _PRODUCTS

    def run(*args: Any, **kwargs: Any) -> Any:
        if is_product and (not value._traits.is_mapped or value._runs_above) and is_called_by_engine():
            if is_tracing() and value._has_formulas:
                check_no_cotangents(value, op, [v for v in args if is_cotangent(v)])
            raise inside_error(value, op)
        operands: list[Any] = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)]
        x = next(v for v in operands if is_cotangent(v))
        target = argument(facts, args, kwargs, facts.written[0]) if facts.written else None
        if not all(_fits(x, v, value) for v in operands) or not (target is None or isinstance(target, value)):
            return by_formula(*args, **kwargs)
        # In a comparison with a mask, a cotangent of bools, the op runs on the inner tensors of the other operand.
        x = next((v for v in operands if isinstance(v, value) and differentiable_names(v)), x)
        results = run_per_inner(value, op, x, args, kwargs)
        if target is not None:
            bump_versions(list(results.values()))
            return target
        first = args[0]
        if op in MOVING_OPS and isinstance(first, value) and not is_cotangent(first):
            return remade(first, results, first._layout, OF_PARAMETER)
        return remade(x, results, cotangent_layout(x._layout))

    return run


def _moving(value: Any, mapped: Call, of_parameters: Call) -> Call:
    """Returns the callable of an op of a mapped class whose result replaces its first operand, such as a Parameter."""

    def run(x: Any, *args: Any, **kwargs: Any) -> Any:
        is_moved = isinstance(x, value) and not type(x)._is_cotangent and is_of_parameter(x)
        return (of_parameters if is_moved else mapped)(x, *args, **kwargs)

    return run


def _fits(x: Any, v: Any, value: Any) -> bool:
    """Whether the other operand of an op on a cotangent has the same metadata, is a matching Parameter, or a number.

    A trace has no record of Parameters, and accepts any value as one, except in a backward, which has no step.
    """
    if not isinstance(v, value):
        return v.dim() == 0
    is_one = is_cotangent(v) or is_of_parameter(v) or (is_tracing() and not in_backward())
    return is_one and are_alike(v._layout, x._layout) and dynamic_ints(v) == dynamic_ints(x)


# ---- ops of formulas ---------------------------------------------------------------------------------------


def _of_formula(cot: Any, op: OpOverload, find_own: Callable[[Any], Call | None]) -> Call:
    """Returns the callable of an op that a formula of PyTorch's applies to cotangents and values."""
    value, spec = cot._value_cls, cot._value_cls.__spec__
    if op in COPYING_OPS and (rule := find_own(value)) is not None:
        return _copied_by_rule(cot, rule)
    moves_elements = maps_leading_dims(spec, op) if spec.leads else maps_as_view(spec, op)
    has_dims = spec.leads or spec.fallback == "views" or (spec.fallback == "map" and value._runs_above)
    if has_dims and (moves_elements or op in _SUMS or op in _JOINING):
        return leading_run(cot, op)
    if is_composite(op):
        return decompose_run(op)
    if _maps_formulas(value, op):
        return _with_values_as_cotangents(cot, op)
    if op in ADDITIVE_OPS or op in SCALING_OPS:
        return functools.partial(_refuse_mixed, value, op)
    if value._runs_above and not value._traits.is_representation:
        return functools.partial(_refuse_inside, value, op)
    return fallback_run(value, op)


def _maps_formulas(value: Any, op: OpOverload) -> bool:
    """Whether formulas run an op on each inner tensor; for a class with rules, only the sum of gradients does."""
    return value._traits.is_mapped and (not value._runs_above or op in ADDITIVE_OPS)


def _refuse_inside(value: Any, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    raise inside_error(value, op)


def _with_values_as_cotangents(cot: Any, op: OpOverload) -> Call:
    """Returns the callable that maps an op over cotangents and values of the class."""
    value, spec, run = cot._value_cls, cot.__spec__, fallback_run(cot, op)
    if can_emit(op):
        return run
    names = (*spec.attributes, *(f.name for f in spec.dynamics))
    writes = bool(op_facts(op).written)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        originals: dict[int, Any] = {}

        def convert(t: Any) -> Any:
            if not isinstance(t, value) or type(t)._is_cotangent:
                return t
            new = cot._wrap(cotangent_layout(t._layout), *[t.__dict__[name] for name in names])
            originals[id(new)] = new, t
            return new

        given = [map_tensors(a, convert) if isinstance(a, list | tuple) else convert(a) for a in args]
        out = run(*given, **(map_tensors(kwargs, convert) if kwargs else kwargs))
        return map_tensors(out, lambda t: originals[id(t)][1] if id(t) in originals else t) if writes else out

    return wrapped


def _copied_by_rule(cot: Any, run: Call) -> Call:
    """Wraps an author's rule for a copy, which applies to cotangents too: it computes nothing with inner tensors."""
    value = cot._value_cls

    def wrapped(x: Any, *args: Any, **kwargs: Any) -> Any:
        out = run(x, *args, **kwargs)
        if not isinstance(out, value) or is_cotangent(out):
            return out
        return with_inners(out, inner_tensors(out), cotangent_layout(out._layout))

    return wrapped


def _refuse_mixed(value: Any, op: OpOverload, x: Any, other: Any = None, **kwargs: Any) -> Any:
    raise mixed_error(value, op, x, other)
