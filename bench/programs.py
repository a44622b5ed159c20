"""Measures the search for the program of a call: programs are tried in turn, the most recently used first.

*One of them*: each call has the signature of the call before, so the first program matches. *In turn*: each call has
the least recently used signature, so every other program is tried first; this is the worst case. Signatures differ in
a size, which guards check last. The backend is "eager".
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

import desugar
from bench.subjects import Pair, copy_function, double

WAYS: dict[str, Callable[[Callable], Callable]] = {
    "torch.compile": lambda fn: torch.compile(fn, backend="aot_eager", fullgraph=True, dynamic=False),
    "desugar.compile": lambda fn: desugar.compile(fn, backend="eager", dynamic=False),
}
COUNTS = (1, 5, 20)
PROGRAMS = (1, 8)
ORDERS: dict[str, Callable[[list[Any]], Iterator[Any]]] = {
    "one of them": lambda signatures: itertools.repeat(signatures[0]),
    "in turn": itertools.cycle,
}


def make_calls(count: int) -> dict[tuple[str, str], Callable[[], Any]]:
    """Returns compiled calls by (number of programs and order, way)."""
    calls: dict[tuple[str, str], Callable[[], Any]] = {}
    for programs in PROGRAMS:
        signatures = [
            [Pair(torch.rand(8, size), torch.rand(8, size)) for _ in range(count)]
            for size in range(2, 2 + programs)
        ]
        for (order, choose), (way, compile_) in itertools.product(ORDERS.items(), WAYS.items()):
            if programs == 1 and order != "one of them":
                continue
            title = "one program" if programs == 1 else f"{programs} programs, {order}"
            calls[title, way] = make_call(compile_(copy_function(double)), signatures, choose(signatures))
    return calls


def make_call(
    compiled: Callable[..., Any], signatures: list[list[Any]], chosen: Iterator[list[Any]]
) -> Callable[[], Any]:
    """Calls a function once with each signature; returns a call with the next chosen arguments."""
    with torch.no_grad():
        for args in signatures:
            compiled(*args)
    return lambda: compiled(*next(chosen))
