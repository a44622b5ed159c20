"""Records Dynamo's compilations, its graph breaks, and the functions that it did not compile."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from desugar import _torch as torch_private
from desugar.user_code import Line

BRANCH = "a branch depends on the value of a tensor"
READ = "Unsupported Tensor.item() call with capture_scalar_outputs=False"  # Dynamo's words

_KEPT = 10_000  # compilations; Dynamo's default is 64


@dataclass(frozen=True, slots=True)
class Frames:
    """Dynamo's compilations and graph breaks since :func:`watch_frames` began.

    Attributes:
        graphs: The number of graphs that compute something.
        recompiles: `function: the guard that failed`, for each compilation after the first one.
        breaks: `file:line: why`, for each graph break.
        eager: `function was not compiled: why, file:line`, for each function that Dynamo failed to compile. It ran in
            eager mode, or raised under `fullgraph=True`. The functions that it calls may still be compiled.
    """

    graphs: int = 0
    recompiles: tuple[str, ...] = ()
    breaks: tuple[str, ...] = ()
    eager: tuple[str, ...] = ()


class Watch:
    """The record of :func:`watch_frames`, which may be read at any time."""

    def __init__(self) -> None:
        self._seen = {id(metric) for metric in torch_private.dynamo_utils.get_compilation_metrics()}
        self._broken = len(torch_private.dynamo_utils.graph_break_reasons)
        self._found: Frames | None = None

    def end(self) -> None:
        """Ends the record: it leaves out later compilations."""
        self._found = self.frames()

    def frames(self) -> Frames:
        """Returns the compilations and graph breaks so far."""
        if self._found is not None:
            return self._found
        metrics = torch_private.dynamo_utils.get_compilation_metrics()
        frames = [m for m in metrics if m.is_forward is not False and id(m) not in self._seen]
        reasons = torch_private.dynamo_utils.graph_break_reasons
        # A compilation that the limit ended has no name; its number is `frame/compilation`.
        names = {_frame(m): m.co_name for m in metrics if m.co_name}
        return Frames(
            graphs=sum(bool(metric.graph_op_count) for metric in frames),
            recompiles=tuple(
                f"{m.co_name}: {_guard(m.recompile_reason)}" for m in frames if m.recompile_reason is not None
            ),
            breaks=unique(
                map(_describe_break, reasons[self._broken if self._broken <= len(reasons) else 0 :])
            ),
            eager=unique(
                f"{m.co_name or names.get(_frame(m), 'a function')} was not compiled: {_why_eager(m)}"
                for m in frames
                if m.fail_reason
            ),
        )


@contextlib.contextmanager
def watch_frames() -> Iterator[Watch]:
    """Makes Dynamo keep its metrics of each compilation inside the context; yields the record."""
    torch_private.dynamo_utils.set_compilation_metrics_limit(_KEPT)
    watch = Watch()
    try:
        yield watch
    finally:
        watch.end()


def count_compilations() -> int:
    """Returns the number of Dynamo's compilations in this process, up to the number that Dynamo keeps."""
    return len(torch_private.dynamo_utils.get_compilation_metrics())


def _frame(metric: Any) -> str:
    return str(metric.compile_id).partition("/")[0]


def _guard(reason: str) -> str:
    """Returns the guard of a reason such as `0/0: n == 1  # if n > 1:  # script.py:6 in step`."""
    reason = reason.partition("  # ")[0]
    return first_line(reason).partition(": ")[2] or first_line(reason)


def _why_eager(metric: Any) -> str:
    """Returns why a function was not compiled, with the user's line that Dynamo stopped at, if it names one."""
    why, file = first_line(metric.fail_reason), metric.fail_user_frame_filename
    return f"{why}, {Line(file, metric.fail_user_frame_lineno)}" if file else why


def _describe_break(reason: Any) -> str:
    text = first_line(reason.reason)
    if text.startswith("generic_jump"):
        text = BRANCH
    if not reason.user_stack:
        return text
    frame = reason.user_stack[-1]
    return f"{Line(frame.filename, frame.lineno)}: {text}"


def first_line(text: str) -> str:
    """Returns the first line of a text, with single spaces."""
    return " ".join(text.strip().partition("\n")[0].split())


def unique(texts: Iterable[str]) -> tuple[str, ...]:
    """Returns different texts in their order."""
    return tuple(dict.fromkeys(texts))
