"""Op resolution: picks the step for each class and op once, and returns one callable.

:class:`Step` lists the steps in order. The generated ``__torch_dispatch__`` caches the callable in a dict.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any

import torch

from subclasses._torch import (
    HigherOrderOperator,
    OpOverload,
    is_composite,
    is_traceable_wrapper_subclass_type,
    python_decomposition,
    with_lazy_bits,
)
from subclasses.autograd.above import (
    with_autograd,
    with_checked_view_rule,
    with_each_op,
    with_formula,
    with_formula_of_copy,
    with_formula_of_rule,
    with_open_operands,
    with_run_above,
    with_written_copies,
)
from subclasses.autograd.by_formula import with_formula_marks
from subclasses.autograd.detach import in_one_step
from subclasses.autograd.engine_ops import (
    with_absent_gradients,
    with_engine_sums,
    with_plain_gradients,
)
from subclasses.autograd.plain_operands import is_mapped_cotangent
from subclasses.dispatch import structural
from subclasses.dispatch.cotangents import cotangent_run
from subclasses.dispatch.derived_writes import write_result
from subclasses.dispatch.fallbacks import (
    decompose_run,
    fallback_run,
    fallback_step,
    naming_whole,
    wrappers_in,
)
from subclasses.dispatch.mapping import ALIASING_IF_SAME, is_factory
from subclasses.dispatch.sharding import with_sharding
from subclasses.dispatch.strided import with_checked_strides, with_checked_views
from subclasses.dispatch.structural import COPYING_OPS, with_marks
from subclasses.dispatch.training import takes_lists, with_training
from subclasses.errors import DispatchError, one_of, way_out
from subclasses.higher_order.dispatch import higher_order_run
from subclasses.op_schemas.aliasing import (
    with_aliasing,
    with_checked_writes,
    with_counted_writes,
    with_versions_of_base,
)
from subclasses.op_schemas.schema import functional_counterpart, op_facts
from subclasses.rules.errors import is_of_operator
from subclasses.rules.mapping_conflicts import with_rules_above
from subclasses.rules.registry import find_op_rule, find_tag_rule, has_formula
from subclasses.rules.results import check_refusal, describe, with_note_on_copies, with_results_of
from subclasses.rules.symbolic_numbers import with_numbers

aten = torch.ops.aten

Call = Callable[..., Any]
Wrap = Callable[[Call], Call]


_SUMS = frozenset({aten.add.Tensor, aten.add_.Tensor})  # by which the engine adds two gradients
# If both operands return NotImplemented for x == y, Python compares identities and returns a bool, not a tensor.
_EQUALITY = (aten.eq.Tensor, aten.eq.Scalar, aten.ne.Tensor, aten.ne.Scalar)
# Their derivative is zero, by PyTorch's formula and by a rule.
_FILLING = frozenset({aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor})


class Step(StrEnum):
    """The steps of resolution, in order of precedence; the first that applies decides."""

    HIGHER_ORDER = "higher-order"  # an op that takes functions, such as cond
    COTANGENT = "cotangent"  # the table of the class's cotangents
    RULE = "rule"  # of the author, for this very op
    DERIVED = "derived"  # an in-place or out= op, from the callable of its functional counterpart
    INNERS = "inners"  # an op such as detach, on each inner tensor, unless its arguments change the structure
    TAG_RULE = "tag rule"  # of the author, for a tag of the op
    DECOMPOSITION = "decomposition"  # PyTorch's: of a composite op, and of others where the class allows it
    MAP = "map"  # this and the following are fallbacks, of which a class has one
    VIEWS = "views"
    MATERIALIZE = "materialize"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Resolution:
    """How an op runs.

    Attributes:
        step: The resolution step that applies.
        run: The callable.
        source: For a derived op its functional counterpart, and the step that applies to the counterpart.
        functional: For a derived op the callable of its functional counterpart.
        layers: The names of the layers around it, from the innermost.
        by_formula: Whether the rule that runs has PyTorch's formula as its derivative.
    """

    step: Step
    run: Call
    source: tuple[OpOverload, Step] | None = None
    functional: Call | None = None
    layers: tuple[str, ...] = ()
    by_formula: bool = False

    @property
    def name(self) -> str:
        """The step, and for a derived op its source."""
        return self.step if self.source is None else f"derived from {self.source[0]} ({self.source[1]})"

    @property
    def by_rule(self) -> bool:
        """Whether a rule of the author runs."""
        step = self.step if self.source is None else self.source[1]
        return step in (Step.RULE, Step.TAG_RULE)


# ---- the order ---------------------------------------------------------------------------------------------


def resolve(cls: Any, op: OpOverload | HigherOrderOperator) -> Resolution:
    """Returns the first resolution step that applies to an op, and its callable with the layers around it."""
    if isinstance(op, HigherOrderOperator):
        return Resolution(Step.HIGHER_ORDER, higher_order_run(cls, op))
    if cls._is_cotangent:
        keeps_structure, run = cotangent_run(cls, op, partial(_find_own, op))
        cuts_rows = op is aten.slice.Tensor and cls.__spec__.fallback == "materialize"
        if op in ALIASING_IF_SAME and not cls._traits.is_mapped and not cuts_rows:
            run = ALIASING_IF_SAME[op](run, lambda: resolve(cls, aten.alias.default).run)
        run = with_counted_writes(cls._value_cls, op, with_absent_gradients(op, run))
        return Resolution(Step.INNERS if keeps_structure else Step.COTANGENT, run)
    resolution = _resolve_before_fallback(cls, op) or Resolution(
        Step(fallback_step(cls, op)), fallback_run(cls, op)
    )
    run, names = resolution.run, list[str]()
    for name, wrap in _layers(cls, op, resolution, names):
        wrapped = wrap(run)
        if wrapped is not run:
            names.append(name)
        run = wrapped
    return replace(resolution, run=run, layers=tuple(names))


def _layers(cls: Any, op: OpOverload, resolution: Resolution, names: list[str]) -> Iterator[tuple[str, Wrap]]:
    """Yields the layers of an op by name, from the innermost; a layer may return its argument.

    A layer wraps the callable of a step, for cotangents, views, writes or autograd, whatever the step is.

    Args:
        cls: The class.
        op: The op.
        resolution: The step that applies, and its callable.
        names: The layers that have been added so far.
    """
    facts, step, by_library = op_facts(op), resolution.step, not resolution.by_rule
    if op in ALIASING_IF_SAME and by_library and (step != Step.MAP or op is aten.slice.Tensor):
        yield "whole", partial(_with_alias_if_same, cls, op)
    if step in (Step.MAP, Step.VIEWS) or (step == Step.MATERIALIZE and not cls._traits.is_representation):
        yield "rules above", partial(with_rules_above, cls, op)
    yield from _gradient_layers(cls, op, resolution)
    if step != Step.RULE:
        yield "sharding", partial(with_sharding, cls, op)
    is_each_inner = step == Step.INNERS and not names
    if op in COPYING_OPS:
        yield "marks", partial(with_marks, cls, op)
    if facts.viewed and step != Step.DECOMPOSITION:  # each of its ops has these itself
        yield from _view_layers(cls, op, resolution)
    if facts.written:
        yield "counted writes", partial(with_counted_writes, cls, op)
    if cls._runs_above:
        yield "above autograd", partial(_with_recording, cls, op, resolution)
    if op is aten.detach.default and is_each_inner:
        yield "one step", partial(in_one_step, cls)


def _view_layers(cls: Any, op: OpOverload, resolution: Resolution) -> Iterator[tuple[str, Wrap]]:
    if resolution.step != Step.INNERS:
        yield "checked strides", partial(with_checked_strides, cls, op)
    if resolution.by_rule:
        yield "checked views", partial(with_checked_views, cls, op)
    how = {"is_copy": resolution.step == Step.MATERIALIZE, "by_rule": resolution.by_rule}
    yield "versions of base", lambda run: with_versions_of_base(op, run, **how)


def _gradient_layers(cls: Any, op: OpOverload, resolution: Resolution) -> Iterator[tuple[str, Wrap]]:
    """Yields the layers for cotangents and for Parameters."""
    if cls._traits.trainable:
        yield "training", partial(with_training, cls, op)
    is_structure = cls._traits.has_cotangents and not cls._traits.is_representation
    if op in _SUMS and is_structure and not (resolution.step == Step.MAP and resolution.source is None):
        yield "engine sums", partial(with_engine_sums, cls)
    yield "absent gradients", partial(with_absent_gradients, op)


def _with_alias_if_same(cls: Any, op: OpOverload, run: Call) -> Call:
    return ALIASING_IF_SAME[op](run, lambda: resolve(cls, aten.alias.default).run)


def _with_call_above(cls: Any, op: OpOverload, resolution: Resolution, run: Call) -> Call:
    """Wraps the callable of an op for a call where autograd records."""
    facts = op_facts(op)
    if resolution.step == Step.DECOMPOSITION:
        return with_each_op(run)
    # Zeros of a value's size do not depend on the value.
    makes_like = op is not aten._to_copy.default and is_factory(op)
    if resolution.step == Step.MATERIALIZE and not makes_like:
        above = with_formula(op, run)
        return with_run_above(_with_alias_if_same(cls, op, above), run) if op in ALIASING_IF_SAME else above
    if resolution.by_formula and op not in COPYING_OPS:
        return with_formula_of_rule(op, run)
    is_out = any(facts.arguments[i].keyword for i in facts.written)
    if facts.written and not (is_out or facts.changes_metadata or op in _FILLING):
        return with_written_copies(op, run, resolution.functional, by_rule=resolution.by_rule)
    if facts.viewed and resolution.by_rule:
        return with_checked_view_rule(op, run)
    computes = set(facts.returns) != {"other"} and not (facts.viewed or makes_like)
    if facts.written or not computes:
        return with_autograd(op, run)
    if op in COPYING_OPS:
        return (
            with_formula_of_copy(op, run, by_formula=resolution.by_formula)
            if resolution.by_rule
            else with_autograd(op, run)
        )
    return with_open_operands(run)


def _with_recording(cls: Any, op: OpOverload, resolution: Resolution, run: Call) -> Call:
    """Wraps the callable of an op where autograd records: it runs above autograd, and marks results by formula."""
    run = _with_call_above(cls, op, resolution, run)
    if not cls._has_formulas or op is aten.detach.default:
        return run
    # A copy keeps the mark of its operand, also if a rule makes it.
    return with_formula_marks(run, by_rule=resolution.by_formula and op not in COPYING_OPS)


def find_step(cls: Any, op: OpOverload) -> str:
    """Returns the name of the step that applies, without building the callable of a fallback."""
    resolution = _resolve_before_fallback(cls, op)
    return resolution.name if resolution is not None else fallback_step(cls, op)


def _find_own(op: OpOverload, cls: Any) -> Call | None:
    resolution = _exact(cls, op)
    return None if resolution is None else resolution.run


def _resolve_before_fallback(cls: Any, op: OpOverload) -> Resolution | None:
    resolutions = (step(cls, op) for step in (_exact, _derived, _structural, _tagged, _decomposed))
    return next((resolution for resolution in resolutions if resolution is not None), None)


def _exact(cls: Any, op: OpOverload) -> Resolution | None:
    rule = find_op_rule(cls, op)
    if rule is None:
        return None
    run = _with_rule_checks(cls, op, rule)
    if op is aten.copy_.default:
        run = with_note_on_copies(cls, rule, run)
    run = with_checked_writes(cls, op, f"the rule {describe(rule)}", run)
    return Resolution(Step.RULE, with_aliasing(op, run), by_formula=_is_by_formula(cls, rule))


def _with_rule_checks(cls: Any, op: OpOverload, rule: Call) -> Call:
    refuse = () if _is_left_to_python(op) else (partial(check_refusal, cls, op, rule),)
    rule = with_numbers(rule)
    run: Call = with_lazy_bits(partial(with_results_of(cls, op, rule, *refuse), op))
    return with_plain_gradients(cls, run) if cls._has_formulas else run


def _is_left_to_python(op: OpOverload) -> bool:
    """Whether Python tries the other operand, or raises TypeError, if a class has no rule for an op."""
    return is_of_operator(op) and op not in _EQUALITY


def _derived(cls: Any, op: OpOverload) -> Resolution | None:
    """Returns the resolution of an in-place or ``out=`` op, by the resolution of its functional counterpart."""
    functional = functional_counterpart(op)
    if functional is None:
        return None
    for step in (_exact, _tagged, _decomposed):
        resolution = step(cls, functional)
        if resolution is not None:
            run, source = write_result(cls, op, resolution.run), (functional, resolution.step)
            return Resolution(Step.DERIVED, run, source, resolution.run, by_formula=resolution.by_formula)
    return None


def _structural(cls: Any, op: OpOverload) -> Resolution | None:
    run = structural.find_structural(op)
    if run is None:
        return None
    other = functools.cache(partial(fallback_run, cls, op))
    computes_dtype = cls.__spec__.has_outer and op in (aten._to_copy.default, aten.empty_like.default)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if structural.preserves_structure(cls, op, args, kwargs):
            out = run(*args, **kwargs)
            if not computes_dtype or structural.has_requested_dtype(cls, out, kwargs):
                return out
        out = other()(*args, **kwargs)
        if computes_dtype and not structural.has_requested_dtype(cls, out, kwargs):
            structural.raise_dtype_stays(cls, op, out, kwargs)
        return out

    return Resolution(Step.INNERS, wrapped)


def _tagged(cls: Any, op: OpOverload) -> Resolution | None:
    if op_facts(op).written or set(op_facts(op).returns) == {"other"}:
        return None  # such as `equal`, which is a pointwise op to PyTorch and returns a bool
    rule = find_tag_rule(cls, op)
    if rule is None:
        return None
    run = with_aliasing(op, _with_rule_checks(cls, op, rule))
    return Resolution(Step.TAG_RULE, run, by_formula=_is_by_formula(cls, rule))


def _is_by_formula(cls: Any, rule: Call) -> bool:
    return cls._traits.is_representation or has_formula(rule)


def _decomposed(cls: Any, op: OpOverload) -> Resolution | None:
    if is_composite(op):
        return Resolution(Step.DECOMPOSITION, decompose_run(op))
    allowed = cls.__spec__.decompose
    is_allowed = allowed is True or (allowed and op in allowed)
    if is_allowed and (function := python_decomposition(op)) is not None:
        return Resolution(Step.DECOMPOSITION, with_aliasing(op, naming_whole(cls, op, function)))
    return None


# ---- other subclasses in the same call ---------------------------------------------------------------------


def is_foreign(cls: Any, op: OpOverload, types: Any, args: Any) -> bool:
    """Whether another subclass in the call handles the op first: this class has no rule, and does not contain it.

    Raises:
        DispatchError: the other class is a base of this class, and the op would be mapped over inner tensors of one
            of them. Also if all classes in the call are declared, and each leaves the op to the others.
    """
    if not _defers(cls, op, types, args):
        return False
    declared = [t for t in types if hasattr(t, "__spec__")]
    if _is_left_to_python(op) or len(declared) < sum(map(is_traceable_wrapper_subclass_type, types)):
        return True
    if all(_defers(t, op, types, args) for t in declared if t is not cls):
        names = " and ".join(map(one_of, declared))
        plain = [t.__name__ for t in declared if t.__spec__.has_materialize]
        convert = f", or call it with the materialize() of the {plain[-1]}" if plain else ""
        raise DispatchError(
            f"{op} on {names}: none of the classes has a rule for it",
            code="classes-mixed",
            hint=f"{way_out(cls, f'add one to either: @{cls.__name__}.implements(torch.ops.{op})')}{convert}",
        )
    return True


def _defers(cls: Any, op: OpOverload, types: Any, args: Any) -> bool:
    """Whether a class leaves an op to another subclass in the call."""
    others: list[type] = [
        t for t in types if not issubclass(t, cls._value_cls) and is_traceable_wrapper_subclass_type(t)
    ]
    if not others or find_op_rule(cls, op) is not None:
        return False
    if cls._traits.trainable and takes_lists(op):
        return False  # it leaves elements of other classes to them
    if op is aten.add.Tensor and all(map(is_mapped_cotangent, (cls, *others))):
        return False  # gradients of one plain operand
    inside = {layout.cls for x in wrappers_in(cls, args) for _, layout in x._layout.nested}
    bases = [t for t in others if issubclass(cls, t)]
    is_mapped = cls._traits.is_mapped and find_step(cls, op) in (Step.MAP, Step.INNERS)
    if bases and is_mapped and not inside.issuperset(bases):
        raise DispatchError(
            f"{op} on {one_of(cls)} and {one_of(bases[0])}: an op is mapped over the inner tensors of values of one "
            "class",
            code="classes-mixed",
            hint=f"make {one_of(cls)} of the other value, or write a rule: @{cls.__name__}.implements(torch.ops.{op})",
        )
    return not (bases or inside.issuperset(others))
