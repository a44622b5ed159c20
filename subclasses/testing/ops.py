"""Promises about what ops give: as what the value stands for, and the same in every mode."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subclasses._torch import is_traceable_wrapper_subclass
from subclasses.testing.cases import Case, accepted, functional_cases
from subclasses.testing.compare import (
    check_stands_for,
    difference,
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
    "apart with func.decompose(), as outside of inference mode"
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
    collect_problems(s, accepted(s), run)


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
    works, grads = s.works(
        "the gradient of F.dropout(x)", lambda: torch.autograd.grad(y, x, torch.ones(x.shape, dtype=x.dtype))
    )
    if not works or type(grads[0]) is not type(y):
        return
    dropped = [p == 0 for p in s.reference(y)]
    for g, zero, plain in zip(s.reference(grads[0]), dropped, s.reference(x), strict=True):
        if bool(((g == 0) & (plain != 0)).ne(zero & (plain != 0)).any()):
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
        cases = [Case(n, f) for n, f in LAZY.items()]

        def run(case: Case) -> None:
            with torch.no_grad():
                check_stands_for(s, case.name, case.run(s.make()), run_on_reference(s, case, s.make()))

        collect_problems(s, cases, run)
    _check_lazy_inners(s, x)


def _check_lazy_inners(s: Subject, x: Any) -> None:
    lazy, solid = {}, {}
    for name, t in s.inners(x).items():
        plain = isinstance(t, Tensor) and not is_traceable_wrapper_subclass(t)
        if plain and t.is_complex():
            lazy[name], solid[name] = t.conj(), t.conj().resolve_conj()
        elif plain and t.is_floating_point() and t.dtype.itemsize > 1:
            lazy[name], solid[name] = torch.complex(t.float(), t.float()).conj().imag.to(t.dtype), -t
            if t.dtype == torch.float32:
                lazy[name] = torch.complex(t, t).conj().imag  # carries the negative bit
        else:
            lazy[name] = solid[name] = t
    works, pair = s.works("lazy inner tensors", lambda: (s.construct(x, lazy), s.construct(x, solid)))
    if not works:
        return
    for case in (Case("clone", lambda v: v.clone()), *accepted(s)[:8]):
        with torch.no_grad(), Attempt() as attempt:
            got, expected = case.run(pair[0]), case.run(pair[1])
        if attempt.error is not None:
            if not s.refuses(case.name, attempt.error):
                raise attempt.error
            continue
        for g, e in zip(leaves(got), leaves(expected), strict=True):
            if not isinstance(g, Tensor):
                continue
            whole = s.reference(g) if isinstance(g, s.cls) else (g,)
            other = s.reference(e) if isinstance(e, s.cls) else (e,)
            for one, two in zip(whole, other, strict=True):
                problem = difference(s, one, two)
                if problem:
                    raise Broken(f"{case.name} on inner tensors with the lazy bit set: {problem}")
