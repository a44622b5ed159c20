"""New processes for each way: forked from a server that has imported torch, and has compiled nothing.

So a process starts at once and with empty caches, its imports are not part of what is timed, and it can be ended when
it hangs, together with the compilers that it started.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from desugar import _torch as private
from desugar.compare.child_process import Failure, serve
from desugar.compare.records import Request

PRELOADED = ("desugar.compare.child_process", *private.COMPILER_MODULES)
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
