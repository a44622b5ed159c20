"""The errors of a check, and their meaning.

A check raises :class:`Broken` where the class under test breaks a promise, and :class:`Skipped` where it cannot
compare. A clean refusal by the class (:func:`refusal`) breaks no promise; every other error of the class does.
"""

from __future__ import annotations

import dis
import re
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

# ---- errors of a check ---------------------------------------------------------------------------------------


class Broken(AssertionError):
    """A promise is broken.

    Attributes:
        got: the result, if it was compared with another one.
        expected: the result of the reference, of eager mode or of a difference.
        mend: replaces the promise's own advice where the cause is known.
        fault: a key of ``ADVICE``, whose advice replaces it.
    """

    def __init__(
        self,
        what: str,
        got: str = "",
        expected: str = "",
        *,
        mend: str | None = None,
        fault: str = "",
    ) -> None:
        super().__init__(f"{what}: {got} instead of {expected}" if expected else what)
        self.got, self.expected, self.mend, self.fault = got or what, expected, mend, fault


class Skipped(Exception):
    """A promise cannot be checked on this class."""


def check_that(holds: object, what: str, got: str = "", expected: str = "") -> None:
    """Raises :class:`Broken` unless something holds."""
    if not holds:
        raise Broken(what, got, expected)


def skip_unless(holds: object, why: str) -> None:
    """Raises :class:`Skipped` unless something holds."""
    if not holds:
        raise Skipped(why)


def tried(run: Callable[..., Any], *args: Any) -> tuple[Any, Exception | None]:
    """The result of a call and None, or None and its error."""
    try:
        return run(*args), None
    except Exception as error:  # noqa: BLE001 - the caller judges the error
        return None, error


def succeeds(run: Callable[..., Any], *args: Any) -> bool:
    """True if a call raises no error."""
    return tried(run, *args)[1] is None


# ---- refusals ----------------------------------------------------------------------------------------------

# PyTorch's messages. Every class in the call returned NotImplemented; AOTAutograd got another tangent than it traced;
# a compiler raised its own error for a class's refusal.
_PYTORCH_REFUSES = (
    "no implementation found for",
    "Multiple dispatch failed",
    "guessed its metadata incorrectly",
    "DispatchError(",
    "NotImplementedError(",
)
# Errors by which a compiler refuses a function; named, since this package does not import compilers.
_COMPILER_REFUSES = ("DesugarError",)
# The errors that a class raises to refuse a call. A KeyError or an AssertionError is an accident.
_DELIBERATE = (TypeError, ValueError, RuntimeError)


def refusal(error: BaseException | None, is_own: Callable[[FrameType], bool] | None = None) -> str | None:
    """The message of a clean refusal, or None for any other error.

    A refusal is a ``NotImplementedError`` with a message (``subclasses.DispatchError`` is one). The class raises it
    directly, or it is the cause of a compiler's error. PyTorch's error that no class in a call implements an op is a
    refusal too.

    Args:
        error: the error that a call raised.
        is_own: whether a frame runs code of the class. If given, a ``TypeError``, ``ValueError`` or ``RuntimeError``
            with a message is a refusal too, where a ``raise`` statement in such a frame raised it.
    """
    for one in chain(error):
        text = short(str(one))
        if isinstance(one, Broken) or getattr(one, "code", None) == "rule-result":
            return None
        by_type = isinstance(one, NotImplementedError) or type(one).__name__ in _COMPILER_REFUSES
        by_type = by_type or (is_own is not None and _is_deliberate(one, is_own))
        if (by_type and text) or any(words in text for words in _PYTORCH_REFUSES):
            return text
    return None


def _is_deliberate(error: BaseException, is_own: Callable[[FrameType], bool]) -> bool:
    """Whether a ``raise`` statement of the class raised an error, not an operation that failed.

    The refusal of parts that a rule passes to the class's constructor is a mistake in the rule, and not deliberate.
    """
    entries = [*entries_of(error)]
    if not entries or not isinstance(error, _DELIBERATE):
        return False
    frames, last = [entry.tb_frame for entry in entries], entries[-1]
    # The class returned NotImplemented to Python.
    if re.match(r"unsupported operand type|'[<>]=?' not supported between", str(error)):
        return not is_own(frames[-1])
    # The kit calls constructors, too, and the rest of this package calls rules.
    calls_rules = [re.match(r"subclasses\.(?!testing\.)", f.f_globals.get("__name__", "")) for f in frames]
    is_of_rule = any(
        c and not is_own(f) and is_own(g) for c, f, g in zip(calls_rules, frames, frames[1:-1], strict=False)
    )
    is_raised = frames[-1].f_code.co_code[last.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return (
        is_raised
        and is_own(frames[-1])
        and not (is_of_rule and frames[-1].f_code.co_name in ("__new__", "__init__"))
    )


# ---- reading errors ------------------------------------------------------------------------------------------


def entries_of(error: BaseException) -> Iterator[TracebackType]:
    """The entries of an error's traceback; the last one is where it was raised."""
    entry = error.__traceback__
    while entry is not None:
        yield entry
        entry = entry.tb_next


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and the errors that caused it, the outermost first."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        # Dynamo raises its own errors "from None".
        hidden = error.__context__ if type(error).__module__.startswith("torch._dynamo.") else None
        error = getattr(error, "inner_exception", None) or error.__cause__ or hidden


def short(text: str) -> str:
    """A text in one line, without colors, cut to 300 characters."""
    line = " ".join(re.sub(r"\x1b\[\d*m", "", text).split())
    return line if len(line) <= 300 else line[:297] + "..."


def shown(error: BaseException) -> str:
    """An error as its type and the beginning of its message."""
    return f"{type(error).__name__}: {short(str(error))}"


def problem(what: str, error: BaseException) -> str:
    """The words for an error of a call: the text of :class:`Broken`, the type and message of any other error."""
    return str(error) if isinstance(error, Broken) else f"{what} raised {shown(error)}".strip()
