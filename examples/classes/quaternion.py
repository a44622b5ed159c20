"""Quaternions: a tensor whose entries are quaternions, and which rotates vectors.

The four parts lie in the last dimension of one plain tensor. The tensor of quaternions has the dims before it, so views
of them need no rule. In-place forms follow from the rules. The script fits the rotation that takes some points to
others.

    python examples/classes/quaternion.py
"""

from typing import Any

import torch
from torch import Tensor

from subclasses import TensorSubclass, inner

aten = torch.ops.aten


class Quaternion(TensorSubclass):
    """`parts` [..., 4]: the real part and three imaginary ones; differentiable to read."""

    parts: Tensor = inner(differentiable=True, shape="... 4")

    @classmethod
    def about(cls, axis: Tensor, angle: Tensor) -> "Quaternion":
        """The rotation about a unit vector [..., 3] by an angle [...]."""
        half = (angle / 2).unsqueeze(-1)
        imaginary = half.sin() * axis
        return cls(torch.cat([half.cos().expand(*imaginary.shape[:-1], 1), imaginary], -1))

    def conjugate(self) -> "Quaternion":
        return Quaternion(torch.cat([self.parts[..., :1], -self.parts[..., 1:]], -1))

    def rotate(self, v: Tensor) -> Tensor:
        """The vectors [..., 3], rotated by this, which need not have norm 1."""
        w, u = self.parts[..., :1], self.parts[..., 1:]
        v, u = torch.broadcast_tensors(v, u)
        twice = 2 * torch.linalg.cross(u, v) / self.parts.square().sum(-1, keepdim=True)
        return v + w * twice + torch.linalg.cross(u, twice)


def scale(func: Any, q: Quaternion, number: Any) -> Quaternion:
    """The product with a real number, or with a tensor of them, or the quotient."""
    if number.is_complex() if isinstance(number, Tensor) else isinstance(number, complex):
        raise NotImplementedError("a quaternion and a complex number")
    factor = number.unsqueeze(-1) if isinstance(number, Tensor) else number
    return Quaternion(func(q.unwrap("parts"), factor))


@Quaternion.implements(torch.mul)
def mul(func, x, y, **out):
    if out:
        return Quaternion.unruled(func, x, y, **out)
    if not isinstance(y, Quaternion):
        return scale(torch.mul, x, y)
    if not isinstance(x, Quaternion):
        return scale(torch.mul, y, x)
    (a, b, c, d), (e, f, g, h) = x.unwrap("parts").unbind(-1), y.unwrap("parts").unbind(-1)
    real, i = a * e - b * f - c * g - d * h, a * f + b * e + c * h - d * g
    j, k = a * g - b * h + c * e + d * f, a * h + b * g - c * f + d * e
    return Quaternion(torch.stack([real, i, j, k], -1))


@Quaternion.implements(torch.div)
def div(func, x, y):
    return x * y.reciprocal() if isinstance(y, Quaternion) else scale(torch.div, x, y)


@Quaternion.implements(torch.conj, torch.conj_physical)
def conj(func, q):
    raise NotImplementedError("write q.conjugate(): PyTorch may leave out conj() where the dtype is real")


@Quaternion.implements(torch.abs)
def norm(func, q):
    return torch.linalg.vector_norm(q.unwrap("parts"), dim=-1)


@Quaternion.implements(torch.reciprocal)  # 2 / q is 2 * q.reciprocal()
def reciprocal(func, q):
    return scale(torch.div, q.conjugate(), q.unwrap("parts").square().sum(-1))


@Quaternion.implements(aten.add.Tensor, aten.sub.Tensor)
def add(func, x, y, **alpha):
    if not (isinstance(x, Quaternion) and isinstance(y, Quaternion)):
        raise NotImplementedError("a quaternion is added to a quaternion alone")
    return Quaternion(func(x.parts, y.parts, **alpha))


@Quaternion.implements(aten.neg)  # and the backward of a difference
def neg(func, x):
    return Quaternion(func(x.parts))


@Quaternion.implements(aten.sum)
def total(func, x, dim=None, keepdim=False, **dtype):
    dims = [d - (d < 0) for d in dim] if dim else list(range(x.ndim))
    return Quaternion(x.parts.sum(dims, keepdim, **dtype) if dims else x.parts.clone())


def main() -> None:
    torch.manual_seed(0)
    points, turn = torch.randn(20, 3), Quaternion.about(torch.tensor([0.0, 0.6, 0.8]), torch.tensor(1.0))
    target = turn.rotate(points)
    parts = torch.tensor([1.0, 0.0, 0.0, 0.0], requires_grad=True)
    optimizer = torch.optim.Adam([parts], lr=0.05)
    for _ in range(200):
        optimizer.zero_grad()
        (Quaternion(parts).rotate(points) - target).square().sum().backward()
        optimizer.step()
    fitted: Any = Quaternion(parts.detach())
    error: Any = (fitted / fitted.abs() - turn).abs()
    print(f"rotation by {turn.parts.tolist()}, found with an error of {error:.3f}")


if __name__ == "__main__":
    main()
