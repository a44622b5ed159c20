"""Derivatives of products, whose formulas ask a rule for the product of a plain gradient and a value."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import desugar
from subclasses import TensorSubclass, inner

aten = torch.ops.aten


class Sum(TensorSubclass, fallback="materialize", kind="structure"):
    """A number in two parts. Its product with a plain tensor is natural, and is no cotangent of it."""

    one: Tensor = inner()
    other: Tensor = inner()

    def materialize(self):
        return self.one + self.other


@Sum.implements(aten.mul)
def _(func, x, y):
    if not isinstance(x, Sum):
        x, y = y, x
    if isinstance(y, Sum):
        return type(x)(x.one * y.one + x.one * y.other + x.other * y.one, x.other * y.other)
    return type(x)(x.one * y, x.other * y)


@Sum.implements(aten.sinh)
def _(func, x):
    return x  # its derivative is one


class Whole(Sum, kind="representation"):
    """A sum that is one tensor, whose derivative is PyTorch's formula."""


def double(values):
    return torch.tensor(values, dtype=torch.float64)


WAYS = {
    "eager": lambda f: f,
    "stock": lambda f: torch.compile(f, backend="aot_eager", fullgraph=True),
    "desugar.compile": lambda f: desugar.compile(f, backend="eager", fullgraph=True),
    "backend": lambda f: torch.compile(f, backend="desugar", options={"backend": "eager"}, fullgraph=True),
}

# What a function does with a value, another value and a plain tensor.
PRODUCTS = {
    "of two": lambda x, y, q: x * y,
    "of three": lambda x, y, q: x * y * x,
    "with a plain tensor": lambda x, y, q: x * q,
    "with a plain tensor that broadcasts": lambda x, y, q: x * q[:1],
    "with itself": lambda x, y, q: x * x,
    "with a power": lambda x, y, q: x * y**2,
    "and a use as a whole": lambda x, y, q: (x * y).sin() * x,
    "in place": lambda x, y, q: (x * 1.0).mul_(y),
    "in place, of a copy": lambda x, y, q: x.clone().mul_(y).mul_(q),
}

READ = {
    "whole": (lambda z: z.sum(), lambda t: t.sum()),
    "materialized": (lambda z: (z.materialize() * 3).sum(), lambda t: (t * 3).sum()),
    "inner": (lambda z: (z.unwrap("one") + z.unwrap("other")).sum(), lambda t: t.sum()),
    "both": (
        lambda z: z.sin().sum() + z.unwrap("one").sum() + z.unwrap("other").sum(),
        lambda t: t.sin().sum() + t.sum(),
    ),
}


def gradients_of(fn, read, way, *, create_graph=False, cls=Sum):
    """Returns the gradients by the parts of two values and by a plain tensor, and those of plain tensors."""
    of_value, of_plain = READ[read]

    def of_values(a, b, c, d, q):
        return of_value(fn(cls(a, b), cls(c, d), q))

    def of_tensors(a, b, c, d, q):
        return of_plain(fn(a + b, c + d, q))

    found = []
    for values in (True, False):
        parts = [double(v).requires_grad_() for v in ([1, 2, 3], [0.5, -1, 2], [3, 1, -2], [2, 2, 1])]
        q = double([2, -1, 3]).requires_grad_()
        call = WAYS[way](of_values) if values else of_tensors
        grads = torch.autograd.grad(
            call(*parts, q), [*parts, q], allow_unused=True, create_graph=create_graph
        )
        if create_graph:
            total = sum(g.square().sum() for g in grads if g is not None)
            grads = (*grads, *torch.autograd.grad(total, [*parts, q], allow_unused=True))
        found.append([torch.zeros(3) if g is None else g for g in grads])
    return found


@pytest.mark.sweep(60)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("cls", "read"), [*((Sum, read) for read in READ), (Whole, "whole"), (Whole, "materialized")]
)
@pytest.mark.parametrize("product", PRODUCTS)
def test_gradients_are_those_of_plain_tensors(product, cls, read, way):
    torch.compiler.reset()
    for got, expected in zip(*gradients_of(PRODUCTS[product], read, way, cls=cls), strict=True):
        assert type(got) is Tensor
        torch.testing.assert_close(got, expected, check_dtype=False)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("way", ["eager", "desugar.compile"])
@pytest.mark.parametrize("product", ["of two", "of three", "with a plain tensor", "with a power"])
def test_second_derivatives(product, way):
    torch.compiler.reset()
    for got, expected in zip(*gradients_of(PRODUCTS[product], "whole", way, create_graph=True), strict=True):
        torch.testing.assert_close(got, expected, check_dtype=False)


def test_a_value_times_itself_in_place_is_refused_as_for_plain_tensors():
    for start in (double([1, 2]), Whole(double([1, 2]), double([3, 4]))):
        z = start.requires_grad_() * 1.0
        z.mul_(z)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("create_graph", [False, True])
def test_a_checkpointed_product_is_computed_again_as_a_value(use_reentrant, create_graph):
    if use_reentrant and create_graph:
        pytest.skip("PyTorch refuses torch.autograd.grad through a reentrant checkpoint")
    seen = []

    def product(a, b, q):
        z = Sum(a, b) * q
        seen.append(type(z))
        found = (z * z).sum()
        return found if create_graph else found + z.unwrap("one").sum()

    a, b, q = (double(v).requires_grad_() for v in ([1, 2], [3, -1], [2, 5]))
    got = checkpoint(product, a, b, q, use_reentrant=use_reentrant)
    if use_reentrant:
        got.backward()
    else:
        grads = torch.autograd.grad(got, (a, b, q), create_graph=create_graph)
        for leaf, grad in zip((a, b, q), grads, strict=True):
            leaf.grad = grad.detach()
    assert seen == [Sum, Sum]
    x = a + b
    expected = (x * q).square().sum() + (0 if create_graph else (a * q).sum())
    expected = torch.autograd.grad(expected, (a, b, q))
    torch.testing.assert_close((a.grad, b.grad, q.grad), expected)


def test_python_code_in_a_backward_computes_with_values():
    seen = []

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, x):
            ctx.x = x
            return q * x.materialize()

        @staticmethod
        def backward(ctx, g):
            z = ctx.x * g
            seen.append(type(z))
            return z.materialize(), None

    q = torch.ones(2, requires_grad=True)
    Scale.apply(q, Sum(torch.ones(2), torch.ones(2))).sum().backward()
    assert seen == [Sum] and q.grad.tolist() == [2, 2]


def test_the_gradient_of_a_plain_operand_is_plain_and_an_optimizer_takes_it():
    q = torch.nn.Parameter(torch.ones(2))
    (Sum(torch.ones(2), torch.ones(2)) * q).sum().backward()
    assert type(q.grad) is Tensor and q.grad.tolist() == [2, 2]
    torch.optim.SGD([q], lr=0.5).step()
    assert q.tolist() == [0, 0]


def test_the_gradient_of_a_value_that_is_a_leaf():
    x, y = (Whole(torch.full((2,), v), torch.ones(2)).requires_grad_() for v in (1.0, 3.0))
    (x * y).sum().backward()
    assert x.grad.tolist() == [4, 4] and y.grad.tolist() == [2, 2]


# ---- a rule that returns its operand -------------------------------------------------------------------------


@pytest.mark.sweep(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_leaf", [True, False])
def test_a_rule_that_returns_its_operand_has_the_derivative_of_that(way, is_leaf):
    """PyTorch's formula is cosh; it would also take the place of what made the operand."""
    torch.compiler.reset()
    one, other = (torch.full((2,), 3.0, requires_grad=True) for _ in range(2))

    def fn(one, other):
        x = Sum(one, other)
        z = (x if is_leaf else x * 5.0).sinh()
        return z.unwrap("one").sum() + x.unwrap("other").sum()

    WAYS[way](fn)(one, other).backward()
    assert one.grad.tolist() == [1.0 if is_leaf else 5.0] * 2 and other.grad.tolist() == [1, 1]


def test_the_operand_stays_what_it_is():
    x = Sum(torch.ones(2), torch.ones(2)).requires_grad_()
    z = x.sinh()
    assert z is not x and z.one.data_ptr() == x.one.data_ptr() and x.is_leaf and z.grad_fn is not None
    q = torch.ones(2, requires_grad=True)
    Returns = type("Returns", (Sum,), {})
    Returns.implements(aten.atan2)(lambda func, x, y: y)
    found = torch.atan2(Returns(torch.ones(2), torch.ones(2)), q)
    assert found is not q and found.data_ptr() == q.data_ptr() and q.is_leaf
