"""`while_loop` and the other higher-order ops inside a function; a Python loop is the judge.

Classes written by hand keep PyTorch's way: Dynamo cannot run the ops on them.
"""

from __future__ import annotations

import pytest
import torch
from torch._higher_order_ops import associative_scan, map as map_rows, scan, while_loop
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from desugar import DesugarError
from subclasses.ragged import JaggedTensor
from tests.desugar.classes import Beside, Labeled, Nested, Pair, TwoTensor, make, plain_parts
from tests.desugar.judge import by_pass

outside = torch.full((4,), 2.0)


def thrice(body):
    """The body three times, as a `while_loop` and in Python."""

    def loop(x):
        return while_loop(lambda n, x: n < 3, lambda n, x: (n + 1, body(x)), (torch.tensor(0), x))[1]

    def python(x):
        for _ in range(3):
            x = body(x)
        return x

    return loop, python


def same(got, want):
    assert type(got) is type(want)
    torch.testing.assert_close(plain_parts(got.detach()), plain_parts(want.detach()))


@pytest.mark.sweep(10)
@pytest.mark.parametrize(
    "kind", [torch.Tensor, Pair, Beside, Nested, Labeled], ids=lambda kind: kind.__name__
)
@pytest.mark.parametrize("body", [lambda x: x * 2, lambda x: x.sin() + outside], ids=["own", "closure"])
def test_loops(kind, body):
    loop, python = thrice(body)
    compiled = by_pass(loop)
    for _ in range(3):
        x = make(kind, 3, 4)
        same(compiled(x), python(x))
    assert len(compiled.programs) == 1


def test_the_condition_looks_into_a_subclass():
    compiled = by_pass(lambda x: while_loop(lambda x: x.a.sum() < 100, lambda x: (x * 2,), (x,))[0])
    for size in (1.0, 30.0, 200.0):
        want = Pair(torch.full((3,), size), torch.ones(3))
        while want.a.sum() < 100:
            want = want * 2
        same(compiled(Pair(torch.full((3,), size), torch.ones(3))), want)


def test_inner_tensors_that_are_one_at_first():
    loop, python = thrice(lambda x: Pair(x.a * 2, x.b * 3))
    shared = torch.ones(3)
    same(by_pass(loop)(Pair(shared, shared)), python(Pair(shared, shared)))


def test_a_closure_over_a_traced_tensor():
    def fn(x, way):
        y = x * 2
        return thrice(lambda z: z * y)[way](torch.ones_like(x))

    x = make(Pair, 3, 4)
    same(by_pass(lambda x: fn(x, 0))(x), fn(x, 1))


def test_ragged():
    loop, python = thrice(lambda x: x * 2)
    x = JaggedTensor.from_tensors([torch.randn(2, 3), torch.randn(4, 3)])
    torch.testing.assert_close(by_pass(lambda x: loop(x).sum(1))(x), python(x).sum(1))


@pytest.mark.slow
def test_gradients_through_plain_loops():
    loop, python = thrice(lambda x: x * 2)
    x = torch.randn(3, requires_grad=True)
    torch.testing.assert_close(*(torch.autograd.grad(fn(x).sum(), x) for fn in (by_pass(loop), python)))


@pytest.mark.slow
def test_through_inductor():
    loop, python = thrice(lambda x: x * 2)
    x = make(Pair, 3, 4)
    same(by_pass(loop, backend="inductor")(x), python(x))


REFUSED = {
    "a class written by hand": (
        lambda x: thrice(lambda x: x * 2)[0](TwoTensor(x, x + 1)),
        "while_loop: PyTorch cannot run it on a TwoTensor, a wrapper class written by hand",
    ),
    "another type": (
        lambda x: while_loop(lambda x: x.a.sum() < 9, lambda x: (x.a * 1,), (Pair(x, x + 1),)),
        "same structure, classes and metadata",
    ),
    "another size": (
        lambda x: while_loop(lambda x: x.a.sum() < 9, lambda x: (x[:1] * 1,), (Pair(x, x + 1),)),
        "same metadata",
    ),
    "map": (lambda x: map_rows(lambda row: row.sin(), Pair(x, x + 1)), "map_impl"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    """By Dynamo, as in stock, or by the class."""
    fn, match = REFUSED[name]
    with pytest.raises(RuntimeError, match=match):
        by_pass(fn)(torch.ones(3, 4))


@pytest.mark.skipif(torch.__version__ < "2.15", reason="Dynamo refuses the loop")
def test_a_class_written_by_hand_is_named():
    with pytest.raises(DesugarError, match="while_loop over a TwoTensor, a class written by hand"):
        by_pass(REFUSED["a class written by hand"][0], strict=True)(torch.ones(3, 4))


# ---- over plain tensors PyTorch's own ops are traced as they are ---------------------------------------------

q, k, v = (torch.randn(1, 2, 16, 8) for _ in range(3))
causal = create_block_mask(lambda b, h, i, j: i >= j, None, None, 16, 16, device="cpu")

# Each with the same in Python.
PLAIN = {
    "map": (lambda x: map_rows(lambda row, w: row.sin() * w, x, outside), lambda x: x.sin() * outside),
    "scan": (
        lambda x: scan(lambda carry, row: (carry + row, carry * row), torch.zeros(4), x),
        lambda x: (x.sum(0), (x.cumsum(0) - x) * x),
    ),
    "associative_scan": (
        lambda x: associative_scan(lambda a, b: a + b, x, 0, combine_mode="generic"),
        lambda x: x.cumsum(0),
    ),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", PLAIN)
def test_plain_ones(name):
    (fn, python), x = PLAIN[name], torch.randn(3, 4)
    torch.testing.assert_close(by_pass(fn)(x), python(x))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("wrapped", [False, True])
def test_flex_attention_where_masks_are_plain(wrapped):
    fn = by_pass(lambda x: flex_attention(x.a if wrapped else x, k, v, block_mask=causal))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(fn(TwoTensor(q, q.clone()) if wrapped else q), want)
