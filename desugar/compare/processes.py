"""New processes for each way: forked from a server that has imported torch, and has compiled nothing.

So a process starts at once and with empty caches, its imports are not part of what is timed, and it can be ended when
it hangs, together with the compilers that it started. It answers requests of the one that started it, and turns errors
into answers.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from desugar import _torch as private
from desugar.compare.import_names import TargetError
from desugar.compare.records import Request
from desugar.compare.worker import Worker
from desugar.user_code import is_library_file

PRELOADED = ("desugar.compare.processes", *private.COMPILER_MODULES)
_CLEAN_UP = 2.0  # seconds that a process has for it
_LAST_WORDS = 300  # characters of what a process printed last


class WayFailed(Exception):
    """A process raised, ended or hung; the failure says which."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.failure = failure


class Process:
    """A process that answers for one way."""

    def __init__(self, request: Request, folder: Path, caches: Path, timeout: float) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        self.is_busy = False
        self.timeout, self.log = timeout, folder / f"log-{len(list(folder.glob('log-*')))}"
        self.log.touch()
        environment = {
            "TORCHINDUCTOR_CACHE_DIR": str(caches),
            "TRITON_CACHE_DIR": str(caches / "triton"),
        }
        self.connection, theirs = context.Pipe()
        arguments = (theirs, request, environment, str(self.log))
        self.process = context.Process(target=serve, args=arguments, daemon=False)
        self.process.start()
        theirs.close()

    def ask(self, method: str, **arguments: Any) -> Any:
        """Returns what a method of the worker returns.

        Raises:
            WayFailed: The method raised, the process ended, or no answer came in time.
        """
        self.is_busy = True
        with contextlib.suppress(BrokenPipeError):  # it has ended, which is said below
            self.connection.send((method, arguments))
        ready = wait([self.connection, self.process.sentinel], self.timeout)
        if not ready:
            self.stop()
            what = f"no answer within {self.timeout:g} s; --timeout waits longer{self._last_words()}"
            raise WayFailed(Failure("way", what))
        try:
            answer = self.connection.recv()
        except (EOFError, ConnectionError):
            raise WayFailed(Failure("way", self._describe_end())) from None
        self.is_busy = False
        if isinstance(answer, Failure):
            raise WayFailed(answer)
        return answer

    def _describe_end(self) -> str:
        self.process.join(self.timeout)
        code = self.process.exitcode or 0
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"the process ended with {how}{self._last_words()}"

    def _last_words(self) -> str:
        """Returns the last line that it printed; an indented one belongs to a warning or a traceback."""
        printed = self.log.read_text(errors="replace").splitlines()
        lines = [line for line in printed if line.strip() and not line.startswith(" ")]
        return f"; it last printed: {lines[-1][:_LAST_WORDS]}" if lines else ""

    def stop(self) -> None:
        """Ends the process, and those that it started; one that waits for a request may clean up."""
        self.connection.close()
        if not self.is_busy:
            self.process.join(_CLEAN_UP)
        if self.process.pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        if self.process.is_alive():
            self.process.kill()
        self.process.join()


@contextlib.contextmanager
def started(request: Request, folder: Path, caches: Path, timeout: float) -> Iterator[Process]:
    """Yields a new process, which is ended with the context."""
    process = Process(request, folder, caches, timeout)
    try:
        yield process
    finally:
        process.stop()


# ---- in the child ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Failure:
    """An error in a process: "target" (a wrong request), "user" (of the code that is compared) or "way".

    Attributes:
        kind: Whose error it is.
        text: One line.
        traceback: From the first line of the user's on.
    """

    kind: str
    text: str
    traceback: str = ""


def serve(connection: Connection, request: Request, environment: dict[str, str], log: str) -> None:
    """Runs in a new process: answers requests (method, arguments) until the connection ends.

    Each answer is what the method returned, or a :class:`Failure`. What the user's code prints goes to a log.
    """
    os.setsid()  # so that the compilers that this process starts can be ended with it
    _print_to(log)
    os.environ.update(environment)
    worker = Worker(request)
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        connection.send(answer(partial(getattr(worker, method), **arguments)))


def _print_to(log: str) -> None:
    """Makes whatever is printed, by C++ too, go to a file; there is nothing to read from standard input."""
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(target, 1)
    os.dup2(target, 2)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    sys.stdin = io.TextIOWrapper(os.fdopen(nothing, "rb"))
    sys.stdout = sys.stderr = io.TextIOWrapper(os.fdopen(target, "wb", 0), write_through=True)


def answer(work: Callable[[], Any]) -> Any:
    """Returns what work returns, or what went wrong in it."""
    try:
        return work()
    except TargetError as error:
        return Failure("target", str(error))
    except SystemExit as end:
        return Failure("user", f"the code that was to be compared called sys.exit({end.code!r})")
    except Exception as error:  # noqa: BLE001 - whatever a way raises is a result of the comparison
        return Failure("way", describe_error(error), format_error(error))


def describe_error(error: BaseException) -> str:
    """Returns the class of an error and the first line of its text; the second, too, where the first announces it."""
    lines = str(error).strip().splitlines()
    told = " ".join(lines[:2]) if lines and lines[0].endswith(":") else lines[0] if lines else ""
    return f"{type(error).__name__}: {told}" if told else type(error).__name__


def format_error(error: BaseException) -> str:
    """Returns the traceback of an error from the first line of the user's code on; all of it if there is none."""
    found = error.__traceback__
    while found is not None and is_library_file(found.tb_frame.f_code.co_filename):
        found = found.tb_next
    if found is None and isinstance(error, SyntaxError):  # says itself where it is
        return "".join(traceback.format_exception_only(error))
    return "".join(traceback.format_exception(type(error), error, found or error.__traceback__))
