"""The calls that a thread makes above autograd, for dispatch and messages below it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from subclasses._torch import in_backward


class _Calling(threading.local):
    """The calls that this thread makes.

    Attributes:
        func: The function without a rule that is called on a value; None for one that runs a backward.
        target: The value x of ``x[index] = value``, if that is called.
        opens: Whether an op that is dispatched to a class opens its operands.
        rules: How many rules run on open values.
        writing: The op whose result ``copy_`` writes.
    """

    func: Callable[..., Any] | None = None
    target: Any = None
    opens = False
    rules = 0
    writing: Any = None


CALLING = _Calling()


def in_rule() -> bool:
    """Whether a rule runs on open values in this thread."""
    return CALLING.rules > 0


def is_called_by_engine() -> bool:
    """Whether the engine calls an op in a backward of a class with rules, and no Python code such as a hook does.

    PyTorch's formulas, and the engine where it adds gradients, call no ``__torch_function__``.
    """
    return CALLING.func is None and in_backward()
