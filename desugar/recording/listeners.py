"""Who looks on while programs are compiled. Nothing is noted, and nothing costs, while nobody does.

A *recording* is what one compilation tells of itself: how long each stage took, which ops the function ran
(`desugar.recording.ops`), and the records that the stages made. Listeners get it when the compilation has ended.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from desugar.user_code import Line
from subclasses.codegen.emitter import Emitter

# ------------------------------------------------------------------------------------------------- records


@dataclass(slots=True)
class Op:
    """Something that the function ran, as it was seen above dispatch or on its way to a subclass.

    Attributes:
        number: Its place among the ops of the recording.
        name: `torch.nn.functional.linear`, `aten.mul.Tensor`.
        how: What turned it into plain ops: a rule, "structure", "materialize", ...; "plain" where none was needed.
        operands: Types and sizes of its tensors.
        line: The user's line that ran it.
        parent: The op in which it was run.
    """

    number: int
    name: str
    how: str
    operands: str
    line: Line | None = None
    parent: int | None = None


@dataclass(slots=True)
class Recording:
    """One compilation.

    Attributes:
        fn: The user's function or module, if `desugar.compile` asked; else the graph, or a function of leaves.
        reason: Why it is compiled.
        failed: What failed of an earlier program's guards, in words; empty for a first one.
        args: The graph's leaves; gone when the listeners have returned, as are `graph`, `inputs` and `traced`.
        graph: Dynamo's graph.
        guards: Dynamo's guards of the frame; what they check is known once Dynamo has built them, after this.
        stages: (name, seconds) in order; a stage that is run again occurs again.
        ops: What the recorded run of the function ran.
        materialized: (class, op, line) of its materializing fallbacks.
        inputs, traced: The records of the stages, once there.
        program: The program, once there.
        error: What ended the compilation instead.
        seconds: How long it took.
    """

    fn: Any
    reason: str
    args: tuple[Any, ...] = ()
    graph: Any = None
    failed: str = ""
    guards: tuple[Any, ...] = ()
    stages: list[tuple[str, float]] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    materialized: list[tuple[str, str, Line | None]] = field(default_factory=list)
    inputs: Any = None
    traced: Any = None
    program: Any = None
    error: BaseException | None = None
    seconds: float = 0.0


class Caller:
    """Who has something compiled.

    Attributes:
        what: The function or module, as the user has it.
        reason: Why, where no guard of an earlier program has failed.
    """

    def __init__(self, what: Any, reason: str) -> None:
        self.what, self.reason = what, reason

    def add(self, program: Any, why: str) -> None:
        """Gets a program that was compiled for the call in progress."""

    def variables(self, compile_id: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """The variables, in this call, of the frame that Dynamo compiled: local ones, global ones; none if unknown."""
        return {}, {}


# ----------------------------------------------------------------------------------------------- listening

Listener = Callable[[Recording], None]

_listeners: list[Listener] = []
_here = threading.local()


@contextlib.contextmanager
def listen(listener: Listener) -> Iterator[None]:
    """Inside, the listener is called with each compilation that ends, in whatever thread."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def has_listeners() -> bool:
    """Whether somebody looks on."""
    return bool(_listeners)


def current() -> Recording | None:
    """The recording of the compilation in progress in this thread, if anybody looks on."""
    return getattr(_here, "recording", None)


@contextlib.contextmanager
def recording(made: Recording, *, also: Listener | None = None) -> Iterator[None]:
    """A compilation; `also` listens to this one besides those who listen to all."""
    listeners = [*_listeners, *([also] if also is not None else [])]
    if not listeners:
        yield
        return
    try:
        with resumed(made):
            yield
    except BaseException as error:
        made.error = error
        raise
    finally:
        for listener in listeners:
            listener(made)
        made.args, made.graph, made.inputs, made.traced = (), None, None, None


@contextlib.contextmanager
def resumed(made: Recording) -> Iterator[None]:
    """Inside, what is compiled in this thread belongs to a recording."""
    outer, start = current(), time.perf_counter()
    _here.recording = made
    try:
        yield
    finally:
        _here.recording = outer
        made.seconds += time.perf_counter() - start


@contextlib.contextmanager
def called_by(caller: Caller) -> Iterator[None]:
    """Inside, what is compiled in this thread is compiled for `caller`."""
    outer, _here.caller = getattr(_here, "caller", None), caller
    try:
        yield
    finally:
        _here.caller = outer


def caller() -> Caller | None:
    """Whose call compiles in this thread, if `desugar` was called; None behind `torch.compile`."""
    return getattr(_here, "caller", None)


def note_left_out(out: Emitter, text: str) -> None:
    """A comment beside a check that generated text does without, and what proves it; only if anybody looks on."""
    if current() is not None:
        out.writeline(f"# left out: {text}")


@contextlib.contextmanager
def stage(name: str) -> Iterator[None]:
    """A stage of the compilation in progress."""
    noted = current()
    if noted is None:
        yield
        return
    start = time.perf_counter()
    try:
        yield
    finally:
        noted.stages.append((name, time.perf_counter() - start))
