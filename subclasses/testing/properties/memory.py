"""Memory: what a new result has for itself, and what a view has in common with its base, for every inner tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import is_traceable_wrapper_subclass, storage_key
from subclasses.layout import RAW
from subclasses.rules.results import describe
from subclasses.testing import derive
from subclasses.testing.cases import (
    VIEWS,
    accepted,
    applicable,
    argument_cases,
    callable_on,
    once,
    refuses,
    stand_ins,
)
from subclasses.testing.compare import leaves, snapshot, value_difference
from subclasses.testing.errors import Attempt, Broken
from subclasses.testing.faults import harmless
from subclasses.testing.property import Case, promise
from subclasses.testing.reach import is_for_op, rules_run
from subclasses.testing.subject import Subject, is_differentiable

# Writes to a result: each may reach other inner tensors than the others do.
WRITES: dict[str, Callable[[Any], Any]] = {
    "y.mul_(2)": lambda y: y.mul_(2),
    "y.add_(1)": lambda y: y.add_(1),
    "y.zero_()": lambda y: y.zero_(),
    "y.fill_(2)": lambda y: y.fill_(2),
    "y.copy_(-y)": lambda y: y.copy_(-y),
    "y.copy_(y.flip(0))": lambda y: y.copy_(y.flip(0)),
}


def _memory(s: Subject, x: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The plain tensors inside of a value, by path, each by its storage; of a plain tensor, its own."""
    if not (is_traceable_wrapper_subclass(x) or isinstance(x, s.cls)):
        if isinstance(x, Tensor) and x.numel():
            yield name, storage_key(x)
        return
    for inner, t in s.inners(x).items():
        yield from _memory(s, t, f"{name}.{inner.removeprefix(RAW)}")


# ---- new results ---------------------------------------------------------------------------------------------


@promise(
    "the result of an op that is no view has memory of its own: a rule hands on a copy of an inner tensor, as in "
    "x.values.clone(), and not x.values itself",
    cases=lambda s: [*harmless(s), *argument_cases(s)],
)
@torch.no_grad()
def own_memory(s: Subject, case: Case) -> None:
    """A write to the result of an op that is no view leaves the value that it was computed from alone."""
    s.needs_flatten()
    if _is_view_of_plain(s, case):
        return
    with Attempt() as attempt:
        count = len(leaves(case.run(s.make())))
    if attempt.error is not None:
        return  # `values` and `keyword_arguments` are about that
    for number in range(count):
        for words, write in _writes(s).items():
            x = s.make()
            y = leaves(case.run(x))[number]
            shared = _shared(s, x, y)
            if not shared or y is x:  # as C++ returns it, by the strides that the value shows
                break
            before = snapshot(s, x)
            with Attempt():
                write(y)
            if words == "y.copy_(-y)" and _negation_is_wrong(s):
                continue  # `kept_inners` is about that
            problem = value_difference(s, x, before)
            if problem:
                raise Broken(f"y = {case.name}; {words} changed x: {problem}", _mend(s, case, shared))


def _writes(s: Subject) -> dict[str, Callable[[Any], Any]]:
    """The in-place ops, and what they need not do, as a rule for one may write to some of the inner tensors alone."""
    if not (s.declared and s.cls._traits.trainable):
        return WRITES
    return WRITES | {"a step of an optimizer on nn.Parameter(y)": lambda y: step(s, y)}


def step(s: Subject, x: Any) -> None:
    """Writes to the inner tensors as an optimizer does to those of a Parameter."""
    if isinstance(x, s.cls):
        for t in s.inners(x).values():
            with Attempt():  # elements of an expanded tensor share memory, which is not written to
                if is_differentiable(t):  # of integers, such as indices, other ones may have no meaning
                    t.add_(1)


@once
def _negation_is_wrong(s: Subject) -> bool:
    """Whether the negative of a value has other labels: copied to where it shares memory, they would be new there."""
    found = [case for case in _pointwise(s) if case.name == "-x"]
    return s.declared and s.has_reference and any(_first_lost(s, case) for case in found)


def _is_view_of_plain(s: Subject, case: Case) -> bool:
    """Whether a case gives a plain tensor itself or a view of it, as ``contiguous`` and ``reshape`` may."""
    for plain in stand_ins(s):
        results: list[Any] = []
        with Attempt():
            results = leaves(case.run(plain))
        if any(isinstance(r, Tensor) and _is_view_of(r, plain) for r in results):
            return True
    return False


def _is_view_of(y: Tensor, x: Tensor) -> bool:
    """Whether a result is a tensor itself, or a view of it; a value may give plain views of what it holds."""
    return storage_key(y) == storage_key(x) or (y._is_view() and y._base is x)


def _shared(s: Subject, x: Any, y: Any) -> list[tuple[str, str]]:
    """Pairs of the inner tensors of a result and of a value that lie in one storage."""
    return [(of_y, of_x) for of_y, a in _memory(s, y) for of_x, b in _memory(s, x) if a == b]


def _mend(s: Subject, case: Case, shared: list[tuple[str, str]]) -> str:
    run = rules_run(s, lambda: case.run(s.make())) if s.declared else []
    rules = {describe(rule): key for key, rule in run if key != "materialize"}
    pairs = ", ".join(f"y{of_y} in that of x{of_x}" for of_y, of_x in shared)
    read = ".{}" if all(map(is_for_op, rules.values())) else '.unwrap("{}")'
    parts = dict.fromkeys(of_x.removeprefix(".").partition(".")[::2] for _, of_x in shared)
    copies = [f"x{read.format(field)}{'.' * bool(rest)}{rest}.clone()" for field, rest in parts]
    return (
        f"{' or '.join(rules) or 'the rule'} hands on memory of its operand ({pairs}), and a write to y is one to x: "
        f"return {' and '.join(copies)}"
    )


# ---- what the reference does not show ------------------------------------------------------------------------

# Calls on each entry of one value: a label of a row, such as a time, is that of the row afterwards.
_POINTWISE = {
    *(
        "x * 2",
        "x + x",
        "x - plain",
        "plain * x",
        "1 - x",
        "x / 2",
        "-x",
        "x.abs()",
        "x.exp()",
        "x.sigmoid()",
    ),
    *("F.relu(x)", "F.gelu(x)", "x.clamp(-1, 1)", "x * x", "x + 3"),
}


@once
def _pointwise(s: Subject) -> list[Case]:
    return [case for case in accepted(s) if case.name in _POINTWISE]


@promise(
    "the rule makes its result without that inner tensor, or with another: pass on what it does not compute with, as "
    "in type(x)(..., white=x.white). If the op is meant to leave one out, such as a cache, or to change it: "
    "skip={'kept_inners'}",
    cases=_pointwise,
)
@torch.no_grad()
def kept_inners(s: Subject, case: Case) -> None:
    """An op on each entry hands on what the reference does not show: optional inner tensors, integers as labels."""
    if not s.declared or not any(f.optional or _is_label(t) for f, t in s.held(s.make())):
        return
    if (problem := _first_lost(s, case)) is not None:
        raise Broken(problem)


def _first_lost(s: Subject, case: Case) -> str | None:
    """Which inner tensor, that a reference does not show, a case leaves out or changes, or None."""
    x = s.make().detach()
    s.reference(x)  # without one, nobody knows what it shows
    for name, t in _others(s, x, case.run(s.make())).items():
        keeper = _keepers(s).get(name)
        if (t is None or keeper is not None) and not derive.is_told_apart(s, x, {name: t}):
            how = "loses" if t is None else "changes"
            others = "" if keeper is None else f", which {keeper} keeps"
            return f"{case.name} {how} {name}{others}"
    return None


def _others(s: Subject, x: Any, result: Any) -> dict[str, Any]:
    """The optional inner tensors that a result does not have, and the integers in it that are others, by field."""
    if not isinstance(result, s.cls) or result.shape != x.shape:
        return {}
    found = s.inners(result)
    pairs = [(f.name, t, found.get(f.attribute)) for f, t in s.held(x)]
    return {
        name: got
        for name, t, got in pairs
        if got is None or (_is_label(t) and value_difference(s, got, t) is not None)
    }


@once
def _keepers(s: Subject) -> dict[str, str]:
    """For each field, an op on each entry that hands its inner tensor on: that others change it is no habit then."""
    found: dict[str, str] = {}
    x = s.make().detach()
    for case in _pointwise(s):
        result = case.run(s.make())
        if isinstance(result, s.cls) and result.shape == x.shape:
            lost = _others(s, x, result)
            found |= {f.name: case.name for f, _ in s.held(x) if f.name not in lost and f.name not in found}
    return found


def _is_label(t: Tensor) -> bool:
    return not (t.is_floating_point() or t.is_complex() or t.dtype is torch.bool)


# ---- views ---------------------------------------------------------------------------------------------------


def _written_views(s: Subject) -> list[Case]:
    """Each view with each write to it that the class takes: a function from a value to the written view."""

    def pair(view: Callable[[Any], Any], write: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def run(x: Any) -> Any:
            y = leaves(view(x))[0]
            write(y)
            return y

        return run

    def overwriting(view: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return pair(view, lambda y: y.copy_(leaves(view(derive.again(s).detach()))[0]))

    # The entries of `expand` share memory, and many ops do not write to such.
    views = {name: view for name, view in callable_on(s, VIEWS).items() if name != "x.expand"}
    writes = {
        f"y = {name}; {words}": pair(view, write)
        for name, view in views.items()
        for words, write in WRITES.items()
    }
    copies = [
        Case(f"y = {case.name}; y.copy_(that of another value)", overwriting(case.run))
        for case in applicable(s, views)
    ]
    return [case for case in applicable(s, writes) + copies if not refuses(s, case)]


@promise(
    "a view holds views of all inner tensors, none of them a copy: what is written to the view is lost otherwise. Let "
    "the rule make each by a view op, such as x.values.select(...), or refuse the op",
    cases=_written_views,
)
@torch.no_grad()
def writes_to_views(s: Subject, case: Case) -> None:
    """What is written to a view is in the value, in every inner tensor: the same view, taken again, has it."""
    s.needs_flatten()
    x = s.make()
    y = case.run(x)
    if type(y) is not s.cls:
        return  # a plain copy, which mutation_of_views is about
    view = VIEWS[case.name.removeprefix("y = ").split(";")[0]]
    problem = value_difference(s, leaves(view(x))[0], y)
    if problem:
        raise Broken(f"{case.name}: the view, taken again, does not have what was written to it: {problem}")
