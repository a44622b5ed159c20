"""Probabilities that are stored as their logarithms.

A product of a thousand probabilities underflows in float32; the sum of their logarithms does not. Products add
logarithms, sums take `logsumexp`, and an op without a rule is an error. As with `torch.logsumexp`, the gradient of
a sum of zeros is not a number. The script computes the likelihood of a hidden Markov model, and its gradient.

    python examples/classes/log_probability.py
"""

from typing import Any

import torch
from torch import Tensor

from subclasses import Outer, TensorSubclass, inner


class LogProbability(TensorSubclass, fallback="views"):
    """Non-negative numbers `exp(values)`; `values` is differentiable to read."""

    values: Tensor = inner(differentiable=True)

    @staticmethod
    def outer(values) -> Outer:
        if not values.is_floating_point():
            raise NotImplementedError(f"a LogProbability holds floating-point logarithms, not {values.dtype}")
        return Outer(values.shape, values.stride(), storage_offset=values.storage_offset())

    def materialize(self) -> Tensor:
        return self.values.exp()


def log(operand: Any, like: Any) -> Tensor:
    """The logarithm of an operand, which is a LogProbability or a number that is not negative."""
    if isinstance(operand, LogProbability):
        return operand.unwrap("values")
    if isinstance(operand, Tensor):
        raise NotImplementedError("a plain tensor may be negative: pass LogProbability(tensor.log())")
    if operand < 0:
        raise ValueError(f"a LogProbability cannot represent the negative number {operand}")
    return like.unwrap("values").new_full((), operand).log()


def logs(x: Any, y: Any) -> tuple[Tensor, Tensor]:
    like = x if isinstance(x, LogProbability) else y
    return log(x, like), log(y, like)


@LogProbability.implements(torch.mul)
def mul(func, x, y, **out):
    if out:
        return LogProbability.unruled(func, x, y, **out)
    a, b = logs(x, y)
    return LogProbability(a + b)


@LogProbability.implements(torch.div)
def div(func, x, y):
    a, b = logs(x, y)
    return LogProbability(a - b)


@LogProbability.implements(torch.reciprocal)  # 2 / x is 2 * x.reciprocal()
def reciprocal(func, x):
    return LogProbability(-x.unwrap("values"))


@LogProbability.implements(torch.add)
def add(func, x, y):
    return LogProbability(torch.logaddexp(*logs(x, y)))


@LogProbability.implements(torch.sum)
def total(func, x, dim=None, keepdim=False):
    values = x.unwrap("values")
    dims = tuple(range(values.ndim)) if dim is None or dim == () else dim
    return LogProbability(torch.logsumexp(values, dims, keepdim))


@LogProbability.implements(torch.prod)
def product(func, x, dim=None, keepdim=False):
    return LogProbability(x.unwrap("values").sum(dim, keepdim))


@LogProbability.implements(torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge)
def compare(func, x, y):
    return func(*logs(x, y))


def main() -> None:
    """The forward algorithm: 3 states, 2000 observations."""
    torch.manual_seed(0)
    logits = torch.randn(3, 3, requires_grad=True)
    transition = LogProbability(logits.log_softmax(1))
    emission = LogProbability(torch.randn(2000, 3).log_softmax(1))
    state: Any = emission[0] / 3
    for step in range(1, 2000):
        state = (state.unsqueeze(1) * transition).sum(0) * emission[step]
    likelihood = state.sum()
    (gradient,) = torch.autograd.grad(likelihood.values, logits)
    print(f"log-likelihood {likelihood.values:.1f}; as a probability {likelihood.materialize():.1e}")
    print(f"largest entry of its gradient {gradient.abs().max():.3f}")


if __name__ == "__main__":
    main()
