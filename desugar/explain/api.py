"""`desugar.explain`. The collectors and renderers are imported on first use, not by `import desugar`."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from desugar.backends.base import Backend
    from desugar.dynamo.entry import CompiledCallable
    from desugar.explain.collecting.guards import TakenGuards
    from desugar.explain.records import Cost, Program
    from desugar.recording.listeners import Recording


class Explanation:
    """Explains the compilation of one call: `print` shows it, `to_dict` returns it as data, `to_html` writes a page.

    Attributes:
        program: The record of the compilation (`desugar.explain.records.Program`).
    """

    def __init__(self, program: Program) -> None:
        self.program = program

    def to_dict(self) -> dict[str, Any]:
        """Returns the record as dictionaries, lists, strings and numbers, by the attributes of the records."""
        return self.program.to_dict()

    def to_json(self) -> str:
        """Returns the data of `to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=1)

    def to_html(self, path: str | Path) -> Path:
        """Writes one self-contained HTML page, which needs no network; returns its path."""
        target = Path(path)
        target.write_text(self._page(), encoding="utf-8")
        return target

    def text(self, *, folded: bool = True) -> str:
        """Returns the text that `print` shows, without colours; `folded=False` shows every layer and whole lines."""
        from desugar.explain.render import render_text

        return render_text(self.program, folded=folded)

    def _page(self) -> str:
        from desugar.explain.records import Report
        from desugar.explain.render import render_page

        return render_page(Report(self.program.name, (self.program,)))

    def _repr_html_(self) -> str:
        """Returns the page in an iframe, for notebooks; its styles and keys do not affect the notebook's page."""
        from desugar.explain.render import render_frame

        return render_frame(self._page(), f"Explanation of {self.program.name}")

    def __str__(self) -> str:
        from desugar.explain.render import render

        return render(self.program)

    def __repr__(self) -> str:
        return f"Explanation({self.program.name}, {len(self.program.ops)} ops)"


def explain(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
    """Explains one call: the traced ops, the plain ops of each line, the guards, the runtime wrapper and the cost.

    Each call of `explain` captures the function anew as one graph, as `desugar.trace` does, and does not run it. The
    result of `desugar.compile` is explained with its own backend, any other function with the backend "eager". To
    measure the cost of a call, `explain` runs the compiled program on the arguments of the graph, unless it writes to
    them.

    Args:
        fn: A function or module, or a result of `desugar.compile`.
        *args: The call's arguments; they are not changed.
        **kwargs: The call's arguments by name.

    Returns:
        An explanation to print, to look through or to write as a page.

    Raises:
        DesugarError: Desugaring does not support the function.
        torch._dynamo.exc.Unsupported: Dynamo cannot capture the function as one graph.
    """
    from desugar.api import calls_of
    from desugar.backends.choose import choose_backend

    calls = calls_of(fn)
    backend = choose_backend("eager") if calls is None else _backend_of(calls)
    dynamic = None if calls is None else calls.backend.dynamic
    return Explanation(_explain(fn, backend, dynamic, args, kwargs))


def _backend_of(calls: CompiledCallable) -> Backend:
    """Returns the backend of a function that `desugar.compile` returned."""
    from desugar.backends.choose import choose_backend

    given = calls.backend.kwargs
    options = {name: option for name, option in given.get("options", {}).items() if name != "strict"}
    return choose_backend(options.pop("backend", "inductor"), given.get("mode"), options)


def _explain(
    fn: Any,
    backend: Backend,
    dynamic: bool | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Program:
    """Returns the record of one call, compiled for the purpose, with its measured cost."""
    from desugar.api import capture
    from desugar.explain.collecting.collect import collect_program
    from desugar.explain.collecting.cost import measure_cost
    from desugar.explain.collecting.guards import take_guards
    from desugar.recording.listeners import listen, resumed

    explained: list[tuple[Program, TakenGuards, Callable[[], Cost | str]]] = []
    thread = threading.get_ident()

    def note(recording: Recording) -> None:
        program = recording.program
        if program is None or threading.get_ident() != thread or explained:
            return
        if program.variants is not None:  # the backward for all gradients
            with resumed(recording):
                program.variants.table[(True,) * len(program.variants.interface.tangents)]
        record = collect_program(recording, backend.name)
        measure = partial(measure_cost, program, program.spec.outputs, recording.args)
        explained.append((record, take_guards(recording, record), measure))

    with listen(note):
        capture(fn, args, kwargs, backend, reason="to be explained", dynamic=dynamic)
    record, guards, measure = explained[0]
    cost = measure()
    measured = {"no_cost": cost} if isinstance(cost, str) else {"cost": cost}
    return replace(record, guards=guards.describe(), **measured)


__all__ = ["Explanation", "explain"]
