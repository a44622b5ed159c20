"""Private names of PyTorch's guards: the measurement of a compilation's guards, which only a log shows."""

from __future__ import annotations

import functools
from typing import Any

from torch._guards import CompileContext as _CompileContext  # the compilation in progress

from subclasses.after_import import after_import

_UNTIMED = "_desugar_leaves_guards_untimed"


def leave_guards_untimed() -> None:
    """Skips Dynamo's measurement of the guards of the compilation in progress, which only a log shows.

    Dynamo empties the processor's caches before it, which takes 22 ms of each compilation.
    """
    context = _CompileContext.try_get()  # of this thread
    if context is not None:
        setattr(context, _UNTIMED, True)


def _measure_the_rest(guards: Any) -> None:
    measure = getattr(guards, "profile_guard_manager", None)
    if measure is None:  # a release that measures otherwise, or not at all
        return

    @functools.wraps(measure)
    def profile_guard_manager(*args: Any) -> float:
        context = _CompileContext.try_get()  # of this thread
        return 0.0 if getattr(context, _UNTIMED, False) else measure(*args)

    guards.profile_guard_manager = profile_guard_manager


after_import("torch._dynamo.guards", _measure_the_rest)
