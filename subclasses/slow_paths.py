"""``say_once()``: logs that a computation takes a slow path, and how to avoid that, once in a process."""

from __future__ import annotations

import logging
from collections.abc import Callable

from subclasses.after_import import after_import

# Each is called with the text of every slow path that is taken or traced, for recorders such as report's.
watchers: list[Callable[[str], None]] = []

_said: set[str] = set()


def say_once(reason: str, remedy: str, logger: str = "subclasses") -> None:
    """Logs that a faster path was not taken, unless this text was logged before, and notifies the watchers.

    Args:
        reason: The computation, and why it takes more time than necessary.
        remedy: The change to the user's code that avoids it.
        logger: The name of the logger.
    """
    text = f"{reason}; {remedy}"
    for watcher in tuple(watchers):
        watcher(text)
    if text not in _said:
        _said.add(text)
        logging.getLogger(logger).warning("slow: %s", text)


# Code that Dynamo traces logs while it is traced, and has no graph break there.
after_import("torch._dynamo.decorators", lambda dynamo: dynamo.assume_constant_result(say_once))


def forget_said() -> None:
    """Forgets the logged texts, so that each slow path is logged again."""
    _said.clear()
