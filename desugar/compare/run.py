"""The order of a comparison: what each way does, then how its first call starts, then warm calls in turns."""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from desugar.backends.choose import choose_backend
from desugar.compare.processes import Process, WayFailed, started
from desugar.compare.records import Comparison, Request, Spread, Verdict, Way
from desugar.compare.ways import EAGER, WAYS
from desugar.compare.worker import Observed, Started

TURN = 2e-3  # seconds; a shorter call is repeated in its turn
BUDGET = 30.0  # seconds that all turns may take, if that leaves LEAST rounds
LEAST = 5
RECOMPILES = (
    "calls with equal arguments were compiled again and again: the time of a call includes that, or, past Dynamo's "
    "recompile limit, is that of eager mode"
)

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """How to compare.

    Attributes:
        rounds: In each, every way takes a turn; fewer are run where calls are long.
        timeout: Seconds to wait for one answer of a process.
        second_start: Whether to time a first call with the caches of an earlier process, too.
    """

    rounds: int = 50
    timeout: float = 600.0
    second_start: bool = False


def compare(request: Request, plan: Plan, tell: Tell = lambda text: None) -> Comparison:
    """Runs a function in all ways.

    Raises:
        ValueError: There is no such backend.
        WayFailed: Eager mode failed, so there is nothing to compare with.
    """
    choose_backend(request.backend)
    with tempfile.TemporaryDirectory(prefix="desugar-compare-") as folder, contextlib.ExitStack() as stack:
        return _Run(request, plan, tell, Path(folder), stack).compare()


@dataclass
class _Run:
    request: Request
    plan: Plan
    tell: Tell
    folder: Path
    stack: contextlib.ExitStack
    started: dict[str, tuple[Process, Started]] = field(default_factory=dict)

    def compare(self) -> Comparison:
        """Runs all stages. A way that fails is left out of the later ones."""
        judge = self._observe(EAGER)
        observed = {EAGER: judge}
        found = {EAGER: Way(EAGER, judge.verdict)}
        for way in WAYS[1:]:
            found[way] = self._attempt(
                way, Way(way, Verdict("error")), lambda way: self._observed(way, observed)
            )
        if any(way.verdict.state == "wrong" for way in found.values()):
            self._check_judge(found)
        for way in WAYS:
            if way in observed:
                found[way] = self._attempt(
                    way, found[way], lambda way: self._start(found[way], observed[way])
                )
        rounds = self._take_turns(found)
        return Comparison(self.request, judge.calls, rounds, tuple(found.values()), judge.machine)

    def _attempt(self, way: str, so_far: Way, stage: Callable[[str], Way]) -> Way:
        """Runs a stage; where it fails, what was found so far has the error as its verdict."""
        try:
            return stage(way)
        except WayFailed as error:
            if way == EAGER:
                raise
            return replace(so_far, verdict=Verdict("error", str(error)))

    # ---- the stages ------------------------------------------------------------------------------------------

    def _observed(self, way: str, observed: dict[str, Observed]) -> Way:
        observed[way] = answer = self._observe(way)
        return Way(way, answer.verdict, answer.programs)

    def _observe(self, way: str) -> Observed:
        self.tell(f"{way}: results")
        with started(self.request, self.folder, self._caches(), self.plan.timeout) as process:
            return process.ask("observe", way=way, folder=str(self.folder))

    def _check_judge(self, found: dict[str, Way]) -> None:
        """Runs eager mode in another process: where it differs from itself, no way can be called wrong."""
        self.tell(f"{EAGER}: results again")
        with started(self.request, self.folder, self._caches(), self.plan.timeout) as process:
            again: Observed = process.ask("observe", way=EAGER, folder=str(self.folder), again=True)
        if again.verdict.agrees:
            return
        detail = f"eager mode does not do the same twice: {again.verdict.detail}"
        for name, way in found.items():
            if way.verdict.state == "wrong":
                found[name] = replace(way, verdict=Verdict("unknown", detail))

    def _start(self, so_far: Way, observed: Observed) -> Way:
        """Times the first call in a process that goes on to take turns; and in a second one, if asked to."""
        way, caches = so_far.name, self._caches()
        self.tell(f"{way}: first call")
        process = self.stack.enter_context(started(self.request, self.folder, caches, self.plan.timeout))
        first: Started = process.ask("start", way=way, modules=observed.modules)
        self.started[way] = process, first
        found = replace(so_far, first_call=first.seconds, memory=first.memory)
        if first.recompiled:
            programs = replace(found.programs, notes=(*found.programs.notes, RECOMPILES))
            found = replace(found, programs=programs)
        if not self.plan.second_start:
            return found
        self.tell(f"{way}: second start")
        with started(self.request, self.folder, caches, self.plan.timeout) as again:
            second: Started = again.ask("start", way=way, modules=observed.modules)
        return replace(found, second_start=second.seconds)

    def _take_turns(self, found: dict[str, Way]) -> int:
        """Times warm calls: in each round every way takes a turn, in an order shuffled anew."""
        repeats = {way: max(1, round(TURN / first.warm)) for way, (_, first) in self.started.items()}
        cost = sum(repeats[way] * first.warm for way, (_, first) in self.started.items())
        rounds = max(min(LEAST, self.plan.rounds), min(self.plan.rounds, int(BUDGET / cost)))
        samples: dict[str, list[float]] = {way: [] for way in self.started}
        rng = random.Random(0)
        for number in range(1, rounds + 1):
            self.tell(f"warm calls, round {number} of {rounds}")
            for way in rng.sample(list(self.started), len(self.started)):
                found[way] = self._attempt(
                    way, found[way], lambda way: self._turn(way, found, repeats, samples)
                )
        for way, times in samples.items():
            found[way] = with_times(found[way], times, samples[EAGER])
        return rounds

    def _turn(
        self, way: str, found: dict[str, Way], repeats: dict[str, int], samples: dict[str, list[float]]
    ) -> Way:
        try:
            samples[way].append(self.started[way][0].ask("turn", repeats=repeats[way]))
        except WayFailed:
            del self.started[way]
            del samples[way]
            raise
        return found[way]

    def _caches(self) -> Path:
        """Returns a new folder for caches."""
        return Path(tempfile.mkdtemp(prefix="caches-", dir=self.folder))


def with_times(way: Way, times: list[float], eager: list[float]) -> Way:
    """Returns a way with its time, and with its ratio to eager mode round by round."""
    ratios = [time / base for time, base in zip(times, eager, strict=True)]
    return replace(way, call=Spread.of(times), ratio=Spread.of(ratios))
