"""Runs idioms of Python around tensors, records their results, and compares the records with eager mode.

An idiom is a function that returns an iterator. It gets `compile_` and calls a compiled function several times. It
changes the function's surroundings between the calls, and yields everything that a caller can see after each call.

Each item is recorded at once, so that later writes to it do not count. The idiom runs in eager mode, where `compile_`
returns its argument, and compiled in one way of `DOORS`. Both records must be equal.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from tests.desugar.classes import make, plain_parts
from tests.desugar.judge import DOORS, aliasing, backward, facts, identities
from tests.doors import by_stock, eager

Compile = Callable[[Any], Any]
Idiom = Callable[[Compile], Iterator[Any]]

STOCK = "stock"

# ------------------------------------------------------------------------------------------ idioms and exceptions


@dataclasses.dataclass(frozen=True)
class Unlike:
    """An idiom with another outcome than in eager mode.

    Args:
        outcome: `differs`, or the name of the type of an error that eager mode does not raise. A tuple has the names of
            several releases of PyTorch.
        reason: Why the outcome is right.
        fixed_in: The first PyTorch release with the same outcome as eager mode.
        doors: The ways to compile that have this outcome; in the others, the idiom runs as in eager mode.
    """

    outcome: str | tuple[str, ...]
    reason: str
    fixed_in: str | None = None
    doors: tuple[str, ...] = (*DOORS, STOCK)

    def holds(self, door: str) -> bool:
        return door in self.doors and not (self.fixed_in and torch.__version__ >= self.fixed_in)


IDIOMS: dict[str, Idiom] = {}


def idiom(scenario: Idiom, name: str = "") -> Idiom:
    """Registers an idiom under its name."""
    name = name or scenario.__name__
    assert name not in IDIOMS, f"there are two idioms {name}"
    IDIOMS[name] = scenario
    return scenario


def idioms_of_calls(table: dict[str, Any]) -> None:
    """Registers idioms in which nothing but the arguments changes.

    Args:
        table: Maps a name to the function, and to a function that calls the compiled function with a tensor. The class
            and the sizes of the tensor follow if it is not a `TwoTensor` of 2 x 3. Each item of an iterator is recorded
            when it comes; any other value is recorded as a whole.
    """
    for name, (fn, calls, *of) in table.items():
        idiom(functools.partial(_called, fn, calls, of or [TwoTensor]), name)


def _called(fn: Any, calls: Any, of: Any, compile_: Compile) -> Iterator[Any]:
    cls, *size = of
    yield from _each(calls(compile_(fn), make(cls, *(size or (2, 3)))))


def _each(results: Any) -> Iterator[Any]:
    """The items, of which no variable keeps one alive over the next call."""
    return results if isinstance(results, Iterator) else iter([results])


def idioms_of_changes(table: dict[str, Any]) -> None:
    """Registers idioms in which an object changes between calls of a function that reads it.

    Args:
        table: Maps a name to a function that makes the object, a function that returns the callable to compile, a call,
            and changes. None in the second place compiles the object itself; of a list, each item is compiled. The call
            gets the compiled function and the object; it may return the results of several calls as an iterator. Each
            change has another such call after it.
    """
    for name, (make_held, what, call, *changes) in table.items():
        idiom(functools.partial(_changed, make_held, what, call, (again, *changes)), name)


def _changed(make_held: Any, what: Any, call: Any, changes: Any, compile_: Compile) -> Iterator[Any]:
    held = make_held()
    compiled = held if what is None else what(held)
    fn = list(map(compile_, compiled)) if isinstance(compiled, list) else compile_(compiled)
    for change in changes:
        change(held)
        yield from _each(call(fn, held))


# ------------------------------------------------------------------------------------------ parts of idioms


def wrapper(rows: int = 2) -> TwoTensor:
    """A pair of matrices of three columns."""
    return make(TwoTensor, rows, 3)


def calling(fn: Any, held: Any) -> Any:
    """A call of the compiled function with one such pair."""
    return fn(wrapper())


def again(held: Any) -> None:
    """Changes nothing before another call."""


def put(**values: Any) -> Callable[[Any], None]:
    """A change that sets attributes."""

    def change(held: Any) -> None:
        for name, value in values.items():
            setattr(held, name, value)

    return change


def between(call: Callable[[], Any], *changes: Callable[[], Any]) -> Iterator[Any]:
    """Yields what a call gives, before the changes and after each of them."""
    yield call()
    for change in changes:
        change()
        yield call()


def within(call: Callable[[], Any], *managers: Any) -> Iterator[Any]:
    """Yields the result of a call inside of each context manager, recorded outside; None enters none."""
    for manager in managers:
        with manager or contextlib.nullcontext():
            out = call()
        yield out


def trained(fn: Any, *args: Any) -> tuple[Any, ...]:
    """Calls a function, runs the backward of its results, and returns the results and the arguments."""
    out = fn(*args)
    backward(out)
    return out, args


def check_idiom(name: str, door: str, unlike: Unlike | None = None) -> None:
    """Runs an idiom in eager mode and compiled.

    Args:
        name: Which idiom.
        door: How to compile; `STOCK` is PyTorch without this library.
        unlike: The exception, if there is one for this idiom.

    Raises:
        AssertionError: The outcome differs from the expected one.
    """
    compile_ = by_stock if door == STOCK else DOORS[door]
    want = run(IDIOMS[name], eager)
    if unlike is None or not unlike.holds(door):
        assert_equal(run(IDIOMS[name], compile_), want)
    else:
        wanted = (unlike.outcome,) if isinstance(unlike.outcome, str) else unlike.outcome
        assert outcome(IDIOMS[name], compile_, want) in wanted, unlike.reason


def outcome(idiom: Idiom, compile_: Compile, want: list[Any]) -> str:
    """`equal`, `differs`, or the name of the type of the error."""
    try:
        return "equal" if difference(run(idiom, compile_), want) is None else "differs"
    except Exception as error:  # noqa: BLE001 - the table of exceptions names its type
        return type(error).__name__


# -------------------------------------------------------------------------------------------------- one run


def run(idiom: Idiom, compile_: Compile) -> list[Any]:
    """The records of one run, which starts from fixed seeds."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    with contextlib.closing(idiom(compile_)) as steps:
        return list(map(record, steps))  # a loop's variable would keep a result alive over the next call


def raised(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result of a call, or the type of the error and, if that is a user's, its text."""
    try:
        return fn(*args, **kwargs)
    except (AttributeError, NameError, TypeError) as error:
        return type(
            error
        ).__name__  # Python's text names the function that was called, which may be a wrapper
    except (LookupError, ValueError) as error:
        return type(error).__name__, error.args


def record(value: Any) -> list[Any]:
    """Structure, and of every tensor type, metadata, sizes, aliasing, values and `.grad`."""
    tensors: list[Tensor] = []
    structure = _structure(value, tensors)
    for tensor in tensors:  # grows while it is read: a gradient may have one itself
        if tensor.is_leaf and tensor.grad is not None:
            structure = (structure, _structure(tensor.grad, tensors))
    values = [[part.detach().clone() for part in plain_parts(tensor)] for tensor in tensors]
    return [structure, [facts(tensor) for tensor in tensors], aliasing(tensors), identities(tensors), values]


def _structure(value: Any, tensors: list[Tensor]) -> Any:
    """The value with every tensor replaced by its number."""
    kind = type(value).__qualname__
    match value:
        case Tensor():
            tensors.append(value)
            return f"tensor {len(tensors) - 1}"
        case dict():
            return kind, [
                (_structure(key, tensors), _structure(entry, tensors)) for key, entry in value.items()
            ]
        case tuple() | list() | deque():
            return kind, [_structure(entry, tensors) for entry in value]
        case set() | frozenset():
            return kind, sorted(map(repr, value))
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return kind, [
                (field.name, _structure(getattr(value, field.name), tensors))
                for field in dataclasses.fields(value)
            ]
    return kind, value


def assert_equal(got: list[Any], want: list[Any]) -> None:
    """Compares the records of two runs."""
    found = difference(got, want, "record")
    assert found is None, found


def difference(got: Any, want: Any, where: str = "") -> str | None:
    """How one nested list of tensors and other values differs from another, if it does."""
    if isinstance(want, Tensor):
        same = torch.allclose(got, want, rtol=1e-4, atol=1e-5, equal_nan=True)
        return None if same else f"{where}: got {got}, expected {want}"
    if isinstance(want, list | tuple) and isinstance(got, list | tuple) and len(got) == len(want):
        found = (difference(g, w, f"{where}.{n}") for n, (g, w) in enumerate(zip(got, want, strict=True)))
        return next(filter(None, found), None)
    return None if got == want else f"{where}: got {got}, expected {want}"
