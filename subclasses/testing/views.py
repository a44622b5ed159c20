"""Promises about views and about writing: what shares memory, what is written, what is left alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subclasses._torch import storage_key
from subclasses.testing import cases
from subclasses.testing.cases import Case, applicable
from subclasses.testing.compare import (
    check_equal,
    check_stands_for,
    leaves,
    snapshot,
    value_difference,
)
from subclasses.testing.ops import collect_problems, run_on_reference
from subclasses.testing.promise import Attempt, Broken, promise
from subclasses.testing.subject import Subject

_ALIASING = (
    "end __torch_dispatch__ with `return torch.utils._python_dispatch.return_and_correct_aliasing(func, args, "
    "kwargs, out)`"
)


@promise(f"{_ALIASING}, and make the inner tensors of the result views of the inner tensors")
def views(s: Subject) -> None:
    """A view shares memory with the value that it is a view of; a copy does not claim to."""

    def run(case: Case) -> None:
        x = s.make()
        with torch.no_grad():
            view = leaves(case.run(x))[0]
            check_stands_for(s, case.name, view, run_on_reference(s, case, s.make()))
        if view is x:
            if not _gives_itself(s, case):
                raise Broken(f"{case.name} gave x itself, not a view of it")
        elif type(view) is s.cls:
            _check_view(s, case.name, x, view)
        elif view._is_view() and view._base is x:
            raise Broken(
                f"{case.name} is a copy of type {type(view).__name__}, yet it claims to be a view of x",
                "give back a view of the class, or refuse the op; a plain copy must be detached from x",
            )

    collect_problems(s, applicable(s, cases.VIEWS), run)


def _gives_itself(s: Subject, case: Case) -> bool:
    """Whether a plain tensor gives itself here, as one-dimensional ones do for ``flatten``."""
    plain = s.reference(s.make())[0].detach()
    return leaves(case.run(plain))[0] is plain


def _check_view(s: Subject, what: str, x: Any, view: Any) -> None:
    if storage_key(view) != storage_key(x):
        raise Broken(
            f"{what} has a storage of its own, so that autograd and the compiler take it for a copy",
            _ALIASING,
        )
    if what != "x.detach()" and not (view._is_view() and view._base is x):
        raise Broken(f"{what} is no view of x to autograd: _base is not x", _ALIASING)
    inside = {storage_key(t) for t in _plain_inners(s, x)}
    strays = [t for t in _plain_inners(s, view) if storage_key(t) not in inside and t.numel()]
    if strays and len(strays) == len(_plain_inners(s, view)):
        raise Broken(f"{what} holds copies: no inner tensor shares memory with one of x")


def _plain_inners(s: Subject, x: Any) -> list[Tensor]:
    return [t for t in s.inners(x).values() if isinstance(t, Tensor)]


# ---- writing -----------------------------------------------------------------------------------------------


@promise(
    "write into the inner tensors (copy_) and return the very argument that was written; where a class cannot, "
    "raise before anything is written"
)
def mutation(s: Subject) -> None:
    """An in-place op changes the value itself, or is refused and changes nothing."""
    collect_problems(s, applicable(s, cases.MUTATIONS), lambda case: _check_write(s, case, returns_self=True))


@promise(
    "write through to the inner tensors of the base: a view must hold views, and an op that makes a copy must "
    "not be followed by a write that is lost"
)
def mutation_of_views(s: Subject) -> None:
    """Writing to a view changes the value that it is a view of."""
    collect_problems(
        s, applicable(s, cases.VIEW_MUTATIONS), lambda case: _check_write(s, case, returns_self=False)
    )


@promise("return x itself with its new sizes, through return_and_correct_aliasing; or refuse the op")
def metadata_mutation(s: Subject) -> None:
    """An in-place change of sizes shows in the value itself, or is refused."""
    collect_problems(
        s, applicable(s, cases.METADATA_MUTATIONS), lambda case: _check_write(s, case, returns_self=True)
    )


def _check_write(s: Subject, case: Case, *, returns_self: bool) -> None:
    x = s.make()
    before, version, out = snapshot(s, x), x._version, None
    with Attempt() as attempt, torch.no_grad():
        out = case.run(x)
    if attempt.error is not None:
        problem = value_difference(s, x, before)
        if problem:
            raise Broken(f"{case.name} was refused, but had changed x: {problem}") from attempt.error
        raise attempt.error
    if not returns_self and not isinstance(out, s.cls):
        _check_copy_was_plain(s, case, x, before, out)
        return
    if returns_self and out is not x:
        raise Broken(f"{case.name} gave another object than x", _ALIASING)
    expected = []
    for plain in s.reference(before):
        plain = plain.detach().clone()
        with torch.no_grad():
            case.run(plain)
        expected.append(plain)
    check_stands_for(s, f"x after {case.name}", x, expected)
    if x._version == version:
        raise Broken(
            f"{case.name} left the version counter of x as it was, so a stale gradient goes unnoticed"
        )


def _check_copy_was_plain(s: Subject, case: Case, x: Any, before: Any, out: Any) -> None:
    """A write to a plain copy, which is no lie as long as the copy never claimed to be a view."""
    check_equal(s, f"x after {case.name}, which wrote to a plain copy", x, before)
    if isinstance(out, Tensor) and out._is_view() and out._base is x:
        raise Broken(f"{case.name} wrote to a copy that claims to be a view of x: the write is lost")


@promise("save tensors with ctx.save_for_backward, and raise version counters of what a rule writes to")
def stale_gradients(s: Subject) -> None:
    """A gradient that needs a value which has been overwritten is an error."""
    x = s.trainable()
    works, y = s.works("x * x", lambda: x * x)
    if not works:
        return

    def write() -> None:
        with torch.no_grad():
            x.mul_(2)

    works, _ = s.works("x.mul_(2)", write)
    if not works:
        return
    with Attempt() as attempt:
        torch.autograd.grad(y, x, torch.ones(y.shape, dtype=y.dtype))
    if attempt.error is None:
        raise Broken("y = x * x; x.mul_(2); the gradient of y came out, from the overwritten x")
