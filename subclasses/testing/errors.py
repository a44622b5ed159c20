"""What an error of a property function means.

:class:`Broken`: the class under test lacks the property. :class:`Skipped`: the kit cannot tell. A clean refusal by the
class (:func:`refusal`) breaks nothing; every other error of the class does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

# ---- errors of a property function -------------------------------------------------------------------------


class Broken(AssertionError):
    """A promise is broken; ``mend`` replaces the promise's own advice where the cause is known."""

    def __init__(self, what: str, mend: str | None = None) -> None:
        super().__init__(what)
        self.mend = mend


class Skipped(Exception):
    """A promise cannot be checked on this class."""


class Refused(NotImplementedError):
    """The class refuses a call cleanly; the message begins with the call."""


class Attempt(AbstractContextManager["Attempt"]):
    """Runs a block and stores the error that it raised, if any."""

    error: Exception | None = None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, Exception):
            self.error = error
            return True
        return False


def succeeds(run: Callable[..., Any], *args: Any) -> bool:
    """True if a call raises no error."""
    with Attempt() as attempt:
        run(*args)
    return attempt.error is None


@contextmanager
def must(what: str) -> Iterator[None]:
    """Turns every error of a block into :class:`Broken`: no class should refuse what the block does."""
    try:
        yield
    except (Broken, Skipped):
        raise
    except Exception as error:
        raise Broken(problem(what, error)) from error


# ---- refusals ----------------------------------------------------------------------------------------------

# PyTorch's messages when every class in the call answered NotImplemented, when AOTAutograd is given a tangent
# other than the one it traced, and when a compiler stopped at an error that a class's refusal became.
_PYTORCH_REFUSES = (
    "no implementation found for",
    "Multiple dispatch failed",
    "guessed its metadata incorrectly",
    "DispatchError(",
    "NotImplementedError(",
)
# Errors by which a compiler refuses a function; named, since this package does not import compilers.
_COMPILER_REFUSES = ("DesugarError",)


def refusal(error: BaseException | None) -> str | None:
    """The message of a clean refusal, or None for any other error.

    A refusal is a ``NotImplementedError`` with a message (``subclasses.DispatchError`` is one), raised directly
    or as the cause of a compiler's error, or PyTorch's own error that no class in a call implements an op.
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
    """The first line that is not blank, cut to 300 characters."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= 300 else line[:297] + "..."


def first_three(problems: Sequence[str], noun: str) -> str:
    """The first three problems, and the number of the others."""
    more = f" (and {len(problems) - 3} more {noun})" if len(problems) > 3 else ""
    return "; ".join(problems[:3]) + more


def shown(error: BaseException) -> str:
    """An error as its type and the beginning of its message."""
    return f"{type(error).__name__}: {first_line(' '.join(str(error).split()))}"


def problem(what: str, error: BaseException) -> str:
    """What an error says about a call: the text of :class:`Broken`, the type and message of any other error."""
    return str(error) if isinstance(error, Broken) else f"{what} raised {shown(error)}"
