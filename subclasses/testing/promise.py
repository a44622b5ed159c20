"""Promises, and what became of them.

A promise is one thing that PyTorch, or a user, may rely on with a tensor subclass. It is a function of a
:class:`~subclasses.testing.subject.Subject` that raises :class:`Broken` where it finds the promise broken,
:class:`Skipped` where it cannot tell, and lets any error of the class through: the runner decides what an error
means. A clean refusal (:func:`refusal`) breaks nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NoReturn

if TYPE_CHECKING:
    from subclasses.testing.subject import Subject

Run = Callable[["Subject"], None]


class Broken(AssertionError):
    """A promise is broken; ``mend`` replaces the promise's own advice where the cause is known."""

    def __init__(self, what: str, mend: str | None = None) -> None:
        super().__init__(what)
        self.mend = mend


class Skipped(Exception):
    """A promise cannot be put to the test on this class."""


@dataclass(frozen=True)
class Promise:
    """One promise: its name, what it says in a sentence, how a class that breaks it is mended."""

    name: str
    says: str
    mend: str
    run: Run


PROMISES: dict[str, Promise] = {}


def promise(mend: str) -> Callable[[Run], Run]:
    """Files the decorated function as a promise: its name, and what its docstring says."""

    def register(run: Run) -> Run:
        says = (run.__doc__ or "").splitlines()[0]
        PROMISES[run.__name__] = Promise(run.__name__, says, mend, run)
        return run

    return register


# ---- what became of them -----------------------------------------------------------------------------------

State = Literal["kept", "broken", "skipped"]


@dataclass(frozen=True)
class Outcome:
    """What became of one promise.

    Attributes:
        promise: which.
        state: kept, broken, or skipped where it could not be put to the test.
        detail: what broke it, or why it was skipped.
        mend: how to mend it, if broken.
        refused: what the class refused cleanly on the way, with the first line of each message.
        error: the exception behind a broken promise.
    """

    promise: Promise
    state: State
    detail: str = ""
    mend: str = ""
    refused: tuple[str, ...] = ()
    error: BaseException | None = field(default=None, compare=False)

    def __str__(self) -> str:
        head = f"{self.promise.name}: {self.promise.says}"
        if self.state == "broken":
            return f"{head}\n  broken: {self.detail}\n  mend: {self.mend}"
        return f"{head}\n  {self.state}{f': {self.detail}' if self.detail else ''}"


class Attempt(AbstractContextManager["Attempt"]):
    """Runs a block and keeps the error that it raised, if any, for the caller to judge."""

    error: Exception | None = None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, Exception):
            self.error = error
            return True
        return False


# ---- refusals ----------------------------------------------------------------------------------------------

# What PyTorch says when every class in the call answered NotImplemented, when AOTAutograd is given a tangent
# other than the one it traced, and when a compiler stopped at an error that a class's refusal became.
_PYTORCH_REFUSES = (
    "no implementation found for",
    "Multiple dispatch failed",
    "guessed its metadata incorrectly",
    "DispatchError(",
    "NotImplementedError(",
)
# Errors of compilers that say that they do not take a function; named, since this package does not know them.
_COMPILER_REFUSES = ("DesugarError",)


def refusal(error: BaseException | None) -> str | None:
    """The message of a clean refusal, or None for any other error.

    A refusal is a ``NotImplementedError`` with a message (``subclasses.DispatchError`` is one), raised as it is
    or behind the error of a compiler, or PyTorch's own word that no class in a call knows an op.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        text = " ".join(str(error).split())
        if isinstance(error, Broken):
            return None
        by_type = isinstance(error, NotImplementedError) or type(error).__name__ in _COMPILER_REFUSES
        if (by_type and text) or any(words in text for words in _PYTORCH_REFUSES):
            return first_line(text)
        error = getattr(error, "inner_exception", None) or error.__cause__
    return None


def first_line(text: str) -> str:
    """The first line that says something, not longer than a few hundred characters."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= 300 else line[:297] + "..."


def shown(error: BaseException) -> str:
    """An error as its type and the beginning of its message."""
    return f"{type(error).__name__}: {first_line(' '.join(str(error).split()))}"


def broke(what: str, error: BaseException, mend: str | None = None) -> NoReturn:
    """Raises :class:`Broken` for an error that is no clean refusal."""
    raise Broken(f"{what} raised {shown(error)}", mend) from error
