"""Functions of several ops on values that represent no plain tensors: gradients are by the rules of the ops inside.

The class represents matrices over the semiring of logarithms, in which a product is a sum and a sum is a logsumexp. So
PyTorch's formula for a product of matrices is another one.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import desugar
from subclasses import DispatchError, TensorSubclass, inner

aten = torch.ops.aten


class Logs(TensorSubclass):
    logs: Tensor = inner(shape="...")

    def wrap_cotangent(self, cotangent):
        return Logs(cotangent)


def raw(t):
    return t.logs if isinstance(t, Logs) else t


def product(a, b):
    return torch.logsumexp(a[..., :, :, None] + b[None], -2)


@Logs.implements(aten.mm)
def _(func, x, y):
    return product(raw(x), raw(y))


def batched(b, x):
    return torch.logsumexp(b[..., :, :, None] + x, -2)


def twice(y):
    return y + y.sin()


WAYS = {
    "eager": lambda fn: fn,
    "stock": lambda fn: torch.compile(fn, backend="aot_eager"),
    "desugar": lambda fn: desugar.compile(fn, backend="eager"),
}
CALLS = {
    "matrix": ((3, 2), lambda b, x: b @ Logs(x), batched),
    "batch": ((3, 2, 2), lambda b, x: b @ Logs(x), batched),
    "4-D": ((2, 3, 2, 2), lambda b, x: b @ Logs(x), batched),
    "linear": ((3, 2, 2), lambda b, x: F.linear(b, Logs(x)), lambda b, x: batched(b, x.t())),
    "two uses": ((3, 2, 2), lambda b, x: b @ Logs(x) + (b @ Logs(x)).sin(), lambda b, x: twice(batched(b, x))),
    "a power": ((2, 2), lambda b, x: torch.matrix_power(Logs(b), 3), lambda b, x: product(product(b, b), b)),
}  # fmt: skip


def gradients(fn, size, trained, double):
    torch.manual_seed(0)
    b, x = torch.rand(size).requires_grad_(), torch.rand(2, 2).requires_grad_(trained)
    y = fn(b, x)
    found = torch.autograd.grad(
        y.sin().sum(), (b, x) if trained else b, create_graph=double, allow_unused=True
    )
    if double:
        found = torch.autograd.grad(found[0].square().sum(), b)
    return y.detach(), found


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_the_gradient_is_that_of_the_rule(call, trained, double):
    size, fn, plain = CALLS[call]
    torch.testing.assert_close(gradients(fn, size, trained, double), gradients(plain, size, trained, double))


@pytest.mark.sweep(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("call", ["matrix", "batch", "linear"])
def test_every_way_gives_the_same(call, way):
    size, fn, plain = CALLS[call]
    compiled = WAYS[way](fn)
    for _ in range(2):
        torch.testing.assert_close(
            gradients(compiled, size, True, False), gradients(plain, size, True, False)
        )


class Matrix(Logs):
    """The product of two of its values is a value."""


class Bare(TensorSubclass):
    """Has no way to wrap a plain cotangent."""

    logs: Tensor = inner(shape="...")


def _by_values(cls):
    def field(t):
        return t.logs if isinstance(t, cls) else t

    @cls.implements(aten.mm)
    def _(func, x, y):
        out = product(field(x), field(y))
        return cls(out) if isinstance(x, cls) and isinstance(y, cls) else out


_by_values(Matrix)
_by_values(Bare)
CHAINS = {
    "b X X": (
        (3, 2),
        lambda cls, b, x: torch.linalg.multi_dot([b, cls(x), cls(x)]),
        lambda b, x: product(b, product(x, x)),
    ),
    "b X Y X": (
        (3, 2),
        lambda cls, b, x: torch.linalg.multi_dot([b, cls(x), cls(2 * x), cls(x)]),
        lambda b, x: product(b, product(x, product(2 * x, x))),
    ),
    "one value twice": (
        (3, 2),
        lambda cls, b, x: (lambda v: torch.linalg.multi_dot([b, v, v]))(cls(x)),
        lambda b, x: product(b, product(x, x)),
    ),
    "of a product": (
        (3, 2),
        lambda cls, b, x: torch.linalg.multi_dot([b, cls(x) @ cls(x), cls(x)]),
        lambda b, x: product(b, product(product(x, x), x)),
    ),
    "a value": (
        (2, 2),
        lambda cls, b, x: torch.linalg.multi_dot([cls(b), cls(x), cls(x)]).unwrap("logs"),
        lambda b, x: product(b, product(x, x)),
    ),
    "a power": (
        (2, 2),
        lambda cls, b, x: b @ torch.matrix_power(cls(x), 5),
        lambda b, x: product(b, product(product(product(x, x), product(x, x)), x)),
    ),
    "a layer": (
        (4, 3, 2),
        lambda cls, b, x: F.linear(b, cls(x) @ cls(x)),
        lambda b, x: batched(b, product(x, x).t()),
    ),
}


@pytest.mark.sweep(12)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cls", [Matrix, Bare])
@pytest.mark.parametrize("call", CHAINS)
def test_values_in_the_middle_have_the_gradient_of_the_rule(call, cls, way):
    size, fn, plain = CHAINS[call]
    compiled = WAYS[way](lambda b, x: fn(cls, b, x))
    for double in (False, True) if way == "eager" else (False,):
        torch.testing.assert_close(
            gradients(compiled, size, True, double),
            gradients(plain, size, True, double),
            atol=1e-4,
            rtol=1e-4,
        )


def test_a_graph_that_is_kept():
    b = torch.rand(3, 2, 2, requires_grad=True)
    y = b @ Logs(torch.rand(2, 2))
    first, second = (torch.autograd.grad(y.sum(), b, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    torch.autograd.grad(y.sum(), b)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y.sum(), b)


def test_an_exception_half_way_leaves_nothing():
    b, x = torch.rand(3, 2, 2, requires_grad=True), Logs(torch.rand(2, 2))
    for _ in range(2):
        with pytest.raises((DispatchError, RuntimeError)):
            torch.matmul(torch.rand(3, 2, 5), x)
        torch.testing.assert_close(
            torch.autograd.grad((b @ x).sum(), b), torch.autograd.grad(batched(b, x.logs).sum(), b)
        )


def test_a_result_that_is_changed_in_place():
    """The product of a vector is squeezed in place, behind the rule."""
    v, x = torch.rand(2, requires_grad=True), torch.rand(2, 2)
    got, expected = v @ Logs(x), batched(v[None], x)[0]
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(*(torch.autograd.grad(t.sum(), v) for t in (got, expected)))
