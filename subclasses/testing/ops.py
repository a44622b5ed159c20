"""Promises about what ops give: as what the value stands for, and the same in every mode."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F

from subclasses._torch import is_traceable_wrapper_subclass
from subclasses.testing.cases import Case, accepted, applicable, functional_cases, recorded
from subclasses.testing.compare import (
    check_stands_for,
    leaves,
    value_difference,
)
from subclasses.testing.promise import Attempt, Broken, Skipped, promise, shown
from subclasses.testing.subject import Subject


def run_on_reference(s: Subject, case: Case, x: Any) -> list[Any]:
    """The results on what a value stands for."""
    with torch.no_grad():
        return [case.run(plain.detach().clone()) for plain in s.reference(x)]


def collect_problems(s: Subject, cases: Iterable[Case], run: Callable[[Case], None]) -> None:
    """Runs each case, and raises with all that went wrong; clean refusals are noted."""
    problems: list[tuple[str, Exception]] = []
    for case in cases:
        with Attempt() as attempt:
            run(case)
        error = attempt.error
        if error is None or s.refuses(case.name, error):
            continue
        text = str(error) if isinstance(error, Broken) else f"{case.name} raised {shown(error)}"
        problems.append((text, error))
    if problems:
        more = f" (and {len(problems) - 3} more calls)" if len(problems) > 3 else ""
        raise Broken("; ".join(text for text, _ in problems[:3]) + more) from problems[0][1]


@promise(
    "write a rule that computes this, or refuse the op: raise subclasses.DispatchError or NotImplementedError "
    "with a message, or return NotImplemented"
)
def values(s: Subject) -> None:
    """An op on a value gives what it gives on the tensor that the value stands for."""

    def run(case: Case) -> None:
        with torch.no_grad():
            got = case.run(s.make())
            check_stands_for(s, case.name, got, run_on_reference(s, case, s.make()))

    collect_problems(s, functional_cases(s), run)


def _check_mode(s: Subject, enter: Callable[[], AbstractContextManager[Any]], made_inside: bool) -> None:
    def run(case: Case) -> None:
        with torch.no_grad():
            expected = case.run(s.make())
        x = None if made_inside else s.make()
        with enter():
            got = case.run(s.make() if x is None else x)
            problem = value_difference(s, got, expected)
        if problem:
            raise Broken(f"{case.name}: {problem}")

    collect_problems(s, accepted(s), run)


@promise(
    "there, composite ops (linear, matmul, reshape) reach __torch_dispatch__ whole: take those without a rule "
    "apart with func.decompose(), as outside of inference mode; views of a value from outside must be made under "
    "torch.inference_mode(False), for they share its version counter"
)
def inference_mode(s: Subject) -> None:
    """An op gives in inference mode what it gives outside of it."""
    for made_inside in (False, True):
        _check_mode(s, torch.inference_mode, made_inside)


@promise("a rule must not look at grad mode, and a rule above autograd must give what the op below it gives")
def grad_mode(s: Subject) -> None:
    """An op gives the same value whether gradients are recorded or not."""

    def run(case: Case) -> None:
        with torch.no_grad():
            expected = case.run(s.make())
        problem = value_difference(s, case.run(s.trainable()), expected)
        if problem:
            raise Broken(f"{case.name}: {problem}")

    s.trainable()
    collect_problems(s, recorded(s), run)


# ---- randomness --------------------------------------------------------------------------------------------

RANDOM: dict[str, Callable[[Any], Any]] = {
    "F.dropout(x)": lambda x: F.dropout(x, 0.5),
    "torch.rand_like(x)": lambda x: torch.rand_like(x),
    "torch.randn_like(x)": lambda x: torch.randn_like(x),
    "x.clone().uniform_()": lambda x: x.clone().uniform_(),
    "torch.bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.5)),
}


@promise(
    "draw from torch's generator at each call, once, by running the op itself on the inner tensors; keep no "
    "generator and no mask"
)
def randomness(s: Subject) -> None:
    """Random ops follow the seed: the same after the same seed, something new at the next call."""
    x = s.make()
    if not (x.is_floating_point() and x.numel() > 8):
        raise Skipped("random ops draw floating point numbers, and want more than 8 of them")

    def run(case: Case) -> None:
        x, draws = s.make(), []
        for seed in (1, 1, None):
            if seed is not None:
                torch.manual_seed(seed)
            with torch.no_grad():
                draws.append(case.run(x))
        problem = value_difference(s, draws[1], draws[0])
        if problem:
            raise Broken(f"{case.name} twice after the same seed: {problem}")
        if value_difference(s, draws[2], draws[1]) is None:
            raise Broken(f"{case.name} gave the same numbers twice, without a seed between")

    collect_problems(s, [Case(n, f) for n, f in RANDOM.items()], run)


@promise("the backward of a random op must use the mask of its forward: save it, do not draw anew")
def random_backward(s: Subject) -> None:
    """Forward and backward of dropout agree on what was dropped."""
    x = s.trainable()
    if not x.is_floating_point():
        raise Skipped("dropout of complex numbers is not defined")
    works, y = s.works("F.dropout(x)", lambda: F.dropout(x, 0.5))
    if not works:
        return
    ones = torch.ones(x.shape, dtype=x.dtype)
    works, grads = s.works("the gradient of F.dropout(x)", lambda: torch.autograd.grad(y, x, ones))
    if not works:
        return
    kept = s.reference(y.detach()) if isinstance(y, s.cls) else (y.detach(),) * len(s.reference(x.detach()))
    (grad,) = grads
    if isinstance(grad, s.cls) and not isinstance(y, s.cls):
        return  # the gradient by inner tensors says nothing entry by entry
    flows = s.reference(grad) if isinstance(grad, s.cls) else (grad,) * len(kept)
    for k, g, plain in zip(kept, flows, s.reference(x.detach()), strict=True):
        if bool(((g != 0) != (k != 0))[plain != 0].any()):
            raise Broken("entries that F.dropout dropped have a gradient, or kept ones have none")


# ---- conjugate and negative bits ---------------------------------------------------------------------------

LAZY: dict[str, Callable[[Any], Any]] = {
    "x.conj()": lambda x: x.conj(),
    "x.conj().clone()": lambda x: x.conj().clone(),
    "x.conj() * x": lambda x: x.conj() * x,
    "x.conj().resolve_conj()": lambda x: x.conj().resolve_conj(),
    "x.conj().conj() + 1": lambda x: x.conj().conj() + 1,
    "x.conj().imag": lambda x: x.conj().imag,
    "x.conj().real": lambda x: x.conj().real,
    "x.mH": lambda x: x.mH,
    "x.conj().sum()": lambda x: x.conj().sum(),
}


@promise(
    "within __torch_dispatch__ PyTorch does not look at the lazy bits of inner tensors (its issue 130646): resolve "
    "them (t.resolve_conj().resolve_neg()) at construction and after _conj and _neg_view, or hand them on to the "
    "outer tensor"
)
def lazy_bits(s: Subject) -> None:
    """Conjugate and negative bits are kept, on a value and on its inner tensors."""
    x = s.make()
    if x.is_complex():

        def run(case: Case) -> None:
            with torch.no_grad():
                check_stands_for(s, case.name, case.run(s.make()), run_on_reference(s, case, s.make()))

        collect_problems(s, applicable(s, LAZY), run)
    _check_lazy_inners(s, x)


def _check_lazy_inners(s: Subject, x: Any) -> None:
    s.reference(x)  # without a reference there is nothing to compare
    lazy = {name: _lazily(t) for name, t in s.inners(x).items()}
    solid = {name: t.resolve_conj().resolve_neg() for name, t in lazy.items()}
    works, pair = s.works("lazy inner tensors", lambda: (s.construct(x, lazy), s.construct(x, solid)))

    def run(case: Case) -> None:
        with torch.no_grad():
            got, expected = (_meaning(s, case.run(value)) for value in pair)
        problem = value_difference(s, got, expected)
        if problem:
            raise Broken(f"{case.name} on inner tensors with a lazy bit set: {problem}")

    if works:
        collect_problems(s, [Case("x.clone()", lambda x: x.clone()), *accepted(s)[:8]], run)


def _lazily(t: Any) -> Any:
    """A plain tensor with its conjugate or negative bit set, as far as its dtype has one."""
    if is_traceable_wrapper_subclass(t):
        return t
    if t.is_complex():
        return t.conj()
    return torch.complex(t, t).conj().imag if t.dtype in (torch.float32, torch.float64) else t


def _meaning(s: Subject, result: Any) -> list[Any]:
    """The plain tensors that the results stand for."""
    parts = [s.reference(leaf) if isinstance(leaf, s.cls) else (leaf,) for leaf in leaves(result)]
    return [tensor for part in parts for tensor in part]
