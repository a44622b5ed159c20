"""Collects every program that is compiled while something else runs, and what its calls cost."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from desugar.explain.collect import collect_program, function_name, merge_materialized
from desugar.explain.cost import GRAPH, middle_cost
from desugar.explain.guards import describe_left_out
from desugar.explain.leaves import argument_names
from desugar.explain.records import Cost, Leaf, Materialized, Program, Report
from desugar.listening import Line, Recording, current, listen
from desugar.misses import find_miss
from desugar.notes import find_line
from desugar.signature import MISS
from subclasses import strictness

_ARGUMENT = re.compile(
    r"\ba(\d+)((?:_\w+)?)\b"
)  # what a wrapper calls an argument leaf, and the tensors in it
_SHORT = 1e-3  # seconds that are not worth a stage of their own
_SAMPLES = 1000  # calls of one program whose times are kept

# --------------------------------------------------------------------------------------------------- meters


@dataclass(slots=True)
class Meter:
    """What the calls of one program took."""

    calls: int = 0
    whole: list[float] = field(default_factory=list)
    graph: list[float] = field(default_factory=list)
    last_graph: float = 0.0

    @property
    def cost(self) -> Cost | None:
        """Medians, without the first call where there are others."""
        whole, graph = (times[1:] or times for times in (self.whole, self.graph))
        return middle_cost(whole, graph) if whole else None


def attach_meter(program: Any) -> Meter:
    """Counts and times the calls of a program from now on."""
    meter, run, scope = Meter(), program.run, program.run.__globals__
    compiled = scope.get(GRAPH)

    @functools.wraps(run)
    def metered(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        meter.last_graph, start = 0.0, time.perf_counter()
        result = run(args, kwargs)
        if result is not MISS:
            meter.calls += 1
            if len(meter.whole) < _SAMPLES:
                meter.whole.append(time.perf_counter() - start)
                meter.graph.append(meter.last_graph)
        return result

    def timed(items: list[Any]) -> Any:
        start = time.perf_counter()
        try:
            return compiled(items)
        finally:
            meter.last_graph += time.perf_counter() - start

    if compiled is not None:
        scope[GRAPH] = timed
    program.run = metered
    return meter


# ------------------------------------------------------------------------------------------------ collector


@dataclass(slots=True)
class _Seen:
    record: Program
    fn: int
    program: Any = None  # a weak reference
    meter: Meter | None = None

    def finish(self) -> Program:
        """The record with what came after the compilation: backwards, calls, costs."""
        if self.meter is None:
            return self.record
        cost = self.meter.cost
        counted = replace(
            self.record, calls=self.meter.calls, cost=cost, no_cost="" if cost else "it was not called"
        )
        program = self.program()
        if program is None:  # collected by now
            return counted
        late = program.family.late_seconds if program.family is not None else 0.0
        return replace(
            counted,
            seconds=counted.seconds + late,
            stages=counted.stages + ((("compile backward, late", late),) if late > _SHORT else ()),
            wrapper=program.source,
            left_out=tuple(describe_left_out(program.source)),
        )


class Collector:
    """Listens while it is entered; `report` is what it heard."""

    def __init__(self) -> None:
        self._seen: list[_Seen] = []
        self._eager: list[tuple[str, str, Line | None]] = []
        self._lock = threading.Lock()
        self._start = time.perf_counter()

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Inside, compilations and materializing fallbacks of all threads are collected."""
        strictness.watchers.append(self._note_eager)
        try:
            with listen(self._note):
                yield
        finally:
            strictness.watchers.remove(self._note_eager)

    def _note(self, recording: Recording) -> None:
        with self._lock:
            earlier = [
                seen.program()
                for seen in reversed(self._seen)
                if seen.fn == id(recording.fn) and seen.program
            ]
        failed = [
            find_miss(program, recording.args, recording.kwargs) for program in earlier if program is not None
        ]
        record = _describe(recording)
        names = [leaf.name for leaf in record.inputs] or argument_names(
            recording.fn, recording.args, recording.kwargs
        )
        failed = tuple(dict.fromkeys(_named(text, names, record.inputs) for text in failed if text))
        record = replace(
            record, reason=record.reason.split(": ")[0] if failed else record.reason, failed=failed
        )
        seen = _Seen(record, id(recording.fn))
        if recording.program is not None:
            seen.program, seen.meter = weakref.ref(recording.program), attach_meter(recording.program)
        with self._lock:
            self._seen.append(seen)

    def _note_eager(self, cls: type, op: Any) -> None:
        if current() is None:
            self._eager.append((cls.__name__, str(op), find_line()))

    def report(self, title: str) -> Report:
        """Everything so far."""
        programs = tuple(seen.finish() for seen in self._seen)
        traced = Counter((found.cls, found.op, found.place) for p in programs for found in p.materialized)
        return Report(
            title,
            programs,
            (
                *(Materialized(*key, number, True) for key, number in traced.items()),
                *merge_materialized(self._eager, traced=False),
            ),
            versions(),
            time.perf_counter() - self._start,
        )


def _describe(recording: Recording) -> Program:
    """The record of a compilation; one that cannot be described is told of, for looking on must not end a script."""
    try:
        return collect_program(recording)
    except Exception as error:  # noqa: BLE001 - whatever is wrong here is no error of the script
        what = f"it was compiled, and cannot be described: {type(error).__name__}: {error}"
        return Program(function_name(recording.fn), recording.reason, "", recording.seconds, error=what)


def _named(check: str, names: Sequence[str], leaves: Sequence[Leaf]) -> str:
    """A check that speaks of arguments as the user does."""

    def name(found: re.Match[str]) -> str:
        number, inside = int(found[1]), found[2].removeprefix("_")
        if number >= len(names):
            return found[0]
        path = _path(inside, leaves[number].inner if number < len(leaves) else ())
        return ".".join(filter(None, [names[number], *path]))

    return _ARGUMENT.sub(name, check)


def _path(inside: str, inner: Sequence[Leaf]) -> list[str]:
    """The inner tensors that a generated name goes through; the name itself where it is none of theirs."""
    for leaf in inner:
        if inside == leaf.name or inside.startswith(f"{leaf.name}_"):
            return [leaf.name, *_path(inside.removeprefix(leaf.name).removeprefix("_"), leaf.inner)]
    return [inside]


def versions() -> tuple[tuple[str, str], ...]:
    """What it ran on."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return (("Python", sys.version.split()[0]), ("PyTorch", torch.__version__), ("device", device))
