"""Patches of Inductor, which save time at a start; each is in force in a context and in one thread alone.

*Kernels that are built in parallel.* Inductor passes the kernels of a graph to the C++ compiler in threads of its own.
As the last step of compiling the graph, it waits for them; on a CPU this wait is most of a cold start. Here the wait is
postponed. While the C++ compiler builds the forward, the expected backward is compiled too, up to its own wait. Its
first call does that wait.

*Kernels of stored graphs.* Inductor's code compiles its kernels when it is imported. The libraries are in Inductor's
cache, under names that depend on the compiler's command line. To build this command line, Inductor queries the compiler
and the processor in separate processes, which takes most of the time of a warm start. So a stored graph has the path of
each library, by a digest of the kernel's source. A library that still exists is loaded without these queries; other
kernels are compiled.

*Vector instruction sets.* Inductor tries each instruction set that the processor has: the C++ compiler builds a library
of ATen's vectors, which a new process loads. Then Inductor chooses the first set that worked, the widest. With empty
caches, the other sets take most of the time of a start. Inside :func:`tried_when_asked`, Inductor tries no set after
the first that works, unless a setting names another set.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import logging
import os
import platform
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, fx

from desugar import _torch as torch_private

log = logging.getLogger("desugar")


class _Thread(threading.local):
    """The state of the patches in one thread.

    Attributes:
        pending: Receives the kernels whose build is not waited for.
        requested: Receives the kernels that a graph requests, by digest of the source.
        libraries: Digest of a kernel's source -> path of its library.
        tries_first: Whether vector instruction sets are tried up to the first that works.
    """

    pending: PendingKernels | None = None
    requested: dict[str, Any] | None = None
    libraries: Mapping[str, str] | None = None
    tries_first = False


_thread = _Thread()


@contextlib.contextmanager
def _in_this_thread(name: str, value: Any) -> Iterator[Any]:
    """Sets an attribute of :class:`_Thread` inside the context."""
    outer = getattr(_thread, name)
    setattr(_thread, name, value)
    try:
        yield value
    finally:
        setattr(_thread, name, outer)


# ---------------------------------------------------------------------------- kernels that are built in parallel

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
        except (torch_private.CppCompileError, ImportError, OSError) as error:
            # The caller compiles the graph again, and gets the error if it persists.
            log.info("compiling a graph again, because its kernels failed: %s", error)
            return False


def postpone_kernels(graph: fx.GraphModule) -> contextlib.AbstractContextManager[PendingKernels]:
    """Stops Inductor from waiting for the C++ compiler in this thread; :meth:`PendingKernels.finish` waits instead.

    Kernels of other devices are built and tuned in other ways, so graphs that use one are compiled as usual. So are
    all graphs under an option that makes Inductor time kernels.
    """
    values = (node.meta.get("val") for node in graph.graph.nodes)
    is_on_cpu = all(value.device.type == "cpu" for value in values if isinstance(value, Tensor))
    if not is_on_cpu or any(
        getattr(torch_private.inductor_config, name, False) for name in _BENCHMARKING_OPTIONS
    ):
        return contextlib.nullcontext(PendingKernels())
    _patch_waiting()
    return _in_this_thread("pending", PendingKernels())


@functools.cache
def _patch_waiting() -> None:
    """Patches Inductor's `AsyncCompile`; threads outside `postpone_kernels` keep its behaviour."""
    submit, wait = torch_private.AsyncCompile.submit.__func__, torch_private.AsyncCompile.wait

    @functools.wraps(submit)
    def submit_and_record(cls: type, task: Callable[..., Any]) -> Any:
        build = submit(cls, task)
        if _thread.pending is not None and isinstance(build, Future):
            _thread.pending.builds.append(build)
        return build

    @functools.wraps(wait)
    def wait_later(compiler: Any, scope: dict[str, Any]) -> None:
        if _thread.pending is None:
            wait(compiler, scope)
        else:
            threads = torch_private.inductor_config.compile_threads
            _thread.pending.waits.append(functools.partial(wait_with_threads, compiler, scope, threads))

    def wait_with_threads(compiler: Any, scope: dict[str, Any], threads: int) -> None:
        """Waits under the `compile_threads` of the submission: without threads, Inductor does not wait at all."""
        with torch_private.inductor_config.patch(compile_threads=threads):
            wait(compiler, scope)

    torch_private.AsyncCompile.submit = classmethod(submit_and_record)
    torch_private.AsyncCompile.wait = wait_later
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(after_in_child=_forget_builds)


def _forget_builds() -> None:
    """Drops Inductor's thread pool and library cache in a forked process, which does not inherit the threads."""
    torch_private.AsyncCompile.pool.cache_clear()
    torch_private.CppPythonBindingsCodeCache.cache.clear()


# ------------------------------------------------------------------------------------- kernels of stored graphs

ATTRIBUTE = "_desugar_kernels"  # of Inductor's graph: the kernels that its code requested


def libraries_of(kernels: Mapping[str, Any]) -> dict[str, str]:
    """Waits for recorded kernels; returns the path of each library in the cache folder, by digest of the source."""
    root, places = Path(torch_private.cache_dir()), {}
    for digest, kernel in kernels.items():
        kernel = kernel.result() if hasattr(kernel, "result") else kernel
        path = getattr(getattr(kernel, "__self__", None), "__file__", None)
        if path is not None and Path(path).is_relative_to(root):
            places[digest] = str(Path(path).relative_to(root))
    return places


def recorded() -> contextlib.AbstractContextManager[dict[str, Any]]:
    """Records the kernels that Inductor's code requests in this thread, by digest of the source; some are futures."""
    _patch_requests()
    return _in_this_thread("requested", {})


def load_kernels_from(libraries: Mapping[str, str]) -> contextlib.AbstractContextManager[Mapping[str, str]]:
    """Loads the kernels that Inductor's code requests inside the context from libraries, where these still exist."""
    _patch_requests()
    return _in_this_thread("libraries", libraries)


@functools.cache
def _patch_requests() -> None:
    """Patches Inductor's `AsyncCompile`; other threads, and code outside of these contexts, keep its behaviour."""
    compile_kernel = torch_private.AsyncCompile.cpp_pybinding

    @functools.wraps(compile_kernel)
    def find_or_compile(compiler: Any, argtypes: list[str], source_code: str) -> Any:
        if _thread.libraries is None and _thread.requested is None:
            return compile_kernel(compiler, argtypes, source_code)
        digest = hashlib.blake2b(repr((argtypes, source_code)).encode(), digest_size=16).hexdigest()
        kernel = _load((_thread.libraries or {}).get(digest))
        kernel = compile_kernel(compiler, argtypes, source_code) if kernel is None else kernel
        if _thread.requested is not None:
            _thread.requested[digest] = kernel
        return kernel

    torch_private.AsyncCompile.cpp_pybinding = find_or_compile


def _load(library: str | None) -> Any:
    """Returns the kernel of a library; None if there is none."""
    path = None if library is None else os.path.join(torch_private.cache_dir(), library)
    if path is None or not os.path.exists(path):
        return None
    cache = torch_private.CppPythonBindingsCodeCache
    try:
        return getattr(cache._load_library(path, Path(path).name.partition(".")[0]), cache.entry_function)
    except (ImportError, OSError) as error:
        log.warning("compiling a kernel again, because its library cannot be loaded: %s", error)
        with contextlib.suppress(OSError):
            os.unlink(path)  # Inductor would load it, too
        return None


# --------------------------------------------------------------------------------------- vector instruction sets


@contextlib.contextmanager
def tried_when_asked() -> Iterator[None]:
    """Makes Inductor try no instruction set after its choice, inside the context and in this thread."""
    if sys.platform == "linux" and platform.machine() == "x86_64":
        _patch_list_of_sets()  # on other platforms, Inductor has one set, or tries none
    with _in_this_thread("tries_first", True):
        yield


@functools.cache
def _patch_list_of_sets() -> None:
    """Patches Inductor's list of instruction sets; other threads, and code outside of the context, keep it."""
    module = torch_private.cpu_vec_isa
    find_all: Callable[[], list[Any]] = module.valid_vec_isa_list

    @functools.cache
    def find_first() -> list[Any]:
        has = set(module.x86_isa_checker())
        known = (isa for isa in module.supported_vec_isa_list if has.issuperset(str(isa).split()))
        return list(itertools.islice(filter(None, known), 1))

    @functools.wraps(find_all)
    def find() -> list[Any]:
        is_known = find_all.cache_info().currsize > 0  # type: ignore[attr-defined]
        names_another = (
            torch_private.inductor_config.cpp.simdlen is not None or "ATEN_CPU_CAPABILITY" in os.environ
        )
        is_first = _thread.tries_first and not is_known and not names_another
        return find_first() if is_first else find_all()

    find.cache_clear = find_all.cache_clear  # type: ignore[attr-defined]
    module.valid_vec_isa_list = find
