"""`desugar.explain`."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from desugar import listening
from desugar.compilers import Backend, choose_backend
from desugar.explain.collect import collect_program
from desugar.explain.cost import measure_cost
from desugar.explain.records import Program, Report
from desugar.inputs import DynamicPolicy
from desugar.pipeline import build_forgetting, compile_again, compiled_from
from desugar.program import Request
from desugar.state import find_state


class Explanation:
    """What one call of a function becomes: `print` it, take it apart with `to_dict`, or look at `to_html`.

    Attributes:
        program: The record that everything is shown from (`desugar.explain.records.Program`).
    """

    def __init__(self, program: Program) -> None:
        self.program = program

    def to_dict(self) -> dict[str, Any]:
        """Everything as dictionaries, lists, strings and numbers; the keys are the attributes of the records."""
        return self.program.to_dict()

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=1)

    def to_html(self, path: str | Path) -> Path:
        """Writes one page that needs nothing else and no network; returns its path."""
        from desugar.explain.page import render_page

        target = Path(path)
        target.write_text(render_page(Report(self.program.name, (self.program,))), encoding="utf-8")
        return target

    def __str__(self) -> str:
        from desugar.explain.terminal import render

        return render(self.program)

    def __repr__(self) -> str:
        return f"Explanation({self.program.name}, {len(self.program.ops)} ops)"


def explain(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
    """Tells what becomes of one call: what is traced, what each line turns into, what is checked and what it costs.

    The function is traced as by `desugar.trace`, anew each time. What `desugar.compile` returned is explained with
    its own backend; anything else runs its plain graphs as they are. To measure what a call costs, the compiled
    program is run on the arguments, unless it would write to them.

    Args:
        fn: A function or module, or what `desugar.compile` made of one.
        *args: The call's arguments; they are not changed.
        **kwargs: Those by name.

    Returns:
        An explanation to print, to look through or to write as a page.

    Raises:
        DesugarError: The function cannot be desugared.
    """
    cache = compiled_from(fn)
    function = fn if cache is None else cache.fn
    backend = choose_backend("eager") if cache is None else cache.backend
    policy = DynamicPolicy() if cache is None else cache.history.policy_for(args, kwargs)
    return Explanation(explain_call(function, backend, policy, args, kwargs))


def explain_call(
    fn: Any, backend: Backend, policy: DynamicPolicy, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Program:
    """The record of one call, compiled for the purpose."""
    state = functools.partial(find_state, fn)
    again = functools.partial(compile_again, backend=backend)
    found: list[Program] = []

    def note(recording: listening.Recording) -> None:
        if recording.program is not None:
            cost = measure_cost(recording.program, recording.traced.outputs, args, kwargs)
            found.append(collect_program(recording, backend.name, cost))

    with listening.recording(fn, "to be explained", args, kwargs, also=note):
        program = build_forgetting(Request(fn, args, kwargs, backend, policy, state, again))
        if program.family is not None:
            program.family.members[(True,) * len(program.family.traced.tangents)]
    return found[0]


__all__ = ["Explanation", "explain", "explain_call"]
