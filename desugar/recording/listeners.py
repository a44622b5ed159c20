"""Records compilations for listeners. Without a listener nothing is recorded, and recording costs no time.

A *recording* describes one compilation: how long each stage took, which ops the function ran
(`desugar.recording.ops`), and the records that the stages made. A listener gets it when the compilation has ended.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from desugar.user_code import Line
from subclasses.source_text.emitter import Emitter

# ------------------------------------------------------------------------------------------------- records


@dataclass(slots=True)
class Op:
    """A call that the function ran: of a torch function, above dispatch, or of an op with a subclass argument.

    Attributes:
        number: Its index in the recording.
        name: `torch.nn.functional.linear`, `aten.mul.Tensor`.
        how: The mechanism that turned it into plain ops: a rule, "inners", "materialize", ...; "plain" where no
            argument is a subclass; empty for a torch function without a rule.
        operands: Types and sizes of its tensor arguments.
        line: The line of the user's code that ran it.
        parent: The number of the op that ran it; None at the top.
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

    After the listeners have returned, `args` is empty, and `graph`, `inputs` and `traced` are None.

    Attributes:
        fn: The user's function or module, if `desugar.compile` started the compilation; else Dynamo's graph.
        reason: Why it is compiled.
        failed: The guard of an earlier program that failed, in words; empty for a first program.
        args: The argument leaves of the graph.
        graph: Dynamo's graph.
        guards: Dynamo's guards of the frame. Dynamo builds their checks later, after the compilation.
        stages: (name, seconds) in order; a stage that ran twice has two entries.
        ops: The ops of the recorded run of the function.
        materialized: (class name, op, line) of each materializing fallback in that run.
        program, mode: The program and its fake mode; None before the compilation has succeeded.
        error: The error that ended the compilation.
        seconds: How long the compilation took.
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
    program: Any = None
    mode: Any = None
    error: BaseException | None = None
    seconds: float = 0.0


class CompilationOwner:
    """The owner of a call that may compile.

    Attributes:
        what: The user's function or module.
        reason: Why it is compiled, for a compilation where no guard of an earlier program has failed.
    """

    def __init__(self, what: Any, reason: str) -> None:
        self.what, self.reason = what, reason

    def add(self, program: Any, why: str) -> None:
        """Receives a program that was compiled for the call in progress."""

    def arguments_in_progress(self) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Returns the arguments of the call in progress; None if unknown."""
        return None

    def variables(self, compile_id: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the local and global variables of the frame that Dynamo compiles; both are empty if unknown."""
        return {}, {}


# ----------------------------------------------------------------------------------------------- listening

Listener = Callable[[Recording], None]

_listeners: list[Listener] = []
_thread = threading.local()


@contextlib.contextmanager
def listen(listener: Listener) -> Iterator[None]:
    """Calls the listener with each compilation that ends inside the context, in any thread."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def has_listeners() -> bool:
    """Returns whether there is a listener to all compilations."""
    return bool(_listeners)


def current() -> Recording | None:
    """Returns the recording of the compilation in progress in this thread; None if it has no listener."""
    return getattr(_thread, "recording", None)


@contextlib.contextmanager
def publish_recording(made: Recording, *, also: Listener | None = None) -> Iterator[None]:
    """Records the compilation inside the context, and passes the recording to the listeners when it ends.

    Args:
        made: The recording to fill.
        also: A further listener, to this compilation alone.
    """
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
        made.args, made.graph, made.mode = (), None, None


@contextlib.contextmanager
def resumed(made: Recording) -> Iterator[None]:
    """Records the compilation in this thread into a recording inside the context, and adds the time to it."""
    outer, start = current(), time.perf_counter()
    _thread.recording = made
    try:
        yield
    finally:
        _thread.recording = outer
        made.seconds += time.perf_counter() - start


@contextlib.contextmanager
def compiling_for(owner: CompilationOwner) -> Iterator[None]:
    """Makes `owner` the owner of the compilations in this thread inside the context."""
    outer, _thread.owner = getattr(_thread, "owner", None), owner
    try:
        yield
    finally:
        _thread.owner = outer


def compilation_owner() -> CompilationOwner | None:
    """Returns the owner of the call that compiles in this thread; None for a call that `torch.compile` compiles."""
    return getattr(_thread, "owner", None)


def note_skipped_check(out: Emitter, text: str) -> None:
    """Writes a comment into generated text that names a skipped check and its proof, if the compilation is recorded.

    Args:
        out: The generated text.
        text: `check: proof`.
    """
    if current() is not None:
        out.writeline(f"# left out: {text}")


@contextlib.contextmanager
def stage(name: str) -> Iterator[None]:
    """Records the duration of a stage of the compilation in progress."""
    made = current()
    if made is None:
        yield
        return
    start = time.perf_counter()
    try:
        yield
    finally:
        made.stages.append((name, time.perf_counter() - start))
