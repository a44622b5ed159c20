"""Builds the C++ kernels of the forward and the backward at the same time.

Inductor passes the kernels of a graph to the C++ compiler in threads of its own. As the last step of compiling the
graph, it waits for them; on a CPU this wait is most of a cold start. Here the wait is postponed. While the C++
compiler builds the forward, the expected backward is compiled too, up to its own wait. Its first call does that wait.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from desugar import _torch as private

log = logging.getLogger("desugar")

# With one of these options, Inductor times kernels while it compiles: they have to be built, and the machine idle.
_BENCHMARKING_OPTIONS = (
    "max_autotune",
    "max_autotune_gemm",
    "max_autotune_pointwise",
    "profile_bandwidth",
    "profile_bandwidth_output",
)


@dataclass(slots=True)
class PendingKernels:
    """The kernels of one graph that the C++ compiler may not have built yet.

    Attributes:
        builds: One future for each library under construction; libraries in Inductor's cache have none.
        waits: Callables that wait for the libraries and load them into the graph's module.
        process: The id of the process whose threads wait for the C++ compiler.
    """

    builds: list[Future[Any]] = field(default_factory=list)
    waits: list[Callable[[], None]] = field(default_factory=list)
    process: int = field(default_factory=os.getpid)

    def are_being_built(self) -> bool:
        """Whether the C++ compiler has not finished all of them."""
        return not all(build.done() for build in self.builds)

    def finish(self) -> bool:
        """Waits for the kernels and loads them.

        Returns:
            Whether the graph can be called. False in a forked process while its parent still builds the kernels:
            the forked process does not have the threads that wait for them.

        Raises:
            CppCompileError: The C++ compiler rejected a kernel.
            ImportError: A library cannot be loaded.
            OSError: The folder of Inductor's cache is missing.
        """
        if self.process != os.getpid() and self.are_being_built():
            return False
        while self.waits:
            self.waits[0]()
            del self.waits[0]
        return True

    def are_ready(self) -> bool:
        """Waits for the kernels and loads them; returns False if their graph has to be compiled again."""
        try:
            return self.finish()
        except (private.CppCompileError, ImportError, OSError) as error:
            # The caller compiles the graph again, and gets the error if it persists.
            log.info("compiling a graph again, because its kernels failed: %s", error)
            return False


_this_thread = threading.local()


@contextlib.contextmanager
def postpone_kernels(graph: fx.GraphModule) -> Iterator[PendingKernels]:
    """Stops Inductor from waiting for the C++ compiler in this thread; :meth:`PendingKernels.finish` waits instead.

    Kernels of other devices are built and tuned in other ways, so graphs that use one are compiled as usual. So are
    all graphs under an option that makes Inductor time kernels.
    """
    kernels = PendingKernels()
    times_kernels = any(getattr(private.inductor_config, name, False) for name in _BENCHMARKING_OPTIONS)
    if times_kernels or not _is_on_cpu(graph):
        yield kernels
        return
    _patch_async_compile()
    outer, _this_thread.kernels = getattr(_this_thread, "kernels", None), kernels
    try:
        yield kernels
    finally:
        _this_thread.kernels = outer


def _is_on_cpu(graph: fx.GraphModule) -> bool:
    values = (node.meta.get("val") for node in graph.graph.nodes)
    return all(value.device.type == "cpu" for value in values if isinstance(value, Tensor))


@functools.cache
def _patch_async_compile() -> None:
    """Patches Inductor's `AsyncCompile`; threads outside `postpone_kernels` keep its behaviour."""
    submit, wait = private.AsyncCompile.submit.__func__, private.AsyncCompile.wait

    @functools.wraps(submit)
    def submit_and_record(cls: type, task: Callable[..., Any]) -> Any:
        build = submit(cls, task)
        kernels = getattr(_this_thread, "kernels", None)
        if kernels is not None and isinstance(build, Future):
            kernels.builds.append(build)
        return build

    @functools.wraps(wait)
    def wait_later(compiler: Any, scope: dict[str, Any]) -> None:
        kernels = getattr(_this_thread, "kernels", None)
        if kernels is None:
            wait(compiler, scope)
        else:
            threads = private.inductor_config.compile_threads
            kernels.waits.append(functools.partial(wait_with_threads, compiler, scope, threads))

    def wait_with_threads(compiler: Any, scope: dict[str, Any], threads: int) -> None:
        """Waits under the `compile_threads` of the submission: without threads, Inductor does not wait at all."""
        with private.inductor_config.patch(compile_threads=threads):
            wait(compiler, scope)

    private.AsyncCompile.submit = classmethod(submit_and_record)
    private.AsyncCompile.wait = wait_later
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(after_in_child=_forget_builds)


def _forget_builds() -> None:
    """Drops Inductor's thread pool and library cache in a forked process, which does not inherit the threads."""
    private.AsyncCompile.pool.cache_clear()
    private.CppPythonBindingsCodeCache.cache.clear()
