"""Random programs: views, in-place ops, mixed plain and subclass values, shared inputs, several outputs.

Each program is data: its arguments, the next op and its operands, the returned values, the results that get a gradient,
and the writes that follow. Eager mode judges. A `DesugarError` is a clean refusal, which must leave the arguments
alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, example, given, settings, strategies as st

from desugar import DesugarError
from tests.desugar.classes import (
    EVERY,
    Labeled,
    Nested,
    Pair,
    Tagged,
    TwoTensor,
    make,
    metadata,
    plain_parts,
    rebuilt,
)
from tests.desugar.idioms.running import difference
from tests.desugar.judge import aliasing, by_pass, facts, identities, random_like, versions
from tests.doors import by_torch

CLASSES = [TwoTensor, Tagged, Pair, Labeled, Nested]

# ------------------------------------------------------------------------------------------------- programs

UNARY: dict[str, Callable[[Any], Any]] = {
    "sin": torch.sin,
    "neg": torch.neg,
    "sigmoid": torch.sigmoid,
    "double": lambda x: x * 2,
    "sum": lambda x: x.sum(),
    "sum_last": lambda x: x.sum(-1, keepdim=True),
    "softmax": lambda x: x.softmax(-1),
    "detach": lambda x: x.detach(),
    "clone": lambda x: x.clone(),
    "positive": lambda x: (x > 0).to(x.dtype),
}
VIEWS: dict[str, Callable[[Any], Any]] = {
    "transpose": lambda x: x.transpose(0, -1),
    "flatten": lambda x: x.flatten(),
    "first": lambda x: x[:1],
    "rest": lambda x: x[1:],
    "unsqueeze": lambda x: x.unsqueeze(0),
    "alias": lambda x: x.view(x.shape),
    "expand": lambda x: x.expand(2, *x.shape),
    "select": lambda x: x.select(-1, 0),
}
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": torch.add,
    "mul": torch.mul,
    "sub": torch.sub,
    "where": lambda x, y: torch.where(x > 0, x, y),
    "maximum": torch.maximum,
}
IN_PLACE: dict[str, Callable[[Any], Any]] = {
    "mul_": lambda x: x.mul_(1.5),
    "add_": lambda x: x.add_(1),
    "sin_": lambda x: x.sin_(),
    "zero_": lambda x: x.zero_(),
}
IN_PLACE_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add_other_": lambda x, y: x.add_(y),
    "copy_": lambda x, y: x.copy_(y),
}
PURE = {**UNARY, **VIEWS, **BINARY}
OPS = {**PURE, **IN_PLACE, **IN_PLACE_BINARY}


@dataclass(frozen=True)
class Script:
    """A random program and a random call of it."""

    cls: type
    arguments: tuple[str, ...]
    grads: tuple[bool, ...]
    ops: tuple[tuple[str, int, int], ...]
    returned: tuple[int, ...]
    missing: frozenset[int]
    written: int | None
    grad_mode: bool = True


ARGUMENTS = ["wrapper", "plain", "column", "again", "shared", "view", "non-leaf"]


def scripts(ops: dict[str, Any], most: int) -> st.SearchStrategy[Script]:
    index = st.integers(0, 30)
    return st.builds(
        Script,
        cls=st.sampled_from(CLASSES),
        arguments=st.lists(st.sampled_from(ARGUMENTS), min_size=1, max_size=4).map(tuple),
        grads=st.lists(st.booleans(), min_size=4, max_size=4).map(tuple),
        ops=st.lists(st.tuples(st.sampled_from(sorted(ops)), index, index), min_size=1, max_size=most).map(
            tuple
        ),
        returned=st.lists(index, min_size=1, max_size=3).map(tuple),
        missing=st.frozensets(st.integers(0, 2), max_size=2),
        written=st.none() | index,
        grad_mode=st.sampled_from([True, True, True, False]),
    )


def arguments_of(script: Script) -> list[Any]:
    """Fresh arguments, the same each time."""
    torch.manual_seed(7)
    made: list[Any] = []
    for kind, grad in zip(script.arguments, script.grads, strict=False):
        wrappers = [x for x in made if type(x) is script.cls]
        if kind == "again" and made:
            made.append(made[0])
        elif kind == "shared" and wrappers:
            made.append(rebuilt(wrappers[0]).requires_grad_(grad))
        elif kind == "view" and made and all(name in PURE for name, _, _ in script.ops):
            made.append(made[0].detach()[:, :1])
        elif kind == "non-leaf":
            made.append(make(script.cls, 2, 3, grad=grad) * 1)
        elif kind in ("plain", "column"):
            made.append(torch.randn(*((2, 3) if kind == "plain" else (2, 1)), requires_grad=grad))
        else:
            made.append(make(script.cls, 2, 3, grad=grad))
    return made


def function_of(script: Script) -> Callable[..., Any]:
    """The program as a function; an op that shapes or classes do not allow is left out.

    A trace's plain tensors are a subclass of `Tensor`, so the function calls `isinstance` with the wrapper's class.
    """

    def run(*args: Any) -> Any:
        values = list(args)
        for name, i, j in script.ops:
            x, y = values[i % len(values)], values[j % len(values)]
            if name in IN_PLACE or name in IN_PLACE_BINARY:
                write(name, x, y, script.cls)
            elif name in BINARY:
                if fits(x.shape, y.shape) or fits(y.shape, x.shape):
                    values.append(BINARY[name](x, y))
            elif x.dim() and x.dim() < 4 and x.shape[0]:
                values.append(PURE[name](x))
        return tuple(values[n % len(values)] for n in script.returned)

    return run


def write(name: str, x: Any, y: Any, cls: type) -> None:
    """An in-place op, where eager mode allows it."""
    if any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.size(), strict=True)):
        return  # elements share memory: eager mode refuses most writes to such a tensor
    if name in IN_PLACE:
        IN_PLACE[name](x)
    elif x is not y and fits(y.shape, x.shape) and (isinstance(x, cls) or not isinstance(y, cls)):
        IN_PLACE_BINARY[name](x, y)


def fits(small: torch.Size, large: torch.Size) -> bool:
    """Whether a shape broadcasts to another."""
    return len(small) <= len(large) and all(
        a in (1, b) for a, b in zip(reversed(small), reversed(large), strict=False)
    )


# ------------------------------------------------------------------------------------------------ the judge


def play(fn: Callable[..., Any], script: Script, args: list[Any], write: bool | None = None) -> list[Any]:
    """Everything that a caller sees: the call, the arguments after it, gradients, a write to a result.

    Eager mode, which plays first, decides whether there is a write: a plain view of an intermediate that nobody holds
    is left alone.
    """
    with torch.set_grad_enabled(script.grad_mode):
        results = list(fn(*args))
        seen = [look(args, results)]
        outs = [r for r in dict.fromkeys(results) if r.requires_grad]
        kept = [out for n, out in enumerate(outs) if n not in script.missing]
        leaves = [x for x in dict.fromkeys(args) if x.is_leaf and x.requires_grad]
        if kept and leaves:
            generator = torch.Generator().manual_seed(3)
            tangents = [random_like(out, generator) for out in kept]
            seen.append(attempt(lambda: gradients(kept, leaves, tangents), 50))
        target = results[(script.written or 0) % len(results)]
        if write is None:
            write = script.written is not None and (isinstance(target, script.cls) or not target._is_view())
            seen.append(write)
        if write:
            with torch.no_grad():
                seen.append(attempt(lambda: (target.add_(1), look(args, results))[1], 30))
    return seen


def attempt(action: Callable[[], Any], length: int) -> Any:
    """The result of an action, or the beginning of eager mode's error."""
    try:
        return action()
    except DesugarError:
        raise
    except RuntimeError as error:
        return str(error)[:length]


def gradients(outs: list[Any], leaves: list[Any], tangents: list[Any]) -> list[Any]:
    """Gradients without their strides."""
    found = torch.autograd.grad(outs, leaves, tangents, allow_unused=True, retain_graph=True)
    return [
        g if g is None else (metadata(g), tuple(g.size()), g.dtype, [part.clone() for part in plain_parts(g)])
        for g in found
    ]


def shown(leaf: Any) -> Any:
    """The facts of a leaf, with 0 for a stride that nothing steps along: views undone may leave another one there."""
    kind, outer, parts, grad = facts(leaf)

    def idle(size: tuple[int, ...], stride: tuple[int, ...], dtype: Any) -> Any:
        return size, tuple(s if n > 1 else 0 for n, s in zip(size, stride, strict=True)), dtype

    return kind, idle(*outer), [idle(*part) for part in parts], grad


def look(args: list[Any], results: list[Any]) -> Any:
    every = [*args, *results]
    values = [part.data.clone() for x in every for part in plain_parts(x)]
    return [shown(x) for x in every], aliasing(every), identities(every), versions(args), values


def check(script: Script, door: Callable[..., Any] = by_pass) -> str:
    """Plays one script on both sides, and returns the outcome."""
    torch.compiler.reset()  # all scripts run the same code, by which Dynamo keeps what it compiled
    known = num_ops()
    fn = function_of(script)
    try:
        want = play(fn, script, arguments_of(script))
    except (RuntimeError, ValueError, NotImplementedError):
        return "eager refuses"
    write = want.pop(next(n for n, entry in enumerate(want) if isinstance(entry, bool)))
    args = arguments_of(script)
    before = look(args, [])
    compiled = door(fn)
    try:
        got = play(compiled, script, args, write)
    except RuntimeError as error:
        inner = getattr(error, "inner_exception", error)
        # A saved tensor that the function overwrites is met when the backward is traced, at the call.
        if not isinstance(inner, DesugarError) and "modified by an inplace operation" not in str(error):
            raise
        has_run = getattr(compiled, "programs", None) or (inner is error and door is not by_pass)
        assert has_run or difference(look(args, []), before) is None, "a refusal changed its arguments"
        return "refused"
    if len(want) > 1 and isinstance(want[1], str):
        return "right"  # the backward met a saved tensor that had changed; the program may not have needed it
    found = difference(got, want)
    assert found is None, found
    assert difference(play(compiled, script, arguments_of(script), write), want) is None, (
        "the second call differs"
    )
    if door is by_pass and not compiled.programs and num_ops() > known:
        check_refused(fn, script, write)
    return "right" if num_ops() > known else "nothing to compute"


def check_refused(fn: Callable[..., Any], script: Script, write: bool) -> None:
    """Raises unless desugar refuses what Dynamo captured, which is why AOTAutograd compiled it instead."""
    torch.compiler.reset()
    with pytest.raises(Exception) as caught:
        play(by_pass(fn, strict=True), script, arguments_of(script), write)
    assert isinstance(getattr(caught.value, "inner_exception", caught.value), DesugarError), caught.value


def num_ops() -> int:
    """How many ops Dynamo has captured so far."""
    return torch._dynamo.utils.counters["stats"]["calls_captured"]


# ------------------------------------------------------------------------------------------------ the tests

QUIET = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


EVERY_DOOR = pytest.mark.parametrize("door", [by_pass, by_torch])
# `torch.compile` leads to the same pass; the slow tests play many programs through it.
ONE_DOOR = pytest.mark.parametrize("door", [by_pass, pytest.param(by_torch, marks=pytest.mark.slow)])


# A detached view of an argument that is written twice.
DETACHED = (("expand", 0, 0), ("add_", 0, 0), ("add_", 0, 0), ("detach", 1, 0), ("add", 0, 1))

# A detached argument that a write with a gradient has reached.
GRADIENT = (("detach", 0, 0), ("add_other_", 1, 0))

# A view that was taken without gradients, of an argument that requires grad and is written to.
STALE = (("expand", 0, 0), ("detach", 1, 0), ("add_", 0, 0))


@ONE_DOOR
@settings(max_examples=20, suppress_health_check=QUIET)
@given(script=scripts(OPS, 15))
@example(script=Script(TwoTensor, ("wrapper",), (False,) * 4, DETACHED, (2, 0), frozenset(), 0))
@example(script=Script(TwoTensor, ("wrapper",), (True,) * 4, GRADIENT, (1,), frozenset(), None))
@example(script=Script(TwoTensor, ("wrapper",), (True,) * 4, STALE, (2,), frozenset(), None, grad_mode=False))
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_programs(script, door):
    event(check(script, door))


@EVERY_DOOR
@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=2000, suppress_health_check=QUIET)
@given(script=scripts(OPS, 15))
def test_many_programs(script, door):
    event(check(script, door))


@pytest.mark.slow
def test_every_op_and_every_argument_is_played():
    """Each op once on a wrapper, so that none is silently left out."""
    assert set(EVERY) >= set(CLASSES)
    for name in OPS:
        for cls in CLASSES:
            script = Script(cls, ("wrapper", "plain"), (False,) * 4, ((name, 0, 1),), (30, 0), frozenset(), 0)
            assert check(script) in ("right", "nothing to compute"), (name, cls)
