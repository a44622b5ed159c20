"""The two errors of ``subclasses``, each derived from the builtin exception that a caller would expect."""

from __future__ import annotations


class SpecError(TypeError):
    """Raised where a subclass or one of its rules is declared incorrectly."""


class DispatchError(NotImplementedError):
    """Raised where no rule, derivation, decomposition or fallback defines how an op runs on a subclass."""


def one_of(cls: type) -> str:
    """Names a class with its article, for error messages: "a Pair", "an Int8Tensor", "an LSTMState"."""
    name = cls.__name__
    is_spelled = len(name) == 1 or name[:2].isupper() or name[1].isdigit()
    return f"{'an' if name[0] in ('AEFHILMNORSX' if is_spelled else 'AEIOaeio') else 'a'} {name}"
