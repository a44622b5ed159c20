"""Runs of rules for ops where autograd records, for their derivatives.

A rule works with raw inner tensors. Where it runs for its derivative, the inner tensors of its operands are
differentiable functions, and so are those of what it makes on the way, as of a value in another unit that a method of
the class returns: reading them raw must not end the gradient.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor


class _Run(threading.local):
    is_recorded = False


_RUN = _Run()


@contextlib.contextmanager
def recorded_rule() -> Iterator[None]:
    """Marks that a rule for an op runs where autograd records."""
    before, _RUN.is_recorded = _RUN.is_recorded, True
    try:
        yield
    finally:
        _RUN.is_recorded = before


def in_recorded_rule() -> bool:
    """Whether a rule for an op runs where autograd records, in this thread."""
    return _RUN.is_recorded


def keep_readable(x: Any, inners: Sequence[Tensor | None]) -> None:
    """Lets a value that such a rule made hold the differentiable functions themselves, for raw reads."""
    for name, t in zip(type(x).__spec__.attributes, inners, strict=True):
        if t is not None and t.requires_grad:
            x.__dict__[name] = t
