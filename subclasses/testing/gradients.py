"""Gradients: by a value and its operands as the reference has them, by inner tensors as differences have them.

A difference tells a slope where a function is smooth. It is taken in float64, in one random direction, to both sides:
where the sides disagree, as at the kink of a maximum or where numbers are rounded, there is no slope to compare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from subclasses.base import TensorSubclass
from subclasses.layout import RAW, field_name
from subclasses.testing.calls import WHOLE, Case, operands
from subclasses.testing.cases import (
    each,
    gradients_by,
    live,
    ones_for,
    plains_of,
    recorded,
    stand_ins,
)
from subclasses.testing.contexts import Setting
from subclasses.testing.errors import Broken, check_that, skip_unless, succeeds, tried
from subclasses.testing.subject import (
    Subject,
    check_attributes,
    check_close,
    check_equal,
    is_differentiable,
    leaves,
    once,
    seed,
    snapshot,
)

# ---- by values and plain operands, compared with the reference -------------------------------------------------


def by_gradients(s: Subject, case: Case, setting: Setting, *, of_operands: bool = False) -> None:
    """Compares the gradients of a case with the gradients by the tensors that its values represent.

    Args:
        s: the class under test.
        case: the call.
        setting: makes a value, or two.
        of_operands: compare the gradients by the plain operands that the case makes, and not by the values.
    """
    operand, runs = setting.operand(), []
    for given in (operand, *plains_of(s, operand)):
        values = [] if of_operands else each(given, Tensor.requires_grad_)
        with operands(Tensor.requires_grad_) if of_operands else nullcontext(values) as tensors:
            result = case.run(given)
        runs.append((tensors, gradients_by(tensors, result)))
    (values, got), *plains = runs
    for number, (x, g) in enumerate(zip(values, got, strict=True)):
        wanted = [torch.zeros_like(p[number]) if e[number] is None else e[number] for p, e in plains]
        of_pair = f"{case.name} by {'xy'[number]}" if len(values) > 1 else case.name
        what = f"plain operand {number + 1} of {case.name}" if of_operands else of_pair
        if g is None:
            is_lost = any((e != 0).any() for e in wanted)
            skip_unless(of_operands or not is_lost or s.floats(x), "no inner tensor is differentiable")
            check_that(not is_lost, f"the gradient of {what} is lost")
        else:
            check_attributes(f"the gradient of {what}", g, x, "shape")
            _check_meaning(s, f"the gradient of {what} is wrong", None if of_operands else x, g, wanted)


def _check_meaning(s: Subject, what: str, x: Any, got: Any, wanted: Sequence[Tensor]) -> None:
    """Raises unless a gradient by a value means the gradients by the tensors that it represents.

    A gradient of the class may hold the gradients by the inner tensors, or be a value that represents the plain
    gradient. A plain tensor is itself the plain gradient.
    """
    is_own = x is not None and isinstance(got, s.cls)
    pulled = _pull_to_inners(s, x, wanted) if is_own else {}
    _, error = tried(_check_all, s, what, [getattr(got, n) for n in pulled], pulled.values())
    if not pulled or error is not None:
        plains = s.reference(got) if is_own else (got,) * len(wanted)
        _, failure = tried(_check_all, s, what, plains, wanted)
        if failure is not None:
            raise error or failure


def _check_all(s: Subject, what: str, got: Iterable[Any], expected: Iterable[Any]) -> None:
    for one, other in zip(got, expected, strict=True):
        check_close(s, what, one, other)


def _pull_to_inners(s: Subject, x: Any, cotangents: Sequence[Tensor]) -> dict[str, Tensor]:
    """Pulls cotangents of the tensors that a value represents back to its inner tensors.

    Returns:
        The gradient by each differentiable inner tensor; none if autograd cannot record the reference.
    """
    opened = {name: t.detach().requires_grad_() for name, t in s.floats(x.detach()).items()}
    with torch.enable_grad():
        plains = live(s.reference(s.unflatten(x, s.inners(x.detach()) | opened)))
    if len(plains) != len(cotangents):
        return {}
    grads = torch.autograd.grad(
        plains, [*opened.values()], cotangents, allow_unused=True, materialize_grads=True
    )
    return dict(zip(opened, grads, strict=True))


def cotangents(s: Subject, case: Case) -> None:
    """Compares the gradients for a plain cotangent and one of the class, which stays as it was."""
    x = s.trainable()
    results: list[Any] = [t for t in live(case.run(x)) if isinstance(t, s.cls)]
    if not results:
        return
    result, plain = results[0], ones_for(results)[0]
    pulled = _pull_to_inners(s, result, [plain] * len(s.reference(result.detach())))
    if not pulled:
        return
    own = s.unflatten(result.detach(), s.inners(result.detach()) | pulled)
    if hasattr(own, "__coerce_tangent_metadata__"):  # a class tells PyTorch so what its cotangents look like
        own = own.__coerce_tangent_metadata__()
    before, gradient = snapshot(s, own), partial(torch.autograd.grad, result, x, allow_unused=True)
    got, expected = (gradient(given, retain_graph=True)[0] for given in (own, plain))
    check_equal(s, f"the caller's cotangent of {case.name}", own, before)
    what = f"{case.name}: a cotangent of the class and a plain one give different gradients"
    check_equal(s, what, got is None, expected is None)
    mine, other = sorted((got, expected), key=lambda g: not isinstance(g, s.cls))
    if isinstance(other, s.cls):
        _check_all(s, what, s.floats(got).values(), s.floats(expected).values())
    elif other is not None:
        _check_meaning(s, what, x, mine, [other] * len(s.reference(x.detach())))


# ---- by inner tensors ----------------------------------------------------------------------------------------


def inner_requires_grad(s: Subject, case: Case) -> None:
    """Raises where inner tensors that require grad are kept as they are, or cut off, without an error.

    Raises:
        Skipped: no inner tensor can require grad, or the kit has no way to make a value.
        NotImplementedError: the class refuses them.
    """
    x = s.make().detach()
    opened = {name: t.detach().requires_grad_() for name, t in s.floats(x).items()}
    skip_unless(opened, "no inner tensor is differentiable")
    s.builder(x)
    made, error = tried(s.construct, x, s.inners(x) | opened)
    if error is not None:
        raise NotImplementedError(f"inner tensors that require grad: {error}") from error
    held = [field_name(name) for name, t in s.inners(made).items() if t.requires_grad]
    check_that(
        not held,
        f"the value holds inner tensors that require grad ({', '.join(held)}); they never get a gradient",
    )
    check_that(
        made.requires_grad,
        f"{', '.join(map(field_name, opened))} require grad, the value made from them does not: gradients are lost",
    )


# Two steps of differences in float64. The tolerance between a slope and the differences, and between the differences of
# both steps. The largest distance between the slopes of the two sides.
_STEPS, _TOLERANCE, _KINK = (1e-6, 1e-5), 1e-4, 1e-3


def sloped(s: Subject) -> list[Case]:
    """The recorded cases, where the gradient of materialize() is its slope."""
    slopes = _slopes_of(s, WHOLE.run) if s.has_materialize else None
    skip_unless(
        slopes is None or _are_close(s, *slopes),
        "the result of materialize() has another gradient than its differences; see `materialize_gradients`",
    )
    return recorded(s)


def inner_gradients(s: Subject, case: Case) -> None:
    """Compares gradients by the inner tensors with differences, for the plain tensors that results represent.

    By decision of PyTorch the derivative of some ops is not the slope for a plain tensor either: the derivative of
    ``F.embedding(i, x, padding_idx=0)`` is zero in row 0. The expected gradient is then the gradient of the op on
    materialize().
    """
    slopes, materialized = _slopes_of(s, case.run), s.has_materialize
    if slopes is None or (_are_close(s, *slopes) and not materialized):
        return
    of_plain = lambda x: case.run(x.materialize())  # noqa: E731
    decided = _slopes_of(s, of_plain) if materialized else tried(_slopes_of_plain, s, case)[0]
    is_slope = decided is None or _are_close(s, *decided)
    if is_slope or materialized:
        what = f"{', '.join(doubles(s)[1]).replace(RAW, '')} through {case.name}"
        _check_slopes(s, what, slopes[0], decided[0] if decided and not is_slope else slopes[1])


def materialize_gradients(s: Subject, case: Case) -> None:
    """Compares the gradient of materialize() by an inner tensor with differences."""
    if slopes := _slopes_of(s, case.run, case.name):
        _check_slopes(s, f"{case.name.replace(RAW, '')} through materialize()", *slopes)


def _check_slopes(s: Subject, what: str, got: float, expected: float) -> None:
    slopes = f"a slope of {got:.4g} by autograd", f"{expected:.4g} by differences, in a random direction"
    check_that(_are_close(s, got, expected), f"the gradient of {what} is wrong", *slopes)


@once
def doubles(s: Subject) -> tuple[Any, dict[str, Tensor]]:
    """A value, and its floating point tensors by path, in float64.

    Raises:
        Skipped: no value can be made of them, or the kit has no way to make one.
    """
    source, floats = s.make().detach(), dict[str, Tensor]()
    _, error = tried(inner_requires_grad, s, WHOLE)
    lost = "inner tensors are not connected to the value; see `inner_requires_grad`"
    skip_unless(error is None, lost if isinstance(error, Broken) else str(error))

    is_number = lambda t: t.is_floating_point() and t.dtype.itemsize > 1  # noqa: E731
    inners = s.changed(source, lambda path, t: floats.setdefault(path, t.double()) if is_number(t) else t)
    skip_unless(
        floats and succeeds(s.construct, source, inners),
        "no value of float64 can be made, whose differences would tell the gradients",
    )
    return source, floats


def _slopes_of(s: Subject, run: Callable[[Any], Any], *only: str) -> tuple[float, float] | None:
    """The slopes of a call on a value, along a random direction of its inner tensors.

    Returns None where there is no slope.
    """
    source, floats = doubles(s)
    seed(1)
    ways = {n: torch.randn_like(floats[n]) for n in only or floats}

    def at(step: Any) -> Any:
        moved = floats | {name: floats[name] + step * way for name, way in ways.items()}
        return s.construct(source, s.changed(source, lambda path, t: moved.get(path, t)))

    return _slopes(s, at, run)


def _slopes_of_plain(s: Subject, case: Case) -> tuple[float, float] | None:
    """The slopes of a call on a plain tensor."""
    plain = stand_ins(s)[0].to(torch.complex128 if s.dtype.is_complex else torch.float64)
    seed(1)
    way = torch.randn_like(plain)
    return _slopes(s, lambda step: plain + step * way, case.run)


def _slopes(s: Subject, at: Callable[[Any], Any], run: Callable[[Any], Any]) -> tuple[float, float] | None:
    """The slopes of a weighted sum of a call's results at a step of 0, by autograd and by differences.

    Returns None where there is no slope, or where a result is not of float64.
    """

    def total(step: Any) -> Any:
        seed()  # the same random numbers for each
        parts = [*_real_parts(s, run(at(step)))]
        seed(0)
        products = (torch.randn(part.shape, dtype=torch.float64) * part for part in parts)
        return sum(p.sum() for p in products) if {p.dtype for p in parts} <= {torch.float64} else torch.nan

    with torch.no_grad():
        values = {step: float(total(step)) for h in _STEPS for step in (0.0, h, -h)}
    short, long = ((values[h] - values[-h]) / (2 * h) for h in _STEPS)
    scale = max(1, abs(short))
    is_bent = any(not abs(values[h] + values[-h] - 2 * values[0.0]) / h <= _KINK * scale for h in _STEPS)
    if is_bent or not abs(short - long) <= _TOLERANCE / 2 * scale:  # true of nan, too
        return None
    step = torch.zeros((), dtype=torch.float64, requires_grad=True)
    result = total(step)
    (grad,) = torch.autograd.grad(result, step, allow_unused=True) if live(result) else (None,)
    return float(grad or 0), short


def _real_parts(s: Subject, result: Any) -> Iterator[Tensor]:
    """The plain floating point tensors that results represent: materialize(), or the inner tensors, to any depth.

    Of a class without materialize(), they are the result of ``reference=``, if autograd records it: inner tensors may
    hold numbers that a value does not represent.
    """
    for t in (leaf for leaf in leaves(result) if isinstance(leaf, Tensor) and is_differentiable(leaf)):
        value: Any = t
        if isinstance(t, TensorSubclass) and not (type(t) is s.cls and _is_recorded(s)):
            is_shown = value.__spec__.has_materialize
            yield from _real_parts(s, [value.materialize()] if is_shown else [*value.unwrap()])
        elif isinstance(t, s.cls):
            yield from _real_parts(s, [*s.reference(t)])
        else:
            yield torch.view_as_real(t.resolve_conj()) if t.is_complex() else t


@once
@torch.enable_grad()
def _is_recorded(s: Subject) -> bool:
    """Whether autograd records the given ``reference=`` of a class without materialize()."""
    plains, _ = tried(s.reference, s.trainable())
    return not s.has_materialize and bool(live(list(plains or ())))


def _are_close(s: Subject, got: float, expected: float) -> bool:
    tolerance = max(_TOLERANCE, s.options.get("rtol") or 0.0)
    return abs(got - expected) <= tolerance * max(1, abs(expected))
