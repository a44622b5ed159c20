"""`desugar.explain`."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from desugar import program as desugar_program
from desugar.api import calls_of, capture
from desugar.backends.base import Backend
from desugar.backends.choose import choose_backend
from desugar.dynamo.entry import Calls
from desugar.explain.collect import collect_program, guards_of
from desugar.explain.cost import measure_cost
from desugar.explain.guards import TakenGuards
from desugar.explain.records import Cost, Program, Report
from desugar.ir.outputs import Outputs
from desugar.recording.listeners import Recording, listen, resumed


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

    The function is captured as by `desugar.trace`, whole and anew each time, and not run. What `desugar.compile`
    returned is explained with its own backend; anything else runs its plain graphs as they are. To measure what a
    call costs, the compiled program is run on what the graph takes of this call, unless it would write to that.

    Args:
        fn: A function or module, or what `desugar.compile` made of one.
        *args: The call's arguments; they are not changed.
        **kwargs: Those by name.

    Returns:
        An explanation to print, to look through or to write as a page.

    Raises:
        DesugarError: The pass does not take the function.
        torch._dynamo.exc.Unsupported: Dynamo cannot capture the function as one graph.
    """
    calls = calls_of(fn)
    backend = choose_backend("eager") if calls is None else _backend_of(calls)
    return Explanation(_explain(fn, backend, None if calls is None else calls.backend.dynamic, args, kwargs))


def _backend_of(calls: Calls) -> Backend:
    """What compiles the graphs of what `desugar.compile` returned."""
    given = calls.backend.kwargs
    options = {name: option for name, option in given.get("options", {}).items() if name != "strict"}
    return choose_backend(options.pop("backend", "inductor"), given.get("mode"), options)


def _explain(
    fn: Any, backend: Backend, dynamic: bool | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Program:
    """The record of one call, compiled for the purpose."""
    found: list[_Explained] = []
    thread = threading.get_ident()

    def note(recording: Recording) -> None:
        if recording.program is not None and threading.get_ident() == thread and not found:
            found.append(_Explained.of(recording, backend))

    with listen(note):
        capture(fn, args, kwargs, backend, reason="to be explained", dynamic=dynamic)
    return found[0].finish()


@dataclass(frozen=True, slots=True)
class _Explained:
    """What is known when a compilation ends; Dynamo builds its guards afterwards, and nothing has been run."""

    record: Program
    guards: TakenGuards
    program: desugar_program.Program
    outputs: Outputs
    leaves: tuple[Any, ...]

    @staticmethod
    def of(recording: Recording, backend: Backend) -> _Explained:
        """Describes a compilation, with the backward for all gradients."""
        program, outputs = recording.program, recording.traced.outputs
        if program.variants is not None:
            with resumed(recording):
                program.variants.table[(True,) * len(program.variants.traced.tangents)]
        record = collect_program(recording, backend.name)
        return _Explained(record, guards_of(record, recording), program, outputs, recording.args)

    def finish(self) -> Program:
        """The record with guards and cost."""
        cost = measure_cost(self.program, self.outputs, self.leaves)
        measured = {"cost": cost} if isinstance(cost, Cost) else {"no_cost": cost}
        return replace(self.record, guards=self.guards.describe(), **measured)


__all__ = ["Explanation", "explain"]
