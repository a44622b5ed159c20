"""Measured values with their uncertainty, which ops propagate.

Each entry has a value and the standard deviation of its error. Errors of different entries and operands count as
independent and small: the error of a result is exact to first order. Write `x.square()` for `x * x`, and sum before you
broadcast: operands that are not independent get a wrong error. The script computes a resistance from
measurements, and the derivative of its error.

    python examples/classes/uncertain.py
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from subclasses import Outer, TensorSubclass, inner


class Uncertain(TensorSubclass, fallback="views"):
    """`value` plus or minus `error`; both are differentiable to read."""

    value: Tensor = inner(differentiable=True)
    error: Tensor = inner(differentiable=True)

    @staticmethod
    def outer(value, error) -> Outer:
        if value.shape != error.shape:
            raise ValueError(f"values of size {list(value.shape)} with errors of size {list(error.shape)}")
        if not (value.is_floating_point() and error.dtype == value.dtype):
            raise NotImplementedError(f"values of {value.dtype} with errors of {error.dtype}")
        return Outer(value.shape, value.stride(), storage_offset=value.storage_offset())


def parts(x: Any) -> tuple[Any, Any]:
    """Value and error; an exact operand has no error."""
    return x.unwrap() if isinstance(x, Uncertain) else (x, None)


def root(squares: Tensor) -> Tensor:
    """The square root, with a derivative of 0 at 0."""
    positive = squares > 0
    return squares.where(positive, 1).sqrt().where(positive, 0)


def uncertain(value: Tensor, *terms: tuple[Any, Any]) -> Uncertain:
    """A result, with a term for each operand: its error and the derivative by it."""
    errors = [error * derivative for error, derivative in terms if error is not None]
    error = root(errors[0].square() + errors[1].square()) if len(errors) == 2 else errors[0].abs()
    return Uncertain(value, error.expand(value.shape).clone())


@Uncertain.implements(torch.pow)
def power(func, x, n):
    if isinstance(n, Tensor) or not isinstance(x, Uncertain):
        raise NotImplementedError("a power of an uncertain value needs a number as its exponent")
    a, da = parts(x)
    return uncertain(a**n, (da, n * a ** (n - 1)))


UNARY: dict[Any, Callable[[Any], tuple[Any, Any]]] = {  # the value and its derivative
    torch.neg: lambda x: (-x, 1),
    torch.abs: lambda x: (x.abs(), x.sign()),
    torch.exp: lambda x: (x.exp(), x.exp()),
    torch.log: lambda x: (x.log(), 1 / x),
    torch.sqrt: lambda x: (x.sqrt(), 0.5 / x.sqrt()),
    torch.square: lambda x: (x.square(), 2 * x),
    torch.reciprocal: lambda x: (1 / x, 1 / x.square()),  # 2 / x is 2 * x.reciprocal()
}
BINARY: dict[Any, Callable[[Any, Any], tuple[Any, Any, Any]]] = {  # the value and its derivatives
    torch.add: lambda x, y: (x + y, 1, 1),
    torch.sub: lambda x, y: (x - y, 1, 1),
    torch.rsub: lambda x, y: (y - x, 1, 1),
    torch.mul: lambda x, y: (x * y, y, x),
    torch.div: lambda x, y: (x / y, 1 / y, x / y / y),
}


def register(function: Any, formula: Callable[..., tuple[Any, ...]]) -> None:
    @Uncertain.implements(function)
    def rule(func, *operands, **out):
        if out:
            return Uncertain.unruled(func, *operands, **out)
        values, errors = zip(*map(parts, operands), strict=True)
        value, *derivatives = formula(*values)
        return uncertain(value, *zip(errors, derivatives, strict=True))


for function, formula in (UNARY | BINARY).items():
    register(function, formula)


@Uncertain.implements(torch.sum)
def total(func, x, dim=None, keepdim=False):
    value, error = parts(x)
    return Uncertain(value.sum(dim, keepdim), root(error.square().sum(dim, keepdim)))


@Uncertain.implements(torch.mean)
def mean(func, x, dim=None, keepdim=False):
    sums = total(torch.sum, x, dim, keepdim)
    return sums * (sums.numel() / x.numel())


def main() -> None:
    error = torch.tensor([0.1, 0.1, 0.1], requires_grad=True)
    voltage = Uncertain(torch.tensor([9.9, 10.1, 10.3]), error)
    current = Uncertain(torch.tensor(2.0), torch.tensor(0.05))
    resistance: Any = voltage.mean() / current
    (derivative,) = torch.autograd.grad(resistance.error, error)
    print(f"resistance {resistance.value:.3f} +- {resistance.error:.3f}")
    print("derivative of its error by the errors of the voltages", derivative)


if __name__ == "__main__":
    main()
