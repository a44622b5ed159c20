"""Gradients: by a value, by its inner tensors, for every kind of cotangent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from subclasses.layout import field_name
from subclasses.testing.cases import like, once, operands_with_gradients, recorded
from subclasses.testing.compare import check_equal, check_none, difference, leaves, snapshot
from subclasses.testing.errors import Broken, Skipped, succeeds
from subclasses.testing.faults import explaining
from subclasses.testing.properties.slopes import check_slope_of_op
from subclasses.testing.property import Case, promise
from subclasses.testing.subject import Subject, is_differentiable

# ---- computing gradients -----------------------------------------------------------------------------------


def live(result: Any) -> list[Tensor]:
    """The results that require grad."""
    return [t for t in leaves(result) if isinstance(t, Tensor) and t.requires_grad]


def ones_for(results: Sequence[Tensor]) -> list[Tensor]:
    """A plain cotangent for each result: small numbers, not all equal."""
    return [like(torch.empty(t.shape, dtype=t.dtype, device=t.device)) + 1 for t in results]


def gradients_by(tensors: Sequence[Tensor], result: Any) -> Sequence[Any]:
    """The gradient of a result by each tensor, for plain cotangents; None for a tensor without a gradient."""
    results = live(result)
    if not results:
        return [None] * len(tensors)
    return torch.autograd.grad(results, tensors, ones_for(results), allow_unused=True)


def _is_nonzero(gradient: Any) -> bool:
    return gradient is not None and bool((gradient != 0).any())


def check_requires_grad(
    s: Subject, case: Case, values: Sequence[Any], result: Any, expected: Sequence[Any]
) -> None:
    """Raises if a result is cut off from autograd and the gradient of its reference is not zero.

    Raises:
        Skipped: the values hold integers alone, by which nothing is differentiated.
    """
    if not live(result) and any(map(_is_nonzero, expected)):
        if not any(is_differentiable(t) for x in values for t in s.inners(x).values()):
            raise Skipped("no inner tensor is differentiable")
        raise Broken(f"the result of {case.name} does not require grad")


def _first(problems: Iterable[str | None]) -> str | None:
    return next((p for p in problems if p), None)


# ---- comparing gradients -----------------------------------------------------------------------------------


def _pull_to_inners(s: Subject, x: Any, cotangents: Sequence[Tensor]) -> dict[str, Tensor] | None:
    """Pulls cotangents of the tensors that a value stands for back to its inner tensors.

    Returns:
        The gradient by each differentiable inner tensor; None if autograd cannot record the reference.
    """
    inners = s.inners(x.detach())
    names = [n for n, t in inners.items() if is_differentiable(t)]
    with torch.enable_grad():
        open_inners = {n: t.detach().requires_grad_() if n in names else t for n, t in inners.items()}
        pairs = list(zip(s.reference(s.unflatten(x, open_inners)), cotangents, strict=True))
        pairs = [(p, c) for p, c in pairs if p.requires_grad]
        if not pairs or not names:
            return None
        plains, wanted = zip(*pairs, strict=True)
        grads = torch.autograd.grad(
            plains, [open_inners[n] for n in names], wanted, allow_unused=True, materialize_grads=True
        )
    return dict(zip(names, grads, strict=True))


def _gradient_difference(s: Subject, x: Any, got: Any, wanted: Sequence[Tensor]) -> str | None:
    """How a gradient by a value differs from the gradients by the tensors that it stands for, or None.

    A gradient of the class may hold the gradients by the inner tensors, or be a value that stands for the plain
    gradient. A plain one is the plain gradient.
    """
    if not isinstance(got, s.cls):
        return _first(difference(s, got, w) for w in wanted)
    pulled = _pull_to_inners(s, x, wanted)
    by_inner = _first(difference(s, getattr(got, n), g) for n, g in pulled.items()) if pulled else None
    if pulled and by_inner is None:
        return None
    stands = _first(difference(s, g, w) for g, w in zip(s.reference(got), wanted, strict=True))
    return stands and (by_inner or stands)


def check_gradient(s: Subject, what: str, x: Any, got: Any, expected: Sequence[Tensor | None]) -> None:
    """Raises unless a gradient by a value means the gradients by the tensors that it stands for."""
    wanted = [e for e in expected if e is not None]
    if got is None or len(wanted) < len(expected):
        if not isinstance(got, s.cls) and _is_nonzero(got):
            raise Broken(f"the gradient of {what} should be none and is not")
        if any(map(_is_nonzero, wanted)):
            raise Broken(f"the gradient of {what} is lost")
        return
    if got.shape != x.shape:
        raise Broken(f"the gradient of {what} has shape {list(got.shape)}, the value {list(x.shape)}")
    check_none(f"the gradient of {what} is wrong", _gradient_difference(s, x, got, wanted))


# ---- by the value ------------------------------------------------------------------------------------------


@promise(
    "a rule above autograd must be made of differentiable parts (unwrap, not raw inner tensors); a rule below "
    "it must compute what PyTorch's formula for the op assumes",
    cases=recorded,
    of_right_values=True,
)
def gradients(s: Subject, case: Case) -> None:
    """The gradient by a value means the gradient by the tensor that it stands for."""
    plains = [plain.detach().clone().requires_grad_() for plain in s.reference(s.make().detach())]
    expected = [gradients_by([plain], case.run(plain))[0] for plain in plains]
    x = s.trainable()
    with explaining(s, case):
        result = case.run(x)
        check_requires_grad(s, case, [x], result, expected)
        check_gradient(s, case.name, x, gradients_by([x], result)[0], expected)


@once
def differentiable(s: Subject) -> list[Case]:
    """The recorded cases that have a gradient in eager mode."""

    def differentiate(case: Case) -> None:
        x = s.trainable()
        results = live(case.run(x))
        torch.autograd.grad(results, x, ones_for(results), allow_unused=True)

    return [case for case in recorded(s) if succeeds(differentiate, case)]


# ---- by a plain operand --------------------------------------------------------------------------------------


def _operand_gradients(case: Case, x: Any) -> Sequence[Any]:
    """The gradients of a case by the plain operands that it makes."""
    with operands_with_gradients() as operands:
        result = case.run(x)
    return gradients_by(operands, result)


@promise(
    "a rule above autograd computes with a plain operand as it comes, not with operand.detach(), .data or under "
    "no_grad; a rule below it must compute what PyTorch's formula for the op assumes",
    cases=recorded,
    of_right_values=True,
)
def operand_gradients(s: Subject, case: Case) -> None:
    """A plain operand of an op, such as the input of a layer, gets the gradient that the reference gives it."""
    if not s.has_reference:
        raise Skipped("values stand for no plain tensors")
    x = s.make().detach()
    plains = [plain.detach().clone() for plain in s.reference(x)]
    if len(plains) != 1:
        raise Skipped("a value stands for several tensors")
    expected = _operand_gradients(case, plains[0])
    with explaining(s, case, reads=False):
        for number, (g, e) in enumerate(zip(_operand_gradients(case, x), expected, strict=True), 1):
            if not (_is_nonzero(g) or _is_nonzero(e)):
                continue
            which = (
                f"plain operand {number} of {case.name}"
                if len(expected) > 1
                else f"the plain operand of {case.name}"
            )
            if g is None or e is None:
                raise Broken(
                    f"the gradient of {which} {'is lost' if g is None else 'should be none and is not'}"
                )
            check_none(f"the gradient of {which} is wrong", difference(s, g, e))


# ---- by the inner tensors ----------------------------------------------------------------------------------


def _with_live_inners(s: Subject) -> tuple[Any, dict[str, Tensor]]:
    """A value made from inner tensors that require grad, and these."""
    x = s.make().detach()
    inners = {n: t.detach() for n, t in s.inners(x).items()}
    wanted = {n: t.requires_grad_() for n, t in inners.items() if is_differentiable(t)}
    if not wanted:
        raise Skipped("no inner tensor is differentiable")
    what = "construction from inner tensors that require grad"
    return s.call(what, lambda: s.construct(x, inners), any_error=True), wanted


@promise(
    "in __new__, raise for an inner tensor that requires grad, or detach it and connect it to the value by an "
    "autograd.Function (subclasses.TensorSubclass does): autograd sees the outer tensor alone"
)
def inner_requires_grad(s: Subject) -> None:
    """An inner tensor that requires grad gets its gradient, or is refused."""
    problem = _unconnected(s, *_with_live_inners(s))
    if problem:
        raise Broken(problem)


def _unconnected(s: Subject, x: Any, wanted: Mapping[str, Tensor]) -> str | None:
    """Why no gradient can reach the inner tensors that a value was made from, or None."""
    held = [field_name(n) for n, t in s.inners(x).items() if isinstance(t, Tensor) and t.requires_grad]
    if held:
        return (
            f"the value holds inner tensors that require grad ({', '.join(held)}); they never get a gradient"
        )
    if not x.requires_grad:
        names = ", ".join(map(field_name, wanted))
        return f"{names} require grad, the value made from them does not: gradients are lost"
    return None


def _recorded_by_inners(s: Subject) -> list[Case]:
    if _unconnected(s, *_with_live_inners(s)):
        raise Skipped("inner tensors are not connected to the value; see inner_requires_grad")
    return recorded(s)


@promise(
    "a rule for a function reads inner tensors with x.unwrap(name), which is differentiable; x.name is raw. A "
    "class that takes plain cotangents says with wrap_cotangent what they mean",
    cases=_recorded_by_inners,
    of_right_values=True,
)
def inner_gradients(s: Subject, case: Case) -> None:
    """Each differentiable inner tensor gets its gradient through each op."""
    if not s.has_reference and s.declared:
        return check_slope_of_op(s, case)
    x, wanted = _with_live_inners(s)
    source = s.make().detach()
    inners = {n: t.detach().requires_grad_(n in wanted) for n, t in s.inners(source).items()}
    plains = s.reference(s.unflatten(source, inners))
    expected = gradients_by([inners[n] for n in wanted], [case.run(p) for p in plains])
    with explaining(s, case):
        result = case.run(x)
        check_requires_grad(s, case, [x], result, expected)
        for name, g, e in zip(wanted, gradients_by([*wanted.values()], result), expected, strict=True):
            if g is not None or e is not None:
                zeros = torch.zeros_like(e if g is None else g)
                problem = difference(s, zeros if g is None else g, zeros if e is None else e)
                check_none(f"the gradient of {field_name(name)} through {case.name} is wrong", problem)


# ---- cotangents --------------------------------------------------------------------------------------------


@promise(
    "a cotangent arrives as a value of the class or as a plain tensor of the outer size: take both (see "
    "wrap_cotangent), or raise; never write into it. A rule for an op that changes some inner tensors alone, such as a "
    "scale, belongs above autograd: register it for the function, such as torch.mul, and use unwrap",
    cases=recorded,
    of_right_values=True,
)
def cotangents(s: Subject, case: Case) -> None:
    """A cotangent of the class and a plain one give the same gradient, and are left as they were."""
    x = s.trainable()
    results = [t for t in live(case.run(x)) if isinstance(t, s.cls)]
    if not results:
        return
    plain = ones_for(results[:1])[0]
    parts = _pull_to_inners(s, results[0], [plain] * len(s.reference(results[0].detach())))
    if parts is None:
        return
    inners = s.inners(results[0].detach()) | parts
    own = s.unflatten(results[0].detach(), {n: t.detach() for n, t in inners.items()})
    if hasattr(own, "__coerce_tangent_metadata__"):  # a class tells PyTorch so what its cotangents look like
        own = own.__coerce_tangent_metadata__()
    before = snapshot(s, own)
    (got,) = torch.autograd.grad(results[0], x, own, allow_unused=True, retain_graph=True)
    check_equal(s, f"the caller's cotangent of {case.name}", own, before)
    (expected,) = torch.autograd.grad(results[0], x, plain, allow_unused=True)
    check_none(
        f"{case.name}: a cotangent of the class and a plain one give different gradients",
        _difference_in_meaning(s, case, x, got, expected),
    )


def _difference_in_meaning(s: Subject, case: Case, x: Any, got: Any, expected: Any) -> str | None:
    """How two gradients by a value differ in meaning, or None; each is of the class or plain."""
    if (got is None) != (expected is None):
        raise Broken(f"{case.name}: one kind of cotangent gives a gradient, the other none")
    if got is None:
        return None
    if type(got) is not type(expected):
        own, plain = (got, expected) if isinstance(got, s.cls) else (expected, got)
        return _gradient_difference(s, x, own, [plain] * len(s.reference(x.detach())))
    if not isinstance(got, s.cls):
        return difference(s, got, expected)
    pairs = [(t, getattr(expected, n)) for n, t in s.inners(got).items() if is_differentiable(t)]
    return _first(difference(s, g, e) for g, e in pairs)
