"""Runs each way in new processes, forked from a server that has imported torch and has compiled nothing.

A process starts at once and with empty caches, and its imports are not timed. A process that hangs can be killed,
together with the compilers that it started. A process answers requests of its parent process, and returns errors as
answers.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from desugar import _torch as torch_private
from desugar.compare import ways
from desugar.compare.import_names import TargetError
from desugar.compare.judge import judge
from desugar.compare.meters import clock, time_turn
from desugar.compare.records import Programs, Request, Verdict
from desugar.compare.subject import (
    SEED,
    Subject,
    check_has_run,
    find_subject,
    look,
    make_step,
    observe_calls,
    seed,
)
from desugar.user_code import is_library_file

PRELOADED = ("desugar.compare.processes", *torch_private.COMPILER_MODULES)
WARM_UPS = 3
_CLEAN_UP = 2.0  # seconds that a process has to exit
_LAST_WORDS = 300  # characters of a process's last output


class WayFailed(Exception):
    """A process raised, ended or hung.

    Attributes:
        kind: The origin of the error: "target" (a wrong request), "user" (the code that is compared) or "way".
        text: One line.
        traceback: The traceback, from the first frame of the user's code on.
    """

    def __init__(self, kind: str, text: str, traceback: str = "") -> None:
        super().__init__(kind, text, traceback)
        self.kind, self.text, self.traceback = kind, text, traceback

    def __str__(self) -> str:
        return self.text


class Process:
    """A process that runs one way, with caches and a log in a new folder below `folder`."""

    def __init__(self, request: Request, folder: Path, timeout: float) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        caches = Path(tempfile.mkdtemp(dir=folder))
        self.timeout, self.log = timeout, caches / "log.txt"
        environment = {"TORCHINDUCTOR_CACHE_DIR": str(caches), "TRITON_CACHE_DIR": str(caches / "triton")}
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, request, environment, self.log))
        self.process.start()
        theirs.close()

    def ask(self, method: str, **arguments: Any) -> Any:
        """Calls a method of the worker in the process, and returns its result.

        Raises:
            WayFailed: The method raised, the process ended, or no answer came in time.
        """
        with contextlib.suppress(BrokenPipeError):  # it has ended, which raises below
            self.connection.send((method, arguments))
        if not wait([self.connection, self.process.sentinel], self.timeout):
            self.close()
            what = f"no answer within {self.timeout:g} s; --timeout waits longer{self._last_words()}"
            raise WayFailed("way", what)
        try:
            answer = self.connection.recv()
        except (EOFError, ConnectionError):
            raise WayFailed("way", self._describe_end()) from None
        if isinstance(answer, WayFailed):
            raise answer
        return answer

    def _describe_end(self) -> str:
        self.process.join(self.timeout)
        code = self.process.exitcode or 0
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"the process ended with {how}{self._last_words()}"

    def _last_words(self) -> str:
        """Returns the last printed line that is not indented; indented lines belong to a warning or a traceback."""
        printed = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        lines = [line for line in printed if line.strip() and not line.startswith(" ")]
        return f"; it last printed: {lines[-1][:_LAST_WORDS]}" if lines else ""

    def close(self) -> None:
        """Ends the process, after some time to clean up, and the processes that it started."""
        self.connection.close()
        self.process.join(_CLEAN_UP)
        if self.process.pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()


# ---- in the child ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Observed:
    """The observed calls of a way: their number, the verdict, the compilations, and the imported modules."""

    calls: int
    verdict: Verdict
    programs: Programs
    modules: tuple[str, ...]


@dataclass
class Worker:
    """The state of one process: the function, and a warm call of it in one way, to time and to profile."""

    request: Request
    subject: Subject = field(init=False)
    call: Callable[[], Any] = field(init=False)
    turn: Callable[[int], float] = field(init=False)
    look: Callable[[], tuple[int, float | None]] = field(init=False)

    def observe(self, way: str, folder: str, *, again: bool = False) -> Observed:
        """Makes several calls and compares their outcomes with eager mode's outcomes, which are in files of a folder.

        With `again`, eager mode is compared with its own first outcomes.
        """
        subject = find_subject(self.request)
        before = set(sys.modules)
        if way != ways.EAGER and self.request.backend == "inductor":
            torch_private.inductor_config.fallback_random = True  # draw random numbers as eager mode does
        number = max(self.request.calls, len(subject.make_calls()))
        with ways.watch_programs(subject.fn) as programs:
            verdict = self._judge(way, subject, number, Path(folder), again=again)
        imported = tuple(name for name in sys.modules if name not in before)
        return Observed(number, verdict, programs(), imported)

    def _judge(self, way: str, subject: Subject, number: int, folder: Path, *, again: bool) -> Verdict:
        outcomes = observe_calls(subject, ways.compile_way(way, subject.fn, self.request.backend), number)
        if way == ways.EAGER and not again:
            check_has_run(outcomes)
            for n, outcome in enumerate(outcomes):
                torch.save(outcome, folder / f"call-{n}.pt")
            return Verdict("judge")
        return judge([(torch.load(folder / f"call-{n}.pt"), outcome) for n, outcome in enumerate(outcomes)])

    def start(self, way: str, modules: tuple[str, ...]) -> float:
        """Imports the modules of the first call, then makes it and further calls; returns the seconds of the first."""
        for name in modules:
            with contextlib.suppress(
                ImportError, AttributeError
            ):  # made by the call, such as a compiled kernel
                importlib.import_module(name)
        self.subject = find_subject(self.request)
        call, subject = self.subject.make_calls()[0], self.subject

        seed(SEED + 1)
        gc.collect()
        began = clock()
        compiled = ways.compile_way(way, subject.fn, self.request.backend)
        subject.run(compiled, call)
        seconds = clock() - began
        self.call = make_step(subject, compiled, call)
        self.turn, self.look = partial(time_turn, self.call), partial(look, subject, compiled, call)
        for _ in range(WARM_UPS):
            self.call()
        return seconds


def serve(connection: Connection, request: Request, environment: dict[str, str], log: Path) -> None:
    """Runs in a new process: answers requests (method, arguments) until the connection ends.

    Each answer is the result of the method, or a :class:`WayFailed`. The output of the user's code goes to a log.
    """
    os.setsid()  # so that the compilers that this process starts can be ended with it
    sys.stdout = sys.stderr = log.open("w", buffering=1)
    for descriptor in (1, 2):  # C++ prints to these
        os.dup2(sys.stdout.fileno(), descriptor)
    os.environ.update(environment)
    worker = Worker(request)
    with contextlib.suppress(EOFError):
        while True:
            method, arguments = connection.recv()
            connection.send(answer(partial(getattr(worker, method), **arguments)))


def answer(work: Callable[[], Any]) -> Any:
    """Returns the result of `work`, or a :class:`WayFailed` for its error."""
    try:
        return work()
    except TargetError as error:
        return WayFailed("target", str(error))
    except SystemExit as end:
        return WayFailed("user", f"the code that was to be compared called sys.exit({end.code!r})")
    except Exception as error:  # noqa: BLE001 - any error of a way is a result of the comparison
        return WayFailed("way", describe_error(error), format_error(error))


def describe_error(error: BaseException) -> str:
    """Returns the class of an error and the first line of its text; the second, too, if the first ends with a colon."""
    lines = str(error).strip().splitlines()
    told = " ".join(lines[:2]) if lines and lines[0].endswith(":") else lines[0] if lines else ""
    return f"{type(error).__name__}: {told}" if told else type(error).__name__


def format_error(
    error: BaseException, is_users: Callable[[str], bool] = lambda file: not is_library_file(file)
) -> str:
    """Returns the traceback of an error from the first frame in a user's file on; the whole traceback without one."""
    entry = error.__traceback__
    while entry is not None and not is_users(entry.tb_frame.f_code.co_filename):
        entry = entry.tb_next
    if entry is None and isinstance(error, SyntaxError):  # its text has the position
        return "".join(traceback.format_exception_only(error))
    return "".join(traceback.format_exception(type(error), error, entry or error.__traceback__))
