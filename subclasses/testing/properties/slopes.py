"""Gradients, compared with differences of what is computed: they need no reference, and see what a formula does not.

A difference tells a slope where a function is smooth. It is taken in float64, in one random direction, to both sides:
where the sides disagree, as at the kink of a maximum or where numbers are rounded, there is no slope to compare.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from subclasses.layout import RAW
from subclasses.testing.cases import recorded, stand_ins
from subclasses.testing.compare import leaves
from subclasses.testing.errors import Attempt, Broken, Skipped, succeeds
from subclasses.testing.faults import explaining
from subclasses.testing.property import Case, promise
from subclasses.testing.subject import Subject, seed

# A function of inner tensors by name, and what of its results is looked at.
Total = Callable[[Mapping[str, Any]], Tensor | float]
Open = Callable[[list[Any]], list[Any]]

# The steps of differences in float64, how far a slope may be from them and they from each other, and how far the slopes
# of the two sides may be from each other.
_STEP, _LONG_STEP, _TOLERANCE, _KINK = 1e-6, 1e-5, 1e-4, 1e-3

_CUT_IN_RULE = (
    "PyTorch differentiates the ops of a rule on inner tensors: it sees none where the rule calls detach(), reads "
    ".data, converts to numpy or turns gradients off, or where a rule for a function reads fields in place of "
    "x.unwrap()"
)
_BY_FORMULA = (
    "PyTorch's formula for the op is the derivative of a rule for an op of a representation: the rule must compute "
    "the op of the tensors that the values represent. "
)


def _is_real(t: Any) -> bool:
    return isinstance(t, Tensor) and t.is_floating_point()


def _real_parts(tensors: list[Any]) -> list[Tensor]:
    """The floats among tensors, and the complex ones as floats."""
    parts = [
        torch.view_as_real(t.resolve_conj()) if isinstance(t, Tensor) and t.is_complex() else t
        for t in tensors
    ]
    return [part for part in parts if _is_real(part)]


def _in_float64(s: Subject) -> tuple[Any, dict[str, Any], list[str]]:
    """A value, its inner tensors in float64, and the names of those that are floats.

    Raises:
        Skipped: no value can be made of them, or nobody knows how.
    """
    source = s.make().detach()
    inners = {n: t.double() if _is_real(t) else t for n, t in s.inners(source).items()}
    names = [n for n, t in inners.items() if _is_real(t)]
    s.builder(source)
    if not names or not succeeds(s.construct, source, inners):
        raise Skipped("no value of float64 can be made, whose differences would tell the gradients")
    return source, inners, names


def check_slope(s: Subject, case: Case, opened: Open | None = None) -> None:
    """Compares the gradient of what is read from the results of a case with a difference of it.

    Args:
        s: the class under test.
        case: what is run.
        opened: the tensors that are read from the results; the inner tensors of values by default.

    Raises:
        Broken: the derivative in a random direction is another.
        Skipped: no value can be made from inner tensors of float64.
    """
    read = opened or (lambda results: [part for result in results for part in _inner_tensors(s, result)])
    total, at, directions = _total_of(s, case, read)
    expected = _slope(total, at, directions)
    if expected is None:
        return
    whole = Case(case.name, lambda x: read(leaves(case.run(x))))
    what = f"the gradient of {', '.join(n.removeprefix(RAW) for n in at)} through {case.name}"
    with explaining(s, whole):
        got = _slope_by_autograd(total, at, directions)
        if not _are_close(got, expected):
            raise Broken(
                f"{what} is wrong: the slope in a random direction is {expected:.4g} by differences and {got:.4g} by "
                f"autograd",
                _BY_FORMULA * s.cls._traits.is_representation + _CUT_IN_RULE,
            )


def check_slope_of_op(s: Subject, case: Case) -> None:
    """Compares as :func:`check_slope` does; leaves out an op whose derivative is no slope, by decision of PyTorch.

    Such is that of ``F.embedding(i, x, padding_idx=0)``, which has no gradient in row 0.
    """
    try:
        check_slope(s, case)
    except Broken:
        decided = False
        with Attempt():
            decided = _formula_is_slope(s, case) is False
        if not decided:
            raise


def _total_of(s: Subject, case: Case, read: Open) -> tuple[Total, dict[str, Tensor], dict[str, Tensor]]:
    """A function of the inner tensors of floats, in float64, to a number; where to take it, and in which direction."""
    source, inners, names = _in_float64(s)

    def total(moved: Mapping[str, Any]) -> Tensor | float:
        s.make()  # the same random numbers for each
        results = leaves(case.run(s.construct(source, {**inners, **moved})))
        parts = [part.double() for part in _real_parts(read(results))]
        seed(0)
        return sum((torch.randn_like(part) * part).sum() for part in parts)

    return total, {n: inners[n] for n in names}, {n: torch.randn_like(inners[n]) for n in names}


def _are_close(slope: float, expected: float) -> bool:
    return abs(slope - expected) <= _TOLERANCE * max(1, abs(expected))


@torch.no_grad()
def _slope(total: Total, at: Mapping[str, Tensor], directions: Mapping[str, Tensor]) -> float | None:
    """The slope of a function in a direction, by differences; None where it has none."""

    def at_step(step: float) -> float:
        return float(total({n: t + step * directions[n] for n, t in at.items()}))

    here, slopes = at_step(0.0), []
    for step in (_STEP, _LONG_STEP):
        behind, ahead = at_step(-step), at_step(step)
        slopes.append((ahead - behind) / (2 * step))
        if abs(ahead + behind - 2 * here) / step > _KINK * max(1, abs(slopes[-1])):
            return None
    short, long = slopes
    return short if abs(short - long) <= _TOLERANCE / 2 * max(1, abs(short)) else None


def _slope_by_autograd(total: Total, at: Mapping[str, Tensor], directions: Mapping[str, Tensor]) -> float:
    live = {n: t.clone().requires_grad_() for n, t in at.items()}
    result = total(live)
    if not (isinstance(result, Tensor) and result.requires_grad):
        return 0.0
    grads = torch.autograd.grad(result, [*live.values()], allow_unused=True)
    pairs = [(g, directions[n]) for n, g in zip(live, grads, strict=True) if g is not None]
    return sum(float((g.conj() * d).real.sum()) for g, d in pairs)


def _inner_tensors(s: Subject, result: Any) -> list[Any]:
    """The inner tensors of a result, or a plain result, as differentiable functions."""
    return list(result.unwrap()) if isinstance(result, s.cls) else [result]


# ---- of what a result represents -----------------------------------------------------------------------------


@promise(
    _BY_FORMULA + _CUT_IN_RULE,
    cases=recorded,
)
def read_gradients(s: Subject, case: Case) -> None:
    """What a result represents, read with materialize() or unwrap(), has the gradient of the result as a whole."""
    if not s.declared:
        raise Skipped("a class written by hand has no unwrap()")
    has_materialize = s.cls.__spec__.has_materialize
    if not (has_materialize or s.has_reference):
        return  # inner_gradients is about the same

    live = _differentiable_results(s, case)

    def read(results: list[Any]) -> list[Any]:
        values = [results[i] for i in live]
        if has_materialize:
            return [value.materialize() for value in values]
        return [part for value in values for part in _inner_tensors(s, value)]

    if live and _is_exact(s, case, read) and _formula_is_slope(s, case):
        try:
            check_slope(s, case, read)
        except Broken as error:
            problem = _estimates(s) if has_materialize else None
            if problem:
                raise Broken(f"{problem}; {error}", _ESTIMATOR) from error
            raise


_ESTIMATOR = (
    "let materialize() compute with ops whose derivatives are those of what it gives. If its gradient is meant to be "
    "another one, as that of a straight-through estimator: skip={'read_gradients'}"
)


def _estimates(s: Subject) -> str | None:
    """How materialize() has another derivative than its differences, whatever the rules do; None if it has not."""
    total, at, directions = _total_of(s, Case("x", lambda x: x), lambda results: [results[0].materialize()])
    expected, got = _slope(total, at, directions), 0.0
    with Attempt():
        got = _slope_by_autograd(total, at, directions)
    if expected is None or got == 0 or _are_close(got, expected):  # none at all is no estimate
        return None
    return (
        f"what materialize() gives of x has another gradient than its differences, in a random direction {got:.4g} "
        f"and {expected:.4g}"
    )


def _differentiable_results(s: Subject, case: Case) -> list[int]:
    """Which results of a case are values of the class with a gradient, as that of a plain tensor has."""
    source, inners, names = _in_float64(s)
    results: list[Any] = []
    with Attempt():  # a plain operand may be float32
        live = {n: t.clone().requires_grad_(n in names) for n, t in inners.items()}
        results = leaves(case.run(s.construct(source, live)))
    plain = leaves(case.run(stand_ins(s)[0].requires_grad_()))
    pairs = enumerate(zip(results, plain, strict=False))
    return [i for i, (r, p) in pairs if isinstance(r, s.cls) and r.requires_grad and p.requires_grad]


def _formula_is_slope(s: Subject, case: Case) -> bool | None:
    """Whether PyTorch's derivative is the slope for a plain tensor; None where there is no slope.

    That of ``nextafter`` is zero, by decision.
    """
    plain = stand_ins(s)[0]
    plain = plain.to(torch.complex128 if plain.is_complex() else torch.float64)
    weights: list[Tensor] = []

    def total(moved: Mapping[str, Any]) -> Tensor | float:
        parts = _real_parts(leaves(case.run(moved["x"])))
        weights.extend(torch.randn_like(part) for part in parts[len(weights) :])
        return sum((weight * part).sum() for weight, part in zip(weights, parts, strict=True))

    directions = {"x": torch.randn_like(plain)}
    expected = _slope(total, {"x": plain}, directions)
    if expected is None:
        return None
    return _are_close(_slope_by_autograd(total, {"x": plain}, directions), expected)


@torch.no_grad()
def _is_exact(s: Subject, case: Case, read: Open) -> bool:
    """Whether what is read from the results of a case is float64 for a value of float64."""
    source, inners, _ = _in_float64(s)
    parts = read(leaves(case.run(s.construct(source, inners))))
    return all(part.dtype == torch.float64 for part in _real_parts(parts))


# ---- through materialize -------------------------------------------------------------------------------------

# Differences of what materialize() gives, for steps of this part of each entry. Halving a step halves the difference of
# a differentiable function; that of one that rounds, where an entry is just about to change, is of another size.
_SMALL_STEP, _HALVES = 1e-6, 0.2


@promise(
    "let materialize() compute with the tensor itself, not with .detach() or .data of it, nor under no_grad. If it is "
    "meant to stop gradients: skip={'materialize_gradients'}"
)
def materialize_gradients(s: Subject) -> None:
    """An inner tensor that materialize() depends on gets a gradient from it."""
    if not s.declared or not s.cls.__spec__.has_materialize:
        raise Skipped(f"{s.name} has no materialize()")
    source = s.make().detach()
    inners = {n: t.double() if _is_real(t) else t for n, t in s.inners(source).items()}
    s.builder(source)
    if not succeeds(s.construct, source, inners):
        raise Skipped("no value of float64 can be made, whose differences would tell the gradients")
    weights: list[Tensor] = []

    def total(moved: Mapping[str, Tensor]) -> Tensor:
        plain = s.construct(source, {**inners, **moved}).materialize()
        if not weights:
            weights.append(torch.randn(plain.shape, dtype=torch.float64))
        return (plain.double() * weights[0]).sum()

    for name in [n for n, t in inners.items() if _is_real(t)]:
        if _depends_smoothly(total, name, inners[name]) and not _has_gradient(total, name, inners[name]):
            raise Broken(
                f"what materialize() gives depends on {name.removeprefix(RAW)}, which gets no gradient from it"
            )


def _depends_smoothly(total: Callable[[Mapping[str, Tensor]], Tensor], name: str, t: Tensor) -> bool:
    """Whether a result is a smooth function of a tensor, and not a constant one, by differences."""
    direction = torch.randn_like(t) * t.abs()
    with torch.no_grad():
        whole, half = (
            float(total({name: t + step * direction}) - total({name: t - step * direction}))
            for step in (_SMALL_STEP, _SMALL_STEP / 2)
        )
    return whole != 0 and abs(whole - 2 * half) < _HALVES * abs(whole)


def _has_gradient(total: Callable[[Mapping[str, Tensor]], Tensor], name: str, t: Tensor) -> bool:
    live = t.clone().requires_grad_()
    with torch.enable_grad():
        result = total({name: live})
    if not result.requires_grad:
        return False
    gradient = torch.autograd.grad(result, live, allow_unused=True)[0]
    return gradient is not None and bool((gradient != 0).any())
