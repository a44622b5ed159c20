"""One function in four ways, side by side: eager, `torch.compile`, the pass behind it, and `desugar.compile`."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from desugar.api import compile as desugar_compile
from desugar.backends.choose import choose_backend

Call = Callable[[], Any]


def bench_function(
    fn: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    backend: str,
    rounds: int = 50,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, tuple[float, float] | str]:
    """Seconds of a call and their spread (half the distance between the quartiles), or why a way does not work.

    All ways take turns in each round, in an order shuffled anew, so that noise hits all alike. Compiling and the
    first calls are not timed. `tell` hears what is going on, for whoever shows progress.
    """
    choose_backend(backend)  # an unknown one is no result of the comparison
    stock = "aot_eager" if backend == "eager" else backend
    ways: dict[str, Callable[[], Any]] = {
        "eager": lambda: fn,
        f"torch.compile, {stock}": lambda: torch.compile(fn, backend=stock),
        f"torch.compile, desugar ({backend})": lambda: torch.compile(
            fn, backend="desugar", options={"backend": backend}
        ),
        f"desugar.compile, {backend}": lambda: desugar_compile(fn, backend=backend),
    }
    calls: dict[str, Call] = {}
    found: dict[str, tuple[float, float] | str] = {}
    for name, make in ways.items():
        tell(f"compiling: {name}")
        try:
            calls[name] = _warm(make(), args, kwargs)
        except Exception as error:  # noqa: BLE001 - a way that fails is a result of the comparison
            found[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    found |= _take_turns(calls, rounds, tell)
    return {name: found[name] for name in ways}


def _warm(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    for _ in range(3):
        fn(*args, **kwargs)
    return lambda: fn(*args, **kwargs)


def _take_turns(
    calls: dict[str, Call], rounds: int, tell: Callable[[str], None]
) -> dict[str, tuple[float, float] | str]:
    samples: dict[str, list[float]] = {name: [] for name in calls}
    repeats = {name: max(1, round(1e-3 / max(_seconds(call, 3), 1e-7))) for name, call in calls.items()}
    order, rng = list(calls), random.Random(0)
    for number in range(1, rounds + 1):
        tell(f"round {number} of {rounds}")
        rng.shuffle(order)
        for name in order:
            samples[name].append(_seconds(calls[name], repeats[name]))
    return {name: _median(times) for name, times in samples.items()}


def _seconds(call: Call, repeats: int) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


def _median(times: list[float]) -> tuple[float, float]:
    low, _, high = statistics.quantiles(times, n=4)
    return statistics.median(times), (high - low) / 2
