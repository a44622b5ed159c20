"""Records of a comparison: frozen, with text and numbers, and without live objects."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from desugar.recording.record_base import Record, find_named


@dataclass(frozen=True, slots=True)
class Request(Record):
    """The request for a comparison.

    Attributes:
        target: `MODULE:NAME`.
        inputs: The name of the function that makes the arguments; None for the target's `NAME_inputs`.
        backend: The compiler of graphs: "inductor" or "eager".
        train: Whether a call is a training step: the function, the sum of its float results, the backward.
        no_grad: Whether calls run under `torch.no_grad()`.
        calls: The least number of calls to compare.
    """

    target: str
    inputs: str | None = None
    backend: str = "inductor"
    train: bool = False
    no_grad: bool = False
    calls: int = 3


@dataclass(frozen=True, slots=True)
class Verdict(Record):
    """Whether a way agrees with eager mode.

    Attributes:
        state: "judge" (eager mode itself), "right", "rounding", "wrong", "unknown" or "error". With "rounding", floats
            differ by more than the tolerance, but another order of summation explains it. With "unknown", the way
            differs, but eager mode in another process differs from itself, too.
        detail: The first difference, with the call, the leaf and the amount; or the error.
    """

    state: str
    detail: str = ""

    @property
    def agrees(self) -> bool:
        """Whether the way may be used in place of eager mode."""
        return self.state in ("judge", "right", "rounding")


@dataclass(frozen=True, slots=True)
class Spread(Record):
    """The median of samples, and half the distance between their quartiles."""

    median: float
    spread: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """Summarizes at least two samples."""
        low, _, high = statistics.quantiles(samples, n=4)
        return cls(statistics.median(samples), (high - low) / 2)


@dataclass(frozen=True, slots=True)
class Programs(Record):
    """Dynamo's compilations during the compared calls.

    Attributes:
        graphs: The number of compiled graphs.
        recompiles: For each compilation of a frame that had been compiled before, the guard that failed.
        breaks: Why graphs ended early, each with the user's line; a reason that occurs again is listed once.
        notes: Frames that were not compiled, graphs that were handed to PyTorch's AOTAutograd, and slow paths, each
            with the remedy.
    """

    graphs: int = 0
    recompiles: tuple[str, ...] = ()
    breaks: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Way(Record):
    """One way to run the function. A figure is None where the way failed before it was measured.

    Attributes:
        name: "eager", "torch.compile", 'backend="desugar"' or "desugar.compile".
        verdict: Whether it agrees with eager mode.
        programs: Dynamo's compilations during the compared calls.
        first_call: Seconds of the first call in a new process with empty caches, compiling included.
        call: Seconds of a warm call.
        ratio: The time of a warm call divided by eager mode's time in the same round.
        memory: Bytes by which a warm call raises the peak of the allocated memory: the GPU's if there is one.
        graph: Seconds of a warm call in plain graphs of this library; None for other ways, and on a GPU.
    """

    name: str
    verdict: Verdict
    programs: Programs = field(default_factory=Programs)
    first_call: float | None = None
    call: Spread | None = None
    ratio: Spread | None = None
    memory: int | None = None
    graph: float | None = None


def with_times(way: Way, times: list[float], eager: list[float]) -> Way:
    """Returns a way with its time, and with its ratio to eager mode round by round."""
    ratios = [time / base for time, base in zip(times, eager, strict=True)]
    return replace(way, call=Spread.of(times), ratio=Spread.of(ratios))


@dataclass(frozen=True, slots=True)
class Comparison(Record):
    """One function, run in several ways.

    Attributes:
        request: The request.
        calls: The number of compared calls.
        rounds: The number of timed rounds of warm calls.
        ways: The ways, eager mode first.
        machine: Facts about the machine and the installation, by name.
    """

    request: Request
    calls: int
    rounds: int
    ways: tuple[Way, ...]
    machine: tuple[tuple[str, str], ...]

    def way(self, name: str) -> Way:
        """Returns a way by its name.

        Raises:
            KeyError: There is no such way.
        """
        return find_named(self.ways, name)  # type: ignore[no-any-return]
