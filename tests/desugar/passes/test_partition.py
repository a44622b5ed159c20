"""The joint graph split in two, and where each input of the backward comes from."""

from __future__ import annotations

import pytest
import torch

import desugar
from desugar.flatten.fakes import hint
from desugar.ir.stages import FromForward, FromInput, FromTangent
from tests.desugar.classes import EVERY, Pair, TwoTensor, make


def split_of(fn, *args):
    program = desugar.trace(fn, *args)
    return program, program.variants.partitioned


@pytest.mark.sweep(6)
@pytest.mark.parametrize("cls", EVERY)
def test_both_halves_compute_what_the_joint_graph_does(cls):
    program, split = split_of(
        lambda x, w: ((x * w).sin(), x.sum()), make(cls, 2, 6, grad=True), torch.randn(6)
    )

    fakes = [n.meta["val"] for n in program.joint.graph.find_nodes(op="placeholder")]
    arguments = [torch.randn(f.shape) if isinstance(f, torch.Tensor) else hint(f) for f in fakes]
    primals = len(program.forward.graph.find_nodes(op="placeholder"))
    results = program.forward(*arguments[:primals])
    sources = {FromInput: arguments[:primals], FromForward: results, FromTangent: arguments[primals:]}
    gradients = program.backward(*(sources[type(s)][s.index] for s in split.backward_inputs))
    for got, want in zip([*results[: split.num_forward], *gradients], program.joint(*arguments), strict=True):
        assert (got is None) == (want is None)
        if want is not None:
            torch.testing.assert_close(got, want)


def test_what_each_gradient_depends_on():
    _, split = split_of(lambda x, y: (x * 2, y * 3, x * y), *(make(TwoTensor, 2, grad=True) for _ in "xy"))
    assert [sorted(d) for d in split.depends] == [[0, 4], [1, 5], [2, 4], [3, 5]]


def saved_under(**knobs):
    def fn(x):
        for _ in range(4):
            x = (x @ x).sin().cos()
        return x

    with torch._functorch.config.patch(**knobs):
        return desugar.trace(fn, make(Pair, 4, 4, grad=True)).saved_bytes


def test_the_partitioners_knobs_are_reachable():
    usual = saved_under()
    assert saved_under(activation_memory_budget=0.0) < usual
    assert saved_under(aggressive_recomputation=True) <= usual
    assert saved_under(ban_recompute_reductions=False) <= usual
