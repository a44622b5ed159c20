"""How many programs some calls make."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from tests.desugar.judge import by_pass, judge


def assert_programs(
    fn: Callable[..., Any], calls: Sequence[Any], count: int, around: Sequence[Any] = (), **options: Any
) -> Any:
    """Every call is right, twice over, and `count` programs are compiled.

    Args:
        fn: The function.
        calls: Per call what makes its arguments.
        count: How many programs there are in the end.
        around: Per call a context manager, made anew for each.
        options: For `desugar.compile`.
    """
    compiled = by_pass(fn, **options)
    for _ in range(2):
        for n, make_args in enumerate(calls):
            judge(fn, make_args, compiled, around=around[n] if around else contextlib.nullcontext)
    assert len(compiled.programs) == count, [str(program) for program in compiled.programs]
    return compiled
