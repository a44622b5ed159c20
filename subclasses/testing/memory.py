"""Memory: a new result has its own, a view shares its base's, and a write changes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import storage_key
from subclasses.rules.results import describe
from subclasses.testing import derive
from subclasses.testing.calls import METADATA_MUTATIONS, MUTATIONS, VIEWS, WHOLE, WRITES, Case
from subclasses.testing.cases import (
    applicable,
    argument_cases,
    is_for_op,
    not_refused,
    own_methods,
    rules_run,
    stand_ins,
)
from subclasses.testing.errors import Broken, check_that, tried
from subclasses.testing.subject import (
    Subject,
    check_class,
    check_equal,
    differs,
    leaves,
    memory_of,
    shared_memory,
    snapshot,
    tried_alone,
)
from subclasses.testing.values import Setting, by_reference, harmless, step

# ---- views -------------------------------------------------------------------------------------------------


def views(s: Subject, case: Case) -> None:
    """Compares a view with the reference, and raises for one that shares no memory with its base."""
    x, first = s.make(), first_of(case)
    with torch.no_grad():
        view = first.run(x)
    check_class(s, case.name, view)
    if s.has_reference:
        by_reference(s, first, Setting(s.make))
    is_own, claims = type(view) is s.cls, view._is_view() and view._base is x
    shares = bool(shared_memory(s, view, x)) or not [*memory_of(s, view)]
    is_plain_itself = view is x and first.run(plain := stand_ins(s)[0]) is plain  # as of ``flatten``
    for holds, words in (
        (view is not x or is_plain_itself, "gave x itself, not a view of it"),
        (
            not is_own or storage_key(view) == storage_key(x),
            "has a storage of its own, so that autograd and the compiler take it for a copy",
        ),
        (
            not is_own or claims or view is x or case.name == "x.detach()",
            "is not a view of x to autograd: _base is not x",
        ),
        (not is_own or shares, "holds copies: no inner tensor shares memory with one of x"),
        (
            is_own or not claims or shares,
            f"is a copy of type {type(view).__name__}, yet it claims to be a view of x",
        ),
    ):
        check_that(holds, f"{case.name} {words}")


def first_of(case: Case) -> Case:
    """A case that gives the first of its results."""
    return Case(case.name, lambda x: leaves(case.run(x))[0])


def is_view_of_plain(s: Subject, case: Case) -> bool:
    """Whether a case gives a plain tensor itself or a view of it, as ``contiguous`` and ``reshape`` may."""
    results = [
        (r, p) for p in stand_ins(s) for r in leaves(tried_alone(case.run, p)[0]) if isinstance(r, Tensor)
    ]
    return any(storage_key(r) == storage_key(p) or (r._is_view() and r._base is p) for r, p in results)


# ---- writes ------------------------------------------------------------------------------------------------


def written_to(case: Case, words: str, write: Callable[[Any], Any], *marks: str) -> Case:
    """A write to the first result of a case; the case gives the result, its parts are the result and the write."""

    def run(x: Any) -> Any:
        y = result.run(x)
        write(y)
        return y

    result = first_of(case)
    return Case(f"y = {case.name}; {words}", run, marks, parts=(result, Case(words, write)))


def mutations(s: Subject) -> list[Case]:
    """Writes to a value itself."""
    cases = applicable(s, MUTATIONS | METADATA_MUTATIONS)
    return [Case(case.name, case.run, parts=(WHOLE, case)) for case in cases]


def writes_to_results(s: Subject) -> Iterator[Case]:
    """Each call whose results are not views, and each write to the first of its results."""
    by_step = {"a step of an optimizer on nn.Parameter(y)": lambda y: step(s, y)}
    for case in (*harmless(s), *argument_cases(s)):
        x = s.make()
        y, error = tried_alone(first_of(case).run, x)
        if error is None and y is not x and shared_memory(s, y, x) and not is_view_of_plain(s, case):
            trains = s.declared and (s.cls._traits.trainable or case.name in own_methods(s))
            for words, write in (WRITES | (by_step if trains else {})).items():
                yield written_to(case, words, write, "new")


def writes_to_views(s: Subject) -> list[Case]:
    """Each view with each write to it that the class takes."""
    # The entries of `expand` share memory, and many ops do not write to such.
    found = [case for case in applicable(s, VIEWS) if case.name not in ("x.expand", "x.detach()")]
    cases = [written_to(case, *write) for case in found for write in WRITES.items()]
    cases = not_refused(s, cases, lambda: stand_ins(s)[0])
    for case in map(first_of, found):
        copy = lambda y, case=case: y.copy_(case.run(derive.again(s)))  # noqa: E731
        cases.append(written_to(case, "y.copy_(that of another value)", copy))
    return not_refused(s, cases)


@torch.no_grad()
def written(s: Subject, case: Case) -> None:
    """Compares a value after a write: to itself, to a view of it, or to a result with memory of its own."""
    x, (result, write) = s.make(), case.parts
    before, version = snapshot(s, x), x._version
    y = result.run(x)
    out, error = tried(write.run, y)
    if "new" in case.marks:
        _, change = tried(check_equal, s, f"{case.name} changed x", x, before)
        if change is not None:
            raise Broken(str(change), mend=_copies(s, result, shared_memory(s, y, x)))
        return
    if error is not None:
        check_equal(s, f"{case.name} was refused, but had changed x", x, before)
        raise error
    check_that(y is not x or out is x, f"{case.name} gave another object than x")
    if type(y) is s.cls:
        again = f"{case.name}: the view, taken again, does not have what was written to it"
        check_equal(s, again, result.run(x), y)
    elif y.numel() and not shared_memory(s, y, x):
        check_equal(s, f"x after {case.name}, which wrote to a plain copy", x, before)
        check_that(
            not y._is_view() or y._base is not x,
            f"{case.name} wrote to a copy that claims to be a view of x: the write is lost",
        )
        return
    if s.has_reference and "another value" not in case.name:
        after = Case(f"x after {case.name}", lambda x: (case.run(x), x)[1])
        by_reference(s, after, Setting(lambda: snapshot(s, before)))
    check_that(
        x._version != version or not isinstance(y, s.cls),
        f"{case.name} left the version counter of x as it was, so a stale gradient goes unnoticed",
    )


def _copies(s: Subject, result: Case, shared: list[tuple[str, str]]) -> str:
    """The advice to copy what a rule hands on, in the way in which it reads its operand."""
    run = [pair for pair in rules_run(s, lambda: result.run(s.make())) if pair[0] != "materialize"]
    pairs = ", ".join(f"y{of_y} in the memory of x{of_x}" for of_y, of_x in shared)
    read = ".{}" if all(is_for_op(key) for key, _ in run) else '.unwrap("{}")'
    parts = dict.fromkeys(of_x.removeprefix(".").partition(".")[::2] for _, of_x in shared)
    copies = [f"x{read.format(field)}{'.' * bool(rest)}{rest}.clone()" for field, rest in parts]
    return (
        f"{' or '.join(dict.fromkeys(describe(rule) for _, rule in run)) or 'the rule'} hands on memory of its operand "
        f"({pairs}), and a write to y is one to x: return {' and '.join(copies)}"
    )


def stale_gradients(s: Subject, case: Case) -> None:
    """Raises where a gradient is computed from a value that was overwritten."""
    x = s.trainable()
    y = x * x
    gradient = partial(torch.autograd.grad, y, x, torch.ones(y.shape, dtype=y.dtype), retain_graph=True)
    expected = gradient()
    with torch.no_grad():
        x.mul_(2)
    got, error = tried(gradient)
    check_that(
        error is not None or not differs(s, got, expected),
        "y = x * x; x.mul_(2); the gradient of y came out, from the overwritten x",
    )
