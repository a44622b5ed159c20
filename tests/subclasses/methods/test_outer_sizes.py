"""Outer sizes that a class computes from several sizes, under compilers that make symbols of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd import subclass_utils

from subclasses import Outer, dynamic, inner
from tests.doors import COMPILED, by_stock
from tests.subclasses.subjects import declare


def of_two(name: str, outer: Callable[..., Outer], materialize: Callable[[Any], Tensor]) -> Any:
    """A class of two inner tensors that materializes."""
    return declare(
        name=name,
        top=inner(ndim=2),
        bottom=inner(ndim=2),
        outer=staticmethod(outer),
        materialize=materialize,
        keywords={"fallback": "materialize"},
    )


# Rows of `top` above rows of `bottom`: the outer size is a sum of two sizes.
Upright = of_two(
    "Upright",
    lambda top, bottom: Outer((top.shape[0] + bottom.shape[0], top.shape[1])),
    lambda self: torch.cat([self.top, self.bottom]),
)
# A Kronecker product: both outer sizes are products of two sizes. torch.kron requires ints.
Product = of_two(
    "Product",
    lambda top, bottom: Outer((top.shape[0] * bottom.shape[0], top.shape[1] * bottom.shape[1])),
    lambda self: torch.einsum("ij,kl->ikjl", self.top, self.bottom).reshape(self.shape),
)
# The transpose of an upright value, with the strides of a transpose.
Flipped = of_two(
    "Flipped",
    lambda top, bottom: Outer((top.shape[1], top.shape[0] + bottom.shape[0]), (1, top.shape[1])),
    lambda self: torch.cat([self.top, self.bottom]).t(),
)
# Rows followed by `more` rows of zeros: the outer size depends on a size and a dynamic int.
Longer = declare(
    name="Longer",
    rows=inner(ndim=2),
    more=dynamic(),
    outer=staticmethod(lambda rows, more: Outer((rows.shape[0] + more, rows.shape[1]))),
    materialize=lambda self: torch.cat([self.rows, self.rows.new_zeros(self.more, self.rows.shape[1])]),
    keywords={"fallback": "materialize"},
)


@pytest.fixture(params=COMPILED)
def compile_by(request):
    return functools.partial(COMPILED[request.param], fullgraph=True)


def _parts(cls: type, m: int, n: int, p: int, q: int) -> list[Tensor]:
    parts = [
        torch.randn(m, n, requires_grad=True),
        torch.randn(p, q if cls is Product else n, requires_grad=True),
    ]
    return parts[:1] if cls is Longer else parts


# Second sizes make symbols; the same outer size of other parts, equal sizes, and a size of one take their own turn.
SIZES = [(2, 3, 4, 5), (3, 4, 5, 6), (6, 5, 4, 3), (4, 5, 6, 3), (3, 3, 3, 3), (7, 2, 9, 4)]


@pytest.mark.sweep(24)
@pytest.mark.parametrize("cls", [Upright, Product, Longer, Flipped])
def test_a_size_of_several_symbols_takes_one_more_program(cls, compile_by):
    """And gradients reach the inner tensors."""

    def use(x, w):
        return x @ w, x * 2.0, x.sum(1).view(x.shape[0]), x.shape[0] + x.numel()

    compiled = compile_by(use)
    counters.clear()
    for sizes in SIZES:
        parts = _parts(cls, *sizes)
        x, twin = (cls(*parts, **({"more": sizes[2]} if cls is Longer else {})) for _ in range(2))
        w = torch.randn(x.shape[1], 2)
        (*got, number), (*expected, same) = compiled(x, w), use(twin, w)
        assert number == same
        torch.testing.assert_close(got, expected)
        losses = [sum(t.square().sum() for t in results) for results in (got, expected)]
        torch.testing.assert_close(*(torch.autograd.grad(loss, parts) for loss in losses))
    # The gradient of the argument has its class. AOTAutograd of 2.15 guards on the sizes of its inner tensors.
    is_guarded = (
        cls is Flipped and compile_by.func is by_stock and hasattr(subclass_utils, "_safe_metadata_eq")
    )
    assert counters["stats"]["unique_graphs"] == 2 + is_guarded


@pytest.mark.sweep(3)
def test_other_parts_of_one_size(compile_by):
    compiled = compile_by(lambda x: x + 1.0)
    for top, bottom in ((2, 4), (3, 3), (4, 2), (5, 1), (6, 0), (4, 4)):
        x = Upright(torch.randn(top, 3), torch.randn(bottom, 3))
        torch.testing.assert_close(compiled(x), x.materialize() + 1.0)


def test_such_a_value_made_in_a_compiled_function(compile_by):
    def stack(top, bottom):
        x = Upright(top * 2, bottom)
        return x, x.shape[0], x @ top.t()

    compiled = compile_by(stack)
    for rows in (2, 3, 5, 4):
        top, bottom = torch.randn(rows, 3), torch.randn(rows + 1, 3)
        (x, size, product), (_, _, expected) = compiled(top, bottom), stack(top, bottom)
        assert type(x) is Upright and x.shape == (2 * rows + 1, 3) and size == 2 * rows + 1
        torch.testing.assert_close(product, expected)
