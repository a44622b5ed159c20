"""Finding the tensors in nested arguments: generated text beside a walk, as optree and PyTorch's pytrees do it.

A walk flattens the arguments and compares their structure with the one that was traced. The text generated for a
signature names each place instead: `a3 = args[0]['blocks'][1][0]`. Both end with the same leaves, and both notice
arguments of another structure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch.utils import _cxx_pytree as cxx, _pytree as python

from desugar.arguments import Unpacking
from desugar.signature import MISS
from subclasses.build import build_functions
from subclasses.emit import Emitter


def make_arguments() -> dict[str, tuple[Any, ...]]:
    """Arguments of several shapes, twenty tensors each."""
    x = [torch.rand(2) for _ in range(20)]
    pairs = [tuple(x[n : n + 2]) for n in range(0, 20, 2)]
    blocks = {f"block{n}": {"weight": a, "bias": b} for n, (a, b) in enumerate(pairs)}
    deep: Any = x[:2]
    for pair in pairs[1:]:
        deep = {"here": list(pair), "below": deep}
    return {
        "20 in a row": tuple(x),
        "a list of 10 pairs": (pairs,),
        "a dict of 10 dicts": (blocks,),
        "10 levels deep": (deep,),
    }


def generate(args: tuple[Any, ...]) -> Callable[..., Any]:
    """The unpacking that a wrapper begins with; returns the leaves."""
    unpacking, leaves = Unpacking.of(args, {})
    out = Emitter()
    out.reserve("args", "kwargs")
    out.bind(MISS, "MISS")

    def require(condition: str) -> None:
        out.writeline(f"if not ({condition}):")
        with out.indent():
            out.writeline("return MISS")

    out.writeline("def unpack(args, kwargs):")
    with out.indent():
        names = unpacking.emit(out, require)
        out.writeline(f"return [{', '.join(names)}]")
    return build_functions(out.source, out.namespace, filename="<unpack>", owner=leaves[0])["unpack"]


def make_calls() -> dict[tuple[str, str], Callable[[], Any]]:
    """What is timed, by (shape of the arguments, who finds the tensors)."""
    calls: dict[tuple[str, str], Callable[[], Any]] = {}
    for shape, args in make_arguments().items():
        unpack = generate(args)
        walks = {
            "optree": optree.tree_flatten,
            "_cxx_pytree": cxx.tree_flatten,
            "_pytree": python.tree_flatten,
        }
        calls[shape, "generated"] = _generated(unpack, args)
        for name, flatten in walks.items():
            calls[shape, name] = _walk(flatten, args)
        # optree sorts the keys of a dict, PyTorch does not: the same leaves, in another order.
        found = {tuple(sorted(map(id, call()))) for (of, _), call in calls.items() if of == shape}
        if len(found) != 1 or unpack((*args, args[0]), {}) is not MISS:
            raise AssertionError(f"the walks and the text do not agree on {shape}")
    return calls


def _generated(unpack: Callable, args: tuple[Any, ...]) -> Callable[[], Any]:
    return lambda: unpack(args, {})


def _walk(flatten: Callable, args: tuple[Any, ...]) -> Callable[[], Any]:
    """A flattening of the whole call, and the comparison that a cache needs."""
    known = flatten((args, {}))[1]

    def call() -> Any:
        leaves, spec = flatten((args, {}))
        if spec != known:
            raise AssertionError("the structure changed")
        return leaves

    return call
