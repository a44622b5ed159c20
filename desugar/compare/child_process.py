"""What a new process does: it answers requests of the one that started it, and turns errors into answers."""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from desugar.compare.import_names import TargetError
from desugar.compare.records import Request
from desugar.compare.worker import Worker
from desugar.user_code import is_library_file


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
