"""Records of an explanation: frozen, with text and numbers, and without live objects.

`collecting` makes the records of a compilation; `text` and `render` show them. `Program.to_dict()` returns a record as
dictionaries, lists, strings and numbers, for tools; its keys are the attributes below.
"""

from __future__ import annotations

from dataclasses import dataclass

from desugar.recording.record_base import Record

# --------------------------------------------------------------------------------------- arguments and results


@dataclass(frozen=True, slots=True)
class Leaf(Record):
    """A tensor or another object among the arguments or results.

    Attributes:
        name: The user's name: a parameter, an attribute path, or a field of the wrapper around the leaf.
        kind: "Tensor", the name of a subclass, "constant", "int", "same", "view".
        size: Extents as text; a symbolic extent as `s0 (3 here)`.
        dtype, device: Of the tensor.
        requires_grad: Of the tensor.
        metadata: Constant metadata as (name, value); a change recompiles.
        dynamics: Ints as (name, value); symbolic ones change without a recompile.
        note: The value of an int or constant; the base of a view; the object that a leaf is the same as.
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
    """A dynamic size or int: its name, the expression that reads it, and its value in the compiled call."""

    name: str
    source: str
    value: int


# ---------------------------------------------------------------------------------------------- ops and graphs


@dataclass(frozen=True, slots=True)
class SourceLine(Record):
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
        number: The number by which graph nodes refer to the op.
        name: `torch.nn.functional.linear`, `aten.mul.Tensor`.
        kind: "plain", "rule", "inners", "derived", "tag", "decomposition", "map", "materialize", "inside" (see
            the ops inside), "class" (of a class written by hand).
        how: The kind with names: the rule, and its position in the source.
        operands: Types and sizes of its tensors.
        place: The user's line.
        parent: The op in which it ran.
        forward, backward: The plain ops that it became, without the plain ops of ops inside it.
    """

    number: int
    name: str
    kind: str
    how: str
    operands: str
    place: SourceLine | None
    parent: int | None
    forward: tuple[str, ...] = ()
    backward: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Node(Record):
    """A node of a graph: its name, its target, its line in the graph's text (from 0), the number of its outer op."""

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
    """A value that the backward reads: its name in the graph, its source, and the bytes saved for it alone.

    The bytes are counted for the traced call; they depend on symbolic sizes.
    """

    name: str
    source: str
    size: tuple[str, ...]
    dtype: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Materialized(Record):
    """An op without a rule, which ran on the materialized value of a subclass."""

    cls: str
    op: str
    place: SourceLine | None
    count: int = 1
    traced: bool = False


# ------------------------------------------------------------------------------------------------- the wrapper


@dataclass(frozen=True, slots=True)
class Guard(Record):
    """A condition on the calls that run this program.

    Attributes:
        text: The condition, in the user's names.
        place: The user's line that caused the guard, if there is one.
        name: The guarded object: a parameter or an attribute path; empty for modes and conditions on sizes.
        checks: The number of Dynamo's checks that the guard covers.
    """

    text: str
    place: SourceLine | None = None
    name: str = ""
    checks: int = 1


@dataclass(frozen=True, slots=True)
class FailedGuard(Record):
    """A guard of an earlier program that a call did not meet.

    Attributes:
        text: The whole message.
        name: The user's name of the guarded object; empty for a condition on several sizes, or if Dynamo names none.
        expected: The value that the earlier program was compiled for.
        got: The value of the call; empty if it is unknown.
    """

    text: str
    name: str = ""
    expected: str = ""
    got: str = ""

    @classmethod
    def of(cls, text: str) -> FailedGuard:
        """Parses a message such as `x.size(0): expected 2, got 5`."""
        name, separator, values = f": {text}".rpartition(": expected ")
        if not separator:
            return cls(text)
        expected, _, got = values.rpartition(", got ") if ", got " in values else (values, "", "")
        return cls(text, name.removeprefix(": "), expected, got)


@dataclass(frozen=True, slots=True)
class LeftOut(Record):
    """A check that the runtime wrapper omits: its line in the text (from 0), the check, and its proof."""

    line: int
    check: str
    proof: str


@dataclass(frozen=True, slots=True)
class Cost(Record):
    """Median seconds of one call.

    Attributes:
        call: Seconds of the runtime wrapper, with the compiled graph in it, without Dynamo's guards.
        graph: Seconds of the compiled graph.
        rounds: The number of measured calls.
    """

    call: float
    graph: float
    rounds: int

    @property
    def wrapper(self) -> float:
        """Seconds of a call outside the compiled graph."""
        return max(self.call - self.graph, 0.0)

    @property
    def share(self) -> float:
        """The runtime wrapper's fraction of a call."""
        return self.wrapper / self.call if self.call else 0.0


@dataclass(frozen=True, slots=True)
class Worth(Record):
    """Times of the same call in several ways, and whether compiling was worth it.

    `explain --compare` runs each way in a process of its own, `report --compare` all ways after the script's end.

    Attributes:
        ways: (way, seconds of a warm call), guards included; a way that failed has None.
        verdict: The number of compared calls, and the verdict on each way.
        answer: Yes or no, with the factor by which the last way, ours, is faster or slower than each other way.
        memory: (way, bytes by which a warm call raises the peak of the allocated memory).
        losses: For each way that is faster than ours or takes less memory: the difference, the cause, and the remedy.
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
        label: The name, and facts that distinguish the program from others of the function; empty if there is no other.
        reason: Why it was compiled. `failed` is the failed guard of the newest program before it, with both values;
            `failures` holds it as records.
        backend: The compiler of the graphs.
        seconds: Seconds of the compilation; `stages` are (name, seconds).
        error: The error that ended the compilation; empty if there was none.
        inputs, captured, outputs: The graph's inputs from parameters; its inputs from modules, closures and globals;
            its results. Python code around the graph appears in the guards alone.
        aliasing, mutation: The aliasing and the mutations of tensors, as sentences.
        symbols, guards: Dynamic sizes and ints; the conditions on a call, which Dynamo checks.
        sources, ops, graphs: The user's lines, the outer ops and the plain graphs, linked by op numbers.
        saved: The values that the backward reads; `saved_bytes` counts the saved values besides inputs and results.
        wrapper: The generated text.
        left_out: The checks that the runtime wrapper omits.
        materialized: Materializing fallbacks.
        cost: The measured cost, or None with the reason in `no_cost`.
        calls: The number of its calls; None if they were not counted.
        worth: The comparison with eager mode and `torch.compile`; None without `--compare`, or for the reason in
            `no_worth`.
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
        """The label, or the name of a program without a label."""
        return self.label or self.name


@dataclass(frozen=True, slots=True)
class Report(Record):
    """The compilations during a run of a script.

    Attributes:
        title: The name of the script or function.
        programs: The programs, in the order of compilation.
        materialized: Materializing fallbacks, in programs and in eager mode.
        versions: The versions of Python and PyTorch, and the device, by name.
        seconds: Seconds of the run.
        not_compiled: Functions whose compilation failed, each with the reason, also under other backends. They ran in
            eager mode, or raised with `fullgraph=True`.
        breaks: The user's lines with graph breaks, each with the reason.
        slow: Slow paths that ran, each once with its reason and remedy.
    """

    title: str
    programs: tuple[Program, ...]
    materialized: tuple[Materialized, ...] = ()
    versions: tuple[tuple[str, str], ...] = ()
    seconds: float = 0.0
    not_compiled: tuple[str, ...] = ()
    breaks: tuple[str, ...] = ()
    slow: tuple[str, ...] = ()
