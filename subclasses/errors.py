"""The two errors of the spec layer, both subclasses of the builtin a caller would expect."""

from __future__ import annotations


class SpecError(TypeError):
    """A declaration of a subclass, or of one of its rules, is wrong. Raised where it is declared."""


class DispatchError(NotImplementedError):
    """No rule, derivation, decomposition or fallback says how an op runs on a subclass."""


def one_of(cls: type) -> str:
    """A value of a class, in a message: "a Pair", "an Int8Tensor"."""
    return f"{'an' if cls.__name__[0] in 'AEIOaeio' else 'a'} {cls.__name__}"
