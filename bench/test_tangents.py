"""Goals for unwrapping the gradients of a backward: generated text against AOTAutograd's loop."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo  # before AOTAutograd, which has a circular import with it
from torch._functorch._aot_autograd.runtime_wrappers import AOTDispatchAutograd
from torch._functorch._aot_autograd.subclass_utils import create_subclass_metadata
from torch._subclasses import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import desugar
from bench.subjects import Pair, double
from bench.timing import time_side_by_side
from subclasses.source_text.build import build_functions
from subclasses.source_text.emitter import Emitter

COUNT = 10  # gradients of one backward
GOAL = 10  # times faster


def make_generated(cls):
    """Returns a call of the first half of a generated backward, which checks and unwraps the gradients."""
    args = [cls(torch.rand(8, 8), torch.rand(8, 8)).requires_grad_() for _ in range(COUNT)]
    variants = desugar.trace(double, *args).variants
    assert variants is not None and variants.plan is not None
    out = Emitter()
    names = [f"tangent{n}" for n in range(COUNT)]
    out.reserve(*names)
    emitter = variants.emitter(out, (True,) * COUNT)
    out.writeline(f"def unwrap({', '.join(names)}):")
    with out.indent():
        arrived = list(variants.interface.tangents)
        items = emitter.emit_unwrapping(arrived, emitter.emit_check(dict(enumerate(names)), arrived))
        out.writeline(f"return [{', '.join(items.values())}]")
    functions = build_functions(out.source, out.namespace, filename="<tangents>", owner=variants)
    tangents = [cls(torch.rand(8, 8), torch.rand(8, 8)) for _ in range(COUNT)]

    def call():
        with torch.no_grad():  # as in a backward
            return functions["unwrap"](*tangents)

    assert all(unwrapped is inner for unwrapped, inner in zip(call(), inners(tangents), strict=True))
    return call


def inners(tangents):
    return [inner for tangent in tangents for inner in (tangent.a, tangent.b)]


def make_stock():
    """Returns a call of AOTAutograd's `process_runtime_tangent` for each of the same gradients."""
    with FakeTensorMode():
        like = TwoTensor(torch.rand(8, 8), torch.rand(8, 8))
        meta, _ = create_subclass_metadata(like, 0, True, with_memory_format=True)
        meta.make_runtime_safe()
    tangents = [TwoTensor(torch.rand(8, 8), torch.rand(8, 8)) for _ in range(COUNT)]

    def call():
        with torch.no_grad():
            return [
                inner
                for tangent in tangents
                for inner in AOTDispatchAutograd.process_runtime_tangent(tangent, meta)[1]
            ]

    assert all(unwrapped is inner for unwrapped, inner in zip(call(), inners(tangents), strict=True))
    return call


@pytest.fixture(scope="module")
def timings():
    calls = {"stock": make_stock(), "TwoTensor": make_generated(TwoTensor), "declared": make_generated(Pair)}
    return time_side_by_side(calls, rounds=40)


@pytest.mark.parametrize("kind", ["TwoTensor", "declared"])
def test_goal(timings, kind):
    ratio = timings["stock"].low / timings[kind].low
    print(
        f"{COUNT} gradients: stock {timings['stock']} µs, {kind} {timings[kind]} µs, {ratio:.1f} times faster"
    )
    assert ratio >= GOAL
