"""One process of a comparison: it finds the function, and runs it in one way as it is asked to."""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from desugar import _torch as private
from desugar.compare import ways
from desugar.compare.import_names import Call, TargetError
from desugar.compare.judge import judge
from desugar.compare.meters import peak_since, time_turn
from desugar.compare.outcome import Outcome, argument_names, copy_parts, record_outcome
from desugar.compare.records import Programs, Request, Verdict
from desugar.compare.subject import SEED, Subject, find_subject, seed

WARM_UPS = 3
_RUN_LATER = ("generator", "coroutine", "async_generator")  # types of results whose code has not run


@dataclass(frozen=True, slots=True)
class Observed:
    """What a way did: its verdict, what was compiled, and the modules that it imported."""

    calls: int
    verdict: Verdict
    programs: Programs
    modules: tuple[str, ...]


class Worker:
    """What one process holds: the function, one way to run it, the arguments of the first call."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.subject: Subject | None = None
        self.call: Callable[[], Any] = lambda: None

    def observe(self, way: str, folder: str, *, again: bool = False) -> Observed:
        """Makes several calls and compares them with those of eager mode, which are written to a folder.

        With `again`, eager mode is compared with what it did the first time.
        """
        subject = find_subject(self.request)
        before = set(sys.modules)
        if way != ways.EAGER and self.request.backend == "inductor":
            private.inductor_config.fallback_random = True  # draw random numbers as eager mode does
        number = max(self.request.calls, len(subject.make_calls()))
        with ways.watch_programs(subject.fn) as programs:
            verdict = self._judge(way, subject, number, Path(folder), again=again)
        imported = tuple(name for name in sys.modules if name not in before)
        return Observed(number, verdict, programs(), imported)

    def _judge(self, way: str, subject: Subject, number: int, folder: Path, *, again: bool) -> Verdict:
        found = observe_calls(subject, ways.compile_way(way, subject.fn, self.request.backend), number)
        if way == ways.EAGER and not again:
            check_has_run(found)
            for n, outcome in enumerate(found):
                torch.save(outcome, folder / f"call-{n}.pt")
            return Verdict("judge")
        return judge([(torch.load(folder / f"call-{n}.pt"), outcome) for n, outcome in enumerate(found)])

    def start(self, way: str, modules: tuple[str, ...]) -> tuple[float, int]:
        """Makes the first call, after importing what it would import; then some more.

        Returns:
            The seconds of the first call, and the bytes by which it raised the peak.
        """
        for name in modules:
            with contextlib.suppress(
                ImportError, AttributeError
            ):  # made by the call, such as a compiled kernel
                importlib.import_module(name)
        self.subject = find_subject(self.request)
        call, subject = self.subject.make_calls()[0], self.subject

        def first() -> Any:
            compiled = ways.compile_way(way, subject.fn, self.request.backend)
            subject.run(compiled, call)
            return compiled

        seed(SEED + 1)
        gc.collect()
        compiled, seconds, memory = peak_since(first)
        self.call = make_step(subject, compiled, call)
        for _ in range(WARM_UPS):
            self.call()
        return seconds, memory

    def turn(self, repeats: int) -> float:
        """Returns the seconds of a warm call, over so many repeats."""
        return time_turn(self.call, repeats)


def observe_calls(subject: Subject, compiled: Any, number: int) -> list[Outcome]:
    """Makes calls with new arguments each, and records what each did; the state goes on from call to call."""
    state = subject.state()
    before = copy_parts(state)
    found = []
    for n in range(number):
        calls = subject.make_calls()
        call = calls[n % len(calls)]
        subject.clear_gradients(call)
        seed(SEED + 1 + n)
        result = subject.run(compiled, call)
        names = argument_names(subject.fn, *call)
        found.append(record_outcome(result, names, subject.state(), before))
    return found


def check_has_run(outcomes: list[Outcome]) -> None:
    """Raises for calls whose code has not run when they return: their results cannot be compared.

    Raises:
        TargetError: A result is a generator or a coroutine.
    """
    for outcome in outcomes:
        for path, entry in outcome["entries"].items():
            if entry["kind"] in _RUN_LATER:
                raise TargetError(
                    f"not compared: {path} is of type {entry['kind']}, whose code has not run when the call returns; "
                    "name a function that iterates or awaits, and returns the values"
                )


def make_step(subject: Subject, compiled: Any, call: Call) -> Callable[[], Any]:
    """Returns a warm call; a step of a training also forgets the gradients of the one before."""
    if not subject.train and not subject.no_grad:
        return partial(compiled, *call[0], **call[1])

    def step() -> Any:
        if subject.train:
            subject.clear_gradients(call)
        return subject.run(compiled, call)

    return step
