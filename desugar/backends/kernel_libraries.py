"""The C++ kernels of stored graphs, found by their source text.

Inductor's code compiles its kernels when it is imported. The libraries are in Inductor's cache, under names that
depend on the compiler's command line. To build this command line, Inductor queries the compiler and the processor in
separate processes, which takes most of the time of a warm start. So a stored graph has the path of each library, by a
digest of the kernel's source. A library that still exists is loaded without these queries; other kernels are compiled.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from desugar import _torch as private

log = logging.getLogger("desugar")

Libraries = dict[str, str]  # digest of the source -> path in the cache folder

ATTRIBUTE = "_desugar_kernels"  # of Inductor's graph: the `Kernels` that its code requested

_thread = threading.local()


class Kernels:
    """The kernels that one graph requested.

    Attributes:
        made: Digest of the source -> the kernel, or a future of it.
    """

    def __init__(self) -> None:
        self.made: dict[str, Any] = {}

    def libraries(self) -> Libraries:
        """Waits for the kernels; returns the path of each library, in the cache folder."""
        root, places = Path(private.cache_dir()), {}
        for digest, kernel in self.made.items():
            kernel = kernel.result() if hasattr(kernel, "result") else kernel
            path = getattr(getattr(kernel, "__self__", None), "__file__", None)
            if path is not None and Path(path).is_relative_to(root):
                places[digest] = str(Path(path).relative_to(root))
        return places


@contextlib.contextmanager
def recorded() -> Iterator[Kernels]:
    """Records the kernels that Inductor's code requests inside the context, in this thread."""
    _patch_async_compile()
    outer, _thread.kernels = getattr(_thread, "kernels", None), Kernels()
    try:
        yield _thread.kernels
    finally:
        _thread.kernels = outer


@contextlib.contextmanager
def found(libraries: Mapping[str, str]) -> Iterator[None]:
    """Loads the kernels that Inductor's code requests inside the context from libraries, where these still exist."""
    _patch_async_compile()
    outer, _thread.libraries = getattr(_thread, "libraries", None), libraries
    try:
        yield
    finally:
        _thread.libraries = outer


@functools.cache
def _patch_async_compile() -> None:
    """Patches Inductor's `AsyncCompile`; other threads, and code outside of these contexts, keep its behaviour."""
    compile_kernel = private.AsyncCompile.cpp_pybinding

    @functools.wraps(compile_kernel)
    def find_or_compile(compiler: Any, argtypes: list[str], source_code: str) -> Any:
        libraries, kernels = getattr(_thread, "libraries", None), getattr(_thread, "kernels", None)
        if libraries is None and kernels is None:
            return compile_kernel(compiler, argtypes, source_code)
        digest = hashlib.blake2b(repr((argtypes, source_code)).encode(), digest_size=16).hexdigest()
        kernel = None if libraries is None else _load(libraries.get(digest))
        kernel = compile_kernel(compiler, argtypes, source_code) if kernel is None else kernel
        if kernels is not None:
            kernels.made[digest] = kernel
        return kernel

    private.AsyncCompile.cpp_pybinding = find_or_compile


def _load(place: str | None) -> Any:
    """Returns the kernel of a library; None if there is none."""
    path = None if place is None else os.path.join(private.cache_dir(), place)
    if path is None or not os.path.exists(path):
        return None
    cache = private.CppPythonBindingsCodeCache
    try:
        return getattr(cache._load_library(path, Path(path).name.partition(".")[0]), cache.entry_function)
    except (ImportError, OSError) as error:
        log.warning("compiling a kernel again, because its library cannot be loaded: %s", error)
        with contextlib.suppress(OSError):
            os.unlink(path)  # Inductor would load it, too
        return None
