"""The ways to run a function, and what Dynamo compiles for each."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from desugar import _torch as private
from desugar.api import compile as desugar_compile
from desugar.compare.records import Programs
from desugar.user_code import Line

EAGER, STOCK, BACKEND, DIRECT = "eager", "torch.compile", 'backend="desugar"', "desugar.compile"
WAYS = (EAGER, STOCK, BACKEND, DIRECT)
OURS = (BACKEND, DIRECT)


def stock_backend(backend: str) -> str:
    """Returns the backend of `torch.compile` that compiles with the same compiler, or with none."""
    return "aot_eager" if backend == "eager" else backend


def compile_way(way: str, fn: Any, backend: str) -> Any:
    """Returns the function to call; nothing is compiled before it is called."""
    match way:
        case "eager":
            return fn
        case "torch.compile":
            return torch.compile(fn, backend=stock_backend(backend))
        case 'backend="desugar"':
            return torch.compile(fn, backend="desugar", options={"backend": backend})
        case _:
            return desugar_compile(fn, backend=backend)


def draw_as_eager() -> None:
    """Makes Inductor draw random numbers as eager mode does, so that results can be compared."""
    private.inductor_config.fallback_random = True


# -------------------------------------------------------------------------------------------- what is compiled


@dataclass
class Counter:
    """Collects what is compiled inside `counting`."""

    found: Programs = field(default_factory=Programs)
    _warnings: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Inside, compilations and graph breaks are counted; for a new process, where there were none before."""
        private.dynamo_utils.set_compilation_metrics_limit(10_000)
        handler = _Handler(self._warnings)
        logger = logging.getLogger("desugar")
        logger.addHandler(handler)
        try:
            yield
        finally:
            logger.removeHandler(handler)
            self.found = _programs(private.dynamo_utils.get_compilation_metrics(), self._warnings)


def count_compilations() -> int:
    """Returns how often Dynamo compiled a frame in this process, of the last so many that it keeps."""
    return len(private.dynamo_utils.get_compilation_metrics())


class _Handler(logging.Handler):
    """Collects the warnings of the pass: a graph was handed to AOTAutograd."""

    def __init__(self, found: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.found = found

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage().strip())


def _programs(metrics: list[Any], warnings: list[str]) -> Programs:
    frames = [metric for metric in metrics if metric.is_forward is not False]
    failed = [
        f"{m.co_name or 'a function'} ran in eager mode: {_first_line(m.fail_reason)}"
        for m in frames
        if m.fail_reason
    ]
    return Programs(
        graphs=sum(bool(metric.graph_op_count) for metric in frames),
        recompiles=tuple(
            f"{m.co_name}: {_guard(m.recompile_reason)}" for m in frames if m.recompile_reason is not None
        ),
        breaks=_unique(map(_describe_break, private.dynamo_utils.graph_break_reasons)),
        notes=_unique([*failed, *warnings]),
    )


def _guard(reason: str) -> str:
    """Returns the guard of a reason such as `0/0: tensor 'x' size mismatch at index 0`."""
    return _first_line(reason).partition(": ")[2] or _first_line(reason)


def _describe_break(reason: Any) -> str:
    text = _first_line(reason.reason)
    if text.startswith("generic_jump"):
        text = "a branch depends on the value of a tensor"
    if not reason.user_stack:
        return text
    frame = reason.user_stack[-1]
    return f"{Line(frame.filename, frame.lineno)}: {text}"


def _first_line(text: str) -> str:
    return " ".join(text.strip().partition("\n")[0].split())


def _unique(texts: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))
