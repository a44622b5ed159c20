"""Runs the stages of a comparison: the results of each way, then its first call, then warm calls in turns."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from desugar.backends.choose import choose_backend
from desugar.compare.meters import describe_machine, shuffled_rounds
from desugar.compare.processes import Observed, Process, WayFailed
from desugar.compare.records import Comparison, Request, Verdict, Way, with_times
from desugar.compare.ways import EAGER, WAYS

TURN = 2e-3  # seconds; a shorter call is repeated in its turn
BUDGET = 30.0  # seconds that all turns may take

Tell = Callable[[str], None]


def compare(
    request: Request, *, rounds: int = 50, timeout: float = 600.0, tell: Tell = lambda text: None
) -> Comparison:
    """Runs a function in all ways.

    Args:
        request: The function to compare, and its options.
        rounds: The number of rounds, in each of which every way takes a turn; long calls reduce it.
        timeout: Seconds to wait for one answer of a process.
        tell: Called with a text for each step.

    Raises:
        ValueError: There is no such backend.
        WayFailed: Eager mode failed, so there is nothing to compare with.
    """
    choose_backend(request.backend)
    with tempfile.TemporaryDirectory(prefix="desugar-compare-") as folder, contextlib.ExitStack() as stack:
        return _Run(request, rounds, timeout, tell, Path(folder), stack).compare()


@dataclass
class _Run:
    request: Request
    rounds: int
    timeout: float
    tell: Tell
    folder: Path
    stack: contextlib.ExitStack
    results: dict[str, Way] = field(default_factory=dict)
    observed: dict[str, Observed] = field(default_factory=dict)
    started: dict[str, tuple[Process, int]] = field(default_factory=dict)

    def compare(self) -> Comparison:
        """Runs all stages. A way that fails is left out of later stages."""
        for way in WAYS:
            with self._attempt(way):
                self._observe(way)
        if any(way.verdict.state == "wrong" for way in self.results.values()):
            self._check_judge()
        for way in self.observed:
            with self._attempt(way):
                self._start(way)
        rounds = self._take_turns()
        calls, ways = self.observed[EAGER].calls, tuple(self.results.values())
        return Comparison(self.request, calls, rounds, ways, describe_machine())

    @contextlib.contextmanager
    def _attempt(self, way: str) -> Iterator[None]:
        """Turns a failure of a way inside the context into its verdict; a failure of eager mode propagates."""
        try:
            yield
        except WayFailed as error:
            if way == EAGER:
                raise
            so_far = self.results.get(way, Way(way, Verdict("error")))
            self.results[way] = replace(so_far, verdict=Verdict("error", str(error)))
            self.started.pop(way, None)

    # ---- the stages ------------------------------------------------------------------------------------------

    def _observe(self, way: str) -> None:
        self.tell(f"{way}: results")
        self.observed[way] = answer = self._observed_anew(way=way)
        self.results[way] = Way(way, answer.verdict, answer.programs)

    def _observed_anew(self, **arguments: Any) -> Observed:
        with contextlib.closing(self._process()) as process:
            return process.ask("observe", folder=str(self.folder), **arguments)  # type: ignore[no-any-return]

    def _process(self) -> Process:
        return Process(self.request, self.folder, self.timeout)

    def _check_judge(self) -> None:
        """Runs eager mode in another process; if it differs from itself, a wrong way becomes unknown."""
        self.tell(f"{EAGER}: results again")
        again = self._observed_anew(way=EAGER, again=True)
        unknown = Verdict("unknown", f"eager mode does not do the same twice: {again.verdict.detail}")
        for name, way in self.results.items():
            if way.verdict.state == "wrong" and not again.verdict.agrees:
                self.results[name] = replace(way, verdict=unknown)

    def _start(self, way: str) -> None:
        """Times the first call, in a process that takes turns afterwards."""
        self.tell(f"{way}: first call")
        process = self.stack.enter_context(contextlib.closing(self._process()))
        seconds = process.ask("start", way=way, modules=self.observed[way].modules)
        self.results[way] = replace(self.results[way], first_call=seconds)
        self.started[way] = process, max(1, round(TURN / process.ask("turn", repeats=3)))

    def _take_turns(self) -> int:
        """Times warm calls, a turn of every way in each round; then profiles one call. Returns the number of rounds."""
        samples: dict[str, list[float]] = {way: [] for way in self.started}
        for number, order in enumerate(shuffled_rounds(self.started, self.rounds, BUDGET), 1):
            self.tell(f"warm calls, round {number} of {self.rounds}")
            for way in order:
                process, repeats = self.started[way]
                with self._attempt(way):
                    samples[way].append(process.ask("turn", repeats=repeats))
        for way, (process, _) in dict(self.started).items():
            with self._attempt(way):
                memory, graph = process.ask("look")
                timed = with_times(self.results[way], samples[way], samples[EAGER])
                self.results[way] = replace(timed, memory=memory, graph=graph)
        return len(samples[EAGER])
