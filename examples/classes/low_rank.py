"""A matrix of low rank, which is stored as two thin factors.

A product with a vector takes `r (n + m)` multiplications instead of `n m`. Products of matrices, and `F.linear`,
never make the matrix; any other op does. Both factors get gradients. The script trains factors from noisy products,
and counts multiplications.

    python examples/classes/low_rank.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from subclasses import Outer, TensorSubclass, inner


class LowRank(TensorSubclass, fallback="materialize"):
    """`left @ right`."""

    left: Tensor = inner()  # [n, r]
    right: Tensor = inner()  # [r, m]

    @staticmethod
    def outer(left, right) -> Outer:
        if left.ndim != 2 or right.ndim != 2 or left.shape[1] != right.shape[0]:
            raise ValueError(f"factors of sizes {list(left.shape)} and {list(right.shape)}")
        return Outer((left.shape[0], right.shape[1]), dtype=left.dtype)

    def materialize(self) -> Tensor:
        return self.left @ self.right

    @classmethod
    def nearest(cls, matrix: Tensor, rank: int) -> "LowRank":
        """The matrix of this rank with the least squared error."""
        u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
        return cls(u[:, :rank] * s[:rank], vh[:rank])


@LowRank.implements(torch.matmul)
def matmul(func, x, y, **out):
    if out:
        return LowRank.unruled(func, x, y, **out)
    if not isinstance(x, LowRank):
        left, right = y.unwrap()
        return (x @ left) @ right
    left, right = x.unwrap()
    if not isinstance(y, LowRank):
        return left @ (right @ y)
    other_left, other_right = y.unwrap()
    middle = right @ other_left  # goes to the side where it makes the smaller rank
    if left.shape[1] < other_left.shape[1]:
        return LowRank(left, middle @ other_right)
    return LowRank(left @ middle, other_right)


@LowRank.implements(F.linear)
def linear(func, input, weight, bias=None):
    if not isinstance(weight, LowRank) or isinstance(input, LowRank):
        return LowRank.unruled(func, input, weight, bias)
    left, right = weight.unwrap()
    return func(func(input, right), left, bias)


def main() -> None:
    torch.manual_seed(0)
    true = LowRank(torch.randn(60, 2), torch.randn(2, 40))
    x = torch.randn(200, 60)
    y = x @ true + torch.randn(200, 40) / 10
    factors = torch.randn(60, 2, requires_grad=True), torch.randn(2, 40, requires_grad=True)
    optimizer = torch.optim.Adam(factors, lr=0.05)
    for _ in range(400):
        optimizer.zero_grad()
        (x @ LowRank(*factors) - y).square().mean().backward()
        optimizer.step()
    fitted = LowRank(*factors).materialize()
    error = (fitted - true.materialize()).norm() / true.materialize().norm()
    multiplications = sum(factor.numel() for factor in factors)
    print(f"{multiplications} multiplications per row instead of {fitted.numel()}, error {error:.1%}")


if __name__ == "__main__":
    main()
