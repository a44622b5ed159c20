"""Quaternions, declared and by hand: products are those of their matrices, rotations those of their axes."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from by_hand.quaternion import Quaternion as ByHand
from classes.quaternion import Quaternion
from subclasses.testing import suite
from tests.examples.classes.checks import check_gradients, refused

aten = torch.ops.aten


def make(cls, *size, dtype=None):
    return cls(torch.randn(*(size or (4, 6)), 4, dtype=dtype))


OPS = {
    **{op: lambda x: (x,) for op in (torch.abs, torch.neg, torch.reciprocal, aten.sum)},
    **{op: lambda x: (x, x[:1]) for op in (torch.mul, torch.div, aten.add, aten.sub)},
    aten.select: lambda x: (x, -1, 2),
    aten.slice: lambda x: (x, 0, 1, 3),
    aten.unsqueeze: lambda x: (x, -1),
    aten.squeeze: lambda x: (x[:1], 0),
    aten.view: lambda x: (x, [-1]),
    aten.expand: lambda x: (x[:1], [4, 6]),
}


def suite_of(cls, **options):
    return suite(partial(make, cls), ops=OPS, sizes=[partial(make, cls, n, 6) for n in (5, 7)], **options)


TestQuaternion = suite_of(Quaternion)
TestByHand = suite_of(ByHand, construct=ByHand)


@pytest.fixture(params=[Quaternion, ByHand], ids=["declared", "by hand"])
def cls(request):
    return request.param


def matrix(parts):
    """The real matrix [..., 4, 4] of the multiplication by a quaternion from the left."""
    a, b, c, d = parts.unbind(-1)
    rows = [(a, -b, -c, -d), (b, a, -d, c), (c, d, a, -b), (d, -c, b, a)]
    return torch.stack([torch.stack(row, -1) for row in rows], -2)


def times(x, y):
    return (matrix(x) @ y.unsqueeze(-1)).squeeze(-1)


def inverse(x):
    return torch.linalg.solve(matrix(x), torch.tensor([1.0, 0, 0, 0], dtype=x.dtype).expand_as(x))


def formula(x, y, r):
    z = x * y - 2 / y * x + -(r * x.conjugate()) / y.abs()
    return (z[1:] + z[0]).sum(0, keepdim=True)[..., ::2]


def reference(x, y, r):
    sign = torch.tensor([1.0, -1, -1, -1], dtype=x.dtype)
    z = times(x, y) - 2 * times(inverse(y), x) - r[..., None] * x * sign / y.norm(dim=-1, keepdim=True)
    return (z[1:] + z[0]).sum(0, keepdim=True)[:, ::2]


@pytest.mark.sweep(3)
def test_values_and_gradients(cls, way):
    x, y = (torch.randn(4, 6, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    r = torch.randn(6, dtype=torch.float64, requires_grad=True)
    expected = reference(x, y, r)
    weights = torch.randn_like(expected)
    got = way(formula)(cls(x), cls(y), r).parts
    check_gradients(got, expected, (x, y, r), lambda value: (value * weights).sum())


@pytest.mark.sweep(6)
def test_a_rotation_turns_vectors_about_its_axis(cls, way):
    axis = torch.nn.functional.normalize(torch.randn(5, 3, dtype=torch.float64), dim=-1)
    angle, v = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((5,), (5, 3)))
    q = cls.about(axis, angle)
    turned = way(lambda q, v: (3 * q).rotate(v))(q, v)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    along = axis * (axis * v).sum(-1, keepdim=True)  # Rodrigues' formula
    expected = (v - along) * cos + torch.linalg.cross(axis, v) * sin + along
    check_gradients(turned, expected, (angle, v), lambda t: t.prod(1).sum())


def test_a_rotation_is_a_product_with_the_conjugate(cls):
    q, v = make(cls, 5), torch.randn(5, 3)
    pure = cls(torch.cat([torch.zeros(5, 1), v], -1))
    torch.testing.assert_close((q * pure / q).parts[:, 1:], q.rotate(v))


def test_a_quarter_turn(cls):
    turn = cls.about(torch.tensor([0.0, 0, 1]), torch.tensor(math.pi / 2))
    torch.testing.assert_close(turn.rotate(torch.tensor([1.0, 0, 5])), torch.tensor([0.0, 1, 5]))
    assert turn.rotate(torch.randn(2, 7, 3)).shape == (2, 7, 3)


def test_in_place_and_views(cls):
    x, y, leaf = make(cls), make(cls), torch.randn(4, requires_grad=True)
    kept, expected = x, x.parts + y.parts - y.parts[0]
    x += y
    x -= y[0]
    x[1] += y[1]
    x[2] = y[2]
    expected[1] += y.parts[1]
    expected[2] = y.parts[2]
    assert x is kept
    torch.testing.assert_close(x.parts, expected)
    x += cls(leaf)
    torch.testing.assert_close(*torch.autograd.grad(x.parts.sum(), leaf), torch.full((4,), 24.0))


@pytest.mark.parametrize("size", [(), (1,), (0,), (0, 3), (1, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_sizes_and_dtypes(cls, size, dtype):
    x = cls(torch.randn(*size, 4)).to(dtype)
    for y in (x * x, x + x, 2 * x, 1 / x, -x, x.conjugate()):
        assert y.shape == size and y.dtype == y.parts.dtype == dtype
    assert x.abs().shape == size and x.sum().shape == () and x.sum().dtype == dtype
    torch.testing.assert_close(x.sum().parts, x.parts.reshape(-1, 4).sum(0))


PLAIN = torch.ones(4, 6)
test_what_is_refused = refused(
    [partial(make, Quaternion), partial(make, ByHand)],
    {
        "other parts": (
            ValueError,
            r"parts of size \[..., 4\], not \[3\]|expected shape \(... 4\), got \(3\)",
            [lambda x: type(x)(torch.ones(3))],
        ),
        "strides": (
            NotImplementedError,
            "parts are not next to one another|the same strides mean other elements",
            [lambda x: type(x)(torch.randn(4, 6).t()).as_strided((2,), (1,))],
        ),
        "numbers, writes, and ops without a rule": (
            NotImplementedError,
            None,
            [
                lambda x: x + 1,
                lambda x: 1 - x,
                lambda x: x.add_(1),
                lambda x: x * 1j,
                lambda x: x.mul_(x),
                lambda x: x.mul_(2),
                lambda x: x @ x.mT,
                lambda x: x.exp(),
                lambda x: x == x[0],
                lambda x: x.conj(),
                lambda x: x.copy_(PLAIN),
                lambda x: PLAIN.add_(x),
                lambda x: torch.mul(x, x, out=x),
            ],
        ),
    },
)
