"""AOTAutograd compiles graphs that desugar does not support; the fallback detects inner tensors that share memory."""

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import desugar
from desugar import DesugarError
from subclasses import inner
from tests.desugar.judge import warned
from tests.subclasses.subjects import assert_same, declare

Pair = declare(name="Pair", keywords={"fallback": "map"}, first=inner(), second=inner())


def write_and_read(a, b, w):
    """`sgn` has a zero gradient, which desugar does not trace with symbolic sizes."""
    a.mul_(2)
    return b + 1, w.sgn().sum()


def write_by_index(a, b, w):
    a[0] = 5
    return b + 1, w.sgn().sum()


def only_read(a, b, w):
    return a * 2, b + 1, w.sgn().sum()


def two_values(shared):
    return Pair(shared, torch.zeros(3)), Pair(shared, torch.ones(3))


def two_views(shared):
    return Pair(shared[:], torch.zeros(3)), Pair(shared[:], torch.ones(3))


def nothing(shared):
    return Pair(shared, torch.zeros(3)), Pair(shared.clone(), torch.ones(3))


@torch._dynamo.config.patch(enable_aot_compile=True)
def test_a_graph_that_writes_is_not_saved():
    backend = {"backend": "desugar", "options": {"backend": "eager"}}
    args = (
        (*[TwoTensor(torch.ones(3), torch.ones(3)) for _ in range(2)], torch.ones(3, requires_grad=True)),
        {},
    )
    torch.compile(only_read, fullgraph=True, dynamic=True, **backend).aot_compile(args)
    with pytest.raises(DesugarError, match="writes to an argument"):
        torch.compile(write_and_read, fullgraph=True, dynamic=True, **backend).aot_compile(args)


COMPILED = "AOTAutograd compiles this graph instead"
OP_BY_OP = "slow: a call whose arguments share the memory of inner tensors runs op by op"
NOT_COMPILED = "this graph runs op by op instead, since its arguments share the memory of inner tensors"


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    ("fn", "shares", "says"),
    [
        (write_and_read, [two_values, two_values], [NOT_COMPILED]),
        (write_and_read, [nothing, two_views, two_views, nothing], [COMPILED, OP_BY_OP]),
        (write_by_index, [nothing, two_views], [COMPILED, OP_BY_OP]),
        (write_and_read, [lambda shared: (Pair(shared, shared[:3]), torch.ones(3))], [NOT_COMPILED]),
        (write_and_read, [lambda shared: (Pair(torch.zeros(3), shared), shared)], [NOT_COMPILED]),
        (only_read, [two_values], [COMPILED]),
    ],
)
def test_a_write_to_shared_memory_is_seen(fn, shares, says, inside, caplog):
    options = {"backend": "desugar", "options": {"backend": "eager"}} if inside else {"backend": "eager"}
    compiled = (torch.compile if inside else desugar.compile)(fn, dynamic=True, **options)
    for share in shares:
        results = []
        for run in (fn, compiled):
            w = torch.tensor([1.0, -2.0, 3.0], requires_grad=True)
            out = run(*share(torch.ones(3)), w)
            out[-1].backward()
            results.append((*out[:-1], w.grad))
        for got, expected in zip(*results, strict=True):
            assert_same(got, expected)
    assert [message[: len(known)] for message, known in zip(warned(caplog), says, strict=True)] == says
