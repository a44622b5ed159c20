"""What an explanation is made of: frozen records of text and numbers, nothing live.

`collect` makes them from a compilation, `text`, `terminal` and `page` show them. `Program.to_dict()` is the same
as dictionaries, lists, strings and numbers, for tools; its keys are the attributes below.
"""

from __future__ import annotations

from dataclasses import dataclass

from desugar.ir.record_base import Record

# ---------------------------------------------------------------------------------------- what went in and out


@dataclass(frozen=True, slots=True)
class Leaf(Record):
    """A tensor, or something that is none, among the arguments or results.

    Attributes:
        name: As the user names it: a parameter, an attribute path, a field of the wrapper around it.
        kind: "Tensor", the name of a subclass, "constant", "int", "same", "view".
        size: Extents; one that is symbolic as `s0 (3 here)`.
        dtype, device: Of the tensor.
        requires_grad: Of the tensor.
        metadata: Constant metadata as (name, value); a change recompiles.
        dynamics: Ints as (name, value); symbolic ones change without a recompile.
        note: What else is to be said.
        inner: The inner tensors of a wrapper.
    """

    name: str
    kind: str
    size: tuple[str, ...] = ()
    dtype: str = ""
    device: str = ""
    requires_grad: bool = False
    metadata: tuple[tuple[str, str], ...] = ()
    dynamics: tuple[tuple[str, str], ...] = ()
    note: str = ""
    inner: tuple[Leaf, ...] = ()


@dataclass(frozen=True, slots=True)
class Symbol(Record):
    """A size or int that may change: its name, where a call's value comes from, and what it was."""

    name: str
    source: str
    value: int


# ------------------------------------------------------------------------------------------------- what it ran


@dataclass(frozen=True, slots=True)
class Place(Record):
    """A line of a file, and its text."""

    file: str
    line: int
    text: str = ""


@dataclass(frozen=True, slots=True)
class Source(Record):
    """A function of the user's that ran: its file, name, first line and lines."""

    file: str
    function: str
    first: int
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OuterOp(Record):
    """An op that the function ran, and the plain ops that it became.

    Attributes:
        number: By which graph nodes refer to it.
        name: `torch.nn.functional.linear`, `aten.mul.Tensor`.
        kind: "plain", "rule", "structure", "derived", "tag", "decomposition", "map", "materialize", "inside" (see
            the ops inside), "class" (of a class written by hand).
        how: The same with names: which rule, and where it is written.
        operands: Types and sizes of its tensors.
        place: The user's line.
        parent: The op in which it ran.
        forward, backward: The plain ops that it became, those of ops inside it left out.
    """

    number: int
    name: str
    kind: str
    how: str
    operands: str
    place: Place | None
    parent: int | None
    forward: tuple[str, ...] = ()
    backward: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Node(Record):
    """A node of a graph: its name, what it calls, its line in the graph's text (from 0), the outer op it came from."""

    name: str
    target: str
    line: int
    op: int | None


@dataclass(frozen=True, slots=True)
class Graph(Record):
    """A graph over plain tensors: `text` is a Python function that runs by itself unless `needs` names attributes."""

    name: str
    text: str
    nodes: tuple[Node, ...]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Saved(Record):
    """What the backward reads: its name in the graph, where it comes from, and the bytes kept for it alone.

    Bytes are those of the call that was traced; symbolic sizes may give others.
    """

    name: str
    source: str
    size: tuple[str, ...]
    dtype: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Materialized(Record):
    """An op that ran on what a subclass materializes to: no rule was there for it."""

    cls: str
    op: str
    place: Place | None
    count: int = 1
    traced: bool = False


# ------------------------------------------------------------------------------------------------- the wrapper


@dataclass(frozen=True, slots=True)
class Guard(Record):
    """What a call has to meet to run this program.

    Attributes:
        text: The condition, in the user's names.
        place: The user's line that made it one, if there is one.
        name: What it is about: a parameter, an attribute path; empty for modes and the like.
        checks: How many checks of Dynamo's it stands for.
    """

    text: str
    place: Place | None = None
    name: str = ""
    checks: int = 1


@dataclass(frozen=True, slots=True)
class FailedGuard(Record):
    """A guard of an earlier program that a call did not meet.

    Attributes:
        text: The whole in words.
        name: What it is about, as the user names it; empty for a condition on several sizes, or if Dynamo names none.
        expected: What the earlier program was compiled for.
        got: The value of the call; empty if it is unknown.
    """

    text: str
    name: str = ""
    expected: str = ""
    got: str = ""

    @classmethod
    def of(cls, text: str) -> FailedGuard:
        """Reads `x.size(0): expected 2, got 5`."""
        name, found, values = f": {text}".rpartition(": expected ")
        if not found:
            return cls(text)
        expected, _, got = values.rpartition(", got ") if ", got " in values else (values, "", "")
        return cls(text, name.removeprefix(": "), expected, got)


@dataclass(frozen=True, slots=True)
class LeftOut(Record):
    """A check that the wrapper does without: its line in the text (from 0), what it is, what proves it."""

    line: int
    check: str
    proof: str


@dataclass(frozen=True, slots=True)
class Cost(Record):
    """Seconds of one call, medians.

    Attributes:
        call: Of the wrapper, the compiled graph in it included; without Dynamo's guards.
        graph: Of the compiled graph in it.
        rounds: How many calls were measured.
    """

    call: float
    graph: float
    rounds: int

    @property
    def wrapper(self) -> float:
        """What is neither graph nor gained."""
        return max(self.call - self.graph, 0.0)

    @property
    def share(self) -> float:
        """The wrapper's part of a call."""
        return self.wrapper / self.call if self.call else 0.0


@dataclass(frozen=True, slots=True)
class Worth(Record):
    """The same call in several ways: whether compiling was worth it.

    `explain --compare` runs each way in a process of its own, `report --compare` all ways after the script's end.

    Attributes:
        ways: (way, seconds of a warm call), guards included; a way that failed has None.
        verdict: What was compared, and in which ways it was right.
        answer: Yes or no, with how much faster or slower the last way, which is ours, is than each of the others.
        memory: (way, bytes by which a warm call raises the peak of the allocated memory).
        losses: For each way that is faster than ours or takes less memory: by how much, the cause, and the remedy.
    """

    ways: tuple[tuple[str, float | None], ...]
    verdict: str
    answer: str = ""
    memory: tuple[tuple[str, int | None], ...] = ()
    losses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Program(Record):
    """One compiled signature of one function.

    Attributes:
        name: The function.
        label: The name, and what tells the program from others of that function; empty if there is no other.
        reason: Why it was compiled; `failed` says which guard of the newest program before it failed, with both values,
            and `failures` is the same as data.
        backend: What compiled the graphs.
        seconds: How long it took; `stages` are (name, seconds).
        error: What ended the compilation instead.
        inputs, captured, outputs: What goes into the graph, through parameters and through modules, closures and
            globals, and what comes out of it. Python around the graph is Dynamo's, and has its say in the guards alone.
        aliasing, mutation: What was found, as sentences.
        symbols, guards: What a call has to meet; Dynamo checks it.
        sources, ops, graphs: The user's lines, the outer ops and the plain graphs, tied by op numbers.
        saved: What the backward reads; `saved_bytes` what is kept for it besides inputs and results.
        wrapper: The generated text.
        left_out: The checks it does without.
        materialized: Materializing fallbacks.
        cost: Measured, or None with the reason in `no_cost`.
        calls: How often it ran, where that was counted.
        worth: The same call in eager mode and under `torch.compile`, where that was asked for; or None with the reason
            in `no_worth`.
    """

    name: str
    reason: str
    backend: str
    seconds: float
    failed: tuple[str, ...] = ()
    stages: tuple[tuple[str, float], ...] = ()
    error: str = ""
    inputs: tuple[Leaf, ...] = ()
    captured: tuple[Leaf, ...] = ()
    outputs: tuple[Leaf, ...] = ()
    aliasing: tuple[str, ...] = ()
    mutation: tuple[str, ...] = ()
    symbols: tuple[Symbol, ...] = ()
    guards: tuple[Guard, ...] = ()
    sources: tuple[Source, ...] = ()
    ops: tuple[OuterOp, ...] = ()
    graphs: tuple[Graph, ...] = ()
    saved: tuple[Saved, ...] = ()
    saved_bytes: int = 0
    wrapper: str = ""
    left_out: tuple[LeftOut, ...] = ()
    materialized: tuple[Materialized, ...] = ()
    cost: Cost | None = None
    no_cost: str = ""
    calls: int | None = None
    label: str = ""
    worth: Worth | None = None
    no_worth: str = ""
    failures: tuple[FailedGuard, ...] = ()

    @property
    def title(self) -> str:
        """What the program is called where others are shown beside it."""
        return self.label or self.name


@dataclass(frozen=True, slots=True)
class Report(Record):
    """What was compiled while a script ran.

    Attributes:
        title: What the programs are of.
        programs: In the order of compilation.
        materialized: Materializing fallbacks, in programs and in eager mode.
        versions: Names and versions of what ran it.
        seconds: How long it ran.
        not_compiled: Functions that were to be compiled and were not, each with the reason; stock's, too. They ran in
            eager mode, or raised where `fullgraph=True` asked for that.
        breaks: Where graphs broke, each line with the reason.
        slow: Slow paths that were taken, each once with its reason and remedy.
    """

    title: str
    programs: tuple[Program, ...]
    materialized: tuple[Materialized, ...] = ()
    versions: tuple[tuple[str, str], ...] = ()
    seconds: float = 0.0
    not_compiled: tuple[str, ...] = ()
    breaks: tuple[str, ...] = ()
    slow: tuple[str, ...] = ()
