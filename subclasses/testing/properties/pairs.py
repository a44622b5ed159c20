"""Ops on two values: with other numbers in each, and with other metadata."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subclasses.testing import derive
from subclasses.testing.cases import callable_on, like, once, refuses, unreached
from subclasses.testing.compare import check_stands_for
from subclasses.testing.errors import Attempt, Skipped, succeeds
from subclasses.testing.faults import explaining
from subclasses.testing.properties.gradients import check_gradient, check_requires_grad, gradients_by
from subclasses.testing.property import Case, promise
from subclasses.testing.reach import pair_calls_of
from subclasses.testing.subject import Factory, Subject

# ---- the calls ---------------------------------------------------------------------------------------------

# Calls of a pair of values, or of the two tensors that they stand for.
PAIRS: dict[str, Callable[[Any], Any]] = {
    "x + y": lambda pair: pair[0] + pair[1],
    "x - y": lambda pair: pair[0] - pair[1],
    "x * y": lambda pair: pair[0] * pair[1],
    "x < y": lambda pair: pair[0] < pair[1],
    "torch.maximum(x, y)": lambda pair: torch.maximum(*pair),
    "torch.cat([x, y])": lambda pair: torch.cat(pair),
    "torch.stack([x, y])": lambda pair: torch.stack(pair),
    "torch.where(x > 0, x, y)": lambda pair: torch.where(pair[0] > 0, *pair),
    "x.clone().copy_(y)": lambda pair: pair[0].clone().copy_(pair[1]),
    "x.clone().add_(y)": lambda pair: pair[0].clone().add_(pair[1]),
}

# More of them, tried where the values differ in numbers alone.
MORE_PAIRS: dict[str, Callable[[Any], Any]] = {
    "x / y": lambda pair: pair[0] / pair[1],
    "x == y": lambda pair: pair[0] == pair[1],
    "torch.minimum(x, y)": lambda pair: torch.minimum(*pair),
    "torch.where(mask, x, y)": lambda pair: torch.where(like(pair[0]).real > 0, *pair),
    "torch.cat([x, y], -1)": lambda pair: torch.cat(pair, -1),
    "torch.stack([x, y], -1)": lambda pair: torch.stack(pair, -1),
    "torch.add(x, y, alpha=2)": lambda pair: torch.add(*pair, alpha=2),
    "torch.sub(x, y, alpha=2)": lambda pair: torch.sub(*pair, alpha=2),
    "torch.lerp(x, y, 0.25)": lambda pair: torch.lerp(pair[0], pair[1], 0.25),
    "torch.addcmul(x, x, y)": lambda pair: torch.addcmul(pair[0], *pair),
    "torch.addcmul(x, y, y)": lambda pair: torch.addcmul(pair[0], pair[1], pair[1]),
    "x @ y": lambda pair: pair[0] @ pair[1],
    "x @ y.mT": lambda pair: pair[0] @ pair[1].mT,
    "F.linear(x, y)": lambda pair: F.linear(*pair),
    "x.clone().mul_(y)": lambda pair: pair[0].clone().mul_(pair[1]),
    "x[:1] - y": lambda pair: pair[0][:1] - pair[1],
}


def _numbers(s: Subject, pair: Sequence[Factory]) -> list[list[Tensor]]:
    """The tensors that two values stand for, one of each side by side."""
    return [
        [t.detach().clone() for t in both] for both in zip(*map(s.reference, _values(s, pair)), strict=True)
    ]


def _values(s: Subject, pair: Sequence[Factory]) -> list[Any]:
    return [s.make(factory).detach() for factory in pair]


def _two(s: Subject) -> tuple[Factory, Factory]:
    return s.factory, derive.second(s)


@once
@torch.no_grad()
def pair_cases(s: Subject) -> list[Case]:
    """The calls of two values of the factory that the class does not refuse, nor the tensors that they stand for.

    Raises:
        Skipped: there is no second value, or no reference.
    """
    s.reference(s.make())
    table = callable_on(s, PAIRS | MORE_PAIRS)
    table |= {case.name: case.run for case in pair_calls_of(unreached(s))}
    cases = [Case(name, run) for name, run in table.items()]

    def takes(case: Case) -> None:
        for pair in _numbers(s, _two(s)):
            case.run(pair)

    pair = _two(s)
    cases = [case for case in cases if succeeds(takes, case)]
    return [case for case in cases if not refuses(s, case, lambda: _values(s, pair))]


@once
def _recorded_pairs(s: Subject) -> list[Case]:
    """Those with a derivative that the class takes."""
    s.trainable()

    def takes(case: Case) -> None:
        for pair in _numbers(s, _two(s)):
            gradients_by(pair, case.run([t.requires_grad_() for t in pair]))
        with torch.no_grad():
            case.run(_values(s, _two(s)))

    return [case for case in pair_cases(s) if succeeds(takes, case)]


# ---- other numbers -----------------------------------------------------------------------------------------

_BOTH = (
    "a rule for an op on several values computes each inner tensor of its result from those of all of them, in the "
    "order of the operands: for x + y, from x.field and y.field, and not from x.field twice"
)


@promise(
    f"{_BOTH}; what it has no answer to it refuses: raise subclasses.DispatchError or NotImplementedError",
    cases=pair_cases,
)
@torch.no_grad()
def two_values(s: Subject, case: Case) -> None:
    """An op on two values with different numbers gives what it gives on the tensors that they stand for."""
    expected = [case.run(pair) for pair in _numbers(s, _two(s))]
    check_stands_for(s, case.name, case.run(_values(s, _two(s))), expected)
    other = derive.other_integers(s)
    if other is not None and not refuses(s, case, lambda: _values(s, (s.factory, other))):
        pair = (s.factory, other)
        expected = [case.run(plains) for plains in _numbers(s, pair)]
        check_stands_for(
            s, f"{case.name}, where y holds other integers", case.run(_values(s, pair)), expected
        )


@promise(
    f"{_BOTH}. A rule above autograd reads all of them with x.unwrap(name), which is differentiable",
    cases=_recorded_pairs,
)
def two_value_gradients(s: Subject, case: Case) -> None:
    """The gradient of an op on two values by each of them means that by the tensor that it stands for."""
    plains = [[t.requires_grad_() for t in pair] for pair in _numbers(s, _two(s))]
    expected = [gradients_by(pair, case.run(pair)) for pair in plains]
    values = [value.requires_grad_() for value in _values(s, _two(s))]
    with explaining(s, Case(case.name, lambda x: case.run([x, values[1]]))):
        result = case.run(values)
        check_requires_grad(s, case, values, result, [e for both in expected for e in both])
        got = gradients_by(values, result)
        for name, value, g, wanted in zip("xy", values, got, zip(*expected, strict=True), strict=True):
            check_gradient(s, f"{case.name} by {name}", value, g, wanted)


# ---- other metadata ----------------------------------------------------------------------------------------


@promise(
    "a rule for an op on two values must look at the metadata of both: convert one of them where they differ, or "
    "refuse the op: raise subclasses.DispatchError or NotImplementedError. If what a value stands for does not depend "
    "on its metadata, as on names of dimensions: skip={'mixed_metadata'}",
    cases=lambda s: [Case(name, run) for name, run in PAIRS.items()],
)
@torch.no_grad()
def mixed_metadata(s: Subject, case: Case) -> None:
    """An op on two values of different metadata gives what it gives on the tensors that they stand for."""
    unseen = ""
    for difference, make in derive.named_variants(s):
        for factories, what in (
            ((s.factory, make), f"y {difference}"),
            ((make, s.factory), f"x {difference}"),
        ):
            pairs = _numbers(s, factories)
            with Attempt() as attempt:
                expected = [case.run(pair) for pair in pairs]
            if attempt.error is None:
                got = case.run(_values(s, factories))
                check_stands_for(s, f"{case.name}, {what}", got, expected)
                unseen = unseen or (difference if _is_unseen(s, make, got) else "")
    if unseen:
        raise Skipped(
            f"pass reference=, which tells values {unseen} from others, as by numbers in one unit: both stand for "
            f"the same so far, and {case.name} was not refused"
        )


def _is_unseen(s: Subject, make: Factory, result: Any) -> bool:
    """Whether a result takes the metadata of one of two values, or of none, and no comparison can tell if it may."""
    if not (s.declared and isinstance(result, Tensor)):
        return False
    changed = derive.changed_fields(s, s.make(make))
    if not isinstance(result, s.cls):  # without materialize, a rule gave it
        is_by_rule = not s.cls.__spec__.has_materialize and bool(changed)
        return is_by_rule and not derive.is_told_apart(s, s.make().detach(), changed)
    usual, got = s.metadata(s.make()), s.metadata(result)
    is_of_one = any(all(got[name] == one[name] for name in changed) for one in (usual, changed))
    return bool(changed) and is_of_one and not derive.is_told_apart(s, s.make().detach(), changed)
