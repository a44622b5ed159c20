"""Memory: what a new result has for itself, and what a view has in common with its base, for every inner tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import is_traceable_wrapper_subclass, storage_key
from subclasses.layout import RAW
from subclasses.rules.registry import describe
from subclasses.testing import derive
from subclasses.testing.cases import VIEWS, applicable, argument_cases, callable_on, refuses, stand_ins
from subclasses.testing.compare import leaves, snapshot, value_difference
from subclasses.testing.errors import Attempt, Broken
from subclasses.testing.faults import harmless, rules_run
from subclasses.testing.property import Case, promise
from subclasses.testing.subject import Subject

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
        for words, write in WRITES.items():
            x = s.make()
            y = leaves(case.run(x))[number]
            shared = _shared(s, x, y)
            if not shared or y is x:  # as C++ returns it, by the strides that the value shows
                break
            before = snapshot(s, x)
            with Attempt():
                write(y)
            problem = value_difference(s, x, before)
            if problem:
                raise Broken(f"y = {case.name}; {words} changed x: {problem}", _mend(s, case, shared))


def _is_view_of_plain(s: Subject, case: Case) -> bool:
    """Whether a case gives a plain tensor itself or a view of it, as ``contiguous`` and ``reshape`` may."""
    for plain in stand_ins(s):
        results: list[Any] = []
        with Attempt():
            results = leaves(case.run(plain))
        if any(isinstance(r, Tensor) and storage_key(r) == storage_key(plain) for r in results):
            return True
    return False


def _shared(s: Subject, x: Any, y: Any) -> list[tuple[str, str]]:
    """Pairs of the inner tensors of a result and of a value that lie in one storage."""
    return [(of_y, of_x) for of_y, a in _memory(s, y) for of_x, b in _memory(s, x) if a == b]


def _mend(s: Subject, case: Case, shared: list[tuple[str, str]]) -> str:
    run = rules_run(s, lambda: case.run(s.make())) if s.declared else []
    rules = dict.fromkeys(describe(rule) for key, rule in run if key != "materialize")
    who = " or ".join(rules) or "the rule"
    pairs = ", ".join(f"y{of_y} in that of x{of_x}" for of_y, of_x in shared)
    return (
        f"{who} hands on memory of its operand ({pairs}), and a write to y is one to x: return "
        f"{' and '.join(dict.fromkeys(f'x{of_x}.clone()' for _, of_x in shared))}"
    )


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
