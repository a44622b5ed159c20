"""`Run` makes the subjects of a stage, times them in turns, and writes a line for each figure or failure."""

from __future__ import annotations

import importlib.util
import random
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import SubprocessError
from typing import Any, TypeVar

import torch
from torch._dynamo.exc import TorchDynamoException

from bench.gpu.device import ROOT, Call, Device
from bench.gpu.lines import HOST, MICROSECONDS, PEAK, TIME, Line, first_words
from bench.timing import Timing

T = TypeVar("T")
Makers = Mapping[str, Callable[[], Call]]
TURN = 2e3  # microseconds; a turn repeats a shorter call
IN_TURNS = "all in turns"


def _failures() -> tuple[type[Exception], ...]:
    """Returns the errors of a subject: no package, no attribute, no kernel, no memory, a failed compilation."""
    errors: list[type[Exception]] = [
        RuntimeError,
        ImportError,
        AttributeError,
        TypeError,
        ValueError,
        NameError,
    ]
    errors += [LookupError, OSError, AssertionError, SubprocessError, TorchDynamoException]
    if importlib.util.find_spec("triton"):
        errors.append(importlib.import_module("triton.errors").TritonError)
    return tuple(errors)


FAILURES = _failures()


class Absent(RuntimeError):
    """A subject, or a whole stage, needs something that does not exist here."""


@dataclass(frozen=True)
class Turns:
    """How subjects are timed.

    Attributes:
        baseline: The subject that is timed first and last again: the clocks of a device change.
        items: The number of steps or requests in a call, by which its time is divided.
        rounds: The number of turns of each subject.
        seconds: No round starts after this time, once there are five.
        host: Whether the time until a call returns is a figure, too.
        peak: The subjects whose peak memory is a figure, too.
        after: Looks at a subject after all were timed; it gets the group, the name and the call.
    """

    baseline: str
    items: Mapping[str, int] | int = 1
    rounds: int = 30
    seconds: float = 3.0
    host: bool = False
    peak: Sequence[str] = ()
    after: Callable[[str, str, Call], None] = lambda group, name, call: None

    def items_of(self, subject: str) -> int:
        return self.items if isinstance(self.items, int) else self.items.get(subject, 1)


@dataclass
class Run:
    """One stage on one device.

    Attributes:
        stage: The stage.
        device: The device.
        write: Writes a line.
        earlier: The lines that the file has for this device and these versions.
        folder: The folder of caches.
        shard: Compile only: the K-th of N parts of the groups. None: measure.
        any_torch: Whether to try the library on a PyTorch that is older than it requires.
    """

    stage: str
    device: Device
    write: Callable[[Line], None]
    earlier: Sequence[Line] = ()
    folder: Path = ROOT / "build" / "bench-gpu"
    shard: tuple[int, int] | None = None
    any_torch: bool = False
    groups: int = 0
    machine: str = field(init=False)

    def __post_init__(self) -> None:
        self.machine = self.device.describe()

    # -------------------------------------------------------------------------------------------------
    # lines
    # -------------------------------------------------------------------------------------------------

    def line(self, group: str, subject: str, **more: Any) -> None:
        """Writes a line; a stage that only compiles writes none."""
        if self.shard is None:
            self.write(
                Line(
                    self.stage, group, subject, machine=self.machine, rehearsal=self.device.rehearsal, **more
                )
            )

    def time(self, group: str, subject: str, name: str, timing: Timing, **more: Any) -> None:
        """Writes a time: the median and the quartiles."""
        values = {"value": timing.median, "low": timing.low, "high": timing.high}
        self.line(group, subject, figure=name, unit=MICROSECONDS, **values, **more)

    def number(self, group: str, subject: str, name: str, value: float, unit: str) -> None:
        """Writes a count, or a value that was measured once."""
        self.line(group, subject, figure=name, value=float(value), unit=unit)

    def has(self, group: str, subject: str, figure: str = TIME) -> bool:
        """Whether an earlier run has the figure, or failed at it; a subject that hung is tried once more."""
        mine = [x for x in self.earlier if (x.stage, x.group, x.subject) == (self.stage, group, subject)]
        failed = [line for line in mine if line.error]
        hung = [line for line in failed if line.state == "hung"]
        return any(x.figure == figure or x.text for x in mine) or len(failed) > len(hung) or len(hung) > 1

    # -------------------------------------------------------------------------------------------------
    # subjects
    # -------------------------------------------------------------------------------------------------

    def attempt(self, group: str, subject: str, make: Callable[[], T]) -> T | None:
        """Returns the result of `make`, or None for a failure, which becomes a line and costs this subject alone."""
        self.line(group, subject, state="begun")
        try:
            made = make()
            self.device.synchronize()
            return made
        except FAILURES as error:
            words = first_words(error)
        self.device.synchronize()  # raises where the device is lost: the driver then starts the stage again
        self.line(group, subject, error=words)
        self.device.free()
        return None

    def library(self) -> None:
        """Raises unless this project's packages support the PyTorch at hand.

        Raises:
            Absent: PyTorch is too old, or a dependency is missing.
        """
        wanted, installed = _least_torch(), torch.__version__
        numbers = [tuple(map(int, text.partition("+")[0].split(".")[:2])) for text in (wanted, installed)]
        if numbers[1] < numbers[0] and not self.any_torch:
            raise Absent(f"subclasses and desugar: expected torch >= {wanted}, found {installed}")

    def compare(self, group: str, makers: Makers, turns: Turns) -> dict[str, Timing]:
        """Makes the subjects that have no figure yet, and the baseline; times them in turns, and writes lines.

        Returns:
            The times by subject; a subject that failed has none.
        """
        self.groups += 1
        wanted = [name for name in makers if not self.has(group, name)]
        is_mine = self.shard is None or self.groups % self.shard[1] == self.shard[0]
        if not wanted or not is_mine or self.has(group, IN_TURNS):
            return {}
        calls: dict[str, Call] = {}
        for name, make in makers.items():
            if name in wanted or name == turns.baseline:
                call = self.attempt(group, name, lambda make=make: _warm(make()))
                if call is not None:
                    calls[name] = call
        if self.shard is not None or not calls:
            return {}
        timings = self.attempt(group, IN_TURNS, lambda: self._time(group, calls, turns)) or {}
        for name in timings:
            self.attempt(group, name, lambda name=name: turns.after(group, name, calls[name]))
        calls.clear()
        self.device.free()
        return timings

    def _time(self, group: str, calls: dict[str, Call], turns: Turns) -> dict[str, Timing]:
        """Times calls in turns; each round has a new order."""
        times = {name: self._repeats(call) for name, call in calls.items()}
        samples: dict[str, list[float]] = {name: [] for name in calls}
        on_host: dict[str, list[float]] = {name: [] for name in calls if turns.host}
        if turns.baseline in calls:
            self._baseline(group, "first", calls, times, turns)
        order, rng, started, rounds = list(calls), random.Random(0), time.monotonic(), 0
        while rounds < 5 or (rounds < turns.rounds and time.monotonic() - started < turns.seconds):
            rng.shuffle(order)
            for name in order:
                samples[name].append(self.device.time(calls[name], times[name]) / turns.items_of(name))
                if turns.host:
                    on_host[name].append(
                        self.device.time_host(calls[name], times[name]) / turns.items_of(name)
                    )
                    self.device.synchronize()
            rounds += 1
        device_timings = {name: Timing.of(values) for name, values in samples.items()}
        hosts = {name: Timing.of(values) for name, values in on_host.items()}
        for figure, timings in ((TIME, device_timings), (HOST, hosts)):
            for name, timing in timings.items():
                base = timings.get(turns.baseline)
                ratio = timing.median / base.median if base else None
                self.time(group, name, figure, timing, rounds=rounds, ratio=ratio)
        for name in calls.keys() & set(turns.peak):
            if (peak := self.device.peak(calls[name])) is not None:
                self.number(group, name, PEAK, peak, "GiB")
        if turns.baseline in calls:
            self._baseline(group, "last", calls, times, turns)
        return device_timings

    def _baseline(
        self, group: str, when: str, calls: dict[str, Call], times: dict[str, int], turns: Turns
    ) -> None:
        """Writes the time of the baseline alone, in three turns."""
        name = turns.baseline
        values = [self.device.time(calls[name], times[name]) / turns.items_of(name) for _ in range(3)]
        self.time(group, name, f"{TIME}, {when}", Timing.of(values), rounds=len(values))

    def _repeats(self, call: Call) -> int:
        """Returns how often a turn repeats a call: once in a rehearsal."""
        once = min(self.device.time(call, 1) for _ in range(2))
        return 1 if self.device.rehearsal else max(1, round(TURN / max(once, 1.0)))


def _warm(call: Call) -> Call:
    """Runs a call three times, which compiles it, and returns it."""
    for _ in range(3):
        call()
    return call


def _least_torch() -> str:
    """Returns the oldest PyTorch that the packages support."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return next(text for text in project["dependencies"] if text.startswith("torch")).partition(">=")[2]
