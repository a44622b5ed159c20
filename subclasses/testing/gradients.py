"""Gradients: by a value and its operands as the reference has them, by inner tensors as differences have them.

A difference tells a slope where a function is smooth. It is taken in float64, in one random direction, to both sides:
where the sides disagree, as at the kink of a maximum or where numbers are rounded, there is no slope to compare.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from subclasses.base import TensorSubclass
from subclasses.layout import RAW, field_name
from subclasses.testing.cases import like, operands_with_gradients, recorded, stand_ins
from subclasses.testing.compare import check_equal, difference, leaves, snapshot
from subclasses.testing.errors import Attempt, Broken, Skipped, succeeds
from subclasses.testing.reach import WHOLE, Case
from subclasses.testing.subject import Subject, is_differentiable, once, seed
from subclasses.testing.values import pair_cases, plains_of, two

# ---- autograd ----------------------------------------------------------------------------------------------


def live(result: Any) -> list[Tensor]:
    """The results that require grad."""
    return [t for t in leaves(result) if isinstance(t, Tensor) and t.requires_grad]


def ones_for(results: Sequence[Tensor]) -> list[Tensor]:
    """A plain cotangent for each result: small numbers, not all equal."""
    return [like(torch.empty(t.shape, dtype=t.dtype, device=t.device)) + 1 for t in results]


def gradients_by(tensors: Sequence[Tensor], result: Any) -> Sequence[Any]:
    """The gradient of a result by each tensor, for plain cotangents; None for a tensor without a gradient."""
    results = live(result)
    if not results or not tensors:
        return [None] * len(tensors)
    return torch.autograd.grad(results, tensors, ones_for(results), allow_unused=True)


@once
def differentiable(s: Subject) -> list[Case]:
    """The recorded cases that have a gradient in eager mode."""
    return [
        case for case in recorded(s) if succeeds(lambda c=case: gradients_by([x := s.trainable()], c.run(x)))
    ]


# ---- by values and plain operands, compared with the reference -------------------------------------------------


def value_gradients(s: Subject, case: Case) -> None:
    """Compares the gradient by a value with the gradient by the tensors that it represents."""
    plains = [plain.requires_grad_() for plain in plains_of(s, s.make())]
    expected = [gradients_by([plain], case.run(plain)) for plain in plains]
    x = s.trainable()
    _check_gradients(s, case, {case.name: x}, case.run(x), expected)


def pair_gradients(s: Subject, case: Case) -> None:
    """Compares the gradients of an op on two values by each of them."""
    plains = [[t.requires_grad_() for t in pair] for pair in plains_of(s, two(s))]
    expected = [gradients_by(pair, case.run(pair)) for pair in plains]
    values = [value.requires_grad_() for value in two(s)]
    names = [f"{case.name} by {name}" for name in "xy"]
    _check_gradients(s, case, dict(zip(names, values, strict=True)), case.run(values), expected)


def recorded_pairs(s: Subject) -> list[Case]:
    """The calls of two values with a derivative that the class takes."""
    s.trainable()

    def takes(case: Case) -> None:
        for pair in plains_of(s, two(s)):
            gradients_by(pair, case.run([t.requires_grad_() for t in pair]))
        with torch.no_grad():
            case.run(two(s))

    return [case for case in pair_cases(s) if succeeds(takes, case)]


def operand_gradients(s: Subject, case: Case) -> None:
    """Compares the gradients by the plain operands that a case makes."""
    x = s.make().detach()
    if not s.has_reference or len(s.reference(x)) != 1:
        raise Skipped("values stand for no plain tensors, or for several")
    grads = []
    for operand in (x, plains_of(s, x)[0]):
        with operands_with_gradients() as operands:
            result = case.run(operand)
        grads.append(gradients_by(operands, result))
    for number, (got, wanted) in enumerate(zip(*grads, strict=True), 1):
        what = f"the gradient of plain operand {number} of {case.name}"
        _check_gradient(s, what, None, got, [wanted])


def _check_gradients(
    s: Subject, case: Case, values: Mapping[str, Any], result: Any, expected: Sequence[Sequence[Any]]
) -> None:
    if not live(result) and any(_is_nonzero(e) for grads in expected for e in grads):
        if not any(is_differentiable(t) for x in values.values() for t in s.inners(x).values()):
            raise Skipped("no inner tensor is differentiable")
        raise Broken(f"the result of {case.name} does not require grad")
    got = gradients_by([*values.values()], result)
    for (what, x), g, wanted in zip(values.items(), got, zip(*expected, strict=True), strict=True):
        _check_gradient(s, f"the gradient of {what}", x, g, wanted)


def _check_gradient(s: Subject, what: str, x: Any, got: Any, expected: Sequence[Tensor | None]) -> None:
    """Raises unless a gradient by a value agrees with the gradients by the tensors that it represents."""
    wanted = [e for e in expected if e is not None]
    if got is None or len(wanted) < len(expected):
        if not isinstance(got, s.cls) and _is_nonzero(got):
            raise Broken(f"{what} should be none and is not")
        if any(map(_is_nonzero, wanted)):
            raise Broken(f"{what} is lost")
    elif x is not None and got.shape != x.shape:
        raise Broken(f"{what} has another shape", str(list(got.shape)), str(list(x.shape)))
    elif problem := _gradient_difference(s, x, got, wanted):
        raise Broken(f"{what} is wrong: {problem}")


def _is_nonzero(gradient: Any) -> bool:
    return gradient is not None and bool((gradient != 0).any())


def _gradient_difference(s: Subject, x: Any, got: Any, wanted: Sequence[Tensor]) -> str | None:
    """How a gradient by a value differs from the gradients by the tensors that it represents, or None.

    A gradient of the class may hold the gradients by the inner tensors, or be a value that represents the plain
    gradient. A plain tensor is itself the plain gradient.
    """
    if x is None or not isinstance(got, s.cls):
        return next(filter(None, (difference(s, got, w) for w in wanted)), None)
    pulled = _pull_to_inners(s, x, wanted) or {}
    by_inner = next(filter(None, (difference(s, getattr(got, n), g) for n, g in pulled.items())), None)
    if pulled and by_inner is None:
        return None
    pairs = zip(s.reference(got), wanted, strict=True)
    stands = next(filter(None, (difference(s, g, w) for g, w in pairs)), None)
    return stands and (by_inner or stands)


def _pull_to_inners(s: Subject, x: Any, cotangents: Sequence[Tensor]) -> dict[str, Tensor] | None:
    """Pulls cotangents of the tensors that a value represents back to its inner tensors.

    Returns:
        The gradient by each differentiable inner tensor; None if autograd cannot record the reference.
    """
    inners = s.inners(x.detach())
    names = [n for n, t in inners.items() if is_differentiable(t)]
    with torch.enable_grad():
        opened = {n: t.detach().requires_grad_() if n in names else t for n, t in inners.items()}
        pairs = zip(s.reference(s.unflatten(x, opened)), cotangents, strict=True)
        pairs = [(p, c) for p, c in pairs if p.requires_grad]
        if not pairs or not names:
            return None
        plains, wanted = zip(*pairs, strict=True)
        leaves_of = [opened[n] for n in names]
        grads = torch.autograd.grad(plains, leaves_of, wanted, allow_unused=True, materialize_grads=True)
    return dict(zip(names, grads, strict=True))


def cotangents(s: Subject, case: Case) -> None:
    """Compares the gradients for a plain cotangent and one of the class, which stays as it was."""
    x = s.trainable()
    results = [t for t in live(case.run(x)) if isinstance(t, s.cls)]
    if not results:
        return
    plain, result = ones_for(results[:1])[0], results[0]
    parts = _pull_to_inners(s, result, [plain] * len(s.reference(result.detach())))
    if parts is None:
        return
    inners = s.inners(result.detach()) | parts
    own = s.unflatten(result.detach(), {n: t.detach() for n, t in inners.items()})
    if hasattr(own, "__coerce_tangent_metadata__"):  # a class tells PyTorch so what its cotangents look like
        own = own.__coerce_tangent_metadata__()
    before = snapshot(s, own)
    (got,) = torch.autograd.grad(result, x, own, allow_unused=True, retain_graph=True)
    check_equal(s, f"the caller's cotangent of {case.name}", own, before)
    (expected,) = torch.autograd.grad(result, x, plain, allow_unused=True)
    if problem := _difference_in_meaning(s, x, got, expected):
        raise Broken(
            f"{case.name}: a cotangent of the class and a plain one give different gradients: {problem}"
        )


def _difference_in_meaning(s: Subject, x: Any, got: Any, expected: Any) -> str | None:
    """How two gradients by a value differ in meaning, or None; each is of the class or plain."""
    if got is None or expected is None:
        return None if got is expected else "one kind gives none"
    if isinstance(got, s.cls) and isinstance(expected, s.cls):
        pairs = [(t, getattr(expected, n)) for n, t in s.inners(got).items() if is_differentiable(t)]
        return next(filter(None, (difference(s, g, e) for g, e in pairs)), None)
    own, plain = (got, expected) if isinstance(got, s.cls) else (expected, got)
    return _gradient_difference(s, x, own, [plain] * len(s.reference(x.detach())))


# ---- by inner tensors ----------------------------------------------------------------------------------------


def inner_requires_grad(s: Subject, case: Case) -> None:
    """Raises where inner tensors that require grad are kept as they are, or cut off, without an error."""
    if problem := _unconnected(s):
        raise Broken(problem)


@once
def _unconnected(s: Subject) -> str:
    """Why no gradient can reach the inner tensors that a value was made from; empty if it can."""
    wanted, made = _with_live_inners(s)
    held = [field_name(n) for n, t in s.inners(made).items() if isinstance(t, Tensor) and t.requires_grad]
    if held:
        return (
            f"the value holds inner tensors that require grad ({', '.join(held)}); they never get a gradient"
        )
    lost = f"{', '.join(wanted)} require grad, the value made from them does not: gradients are lost"
    return "" if made.requires_grad else lost


def _with_live_inners(s: Subject) -> tuple[list[str], Any]:
    """The fields of the inner tensors that can require grad, and a value made from such tensors.

    Raises:
        Skipped: there are none, or the kit has no way to make a value.
        NotImplementedError: the class refuses them.
    """
    x = s.make().detach()
    inners = {n: t.detach().requires_grad_(is_differentiable(t)) for n, t in s.inners(x).items()}
    wanted = [field_name(n) for n, t in inners.items() if t.requires_grad]
    if not wanted:
        raise Skipped("no inner tensor is differentiable")
    s.builder(x)
    try:
        return wanted, s.construct(x, inners)
    except Exception as error:
        raise NotImplementedError(f"inner tensors that require grad: {error}") from error


# A function of inner tensors to a number, in float64.
Total = Callable[[Mapping[str, Tensor]], Tensor | float]

# Two steps of differences in float64. The tolerance between a slope and the differences, and between the differences of
# both steps. The largest distance between the slopes of the two sides.
_STEP, _LONG_STEP, _TOLERANCE, _KINK = 1e-6, 1e-5, 1e-4, 1e-3


def inner_gradients(s: Subject, case: Case) -> None:
    """Compares gradients by the inner tensors with differences, for the plain tensors that results represent.

    By decision of PyTorch the derivative of some ops is no slope for a plain tensor either: the derivative of
    ``F.embedding(i, x, padding_idx=0)`` is zero in row 0. The expected gradient is then the gradient of the op on
    materialize().
    """
    if _estimates(s):
        raise Skipped(
            "what materialize() gives has another gradient than its differences; see `materialize_gradients`"
        )
    slopes = _slopes_of(s, case)
    has_materialize = s.declared and s.cls.__spec__.has_materialize
    if slopes is None or not (has_materialize or _are_close(s, *slopes) or _is_slope_of_plain(s, case)):
        return
    got, expected = slopes
    if has_materialize:
        decided = _slopes_of(s, Case(case.name, lambda x: case.run(x.materialize())))
        if decided is not None and not _are_close(s, *decided):
            expected = decided[0]
    if not _are_close(s, got, expected):
        raise Broken(
            f"the gradient of {', '.join(map(_shown, _doubles(s)[1]))} through {case.name} is wrong: the slope in "
            f"a random direction is",
            f"{got:.4g} by autograd",
            f"{expected:.4g} by differences",
        )


@once
def _estimates(s: Subject) -> bool:
    """Whether materialize() has another gradient than its differences."""
    slopes = _slopes_of(s, WHOLE) if s.declared and s.cls.__spec__.has_materialize else None
    return slopes is not None and not _are_close(s, *slopes)


def materialize_gradients(s: Subject, case: Case) -> None:
    """Compares the gradient of materialize() by each inner tensor with differences."""
    if not s.declared or not s.cls.__spec__.has_materialize:
        raise Skipped(f"{s.name} has no materialize()")
    for name in _doubles(s)[1]:
        slopes = _slopes_of(s, WHOLE, name)
        if slopes is not None and not _are_close(s, *slopes):
            lost = f"depends on {_shown(name)}, which gets no gradient from it"
            other = f"has another gradient by {_shown(name)} than its differences, in a random direction"
            words = other if slopes[0] else lost
            raise Broken(f"what materialize() gives {words}", *(f"{slope:.4g}" for slope in slopes))


def _doubles(s: Subject) -> tuple[Any, dict[str, Tensor]]:
    """A value, and its floating point tensors by path, in float64.

    Raises:
        Skipped: no value can be made of them, or the kit has no way to make one.
    """
    source = s.make().detach()
    with Attempt() as attempt:
        if _unconnected(s):
            raise Skipped("inner tensors are not connected to the value; see `inner_requires_grad`")
    if attempt.error is not None:
        raise Skipped(str(attempt.error)) from attempt.error
    floats: dict[str, Tensor] = {}

    def keep(path: str, t: Tensor) -> Tensor:
        if not (t.is_floating_point() and t.dtype.itemsize > 1):
            return t
        return floats.setdefault(path, t.double())

    inners = s.changed(source, keep)
    if not floats or not succeeds(s.construct, source, inners):
        raise Skipped("no value of float64 can be made, whose differences would tell the gradients")
    return source, floats


def _shown(path: str) -> str:
    return path.replace(RAW, "")


def _slopes_of(s: Subject, case: Case, *only: str) -> tuple[float, float] | None:
    """The slopes of the plain tensors that a case's results represent, by autograd and by differences.

    Returns None where there is no slope.
    """
    source, floats = _doubles(s)
    exact: list[bool] = []

    def total(moved: Mapping[str, Tensor]) -> Tensor | float:
        s.make()  # the same random numbers for each
        moves = {**floats, **moved}
        parts = _real_parts(
            s, leaves(case.run(s.construct(source, s.changed(source, lambda path, t: moves.get(path, t)))))
        )
        exact.extend(part.dtype == torch.float64 for part in parts)
        seed(0)
        return sum((torch.randn(part.shape, dtype=torch.float64) * part).sum() for part in parts)

    found = _slopes(total, {n: floats[n] for n in only or floats})
    return found if all(exact) else None


def _real_parts(s: Subject, results: Sequence[Any]) -> list[Tensor]:
    """The plain floating point tensors that results represent: materialize(), or the inner tensors, to any depth."""
    parts: list[Tensor] = []
    for t in filter(is_differentiable, results):
        if isinstance(t, TensorSubclass):
            value: Any = t
            inside = [value.materialize()] if value.__spec__.has_materialize else [*value.unwrap()]
            parts += _real_parts(s, inside)
        elif isinstance(t, s.cls):
            parts += _real_parts(s, s.reference(t))
        else:
            parts.append(torch.view_as_real(t.resolve_conj()) if t.is_complex() else t)
    return parts


def _is_slope_of_plain(s: Subject, case: Case) -> bool:
    """Whether PyTorch's derivative is the slope for a plain tensor, as far as there is one."""
    plain = stand_ins(s)[0]
    plain = plain.to(torch.complex128 if plain.is_complex() else torch.float64)

    def total(moved: Mapping[str, Tensor]) -> Tensor | float:
        s.make()
        parts = _real_parts(s, leaves(case.run(moved["x"])))
        seed(0)
        return sum((torch.randn(part.shape, dtype=torch.float64) * part).sum() for part in parts)

    with Attempt() as attempt:
        slopes = _slopes(total, {"x": plain})
        return slopes is None or _are_close(s, *slopes)
    return attempt.error is not None


def _slopes(total: Total, at: Mapping[str, Tensor]) -> tuple[float, float] | None:
    """The slopes of a function in a random direction, by autograd and by differences; None where it has none."""
    seed(1)
    directions = {n: torch.randn_like(t) for n, t in at.items()}

    def at_step(step: float) -> float:
        with torch.no_grad():
            return float(total({n: t + step * directions[n] for n, t in at.items()}))

    here, slopes = at_step(0.0), []
    if not math.isfinite(here):
        return None
    for step in (_STEP, _LONG_STEP):
        behind, ahead = at_step(-step), at_step(step)
        slopes.append((ahead - behind) / (2 * step))
        if abs(ahead + behind - 2 * here) / step > _KINK * max(1, abs(slopes[-1])):
            return None
    short, long = slopes
    if abs(short - long) > _TOLERANCE / 2 * max(1, abs(short)):
        return None
    open_at = {n: t.clone().requires_grad_() for n, t in at.items()}
    result = total(open_at)
    grads: Sequence[Any] = ()
    if isinstance(result, Tensor) and result.requires_grad:
        grads = torch.autograd.grad(result, [*open_at.values()], allow_unused=True)
    got = sum(
        float((g.conj() * d).real.sum())
        for g, d in zip(grads, directions.values(), strict=False)
        if g is not None
    )
    return got, short


def _are_close(s: Subject, got: float, expected: float) -> bool:
    tolerance = max(_TOLERANCE, s.options.get("rtol") or 0.0)
    return abs(got - expected) <= tolerance * max(1, abs(expected))
