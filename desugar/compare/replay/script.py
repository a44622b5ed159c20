"""Calls that a script compiled, made again after it has ended: in eager mode, with stock `torch.compile` and here.

While the script runs, the arguments of each call that compiles are copied, before the call can write to them. After it
has ended, each call is made again with new copies, in all ways and in turns, so that the script itself runs as ever.
Parameters, buffers and gradients have their values again afterwards. What cannot be repeated is left out, with the
reason: a call that broke its graph, other than at a branch, runs lines between its graphs that may write to files.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import random
import re
import sys
import threading
import time
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from desugar import _torch as private
from desugar.compare.import_names import Call
from desugar.compare.judge import judge
from desugar.compare.meters import synchronize, time_turn
from desugar.compare.outcome import Outcome, leaves_of
from desugar.compare.processes import describe_error
from desugar.compare.records import Spread, Verdict
from desugar.compare.replay.compiled_functions import Owner, Owners
from desugar.compare.replay.copies import NoCopy, bytes_of, copy_call, restored
from desugar.compare.replay.worth import sum_up
from desugar.compare.subject import SEED, Subject, seed
from desugar.compare.ways import EAGER
from desugar.compare.worker import make_step, observe_calls
from desugar.explain.records import Program, Report, Worth
from desugar.recording.frames import BRANCH, READ, count_compilations
from desugar.recording.listeners import Recording
from desugar.user_code import is_library_file

_CALLS = 2  # that are compared
_KEPT = 2**30  # bytes of all arguments that are kept
_BUDGET, _LEAST, _MOST = 2.0, 5, 50  # seconds and rounds of the turns of one call
_TURN, _REPEATS, _COPIED = 2e-3, 20, 2**26  # seconds, calls, and bytes of arguments of one turn

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _Modes:
    """The modes of PyTorch in which a call was made."""

    gradients: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]

    @classmethod
    def now(cls) -> _Modes:
        devices = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
        found = tuple((device, torch.get_autocast_dtype(device)) for device in devices)
        return cls(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), found)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.gradients))
            for device, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype))
            yield


@dataclass(slots=True)
class _Kept:
    """A call that compiled programs.

    Attributes:
        owner: The compiled function; None if unknown.
        numbers: Its programs, by their numbers in the report.
        call: Copies of its arguments, from before it ran.
        modes: The modes in which it was made.
        is_broken: Whether it is more than one graph.
        why_not: Why it cannot be made again.
    """

    owner: Owner | None
    numbers: list[int]
    call: Call = ((), {})
    modes: _Modes = field(default_factory=_Modes.now)
    is_broken: bool = False
    why_not: str = ""


class ScriptCalls:
    """The calls that compile while a script runs: `keep` is called with each compilation, `compare` at the end."""

    def __init__(self) -> None:
        self._kept: list[_Kept] = []
        self._owners = Owners()
        self._last = threading.local()
        self._number, self._bytes = 0, 0

    def keep(self, recording: Recording) -> None:
        """Keeps the call in progress. Compilations come in the order of the programs of the report."""
        number, self._number = self._number, self._number + 1
        if recording.program is None:
            return
        owner, call = self._owners.in_progress()
        if owner is None:
            self._kept.append(_Kept(None, [number], why_not=_NO_OWNER))
            return
        args, kept = getattr(self._last, "call", (None, None))
        if args is not call[0] or kept is None:
            kept = self._take(owner, call)
            self._last.call = call[0], kept
        kept.numbers.append(number)
        kept.is_broken |= not recording.program.is_whole or _is_inside_a_broken_call(owner.code)

    def _take(self, owner: Owner, call: Call) -> _Kept:
        kept = _Kept(owner, [])
        self._kept.append(kept)
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
            kept.why_not = "the script runs on several processes, which would wait for each other"
        elif not isinstance(owner.backend(), str):
            kept.why_not = "its backend is a function of the script's"
        elif (nbytes := bytes_of(call)) + self._bytes > _KEPT:
            kept.why_not = "the arguments of all compiled calls together take more than 1 GiB"
        else:
            try:
                kept.call = copy_call(call)
                self._bytes += nbytes
            except NoCopy as error:
                kept.why_not = str(error)
        return kept

    def compare(self, report: Report, tell: Tell = lambda text: None) -> Report:
        """Makes the calls again; returns the report with the times, or the reasons why there are none."""
        programs, ways = list(report.programs), dict[int, _Ways]()
        for number, kept in enumerate(self._kept, 1):
            first = kept.numbers[0]
            tell(f"{programs[first].title}, call {number} of {len(self._kept)}, in other ways")
            if not kept.why_not and kept.is_broken and (unsafe := self._code_between_graphs(kept, report)):
                kept.why_not = f"between its graphs it runs code that may change files and the like: {unsafe}"
            if kept.owner is not None and not kept.why_not:
                made = ways.setdefault(id(kept.owner), _Ways(kept.owner))
                train = any(len(programs[n].graphs) > 1 for n in kept.numbers)
                try:
                    worth = _compare(made, kept, train=train)
                except KeyboardInterrupt:
                    kept.why_not = "interrupted"
                except _EagerFailed as error:
                    kept.why_not = str(error)
                else:
                    programs[first] = replace(programs[first], worth=worth)
            programs = [_with_reason(p, kept, n) for n, p in enumerate(programs)]
        return replace(report, programs=tuple(programs))

    def _code_between_graphs(self, kept: _Kept, report: Report) -> str:
        """Returns the first line between a call's graphs that does more than to read a tensor's value; empty if none.

        A line belongs to the call unless it is known to be in a function that other calls ran, and this one did not.
        """
        own = set(_regions_of(kept, report.programs))
        others = {region for other in self._kept for region in _regions_of(other, report.programs)} - own
        for text in report.breaks:
            if not text.endswith((BRANCH, READ)) and (_is_in(text, own) or not _is_in(text, others)):
                return text
        return next(iter(report.not_compiled), "")


def _is_in(text: str, regions: Collection[tuple[str, int, int]]) -> bool:
    """Returns whether a text begins with `file:line: ` of a line in one of the functions."""
    place = re.match(r"(.*?):(\d+): ", text)
    return place is not None and any(
        file == place[1] and first <= int(place[2]) <= last for file, first, last in regions
    )


_NO_OWNER = (
    'it was compiled outside of a call of what desugar.compile or torch.compile(backend="desugar") returned; '
    "`desugar compare` times any function"
)


def _with_reason(program: Program, kept: _Kept, number: int) -> Program:
    if number not in kept.numbers or program.worth is not None:
        return program
    first = f"it belongs to the call of program {kept.numbers[0] + 1}, which is timed as a whole"
    return replace(program, no_worth=kept.why_not or first)


def _is_inside_a_broken_call(code: types.CodeType) -> bool:
    """Returns whether lines of the user's lie between the frame that runs the function and this compilation."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        if not is_library_file(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False


def _regions_of(kept: _Kept, programs: Sequence[Program]) -> Iterator[tuple[str, int, int]]:
    """Yields the functions that a call is known to have run: file, first line, last line."""
    for source in (source for number in kept.numbers for source in programs[number].sources):
        yield source.file, source.first, source.first + len(source.lines) - 1
    what: Any = None if kept.owner is None else kept.owner.what
    target: Any = type(what).forward if isinstance(what, nn.Module) else what
    with contextlib.suppress(OSError, TypeError):  # it has no source
        lines, first = inspect.getsourcelines(inspect.unwrap(target))
        yield inspect.getfile(target), first, first + len(lines) - 1


# ---------------------------------------------------------------------------------------------------- the ways


class _EagerFailed(Exception):
    """Eager mode raised, so there is nothing to compare with."""


class _Ways:
    """A function of the script in all ways; its calls keep the script's order, so sizes become symbolic alike."""

    def __init__(self, owner: Owner) -> None:
        self.owner, self.fn = owner, owner.what
        self.ways = owner.compile()
        self.drawing: dict[str, Any] = {}  # compiled to draw random numbers as eager mode does


def _compare(made: _Ways, kept: _Kept, *, train: bool) -> Worth:
    """Makes one call in all ways: compares what it does, then times it.

    Raises:
        _EagerFailed: There is nothing to compare with.
    """
    modules = {path: leaf for path, leaf in leaves_of(kept.call, "arguments") if isinstance(leaf, nn.Module)}
    subject = Subject(made.fn, lambda: [copy_call(kept.call)], train, modules=modules)
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=devices))
        stack.enter_context(kept.modes.held())
        stack.enter_context(restored(subject.state()))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        # The script may have compiled the same lines so often already that the limit is reached.
        stack.enter_context(
            private.dynamo_config.patch(recompile_limit=256, accumulated_recompile_limit=1024)
        )
        verdicts = _judge(subject, made)
        times, recompiled = _time(subject, made.ways, verdicts, bytes_of(kept.call))
    shown = [(way, times[way].median if way in times else None) for way in made.owner.ways]
    more = ["each a step of a training: the call, the sum of its results, the backward"] if train else []
    more += [f"{len(kept.numbers)} programs together"] if len(kept.numbers) > 1 else []
    worth = sum_up(_CALLS, shown, verdicts, *more, *([_RECOMPILED] if recompiled else []))
    return replace(worth, answer=_EACH_COMPILES) if recompiled else worth


_RECOMPILED = "times include compiling: equal calls were compiled again and again"
_EACH_COMPILES = "unknown, equal calls were compiled again and again"


def _judge(subject: Subject, made: _Ways) -> dict[str, Verdict]:
    """Compares two calls of each way with eager mode; a way that raised has the verdict "error"."""
    try:
        draws = _draws_random_numbers(subject)
        want, again = _observe(subject, subject.fn), _observe(subject, subject.fn)
    except Exception as error:
        raise _EagerFailed(f"made again after the script's end, it raised {describe_error(error)}") from error
    if not judge(list(zip(want, again, strict=True))).agrees:
        unknown = Verdict("unknown", "eager mode does not do the same twice")
        return {EAGER: Verdict("judge"), **dict.fromkeys(made.owner.ways[1:], unknown)}
    found = {EAGER: Verdict("judge")}
    if draws:
        made.drawing = made.drawing or made.owner.compile()
    for way, compiled in (made.drawing if draws else made.ways).items():
        if way != EAGER:
            with private.inductor_config.patch(fallback_random=draws):
                found[way] = _verdict(subject, compiled, want)
    return found


def _verdict(subject: Subject, compiled: Any, want: list[Outcome]) -> Verdict:
    try:
        return judge(list(zip(want, _observe(subject, compiled), strict=True)))
    except Exception as error:  # noqa: BLE001 - whatever a way raises is a result of the comparison
        return Verdict("error", describe_error(error))


def _observe(subject: Subject, compiled: Any) -> list[Outcome]:
    with restored(subject.state()):
        return observe_calls(subject, compiled, _CALLS)


def _draws_random_numbers(subject: Subject) -> bool:
    seed(SEED)
    with restored(subject.state()):
        call, before = subject.make_calls()[0], _random_states()
        subject.run(subject.fn, call)
    return not all(map(torch.equal, before, _random_states()))


def _random_states() -> list[torch.Tensor]:
    on_gpu = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *on_gpu]


# ------------------------------------------------------------------------------------------------------ timing


def _time(
    subject: Subject, ways: dict[str, Any], verdicts: dict[str, Verdict], nbytes: int
) -> tuple[dict[str, Spread], bool]:
    """Times warm calls in turns, each with copies of the arguments that are made before the turn.

    Returns:
        The times of the ways that did not fail, which are noted among the verdicts; and whether equal calls were
        compiled again.
    """
    ways = {way: fn for way, fn in ways.items() if verdicts[way].state != "error"}
    repeats = {}
    for way, fn in list(ways.items()):
        try:
            for _ in range(2):
                _turn(subject, fn, 1)
            repeats[way] = _repeats(_turn(subject, fn, 1), nbytes)
        except Exception as error:  # noqa: BLE001 - as above
            verdicts[way] = Verdict("error", describe_error(error))
            del ways[way]
    samples: dict[str, list[float]] = {way: [] for way in ways}
    rng, compiled, end = random.Random(0), count_compilations(), time.perf_counter() + _BUDGET
    while len(samples[EAGER]) < _LEAST or (len(samples[EAGER]) < _MOST and time.perf_counter() < end):
        for way in rng.sample(list(ways), len(ways)):
            samples[way].append(_turn(subject, ways[way], repeats[way]))
    return {way: Spread.of(times) for way, times in samples.items()}, count_compilations() != compiled


def _repeats(seconds: float, nbytes: int) -> int:
    """Returns how many calls a turn has: their arguments are there at the same time."""
    fitting = _COPIED // max(nbytes, 1)
    return max(1, min(round(_TURN / max(seconds, 1e-9)), _REPEATS, fitting))


def _turn(subject: Subject, fn: Any, repeats: int) -> float:
    steps = iter([make_step(subject, fn, subject.make_calls()[0]) for _ in range(repeats + 1)])
    synchronize()
    return time_turn(lambda: next(steps)(), repeats)
