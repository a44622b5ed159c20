"""Functions of several ops on values that represent no plain tensors: gradients are by the rules of the ops inside.

The class represents matrices over the semiring of logarithms, in which a product is a sum and a sum is a logsumexp. So
PyTorch's formula for a product of matrices is another one.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from subclasses import DispatchError, inner
from tests.subclasses.autograd.judge import agree, numbers
from tests.subclasses.subjects import declare

aten = torch.ops.aten


def product(a, b):
    return torch.logsumexp(a[..., :, :, None] + b[None], -2)


def batched(b, x):
    return torch.logsumexp(b[..., :, :, None] + x, -2)


def logs_class(*, values=False, **body):
    """A class with a rule for products.

    Args:
        values: Whether the product of two of its values is a value.
        body: More of the class.
    """

    def multiply(func, x, y):
        out = product(*(t.logs if isinstance(t, Logs) else t for t in (x, y)))
        return Logs(out) if values and isinstance(x, Logs) and isinstance(y, Logs) else out

    Logs = declare(logs=inner(shape="..."), rules={aten.mm: multiply}, **body)
    return Logs


def converted(self, cotangent):
    return type(self)(cotangent)


Logs = logs_class(wrap_cotangent=converted)
Matrix = logs_class(wrap_cotangent=converted, values=True)
Bare = logs_class(values=True)  # has no way to wrap a plain cotangent

DEEP = ["eager", "stock", "desugar"]
# The sizes, a function of a class and two tensors, and the same without the class.
CALLS = {
    "matrix": ((3, 2), lambda cls, b, x: b @ cls(x), batched),
    "batch": ((3, 2, 2), lambda cls, b, x: b @ cls(x), batched),
    "4-D": ((2, 3, 2, 2), lambda cls, b, x: b @ cls(x), batched),
    "linear": ((3, 2, 2), lambda cls, b, x: F.linear(b, cls(x)), lambda b, x: batched(b, x.t())),
    "two uses": (
        (3, 2, 2),
        lambda cls, b, x: b @ cls(x) + (b @ cls(x)).sin(),
        lambda b, x: batched(b, x) + batched(b, x).sin(),
    ),
    "a power": (
        (2, 2),
        lambda cls, b, x: torch.matrix_power(cls(b), 3) + 0 * x,
        lambda b, x: product(product(b, b), b) + 0 * x,
    ),
    "a vector": (2, lambda cls, b, x: b @ cls(x), lambda b, x: batched(b[None], x)[0]),  # squeezed in place
}


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_the_gradient_is_that_of_the_rule(call, trained):
    size, fn, plain = CALLS[call]
    if trained:
        agree(lambda b, x: fn(Logs, b, x), plain, numbers(size, (2, 2)), twice=True)
    else:
        (x,) = numbers((2, 2))
        agree(lambda b: fn(Logs, b, x), lambda b: plain(b, x), numbers(size), twice=True)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("door", DEEP)
@pytest.mark.parametrize("call", ["matrix", "batch", "linear"])
def test_every_way_gives_the_same(call, door):
    size, fn, plain = CALLS[call]
    agree(lambda b, x: fn(Logs, b, x), plain, numbers(size, (2, 2)), door=door)


def of_one_value_twice(cls, b, x):
    v = cls(x)
    return torch.linalg.multi_dot([b, v, v])


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
    "one value twice": ((3, 2), of_one_value_twice, lambda b, x: product(b, product(x, x))),
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
@pytest.mark.parametrize("door", DEEP)
@pytest.mark.parametrize("cls", [Matrix, Bare])
@pytest.mark.parametrize("call", CHAINS)
def test_values_in_the_middle_have_the_gradient_of_the_rule(call, cls, door):
    size, fn, plain = CHAINS[call]
    agree(lambda b, x: fn(cls, b, x), plain, numbers(size, (2, 2)), door=door, twice=door == "eager")


def test_a_graph_that_is_kept():
    b = torch.rand(3, 2, 2, requires_grad=True)
    y = (b @ Logs(torch.rand(2, 2))).sum()
    first, second = (torch.autograd.grad(y, b, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    torch.autograd.grad(y, b)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, b)


def test_an_exception_half_way_leaves_nothing():
    (x,) = numbers((2, 2))
    value = Logs(x)
    for _ in range(2):
        with pytest.raises((DispatchError, RuntimeError)):
            torch.matmul(torch.rand(3, 2, 5), value)
        agree(lambda b: b @ value, lambda b: batched(b, x), numbers((3, 2, 2)))
