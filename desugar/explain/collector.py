"""Collects the programs that are compiled while other code runs, and the costs of their calls."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from desugar import _torch as torch_private
from desugar.explain.collecting.collect import collect_program, describe_left_out, merge_materialized
from desugar.explain.collecting.cost import Meter, attach_meter
from desugar.explain.collecting.guards import TakenGuards, take_guards
from desugar.explain.collecting.labels import name_apart
from desugar.explain.records import Materialized, Program, Report
from desugar.recording.frames import Frames, Watch, unique, watch_frames
from desugar.recording.listeners import Recording, current, listen
from desugar.recording.user_names import function_name
from desugar.user_code import Line, find_line
from subclasses import slow_paths, strict_mode

_SHORT = 1e-3  # seconds; a shorter late stage is not listed

# ------------------------------------------------------------------------------------------------ collector


@dataclass(slots=True)
class _Seen:
    record: Program
    guards: TakenGuards | None = None
    program: Any = None  # a weak reference
    meter: Meter | None = None

    def finish(self) -> Program:
        """Returns the record with its guards, backwards, calls and costs, which are known after the compilation."""
        if self.meter is None:
            return self.record
        cost, program = self.meter.cost, self.program()
        changes: dict[str, Any] = {
            "guards": () if self.guards is None else self.guards.describe(),
            "calls": self.meter.calls,
            "cost": cost,
            "no_cost": "" if cost else "it was not called",
        }
        if program is not None:  # None if the program was garbage-collected
            late = program.variants.late_seconds if program.variants is not None else 0.0
            if late > _SHORT:
                changes["stages"] = (*self.record.stages, ("compile backward, late", late))
            changes["seconds"] = self.record.seconds + late
            changes["wrapper"] = program.source
            changes["left_out"] = describe_left_out(program.source)
        return replace(self.record, **changes)


class Collector:
    """Records compilations, materializing fallbacks and slow paths inside `collecting`; `report` returns them.

    Args:
        also: Called with each compilation, in the order of the report's programs.
    """

    def __init__(self, also: Callable[[Recording], None] = lambda recording: None) -> None:
        self._also = also
        self._seen: list[_Seen] = []
        self._eager: list[tuple[str, str, Line | None]] = []
        self._slow: list[str] = []
        self._watch: Watch | None = None
        self._lock = threading.Lock()
        self._start = time.perf_counter()

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Collects compilations, materializing fallbacks and slow paths of all threads inside the context."""
        strict_mode.watchers.append(self._note_eager)
        slow_paths.watchers.append(self._slow.append)
        try:
            with listen(self._note), watch_frames() as watch:
                self._watch = watch
                yield
        finally:
            strict_mode.watchers.remove(self._note_eager)
            slow_paths.watchers.remove(self._slow.append)

    def _note(self, recording: Recording) -> None:
        seen = _describe(recording)
        if recording.program is not None:
            seen.program, seen.meter = weakref.ref(recording.program), attach_meter(recording.program)
        with self._lock:
            self._also(recording)
            self._seen.append(seen)

    def _note_eager(self, cls: type, op: Any) -> None:
        if (
            current() is None and torch_private.CompileContext.try_get() is None
        ):  # Dynamo runs each op once, on fakes
            self._eager.append((cls.__name__, str(op), find_line()))

    def report(self, title: str) -> Report:
        """Returns the report of everything collected so far."""
        programs = name_apart([seen.finish() for seen in self._seen])
        frames = self._watch.frames() if self._watch else Frames()
        traced = Counter(
            (materialized.cls, materialized.op, materialized.place)
            for p in programs
            for materialized in p.materialized
        )
        return Report(
            title,
            programs,
            (
                *(Materialized(*key, number, True) for key, number in traced.items()),
                *merge_materialized(self._eager, traced=False),
            ),
            versions(),
            time.perf_counter() - self._start,
            not_compiled=frames.eager,
            breaks=frames.breaks,
            slow=unique(self._slow),
        )


def _describe(recording: Recording) -> _Seen:
    """Describes a compilation. An error here becomes the record's error, since it must not end the user's script."""
    try:
        record = collect_program(recording)
        guards = None if record.error else take_guards(recording, record)
        return _Seen(record, guards)
    except Exception as error:  # noqa: BLE001 - not an error of the script
        what = f"it was compiled, and cannot be described: {type(error).__name__}: {error}"
        name = function_name(recording.fn, recording.graph)
        return _Seen(Program(name, recording.reason, "", recording.seconds, error=what))


def versions() -> tuple[tuple[str, str], ...]:
    """Returns the versions of Python and PyTorch, and the device, by name."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return (("Python", sys.version.split()[0]), ("PyTorch", torch.__version__), ("device", device))
