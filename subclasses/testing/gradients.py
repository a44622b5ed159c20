"""Promises about gradients: of a value, of its inner tensors, for every kind of cotangent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from subclasses.testing.cases import Case, accepted, like, recorded
from subclasses.testing.compare import check_equal, difference, leaves, snapshot
from subclasses.testing.ops import collect_problems
from subclasses.testing.promise import Attempt, Broken, Skipped, promise, shown
from subclasses.testing.subject import Subject, is_differentiable


def live(result: Any) -> list[Tensor]:
    """The results that gradients flow back from."""
    return [t for t in leaves(result) if isinstance(t, Tensor) and t.requires_grad]


def ones_for(results: Sequence[Tensor]) -> list[Tensor]:
    """A plain cotangent for each result: small numbers, not all equal."""
    return [like(torch.empty(t.shape, dtype=t.dtype, device=t.device)) + 1 for t in results]


def plain_gradients(s: Subject, case: Case, x: Any) -> list[Tensor | None]:
    """The gradient by each tensor that a value stands for; None where there is none."""
    grads: list[Tensor | None] = []
    for plain in s.reference(x.detach()):
        p = plain.detach().clone().requires_grad_()
        results = live(case.run(p))
        if not results:
            return [None for _ in s.reference(x.detach())]
        (grad,) = torch.autograd.grad(results, p, ones_for(results), allow_unused=True)
        grads.append(grad)
    return grads


def pull_to_inners(s: Subject, x: Any, cotangents: Sequence[Tensor]) -> dict[str, Tensor] | None:
    """Cotangents of what a value stands for, carried to its inner tensors; None if that cannot be recorded."""
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


def check_gradient(s: Subject, what: str, x: Any, got: Any, expected: Sequence[Tensor | None]) -> None:
    """Raises unless a gradient by a value means the gradients by what it stands for.

    A gradient of the class may hold the gradients by the inner tensors, or be a value that stands for the plain
    gradient; a plain one is the plain gradient.
    """
    wanted = [e for e in expected if e is not None]
    if got is None or len(wanted) < len(expected):
        if got is not None and not isinstance(got, s.cls) and bool((got != 0).any()):
            raise Broken(f"the gradient of {what} should be none and is not")
        if any(bool((e != 0).any()) for e in wanted):
            raise Broken(f"the gradient of {what} is lost")
        return
    if got.shape != x.shape:
        raise Broken(f"the gradient of {what} has shape {list(got.shape)}, the value {list(x.shape)}")
    if not isinstance(got, s.cls):
        problems = [difference(s, got, e) for e in wanted]
    else:
        problems = _class_gradient_problems(s, x, got, wanted)
    problem = next((p for p in problems if p), None)
    if problem:
        raise Broken(f"the gradient of {what} is wrong: {problem}")


def _class_gradient_problems(s: Subject, x: Any, got: Any, wanted: Sequence[Tensor]) -> list[str | None]:
    pulled = pull_to_inners(s, x, wanted)
    by_inner = None
    if pulled is not None:
        by_inner = [difference(s, getattr(got, n), g) for n, g in pulled.items()]
        if not any(by_inner):
            return []
    stands = [difference(s, g, w) for g, w in zip(s.reference(got), wanted, strict=True)]
    return by_inner if by_inner is not None and any(stands) else stands


# ---- by the value ------------------------------------------------------------------------------------------


@promise(
    "a rule above autograd must be made of differentiable parts (unwrap, not raw inner tensors); a rule below "
    "it must compute what PyTorch's formula for the op assumes"
)
def gradients(s: Subject) -> None:
    """The gradient by a value means the gradient by the tensor that it stands for."""
    s.trainable()
    differentiable = s.cache.setdefault("differentiable", [])

    def run(case: Case) -> None:
        expected = plain_gradients(s, case, s.make())
        x = s.trainable()
        results = live(case.run(x))
        if not results:
            if any(e is not None and bool((e != 0).any()) for e in expected):
                raise Broken(f"the result of {case.name} does not require grad")
            return
        (got,) = torch.autograd.grad(results, x, ones_for(results), allow_unused=True)
        check_gradient(s, case.name, x, got, expected)
        differentiable.append(case)

    collect_problems(s, recorded(s), run)


# ---- by the inner tensors ----------------------------------------------------------------------------------


def with_live_inners(s: Subject) -> tuple[Any, dict[str, Tensor]] | None:
    """A value made from inner tensors that require grad, and these; None if the class refuses it."""
    x = s.make().detach()
    inners = {n: t.detach() for n, t in s.inners(x).items()}
    wanted = {n: t.requires_grad_() for n, t in inners.items() if is_differentiable(t)}
    if not wanted:
        raise Skipped("no inner tensor is differentiable")
    value = None
    with Attempt() as attempt:
        value = s.construct(x, inners)
    if isinstance(attempt.error, Skipped):
        raise attempt.error
    if attempt.error is not None:
        s.refused.append(f"construction from inner tensors that require grad: {shown(attempt.error)}")
        return None
    return value, wanted


@promise(
    "in __new__, raise for an inner tensor that requires grad, or detach it and connect it to the value by an "
    "autograd.Function (subclasses.TensorSubclass does): autograd sees the outer tensor alone"
)
def inner_requires_grad(s: Subject) -> None:
    """An inner tensor that requires grad gets its gradient, or is refused."""
    made = with_live_inners(s)
    if made is None:
        return
    problem = _unconnected(s, *made)
    if problem:
        raise Broken(problem)


def _unconnected(s: Subject, x: Any, wanted: Mapping[str, Tensor]) -> str | None:
    """Why no gradient can reach the inner tensors that a value was made from, or None."""
    held = [n for n, t in s.inners(x).items() if isinstance(t, Tensor) and t.requires_grad]
    if held:
        return (
            f"the value holds inner tensors that require grad ({', '.join(held)}); they never get a gradient"
        )
    if not x.requires_grad:
        return f"{', '.join(wanted)} require grad, the value made from them does not: gradients are lost"
    return None


@promise(
    "a rule above autograd reads inner tensors with x.unwrap(name), which is differentiable; x.name is raw. A "
    "class that takes plain cotangents says with wrap_cotangent what they mean"
)
def inner_gradients(s: Subject) -> None:
    """Each differentiable inner tensor gets its gradient through each op."""
    made = with_live_inners(s)
    if made is None:
        return
    if _unconnected(s, *made):
        raise Skipped("inner tensors are not connected to the value; see inner_requires_grad")

    def run(case: Case) -> None:
        made = with_live_inners(s)
        assert made is not None, "the same construction as before"
        x, wanted = made
        expected = _expected_by_inners(s, case, list(wanted))
        results = live(case.run(x))
        if not results and any(e is not None and bool((e != 0).any()) for e in expected):
            raise Broken(f"the result of {case.name} does not require grad")
        if not results:
            return
        got = torch.autograd.grad(results, list(wanted.values()), ones_for(results), allow_unused=True)
        for name, g, e in zip(wanted, got, expected, strict=True):
            _check_inner(s, f"{name} through {case.name}", g, e)

    collect_problems(s, recorded(s), run)


def _expected_by_inners(s: Subject, case: Case, names: list[str]) -> Sequence[Tensor | None]:
    """Gradients by inner tensors of the op on the reference, recorded from the inner tensors on."""
    x = s.make().detach()
    inners = {n: t.detach().requires_grad_(n in names) for n, t in s.inners(x).items()}
    plains = s.reference(s.unflatten(x, inners))
    results = [t for p in plains for t in live(case.run(p))]
    if not results:
        return [None] * len(names)
    return torch.autograd.grad(results, [inners[n] for n in names], ones_for(results), allow_unused=True)


def _check_inner(s: Subject, what: str, got: Tensor | None, expected: Tensor | None) -> None:
    zero = torch.zeros(())
    if got is None and expected is None:
        return
    got = zero.expand(expected.shape).to(expected.dtype) if got is None and expected is not None else got
    expected = torch.zeros_like(got) if expected is None and got is not None else expected
    problem = difference(s, got, expected)
    if problem:
        raise Broken(f"the gradient of {what} is wrong: {problem}")


# ---- rules -------------------------------------------------------------------------------------------------


@promise("pass the ops with arguments: check(..., ops={op: lambda x: (arguments with x among them)})")
def rules_tried(s: Subject) -> None:
    """Every rule of a declared class is put to the test, gradients included."""
    if not s.declared:
        raise Skipped("only a declared class lists its rules")
    from subclasses.testing.hits import missed_rules

    missed = missed_rules(s, accepted(s))
    if missed:
        raise Skipped(
            f"not tried: {', '.join(missed)}; pass ops={{op: lambda x: (arguments with x in them)}}"
        )


# ---- cotangents --------------------------------------------------------------------------------------------


@promise(
    "a cotangent arrives as a value of the class or as a plain tensor of the outer size: take both (see "
    "wrap_cotangent), or raise; never write into it"
)
def cotangents(s: Subject) -> None:
    """A cotangent of the class and a plain one give the same gradient, and are left as they were."""
    s.trainable()

    def run(case: Case) -> None:
        x = s.trainable()
        results = [t for t in live(case.run(x)) if isinstance(t, s.cls)]
        if not results:
            return
        plain = ones_for(results[:1])[0]
        parts = pull_to_inners(s, results[0], [plain] * len(s.reference(results[0].detach())))
        if parts is None:
            return
        own = _like_value(s, results[0].detach(), parts)
        before = snapshot(s, own)
        (got,) = torch.autograd.grad(results[0], x, own, allow_unused=True, retain_graph=True)
        check_equal(s, f"the caller's cotangent of {case.name}", own, before)
        (expected,) = torch.autograd.grad(results[0], x, plain, allow_unused=True)
        _check_same_meaning(s, case, x, got, expected)

    collect_problems(s, recorded(s), run)


def _like_value(s: Subject, x: Any, parts: Mapping[str, Tensor]) -> Any:
    inners = {n: parts.get(n, t) for n, t in s.inners(x).items()}
    value = s.unflatten(x, {n: t.detach() for n, t in inners.items()})
    # The hook by which a class tells PyTorch what its cotangents look like.
    return value.__coerce_tangent_metadata__() if hasattr(value, "__coerce_tangent_metadata__") else value


def _check_same_meaning(s: Subject, case: Case, x: Any, got: Any, expected: Any) -> None:
    """Two gradients by a value, each of the class or plain, must mean the same."""
    if got is None or expected is None or type(got) is type(expected):
        if (got is None) != (expected is None):
            raise Broken(f"{case.name}: one kind of cotangent gives a gradient, the other none")
        problem = got is not None and _inner_difference(s, got, expected)
    else:
        own, plain = (got, expected) if isinstance(got, s.cls) else (expected, got)
        count = len(s.reference(x.detach()))
        problem = next((p for p in _class_gradient_problems(s, x, own, [plain] * count) if p), None)
    if problem:
        raise Broken(
            f"{case.name}: a cotangent of the class and a plain one give different gradients: {problem}"
        )


def _inner_difference(s: Subject, got: Any, expected: Any) -> str | None:
    if not isinstance(got, s.cls):
        return difference(s, got, expected)
    found = [difference(s, t, getattr(expected, n)) for n, t in s.inners(got).items() if is_differentiable(t)]
    return next((p for p in found if p), None)
