"""Finds the vector instruction set of CPU kernels without trying the sets after it.

Inductor tries each instruction set that the processor has: the C++ compiler builds a library of ATen's vectors, which a
new process loads. Then Inductor chooses the first set that worked, the widest. With empty caches, the other sets take
most of the time of a start. Inside :func:`tried_when_asked`, Inductor tries no set after the first that works, unless a
setting names another set.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import platform
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from desugar import _torch as private

_thread = threading.local()


@contextlib.contextmanager
def tried_when_asked() -> Iterator[None]:
    """Makes Inductor try no instruction set after its choice, inside the context and in this thread."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        yield  # on these platforms, Inductor has one set, or tries none
        return
    _patch_list_of_sets()
    outer, _thread.is_asked = getattr(_thread, "is_asked", False), True
    try:
        yield
    finally:
        _thread.is_asked = outer


@functools.cache
def _patch_list_of_sets() -> None:
    """Patches Inductor's list of instruction sets; other threads, and code outside of the context, keep it."""
    module = private.cpu_vec_isa
    find_all: Callable[[], list[Any]] = module.valid_vec_isa_list

    @functools.cache
    def find_first() -> list[Any]:
        has = set(module.x86_isa_checker())
        known = (isa for isa in module.supported_vec_isa_list if has.issuperset(str(isa).split()))
        return list(itertools.islice(filter(None, known), 1))

    @functools.wraps(find_all)
    def find() -> list[Any]:
        is_known = find_all.cache_info().currsize > 0  # type: ignore[attr-defined]
        names_another = private.inductor_config.cpp.simdlen is not None or "ATEN_CPU_CAPABILITY" in os.environ
        is_first = getattr(_thread, "is_asked", False) and not is_known and not names_another
        return find_first() if is_first else find_all()

    find.cache_clear = find_all.cache_clear  # type: ignore[attr-defined]
    module.valid_vec_isa_list = find
