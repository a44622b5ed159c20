"""Promises about nesting: another class inside a value, a value inside another class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from subclasses.base import TensorSubclass
from subclasses.spec.fields import inner
from subclasses.testing.cases import Case, accepted
from subclasses.testing.compare import leaves, value_difference
from subclasses.testing.ops import collect_problems
from subclasses.testing.paths import compilers
from subclasses.testing.promise import Attempt, Broken, Skipped, promise, shown
from subclasses.testing.subject import Subject


class Nest(TensorSubclass, fallback="map"):
    """A hostile wrapper: it has no data of its own, and runs each op on what it holds."""

    held: Tensor = inner()


def unnest(value: Any) -> Any:
    """The same results with every nest replaced by what it holds."""
    if isinstance(value, list | tuple):
        return [unnest(part) for part in value]
    while isinstance(value, Nest):
        value = value.held
    return value


@promise(
    "treat inner tensors as tensors: ask for no storage, no data_ptr, no exact type torch.Tensor, and build results "
    "by ops on them"
)
def nested_inside(s: Subject) -> None:
    """The inner tensors of a value may be wrappers themselves."""
    x = _with_nests(s)
    back = s.unflatten(x, s.inners(x))
    if value_difference(s, back, x):
        raise Broken(
            f"with inner tensors that are wrappers, a round trip changes a value: {value_difference(s, back, x)}"
        )

    def run(case: Case) -> None:
        with torch.no_grad():
            expected, got = case.run(s.make()), case.run(_with_nests(s))
        _check_nested(s, case.name, got, expected)

    collect_problems(s, accepted(s), run)


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


def _check_nested(s: Subject, what: str, got: Any, expected: Any) -> None:
    """Compares a result that holds nests with one that does not."""
    for g, e in zip(leaves(got), leaves(expected), strict=True):
        if not isinstance(e, s.cls):
            problem = value_difference(s, unnest(g), e)
        elif not isinstance(g, s.cls):
            problem = f"a {type(g).__name__} instead of a {s.name}"
        else:
            pairs = zip(s.inners(g).values(), s.inners(e).values(), strict=True)
            problem = next((p for a, b in pairs if (p := value_difference(s, unnest(a), b))), None)
        if problem:
            raise Broken(f"{what} on a value whose inner tensors are wrappers: {problem}")


@promise(
    "run ops by calling the op itself (func) on the inner tensors, so that a wrapper around this one sees them"
)
def nested_outside(s: Subject) -> None:
    """A value may be the inner tensor of another wrapper."""

    def run(case: Case) -> None:
        with torch.no_grad():
            expected, got = case.run(s.make()), case.run(Nest(s.make()))
        for g, e in zip(leaves(got), leaves(expected), strict=True):
            problem = value_difference(s, unnest(g), e)
            if problem:
                raise Broken(f"{case.name} on a wrapper around a value: {problem}")

    collect_problems(s, accepted(s), run)


@promise("the compiler takes nested wrappers apart with __tensor_flatten__, all the way; see `nested_inside`")
def compiled_nesting(s: Subject) -> None:
    """Nested wrappers compile, whichever is outside."""
    values: Sequence[Any] = [Nest(s.make())]
    with Attempt():
        values = [*values, _with_nests(s)]
    for x in values:
        _check_compiled(s, x)


def _check_compiled(s: Subject, x: Any) -> None:
    function = lambda x: x.clone()  # noqa: E731
    for path, compile in compilers(s):
        got = None
        with Attempt() as attempt, torch.no_grad():
            got = compile(function)(x)
        what = f"x.clone() under {path}, with {type(x).__name__} outside,"
        if attempt.error is not None:
            if s.refuses(what, attempt.error):
                continue
            raise Broken(f"{what} raised {shown(attempt.error)}") from attempt.error
        problem = value_difference(s, got, x)
        if problem:
            raise Broken(f"{what} is not what eager mode gives: {problem}")
