"""Why a call does not fit a program: which of the wrapper's checks it failed, in words."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from typing import Any

from desugar.signature import MISS

_LAYOUT = re.compile(r"(\w+)\._layout is not (\w+)")


class _Fits(Exception):
    """The call has passed every check."""


def find_miss(program: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """The check that a call fails, as the wrapper has it, and what PyTorch says of the tensors; None if it fits.

    The wrapper is run once more and watched line by line. A call that misses has done nothing by then; one that
    fits after all is stopped behind the last check.
    """
    run, seen = inspect.unwrap(program.run), {}
    code, lines = run.__code__, program.wrapper.splitlines()
    last = max((n for n, line in enumerate(lines, 1) if line.strip() == "return MISS"), default=0)

    def watch(frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code is not code:
            return None
        if event == "return":
            seen["values"] = dict(frame.f_locals)
        elif event == "line":
            if frame.f_lineno > last:
                raise _Fits
            seen["before"], seen["line"] = seen.get("line"), frame.f_lineno
        return watch

    earlier = sys.gettrace()
    sys.settrace(watch)
    try:
        result = run(args, kwargs)
    except _Fits:
        return None
    finally:
        sys.settrace(earlier)
    if result is not MISS or seen.get("before") is None:
        return None
    check = lines[seen["before"] - 1].strip().removeprefix("if ").rstrip(":")
    return _in_words(check, seen["values"], run.__globals__)


def _in_words(check: str, values: dict[str, Any], names: dict[str, Any]) -> str:
    """The check, or what it looks at in the words of whoever made it."""
    if "same_global_state()" in check:
        changed = names["same_global_state"].__self__.reason().strip()
        return f"another mode: {changed}" if changed else f"another mode: {check}"
    if found := _LAYOUT.fullmatch(check):
        return f"layout of {found[1]}: expected {names[found[2]]}, got {values[found[1]]._layout}"
    if not check.startswith("not same_tensors("):
        return check
    call: Any = ast.parse(check.removeprefix("not "), mode="eval").body
    arguments = [argument.id for argument in call.args]
    guards = names[call.func.id].__self__
    tensors = [values[name] if name in values else names[name] for name in arguments]
    found = guards.check_verbose(*tensors, tensor_check_names=arguments)
    return found if isinstance(found, str) else check
