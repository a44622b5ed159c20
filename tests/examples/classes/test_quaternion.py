"""Quaternions, declared and by hand: products are those of their matrices, rotations those of their axes."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from by_hand.quaternion import Quaternion as ByHand
from classes.quaternion import Quaternion
from subclasses.testing import suite
from tests.examples.classes.checks import check_gradients, check_refused, check_unchanged

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
    got, expected = way(formula)(cls(x), cls(y), r).parts, reference(x, y, r)
    weights = torch.randn_like(expected)
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
    x, y = make(cls), make(cls)
    expected = x.parts.clone()
    kept = x
    x += y
    x -= y[0]
    x[1] += y[1]
    expected += y.parts - y.parts[0]
    expected[1] += y.parts[1]
    assert x is kept
    torch.testing.assert_close(x.parts, expected)
    x[2] = y[2]
    torch.testing.assert_close(x.parts[2], y.parts[2])
    leaf = torch.randn(4, requires_grad=True)
    z = make(cls, 3)
    z += cls(leaf)
    torch.testing.assert_close(torch.autograd.grad(z.parts.sum(), leaf)[0], torch.full((4,), 3.0))


@pytest.mark.parametrize("size", [(), (1,), (0,), (0, 3), (1, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_sizes_and_dtypes(cls, size, dtype):
    x = cls(torch.randn(*size, 4)).to(dtype)
    for y in (x * x, x + x, 2 * x, 1 / x, -x, x.conjugate()):
        assert y.shape == size and y.dtype == y.parts.dtype == dtype
    assert x.abs().shape == size and x.sum().shape == () and x.sum().dtype == dtype
    torch.testing.assert_close(x.sum().parts, x.parts.reshape(-1, 4).sum(0))


def test_what_is_refused(cls):
    words = r"parts of size \[..., 4\], not \[3\]|expected shape \(... 4\), got \(3\)"
    check_refused(lambda: cls(torch.ones(3)), error=ValueError, match=words)
    words = "parts are not next to one another|the same strides mean other elements"
    check_refused(lambda: cls(torch.randn(4, 6).t()).as_strided((2,), (1,)), match=words)
    x = make(cls)
    check_unchanged(
        [x.parts],
        lambda: x + 1,
        lambda: 1 - x,
        lambda: x.add_(1),
        lambda: x * 1j,
        lambda: x.mul_(x),
        lambda: x.mul_(2),
        lambda: x @ x.mT,
        lambda: x.exp(),
        lambda: x == x[0],
        lambda: x.conj(),
        lambda: x.copy_(torch.zeros(4, 6)),
        lambda: torch.ones(4, 6).add_(x),
        lambda: torch.mul(x, x, out=x),
    )
