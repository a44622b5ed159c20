"""Five classes as a new author writes them, each judged by plain functions of its inner tensors, run in four ways."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subclasses import Outer, TensorSubclass, inner
from tests.subclasses.autograd.judge import agreeing

aten = torch.ops.aten


class Polynomial(TensorSubclass):
    """Polynomials by their coefficients, the constant first."""

    coefficients: Tensor = inner(differentiable=True, shape="... n")

    def at(self, t):
        powers = t ** torch.arange(self.coefficients.shape[-1])
        return (self.coefficients * powers).sum(-1)


def convolve(p, q):
    n, m = p.shape[-1], q.shape[-1]
    pad = torch.nn.functional.pad
    return sum((pad(p[..., i : i + 1] * q, (i, n - 1 - i)) for i in range(n)), torch.zeros(n + m - 1))


@Polynomial.implements(aten.mul.Tensor)
def _(func, x, y):
    if not isinstance(y, Polynomial):
        return Polynomial(x.coefficients * (y.unsqueeze(-1) if isinstance(y, Tensor) else y))
    return Polynomial(convolve(x.coefficients, y.coefficients))


@Polynomial.implements(aten.add.Tensor)
def _(func, x, y):
    return Polynomial(x.coefficients + y.coefficients)


class Gaussian(TensorSubclass):
    """Independent normal variables, by mean and the logarithm of the variance."""

    mean: Tensor = inner(differentiable=True, shape="...")
    logvar: Tensor = inner(differentiable=True, shape="...")


@Gaussian.implements(aten.add.Tensor)
def _(func, x, y):
    if not isinstance(y, Gaussian):
        return Gaussian(x.mean + y, x.logvar.clone())
    return Gaussian(x.mean + y.mean, torch.logaddexp(x.logvar, y.logvar))


@Gaussian.implements(aten.mul.Tensor)
def _(func, x, y):
    y = torch.as_tensor(y, dtype=x.dtype)
    return Gaussian(x.mean * y, x.logvar + 2 * y.abs().log())


class Pose(TensorSubclass):
    """Motions of the plane: a rotation and a translation; a product is one after the other."""

    turn: Tensor = inner(differentiable=True, shape="... 2 2")
    shift: Tensor = inner(differentiable=True, shape="... 2")

    def move(self, points):
        return torch.einsum("...ij,...j->...i", self.turn, points) + self.shift


@Pose.implements(aten.mul.Tensor)
def _(func, x, y):
    return Pose(x.turn @ y.turn, x.move(y.shift))


class Packed(TensorSubclass, fallback="materialize"):
    """Symmetric 2 x 2 matrices, of which one half is stored."""

    triangle: Tensor = inner(shape="3")

    @staticmethod
    def outer(triangle):
        return Outer((2, 2))

    def materialize(self):
        return self.triangle[torch.tensor([[0, 1], [1, 2]])]


@Packed.implements(aten.add.Tensor)
def _(func, x, y):
    if isinstance(x, Packed) and isinstance(y, Packed):
        return Packed(x.triangle + y.triangle)
    return func(*(t.materialize() if isinstance(t, Packed) else t for t in (x, y)))


@Packed.implements(aten.mul.Tensor)
def _(func, x, y):
    if isinstance(x, Packed) and not isinstance(y, Tensor):
        return Packed(x.triangle * y)
    return func(*(t.materialize() if isinstance(t, Packed) else t for t in (x, y)))


class Total(TensorSubclass):
    """Sums of exponentials, by the largest exponent and the sum over its exponential."""

    largest: Tensor = inner(differentiable=True)
    rest: Tensor = inner(differentiable=True)


@Total.implements(aten.add.Tensor)
def _(func, x, y):
    largest = torch.maximum(x.largest, y.largest)
    parts = (t.rest * (t.largest - largest).exp() for t in (x, y))
    return Total(largest, sum(parts))


@Total.implements(aten.log.default)
def _(func, x):
    return x.largest + func(x.rest)


def whole(half):
    return half[torch.tensor([[0, 1], [1, 2]])]


def write_gaussian(x, y):
    x = x * 2.0
    x[0].add_(y[1])
    x[1:] = y[:1]
    return x


# The sizes of the inner tensors of two values, a function of the values and one of their inner tensors.
CASES: dict[str, tuple[Any, Any, Any]] = {
    "a product of polynomials, at a point": (
        [(2, 3), (2, 3)],
        lambda p, q: ((Polynomial(p) * Polynomial(q))[1] * 3.0).at(0.5),
        lambda p, q: (convolve(p, q)[1] * 3.0 * 0.5 ** torch.arange(5)).sum(-1),
    ),
    "polynomials times numbers, joined": (
        [(2, 3), (2, 3), (2,)],
        lambda p, q, t: torch.cat([Polynomial(p) * t, Polynomial(q)])[1:].coefficients,
        lambda p, q, t: torch.cat([p * t.unsqueeze(-1), q])[1:],
    ),
    "a sum of normal variables": (
        [(2, 3)] * 4,
        lambda a, b, c, d: (Gaussian(a, b) + Gaussian(c, d) * 3.0 + 1.0).unwrap(),
        lambda a, b, c, d: (a + 3 * c + 1, torch.logaddexp(b, d + 2 * torch.tensor(3.0).log())),
    ),
    "normal variables, written": (
        [(2, 3)] * 4,
        lambda a, b, c, d: write_gaussian(Gaussian(a, b), Gaussian(c, d)).unwrap(),
        lambda a, b, c, d: (
            torch.stack([2 * a[0] + c[1], c[0]]),
            torch.stack([torch.logaddexp(b[0] + 2 * torch.tensor(2.0).log(), d[1]), d[0]]),
        ),
    ),
    "poses after one another": (
        [(3, 2, 2), (3, 2), (3, 2, 2), (3, 2), (2,)],
        lambda a, b, c, d, x: (Pose(a, b) * Pose(c, d))[1:].flip(0).move(x),
        lambda a, b, c, d, x: ((a @ ((c @ x) + d).unsqueeze(-1)).squeeze(-1) + b)[1:].flip(0),
    ),
    "poses, stacked and chosen": (
        [(3, 2, 2), (3, 2), (3, 2, 2), (3, 2)],
        lambda a, b, c, d: tuple(t.sin() for t in torch.stack([Pose(a, b), Pose(c, d)], 1)[:, 0].unwrap()),
        lambda a, b, c, d: (a.sin(), b.sin()),
    ),
    "a sum of exponentials": (
        [(3,)] * 4,
        lambda a, b, c, d: (Total(a, b.exp()) + Total(c, d.exp())).log(),
        lambda a, b, c, d: torch.logaddexp(a + b, c + d),
    ),
    "packed matrices": (
        [(3,), (3,), (2, 2)],
        lambda p, q, w: (Packed(p) * 2.0 + Packed(q)) @ w,
        lambda p, q, w: (2 * whole(p) + whole(q)) @ w,
    ),
    "a packed matrix as it is": (
        [(3,), (3,)],
        lambda p, q: (Packed(p) + Packed(q)).materialize().sin(),
        lambda p, q: (whole(p) + whole(q)).sin(),
    ),
}


test_classes = agreeing(
    {name: (fn, plain, sizes) for name, (sizes, fn, plain) in CASES.items()}, twice=["eager"]
)
