"""Calls that a script compiled, made again after it has ended: in eager mode, with stock `torch.compile` and here.

While the script runs, the arguments of each call that compiles are copied, before the call can write to them. After it
has ended, each call is made again with new copies, in all ways and in turns, so that the script itself runs as ever.
Parameters, buffers and gradients have their values again afterwards. What cannot be repeated is left out, with the
reason. Lines between the graphs of a call may write to files, unless every graph of the script that broke did so at a
branch or a read.
"""

from __future__ import annotations

import contextlib
import io
import statistics
import sys
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from desugar import _torch as private
from desugar.compare.import_names import Call
from desugar.compare.judge import judge
from desugar.compare.meters import shuffled_rounds, time_turn
from desugar.compare.outcome import Outcome, leaves_of
from desugar.compare.processes import describe_error
from desugar.compare.records import Verdict
from desugar.compare.replay.compiled_functions import Owner, Owners
from desugar.compare.replay.copies import NoCopy, bytes_of, copy_call, restored
from desugar.compare.replay.worth import sum_up
from desugar.compare.subject import SEED, Subject, seed
from desugar.compare.ways import EAGER
from desugar.compare.worker import make_step, observe_calls
from desugar.explain.records import Report, Worth
from desugar.recording.frames import BRANCH, READ, count_compilations
from desugar.recording.listeners import Recording
from desugar.user_code import is_library_file

_CALLS = 2  # that are compared
_KEPT = 2**30  # bytes of all arguments that are kept
_BUDGET, _MOST = 2.0, 50  # seconds and rounds of the turns of one call
_TURN, _REPEATS, _COPIED = 2e-3, 20, 2**26  # seconds, calls, and bytes of arguments of one turn

Tell = Callable[[str], None]


def _modes_now() -> list[Callable[[], contextlib.AbstractContextManager[Any]]]:
    """Returns what makes contexts with the modes of PyTorch that are on now."""
    devices = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    return [
        partial(torch.inference_mode, torch.is_inference_mode_enabled()),
        partial(torch.set_grad_enabled, torch.is_grad_enabled()),
        *(partial(torch.autocast, device, torch.get_autocast_dtype(device)) for device in devices),
    ]


@dataclass(slots=True)
class _Kept:
    """A call that compiled programs.

    Attributes:
        owner: The compiled function; None if unknown.
        numbers: Its programs, by their numbers in the report.
        call: Copies of its arguments, from before it ran.
        modes: Make contexts with the modes in which it was made.
        is_broken: Whether it is more than one graph.
        why_not: Why it cannot be made again.
    """

    owner: Owner | None
    numbers: list[int]
    call: Call = ((), {})
    modes: list[Callable[[], contextlib.AbstractContextManager[Any]]] = field(default_factory=_modes_now)
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
        programs = list(report.programs)
        broken = (*report.breaks, *report.not_compiled)
        unsafe = next((text for text in broken if not text.endswith((BRANCH, READ))), "")
        for number, kept in enumerate(self._kept, 1):
            first = kept.numbers[0]
            tell(f"{programs[first].title}, call {number} of {len(self._kept)}, in other ways")
            if not kept.why_not and kept.is_broken and unsafe:
                kept.why_not = f"lines between its graphs may change files and the like, as here: {unsafe}"
            if kept.owner is not None and not kept.why_not:
                train = any(len(programs[n].graphs) > 1 for n in kept.numbers)
                try:
                    programs[first] = replace(programs[first], worth=_compare(kept.owner, kept, train=train))
                except KeyboardInterrupt:
                    kept.why_not = "interrupted"
                except _EagerFailed as error:
                    kept.why_not = str(error)
            reason = (
                kept.why_not or f"it belongs to the call of program {first + 1}, which is timed as a whole"
            )
            for n in kept.numbers if kept.why_not else kept.numbers[1:]:
                programs[n] = replace(programs[n], no_worth=reason)
        return replace(report, programs=tuple(programs))


_NO_OWNER = (
    'it was compiled outside of a call of what desugar.compile or torch.compile(backend="desugar") returned; '
    "`desugar compare` times any function"
)


def _is_inside_a_broken_call(code: types.CodeType) -> bool:
    """Returns whether lines of the user's lie between the frame that runs the function and this compilation."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        if not is_library_file(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False


# ---------------------------------------------------------------------------------------------------- the ways


class _EagerFailed(Exception):
    """Eager mode raised, so there is nothing to compare with."""


def _compare(owner: Owner, kept: _Kept, *, train: bool) -> Worth:
    """Makes one call in all ways: compares what it does, then times it.

    Raises:
        _EagerFailed: There is nothing to compare with.
    """
    modules = {path: leaf for path, leaf in leaves_of(kept.call, "arguments") if isinstance(leaf, nn.Module)}
    subject = Subject(owner.what, lambda: [copy_call(kept.call)], train, modules=modules)
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices), contextlib.ExitStack() as stack:
        for make in kept.modes:
            stack.enter_context(make())
        with (
            restored(subject.state()),
            contextlib.redirect_stdout(io.StringIO()),
            # The script may have compiled the same lines so often already that the limit is reached.
            private.dynamo_config.patch(recompile_limit=256, accumulated_recompile_limit=1024),
        ):
            verdicts = _judge(subject, owner)
            times, recompiled = _time(subject, owner.compiled, verdicts, bytes_of(kept.call))
    shown = [(way, times.get(way)) for way in owner.ways]
    more = ["each a step of a training: the call, the sum of its results, the backward"] if train else []
    more += [f"{len(kept.numbers)} programs together"] if len(kept.numbers) > 1 else []
    worth = sum_up(_CALLS, shown, verdicts, *more, *([_RECOMPILED] if recompiled else []))
    return replace(worth, answer=_EACH_COMPILES) if recompiled else worth


_RECOMPILED = "times include compiling: equal calls were compiled again and again"
_EACH_COMPILES = "unknown, equal calls were compiled again and again"


def _judge(subject: Subject, owner: Owner) -> dict[str, Verdict]:
    """Compares two calls of each way with eager mode; a way that raised has the verdict "error"."""
    try:
        want, again = _observe(subject, owner.what), _observe(subject, owner.what)
    except Exception as error:
        raise _EagerFailed(f"made again after the script's end, it raised {describe_error(error)}") from error
    if not judge(list(zip(want, again, strict=True))).agrees:
        unknown = Verdict("unknown", "eager mode does not do the same twice")
        return {EAGER: Verdict("judge"), **dict.fromkeys(owner.ways[1:], unknown)}
    found, after = {EAGER: Verdict("judge")}, _random_states()
    seed(SEED + _CALLS)  # as before the last call
    draws = not all(map(torch.equal, after, _random_states()))
    compiled = owner.compiled_to_draw if draws else owner.compiled
    for way in owner.ways[1:]:
        with _noting_errors(found, way), private.inductor_config.patch(fallback_random=draws):
            found[way] = judge(list(zip(want, _observe(subject, compiled[way]), strict=True)))
    return found


@contextlib.contextmanager
def _noting_errors(verdicts: dict[str, Verdict], way: str) -> Iterator[None]:
    """Inside, whatever a way raises becomes its verdict."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - it is a result of the comparison
        verdicts[way] = Verdict("error", describe_error(error))


def _observe(subject: Subject, compiled: Any) -> list[Outcome]:
    with restored(subject.state()):
        return observe_calls(subject, compiled, _CALLS)


def _random_states() -> list[torch.Tensor]:
    on_gpu = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *on_gpu]


# ------------------------------------------------------------------------------------------------------ timing


def _time(
    subject: Subject, ways: dict[str, Any], verdicts: dict[str, Verdict], nbytes: int
) -> tuple[dict[str, float], bool]:
    """Times warm calls in turns, each with copies of the arguments that are made before the turn.

    Returns:
        The times of the ways that did not fail, which are noted among the verdicts; and whether equal calls were
        compiled again.
    """
    repeats: dict[str, int] = {}
    for way, fn in ways.items():
        if verdicts[way].state != "error":
            with _noting_errors(verdicts, way):
                _turn(subject, fn, 1)
                repeats[way] = _repeats(_turn(subject, fn, 1), nbytes)
    samples: dict[str, list[float]] = {way: [] for way in repeats}
    compiled = count_compilations()
    for order in shuffled_rounds(repeats, _MOST, _BUDGET):
        for way in order:
            samples[way].append(_turn(subject, ways[way], repeats[way]))
    return {way: statistics.median(times) for way, times in samples.items()}, count_compilations() != compiled


def _repeats(seconds: float, nbytes: int) -> int:
    """Returns how many calls a turn has: their arguments are there at the same time."""
    fitting = _COPIED // max(nbytes, 1)
    return max(1, min(round(_TURN / max(seconds, 1e-9)), _REPEATS, fitting))


def _turn(subject: Subject, fn: Any, repeats: int) -> float:
    steps = iter([make_step(subject, fn, subject.make_calls()[0]) for _ in range(repeats + 1)])
    return time_turn(lambda: next(steps)(), repeats)
