"""Finds the vector instruction set of kernels for a CPU without trying those that are not chosen.

Inductor tries each instruction set that the processor has: the C++ compiler builds a library of ATen's vectors, which a
new process loads. Then it takes the first that worked, the widest. With empty caches, the others take most of the time
of a start. Inside :func:`tried_when_asked`, a set is tried once somebody asks for it, which is rarely the second one.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import platform
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from desugar import _torch as private

_thread = threading.local()


class WorkingSets:
    """The instruction sets that work, in the order of the candidates, found as far as somebody looks.

    Args:
        candidates: Instruction sets; one whose truth value is true works.
    """

    def __init__(self, candidates: Iterable[Any]) -> None:
        self._working = filter(None, candidates)
        self._found: list[Any] = []
        self._lock = threading.RLock()

    def __iter__(self) -> Iterator[Any]:
        for place in itertools.count():
            with self._lock:
                if place == len(self._found):
                    self._found += itertools.islice(self._working, 1)
                if place == len(self._found):
                    return
            yield self._found[place]

    def __bool__(self) -> bool:
        return next(iter(self), None) is not None

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, place: int) -> Any:
        found = list(self) if place < 0 else list(itertools.islice(self, place + 1))
        return found[place]


@contextlib.contextmanager
def tried_when_asked() -> Iterator[None]:
    """Inside the context, in this thread, Inductor tries no instruction set after the one that it chooses."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        yield  # there, Inductor knows one set, or tries none
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
    find_all: Callable[[], Any] = module.valid_vec_isa_list

    @functools.cache
    def find_lazily() -> WorkingSets:
        has = set(module.x86_isa_checker())
        return WorkingSets(isa for isa in module.supported_vec_isa_list if has.issuperset(str(isa).split()))

    @functools.wraps(find_all)
    def find() -> Any:
        is_known = find_all.cache_info().currsize > 0  # type: ignore[attr-defined]
        return find_lazily() if getattr(_thread, "is_asked", False) and not is_known else find_all()

    find.cache_clear = find_all.cache_clear  # type: ignore[attr-defined]
    module.valid_vec_isa_list = find
