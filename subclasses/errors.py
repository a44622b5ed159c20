"""The two errors of ``subclasses``, each derived from the builtin exception that a caller would expect.

``docs/api.md`` lists the codes, and a test compares its table with the sources.
"""

from __future__ import annotations

from typing import Any, TypeVar

E = TypeVar("E", bound=BaseException)


class _CodedError(Exception):
    """An error with a code and a hint, which ends its message."""

    code: str | None = None
    hint: str | None = None

    def __init__(self, *args: object, code: str | None = None, hint: str | None = None) -> None:
        super().__init__(*([_with_hint(args[0], hint)] if hint else args))
        self.code, self.hint = code or self.code, hint or self.hint


class SpecError(_CodedError, TypeError):
    """Raised where a subclass or one of its rules is declared incorrectly.

    Attributes:
        code: the kind of mistake, a short name that later releases keep; None where a raise statement gave none.
        hint: how to correct it, at the end of the message; None if there is no hint.
    """


class DispatchError(_CodedError, NotImplementedError):
    """Raised where no rule, derivation, decomposition or fallback defines how an op runs on a subclass.

    Attributes:
        code: the kind of mistake, a short name that later releases keep; None where a raise statement gave none.
        hint: how to avoid it, at the end of the message; None if there is no hint.
    """


def coded(kind: type[E], message: str, *, code: str, hint: str | None = None) -> E:
    """Returns an error of a builtin type, with the attributes and the message that an error of this module has."""
    error = kind(_with_hint(message, hint) if hint else message)
    error.code, error.hint = code, hint  # type: ignore[attr-defined]
    return error


def _with_hint(message: object, hint: str) -> str:
    return f"{message}{'. ' if hint[0].isupper() else '; '}{hint}"


def check_keyword(fits: bool, takes: str, got: object) -> None:
    """Raises SpecError unless the value of a keyword argument fits.

    Args:
        fits: whether it does.
        takes: the class or field, and the values that the keyword takes.
        got: the value.
    """
    if not fits:
        raise SpecError(f"{takes}, got {got!r}", code="keyword-value")


def full_name(cls: type) -> str:
    """Returns the name of a class with its module, by which files name it."""
    return f"{cls.__module__}.{cls.__qualname__}"


def one_of(cls: type) -> str:
    """Names a class with its article, for error messages: "a Pair", "an Int8Tensor", "an LSTMState"."""
    name = cls.__name__
    is_spelled = len(name) == 1 or name[:2].isupper() or name[1].isdigit()
    return f"{'an' if name[0] in ('AEFHILMNORSX' if is_spelled else 'AEIOaeio') else 'a'} {name}"


def way_out(cls: Any, of_author: str) -> str:
    """Returns a hint for a class without a rule: advice for its author, or for users of a class of this package.

    Args:
        cls: the class. A class attribute ``_instead`` has the advice for users.
        of_author: the advice for an author, who can add a rule.
    """
    if cls.__module__.partition(".")[0] != __name__.partition(".")[0]:
        return f"{of_author}; or {cls._instead}" if cls._instead else of_author
    names = " and ".join(f"x.unwrap({name!r})" for name in cls.__spec__.inner_names[:2])
    plain = ", or x.materialize()" if cls.__spec__.has_materialize else ""
    return cls._instead or f"compute with its inner tensors, {names}{plain}"
