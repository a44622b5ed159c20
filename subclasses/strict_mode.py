"""``strict()``: a context in which materializing fallbacks raise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from subclasses.errors import DispatchError, one_of
from subclasses.slow_paths import say_once

# Each is called with the class and the op of every materializing fallback that runs, for recorders such as explain's.
watchers: list[Callable[[type, Any], None]] = []

# Names of ops that take most of the time of a model.
_PRODUCTS = frozenset(
    """linear bilinear matmul einsum mv mm bmm addmm addbmm baddbmm convolution
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d""".split()
)

_strict: ContextVar[bool] = ContextVar("strict", default=False)


@contextmanager
def strict() -> Iterator[None]:
    """Context in which a materializing fallback raises a :class:`DispatchError` that names the op."""
    token = _strict.set(True)
    try:
        yield
    finally:
        _strict.reset(token)


def check_materialize(cls: type, op: Any) -> None:
    """Raises a ``DispatchError`` inside :func:`strict`; elsewhere notifies the watchers."""
    if _strict.get():
        raise DispatchError(
            f"{op} would materialize {one_of(cls)}, and subclasses.strict() is in force", code="strict-mode"
        )
    for watcher in watchers:
        watcher(cls, op)
    if not cls.__module__.startswith("subclasses."):
        return
    name = getattr(getattr(op, "overloadpacket", op), "__name__", "")
    if name in _PRODUCTS:
        say_once(
            f"{name} converts a whole {cls.__name__} to floats at each call",
            "leave the layer out of quantize_, or keep the floats",
        )
