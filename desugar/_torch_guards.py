"""Private names of PyTorch's guard managers: the trees of C++ guards that Dynamo builds of a frame's guards."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

from subclasses.after_import import after_import


@contextlib.contextmanager
def watch_guards(then: Callable[[Any, dict[str, Any]], None]) -> Iterator[None]:
    """Calls `then` with the guards that Dynamo builds inside the context, and with the variables of their frame.

    Dynamo frees the frame's variables after a compilation, and no public function returns its guards. The hook is one
    that PyTorch has for its own tests; Dynamo calls it where the guards have just held.
    """
    guards: Any = importlib.import_module("torch._dynamo.guards")
    outer = guards.guard_manager_testing_hook_fn

    def hook(manager: Any, frame: dict[str, Any], builder: Any) -> None:
        if outer is not None:
            outer(manager, frame, builder)
        then(manager.root, frame)

    guards.guard_manager_testing_hook_fn = hook
    try:
        yield
    finally:
        guards.guard_manager_testing_hook_fn = outer


def inner_managers(manager: Any) -> list[Any]:
    """Returns the guard managers of what is read from a value; those of a dictionary are of its keys and values."""
    found = list(manager.get_child_managers())
    if hasattr(manager, "get_key_value_managers"):
        found += [
            part for pair in manager.get_key_value_managers().values() for part in pair if part is not None
        ]
    return found


def clone_of(root: Any, sources: Collection[str]) -> Any:
    """Returns a copy of a tree of guards with the values of these sources alone, the root's own guards included."""
    kept = {root.get_source(), *sources}
    return root.clone_manager(lambda manager: manager.get_source() in kept)


def empty_guards() -> Any:
    """Returns a tree that checks nothing: what is left of the time of a check is that of the call."""
    return importlib.import_module("torch._C._dynamo.guards").RootGuardManager()


# ---- the measurement of guards -----------------------------------------------------------------------------

_UNTIMED = "_desugar_leaves_guards_untimed"


def leave_guards_untimed() -> None:
    """Skips Dynamo's measurement of the guards of the compilation in progress, which only a log shows.

    Dynamo empties the processor's caches before it, which takes 22 ms of each compilation.
    """
    context = importlib.import_module("torch._guards").CompileContext.try_get()
    if context is not None:
        setattr(context, _UNTIMED, True)


def _measure_the_rest(guards: Any) -> None:
    measure = getattr(guards, "profile_guard_manager", None)
    if measure is None:  # a release that measures otherwise, or not at all
        return
    context = importlib.import_module("torch._guards").CompileContext

    @functools.wraps(measure)
    def profile_guard_manager(*args: Any) -> float:
        return 0.0 if getattr(context.try_get(), _UNTIMED, False) else measure(*args)

    guards.profile_guard_manager = profile_guard_manager


after_import("torch._dynamo.guards", _measure_the_rest)
