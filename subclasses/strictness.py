"""``strict()``: inside, nothing is materialized silently."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from subclasses.errors import DispatchError

_strict: ContextVar[bool] = ContextVar("strict", default=False)


@contextmanager
def strict() -> Iterator[None]:
    """Inside, a materializing fallback raises a :class:`DispatchError` that names the op."""
    token = _strict.set(True)
    try:
        yield
    finally:
        _strict.reset(token)


def check_materialize(cls: type, op: Any) -> None:
    """Raises inside :func:`strict`."""
    if _strict.get():
        raise DispatchError(f"{op} would materialize a {cls.__name__}, and subclasses.strict() is in force")
