"""Nested wrappers: another class inside a value, a value inside another class."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subclasses.base import TensorSubclass
from subclasses.errors import one_of
from subclasses.spec.fields import inner
from subclasses.testing.cases import CLONE, accepted
from subclasses.testing.compare import check_class, check_equal, leaves
from subclasses.testing.compilers import against_eager, compilers
from subclasses.testing.errors import Attempt, Broken, Skipped
from subclasses.testing.property import Case, promise
from subclasses.testing.subject import Subject


class Nest(TensorSubclass, fallback="map"):
    """A hostile wrapper: it has no data of its own, and runs each op on its inner tensor."""

    held: Tensor = inner()


def unnest(value: Any) -> Any:
    """The same results with the inner tensor of every nest in its place."""
    if isinstance(value, list | tuple):
        return [unnest(part) for part in value]
    while isinstance(value, Nest):
        value = value.held
    return value


def _nestable(s: Subject) -> list[Case]:
    x = _with_nests(s)
    back = s.unflatten(x, s.inners(x))
    check_equal(s, "with inner tensors that are wrappers, a round trip changes a value", back, x)
    return accepted(s)


@promise(
    "treat inner tensors as tensors: ask for no storage, no data_ptr, no exact type torch.Tensor, and build results "
    "by ops on them",
    cases=_nestable,
    of_right_values=True,
)
@torch.no_grad()
def nested_inside(s: Subject, case: Case) -> None:
    """The inner tensors of a value may be wrappers themselves."""
    expected, got = case.run(s.make()), case.run(_with_nests(s))
    what = f"{case.name} on a value whose inner tensors are wrappers"
    for g, e in zip(leaves(got), leaves(expected), strict=True):
        check_class(s, case.name, e)
        if not isinstance(e, s.cls):
            check_equal(s, what, unnest(g), e)
        elif not isinstance(g, s.cls):
            raise Broken(f"{what}: {one_of(type(g))} instead of a {s.name}")
        else:
            for a, b in zip(s.inners(g).values(), s.inners(e).values(), strict=True):
                check_equal(s, what, unnest(a), b)


def _with_nests(s: Subject) -> Any:
    x = s.make().detach()
    if s.declared and any(f.subclass is not Tensor for f in s.cls.__spec__.inners):
        raise Skipped("an inner tensor is declared to be of a certain class")
    inners = {
        n: Nest(t) if type(t) is Tensor and not n.endswith("_carrier") else t for n, t in s.inners(x).items()
    }
    works, value = s.works("inner tensors that are wrappers", lambda: s.construct(x, inners))
    if not works:
        raise Skipped("the class refuses inner tensors that are wrappers")
    return value


@promise(
    "run ops by calling the op itself (func) on the inner tensors, so that a wrapper around this one sees them. A rule "
    "for a Python-level function is not asked inside of another wrapper, which asks for ops alone: if values of the "
    "class are to be inner tensors, register it for the op",
    cases=accepted,
    of_right_values=True,
)
@torch.no_grad()
def nested_outside(s: Subject, case: Case) -> None:
    """A value may be the inner tensor of another wrapper."""
    expected, got = case.run(s.make()), case.run(Nest(s.make()))
    for g, e in zip(leaves(got), leaves(expected), strict=True):
        check_equal(s, f"{case.name} on a wrapper around a value", unnest(g), e)


@promise("the compiler takes nested wrappers apart with __tensor_flatten__, all the way; see `nested_inside`")
@torch.no_grad()
def compiled_nesting(s: Subject) -> None:
    """Nested wrappers compile, whichever is outside."""
    values = [Nest(s.make())]
    with Attempt():
        values.append(_with_nests(s))
    for x in values:
        for path, compile in compilers(s):
            what = f"x.clone() under {path}, with {type(x).__name__} outside,"
            against_eager(s, what, lambda x=x, c=compile: c(CLONE.run)(x), x)
