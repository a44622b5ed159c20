"""Memory: a new result has its own, a view shares its base's, and a write changes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import is_traceable_wrapper_subclass, storage_key
from subclasses.layout import RAW
from subclasses.rules.results import describe
from subclasses.testing import derive
from subclasses.testing.cases import (
    METADATA_MUTATIONS,
    MUTATIONS,
    VIEWS,
    WRITES,
    accepted,
    applicable,
    argument_cases,
    own_methods,
    refuses,
    stand_ins,
)
from subclasses.testing.compare import (
    check_class,
    check_equal,
    leaves,
    snapshot,
    value_difference,
)
from subclasses.testing.errors import Attempt, Broken
from subclasses.testing.reach import Case, is_for_op, rules_run
from subclasses.testing.subject import Subject, once
from subclasses.testing.values import Setting, by_reference, kept_inners, pointwise, step


def memory_of(s: Subject, x: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The plain tensors inside of a value, by path, each by its storage; of a plain tensor, its own."""
    if not (is_traceable_wrapper_subclass(x) or isinstance(x, s.cls)):
        if isinstance(x, Tensor) and x.numel():
            yield name, storage_key(x)
        return
    for inner, t in s.inners(x).items():
        yield from memory_of(s, t, f"{name}.{inner.removeprefix(RAW)}")


def shared_memory(s: Subject, y: Any, x: Any) -> list[tuple[str, str]]:
    """Pairs of the plain tensors in a result and in a value that lie in one storage."""
    return [(of_y, of_x) for of_y, a in memory_of(s, y) for of_x, b in memory_of(s, x) if a == b]


# ---- calls that write to nothing ---------------------------------------------------------------------------


@torch.no_grad()
def change_of(s: Subject, case: Case) -> str | None:
    """How a case that is not in place changed its argument, or None."""
    x = s.make()
    before = snapshot(s, x)
    with Attempt():
        case.run(x)
    return value_difference(s, x, before)


def arguments(s: Subject, case: Case) -> None:
    """Raises for a case that changed its argument."""
    s.needs_flatten()
    if (problem := change_of(s, case)) is not None:
        raise Broken(f"{case.name} changed x: {problem}")


@once
def harmless(s: Subject) -> list[Case]:
    """The accepted cases that leave their argument as it was, as far as a copy of it can be made."""
    return [case for case in accepted(s) if not s.traceable or change_of(s, case) is None]


# ---- views -------------------------------------------------------------------------------------------------


def views(s: Subject, case: Case) -> None:
    """Compares a view with the reference, and raises for one that shares no memory with its base."""
    x = s.make()
    with torch.no_grad():
        view = leaves(case.run(x))[0]
    check_class(s, case.name, view)
    if s.has_reference:
        by_reference(s, Case(case.name, lambda x: leaves(case.run(x))[0]), Setting(s.make))
    claims = view._is_view() and view._base is x
    if view is x:
        plain = stand_ins(s)[0]
        if leaves(case.run(plain))[0] is not plain:  # as it is for ``flatten`` of one dimension
            raise Broken(f"{case.name} gave x itself, not a view of it")
    elif type(view) is s.cls:
        if storage_key(view) != storage_key(x):
            words = "has a storage of its own, so that autograd and the compiler take it for a copy"
            raise Broken(f"{case.name} {words}")
        if case.name != "x.detach()" and not claims:
            raise Broken(f"{case.name} is no view of x to autograd: _base is not x")
        if [*memory_of(s, view)] and not shared_memory(s, view, x):
            raise Broken(f"{case.name} holds copies: no inner tensor shares memory with one of x")
    elif claims and not _is_plain_view(s, view, x):
        raise Broken(f"{case.name} is a copy of type {type(view).__name__}, yet it claims to be a view of x")


def _is_plain_view(s: Subject, view: Any, x: Any) -> bool:
    """Whether a plain result is a view of an inner tensor, as a view of one row may be."""
    return bool(shared_memory(s, view, x)) or storage_key(view) in {
        storage_key(t) for t in s.inners(x).values()
    }


def is_view_of_plain(s: Subject, case: Case) -> bool:
    """Whether a case gives a plain tensor itself or a view of it, as ``contiguous`` and ``reshape`` may."""
    for plain in stand_ins(s):
        results: list[Any] = []
        with Attempt(), torch.no_grad():
            results = [r for r in leaves(case.run(plain)) if isinstance(r, Tensor)]
        if any(storage_key(r) == storage_key(plain) or (r._is_view() and r._base is plain) for r in results):
            return True
    return False


# ---- writes ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Write(Case):
    """A write to a result: ``run`` does both, and gives the result.

    Attributes:
        find: makes the result.
        write: writes to it.
        is_new: whether the result has memory of its own.
    """

    find: Callable[[Any], Any] = leaves
    write: Callable[[Any], Any] = leaves
    is_new: bool = False


def _write_of(case: Case, words: str, write: Callable[[Any], Any], is_new: bool = False) -> Write:
    def run(x: Any) -> Any:
        y = leaves(case.run(x))[0]
        write(y)
        return y

    return Write(f"y = {case.name}; {words}", run, find=case.run, write=write, is_new=is_new)


def mutations(s: Subject) -> list[Case]:
    """Writes to a value itself."""
    return [
        Write(case.name, case.run, write=case.run) for case in applicable(s, MUTATIONS | METADATA_MUTATIONS)
    ]


def writes_to_results(s: Subject) -> Iterator[Case]:
    """Each call whose results are no views, and each write to the first of its results."""
    s.needs_flatten()
    by_step = {"a step of an optimizer on nn.Parameter(y)": lambda y: step(s, y)}
    for case in (*harmless(s), *argument_cases(s)):
        x = s.make()
        with Attempt(), torch.no_grad():
            y = leaves(case.run(x))[0]
            if y is not x and shared_memory(s, y, x) and not is_view_of_plain(s, case):
                trains = s.declared and (s.cls._traits.trainable or case.name in own_methods(s))
                writes = WRITES | (by_step if trains else {})
                yield from (_write_of(case, words, write, is_new=True) for words, write in writes.items())


def writes_to_views(s: Subject) -> list[Case]:
    """Each view with each write to it that the class takes."""
    s.needs_flatten()
    # The entries of `expand` share memory, and many ops do not write to such.
    found = applicable(
        s, {name: view for name, view in VIEWS.items() if name not in ("x.expand", "x.detach()")}
    )
    cases = [_write_of(case, words, write) for case in found for words, write in WRITES.items()]
    plain = stand_ins(s)[0]
    cases = [case for case in cases if not refuses(s, case, plain.clone)]
    for case in found:
        copy = lambda y, case=case: y.copy_(leaves(case.run(derive.again(s).detach()))[0])  # noqa: E731
        cases.append(_write_of(case, "y.copy_(that of another value)", copy))
    return [case for case in cases if not refuses(s, case)]


@torch.no_grad()
def written(s: Subject, case: Any) -> None:
    """Compares a value after a write: to itself, to a view of it, or to a result with memory of its own."""
    x = s.make()
    before, version = snapshot(s, x), x._version
    y = out = leaves(case.find(x))[0]
    with Attempt() as attempt:
        out = case.write(y)
    if attempt.error is not None and not case.is_new:
        check_equal(s, f"{case.name} was refused, but had changed x", x, before)
        raise attempt.error
    if case.is_new:
        problem = value_difference(s, x, before)
        if problem and not ("copy_(-y)" in case.name and _negation_is_wrong(s)):
            raise Broken(f"{case.name} changed x: {problem}", mend=_copies(s, case, shared_memory(s, y, x)))
        return
    if y is x and out is not x:
        raise Broken(f"{case.name} gave another object than x")
    if type(y) is s.cls:
        again = f"{case.name}: the view, taken again, does not have what was written to it"
        check_equal(s, again, leaves(case.find(x))[0], y)
    elif not _is_plain_view(s, y, x):
        check_equal(s, f"x after {case.name}, which wrote to a plain copy", x, before)
        if y._is_view() and y._base is x:
            raise Broken(f"{case.name} wrote to a copy that claims to be a view of x: the write is lost")
        return
    if s.has_reference and "another value" not in case.name:
        after = Case(f"x after {case.name}", lambda x: (case.run(x), x)[1])
        by_reference(s, after, Setting(lambda: snapshot(s, before)))
    if x._version == version and isinstance(y, s.cls):
        raise Broken(
            f"{case.name} left the version counter of x as it was, so a stale gradient goes unnoticed"
        )


@once
def _negation_is_wrong(s: Subject) -> bool:
    """Whether the negative of a value has other labels: copied to where it shares memory, they would be new there."""
    with Attempt() as attempt:
        for case in pointwise(s):
            if case.name == "-x":
                kept_inners(s, case)
    return isinstance(attempt.error, Broken)


def _copies(s: Subject, case: Any, shared: list[tuple[str, str]]) -> str:
    """The advice to copy what a rule hands on, in the way in which it reads its operand."""
    run = (
        [pair for pair in rules_run(s, lambda: case.find(s.make())) if pair[0] != "materialize"]
        if s.declared
        else []
    )
    pairs = ", ".join(f"y{of_y} in that of x{of_x}" for of_y, of_x in shared)
    read = ".{}" if all(is_for_op(key) for key, _ in run) else '.unwrap("{}")'
    parts = dict.fromkeys(of_x.removeprefix(".").partition(".")[::2] for _, of_x in shared)
    copies = [f"x{read.format(field)}{'.' * bool(rest)}{rest}.clone()" for field, rest in parts]
    return (
        f"{' or '.join(dict.fromkeys(describe(rule) for _, rule in run)) or 'the rule'} hands on memory of its operand "
        f"({pairs}), and a write to y is one to x: return {' and '.join(copies)}"
    )


def stale_gradients(s: Subject, case: Case) -> None:
    """Raises where a gradient is computed from a value that was overwritten."""
    gradients = []
    for write in (False, True):
        x = s.trainable()
        y = x * x
        if write:
            with torch.no_grad():
                x.mul_(2)
        with Attempt() as attempt:
            gradients += torch.autograd.grad(y, x, torch.ones(y.shape, dtype=y.dtype))
        if attempt.error is not None and not write:
            raise attempt.error
    if len(gradients) == 2 and value_difference(s, *gradients):
        raise Broken("y = x * x; x.mul_(2); the gradient of y came out, from the overwritten x")
