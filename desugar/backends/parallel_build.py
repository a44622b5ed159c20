"""The C++ compiler at work on forward and backward at once.

Inductor hands the kernels of a graph to the C++ compiler in threads of its own and, as the last step of compiling
the graph, waits for them: on a CPU most of a cold start. Here that wait is put off. While the compiler works on the
forward, the backward that is expected is compiled too, up to its own wait, which its first call then makes.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from desugar import _torch as private
from desugar.ir.stages import Traced
from desugar.ir.values import Plain, Value, Wrapper

log = logging.getLogger("desugar")

# With one of these, Inductor runs kernels while it compiles: to time them, it needs them there and the machine quiet.
_RUNS_KERNELS = (
    "max_autotune",
    "max_autotune_gemm",
    "max_autotune_pointwise",
    "profile_bandwidth",
    "profile_bandwidth_output",
)


@dataclass(slots=True)
class Kernels:
    """What one graph calls and the C++ compiler may not have built yet.

    Attributes:
        builds: One future for each library that has to be built; none for what Inductor's cache holds.
        waits: What loads the libraries into the graph's module.
        process: The process whose threads wait for the compiler.
    """

    builds: list[Future[Any]] = field(default_factory=list)
    waits: list[Callable[[], None]] = field(default_factory=list)
    process: int = field(default_factory=os.getpid)

    def are_being_built(self) -> bool:
        """Whether the compiler still works on one of them."""
        return not all(build.done() for build in self.builds)

    def finish(self) -> bool:
        """Waits until the graph can be called.

        Returns:
            Whether it can: a forked process waits in vain for what its parent had begun.

        Raises:
            CppCompileError: The compiler refused a kernel.
            ImportError: A library cannot be loaded.
            OSError: The folder of Inductor's cache is gone.
        """
        if self.process != os.getpid() and self.are_being_built():
            return False
        while self.waits:
            self.waits[0]()
            del self.waits[0]
        return True


class Ahead:
    """Compiled graphs that nobody needs yet, by what they will be asked for with."""

    def __init__(self) -> None:
        self._found: dict[Hashable, tuple[Callable[..., Any], Kernels]] = {}

    def put(self, key: Hashable, graph: Callable[..., Any], kernels: Kernels) -> None:
        """Keeps a graph until it is asked for."""
        self._found[key] = graph, kernels

    def take(self, key: Hashable) -> Callable[..., Any] | None:
        """The graph, ready to be called; None where there is none, or where its kernels have come to nothing."""
        graph, kernels = self._found.pop(key, (None, Kernels()))
        try:
            return graph if kernels.finish() else None
        except (
            private.CppCompileError,
            ImportError,
            OSError,
        ) as error:  # met again by whoever compiles it now
            log.info("a graph is compiled anew: %s", error)
            return None


def expected_tangents(traced: Traced) -> tuple[bool, ...]:
    """Which gradients will arrive, as far as results tell: those of results without dimensions, which are losses.

    Where no result is one, all of them.
    """
    losses = tuple(_dim(value, traced) == 0 for _, value in traced.tangents)
    return losses if any(losses) else (True,) * len(losses)


def _dim(value: Value, traced: Traced) -> int | None:
    match value:
        case Plain(index):
            return traced.tangent_items[index].dim()
        case Wrapper(size=size):
            return len(size)
        case _:
            return None


_here = threading.local()


@contextlib.contextmanager
def postponing(graph: fx.GraphModule) -> Iterator[Kernels]:
    """Inside, Inductor does not wait for the C++ compiler in this thread: :meth:`Kernels.finish` does.

    Kernels of other devices are built and tuned in other ways: a graph with one of them is compiled as ever.
    """
    kernels = Kernels()
    if not _is_on_cpu(graph) or any(getattr(private.inductor_config, name, False) for name in _RUNS_KERNELS):
        yield kernels
        return
    _install()
    outer, _here.kernels = getattr(_here, "kernels", None), kernels
    try:
        yield kernels
    finally:
        _here.kernels = outer


def _is_on_cpu(graph: fx.GraphModule) -> bool:
    values = (node.meta.get("val") for node in graph.graph.nodes)
    return all(value.device.type == "cpu" for value in values if isinstance(value, Tensor))


@functools.cache
def _install() -> None:
    """Has Inductor's `AsyncCompile` ask this module; to threads that put nothing off, it stays what it was."""
    submit, wait = private.AsyncCompile.submit.__func__, private.AsyncCompile.wait

    @functools.wraps(submit)
    def submit_noted(cls: type, task: Callable[..., Any]) -> Any:
        build = submit(cls, task)
        kernels = getattr(_here, "kernels", None)
        if kernels is not None and isinstance(build, Future):
            kernels.builds.append(build)
        return build

    @functools.wraps(wait)
    def wait_later(compiler: Any, scope: dict[str, Any]) -> None:
        kernels = getattr(_here, "kernels", None)
        if kernels is None:
            wait(compiler, scope)
        else:
            threads = private.inductor_config.compile_threads
            kernels.waits.append(functools.partial(wait_as_begun, compiler, scope, threads))

    def wait_as_begun(compiler: Any, scope: dict[str, Any], threads: int) -> None:
        """Without threads Inductor has nothing to wait for, so it is to see the number that it saw before."""
        with private.inductor_config.patch(compile_threads=threads):
            wait(compiler, scope)

    private.AsyncCompile.submit = classmethod(submit_noted)
    private.AsyncCompile.wait = wait_later
    if hasattr(os, "register_at_fork"):  # Windows has none
        os.register_at_fork(after_in_child=_forget_builds)


def _forget_builds() -> None:
    """A forked process has the memory of threads that wait for the compiler, and none of them."""
    private.AsyncCompile.pool.cache_clear()
    private.CppPythonBindingsCodeCache.cache.clear()
