"""Times one start, in the process that `bench.starts` makes for it, and prints a JSON object of seconds.

    python -m bench.one_start imports                                      # import torch, then each of our packages
    python -m bench.one_start "20 ops, training" desugar.compile            # modules are imported where needed
    python -m bench.one_start "20 ops, training" desugar.compile LIST.json  # first imports the modules of a list

The case is made before the clock starts. The clock runs from the call of the compiling function to the first result,
or in training to the first gradients. The process also prints the modules that it imported meanwhile; `LIST.json` is
such a list. The top of this module imports the standard library alone.
"""

from __future__ import annotations

import gc
import importlib
import json
import logging
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "desugar", "subclasses.ragged", "subclasses.int8")
STOCK, BACKEND, DIRECT = "torch.compile", 'torch.compile(backend="desugar")', "desugar.compile"
# A call: the function or module to compile, its arguments, and the tensors that get gradients.
Call = tuple[Any, tuple[Any, ...], list[Any]]


# ---------------------------------------------------------------------------------------------------------
# cases
# ---------------------------------------------------------------------------------------------------------


def _double(x: Any) -> Any:
    return x * 2


def _twenty_ops(x: Any) -> Any:
    for _ in range(5):
        x = (x * 1.1 + 0.1).sigmoid() - x
    return x


def _pairs(fn: Callable[[Any], Any], *, grad: bool) -> Call:
    import torch

    from bench.subjects import SHAPE, Pair

    x = Pair(torch.rand(SHAPE), torch.rand(SHAPE)).requires_grad_(grad)
    return fn, (x,), [x] * grad


def _int8_mlp() -> Call:
    import torch

    from bench.modules import BATCH, make_int8

    return make_int8(12, 64), (torch.randn(BATCH, 64),), []


def _language_model() -> Call:
    import torch

    from examples._language_model import LanguageModel, jagged

    model = LanguageModel(dim=64, heads=4, layers=2, longest=64)
    rows = [torch.randint(256, (n,)) for n in (12, 40, 3, 25, 64, 8)]
    return model, jagged(rows), list(model.parameters())


CASES: dict[str, Callable[[], Call]] = {
    "x * 2, inference": lambda: _pairs(_double, grad=False),
    "x * 2, training": lambda: _pairs(_double, grad=True),
    "20 ops, training": lambda: _pairs(_twenty_ops, grad=True),
    "int8 MLP of 12 layers, inference": _int8_mlp,
    "ragged language model, a training step": _language_model,
}


def _compile(way: str, fn: Any) -> Any:
    if way == DIRECT:
        return importlib.import_module("desugar").compile(fn)
    torch = importlib.import_module("torch")
    return torch.compile(fn, fullgraph=True, **{"backend": "desugar"} if way == BACKEND else {})


def _run(fn: Any, args: tuple[Any, ...], wanted: list[Any]) -> list[Any]:
    """Returns the result, and the gradients of the `wanted` tensors for a gradient of ones."""
    import torch

    with torch.set_grad_enabled(bool(wanted)):
        result = fn(*args)
    if not wanted:
        return [result]
    return [result.detach(), *torch.autograd.grad(result, wanted, torch.ones_like(result))]


# ---------------------------------------------------------------------------------------------------------
# measuring
# ---------------------------------------------------------------------------------------------------------


class Clock:
    """Wall time, and the processor time of this process and of its children, those that still run included."""

    def __init__(self) -> None:
        self.cpu, self.wall = _cpu_seconds(), time.perf_counter()

    def read(self) -> dict[str, float]:
        """Returns the seconds since the clock was made."""
        return {"wall": time.perf_counter() - self.wall, "cpu": _cpu_seconds() - self.cpu}


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used) + sum(map(_seconds_of_process, _descendants("self")))


def _descendants(process: str) -> Iterator[str]:
    """Yields the numbers of the processes that a process started and that still run; none where Linux is not."""
    for path in Path("/proc", process, "task").glob("*/children"):
        for child in _read(path).split():
            yield child
            yield from _descendants(child)


def _seconds_of_process(process: str) -> float:
    """Returns the processor time of a process and of those children for whose end it waited."""
    fields = _read(Path("/proc", process, "stat")).rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / _TICKS


_TICKS = 100  # a second, in /proc on every Linux


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the process ended meanwhile
        return ""


def measure_imports() -> dict[str, dict[str, float]]:
    """Imports the packages one after the other; each has the seconds that it takes after those before it.

    `collecting` is the part of them in the garbage collector. Python collects among all objects when their number has
    grown enough, so a collection that one import makes due may run in a later one.
    """
    seconds, collecting = {}, Collecting()
    gc.callbacks.append(collecting)
    for name in PACKAGES:
        clock, before = Clock(), collecting.seconds
        importlib.import_module(name)
        seconds[name] = clock.read() | {"collecting": collecting.seconds - before}
    gc.callbacks.remove(collecting)
    return seconds


class Collecting:
    """Sums up the processor time of the garbage collector, which calls it."""

    def __init__(self) -> None:
        self.seconds, self._start = 0.0, 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._start = time.process_time()
        else:
            self.seconds += time.process_time() - self._start


def measure_start(case: str, way: str, modules: Sequence[str] = ()) -> dict[str, Any]:
    """Starts a case in one way, after importing modules.

    Returns:
        The seconds of the start, `wall` and `cpu`. The part of them from Dynamo's graph to a function that runs it,
        `graph`. The seconds of the imports before the start, `imports`. The names of the `modules` that the start
        imported.

    Raises:
        AssertionError: the results differ from the results in eager mode.
    """
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    fn, args, wanted = CASES[case]()
    clock = Clock()
    _import_all(modules)
    imports = clock.read()["wall"]
    known = set(sys.modules)
    clock = Clock()
    compiled = _compile(way, fn)
    results = _run(compiled, args, wanted)
    seconds = clock.read() | {"graph": _seconds_of_graphs()}
    imported = [name for name in sys.modules if name not in known]
    for actual, expected in zip(results, _run(fn, args, wanted), strict=True):
        _check_equal(actual, expected)
    return seconds | {"imports": imports, "modules": imported}


def _seconds_of_graphs() -> float:
    from torch._dynamo.utils import compilation_time_metrics

    return sum(compilation_time_metrics.get("OutputGraph.call_user_compiler", ()))  # eager mode has none


def _import_all(modules: Sequence[str]) -> None:
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError:  # a module that the start made, such as a compiled kernel
            continue


def _check_equal(actual: Any, expected: Any) -> None:
    import torch

    if hasattr(actual, "unwrap") and hasattr(expected, "unwrap"):
        actual, expected = actual.unwrap(), expected.unwrap()
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if sys.argv[1] == "imports":
        measured: Any = measure_imports()
    else:
        case, way, *lists = sys.argv[1:]
        measured = measure_start(
            case, way, [name for path in lists for name in json.loads(_read(Path(path)))]
        )
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
