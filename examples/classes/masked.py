"""Data of which some entries are missing.

A mask says which entries are present. The result of an elementwise op has an entry where all operands have one. A sum
or a mean takes the entries that are present, and is missing where there is none. The value of a missing entry (a NaN,
say) does not reach any result or gradient. The script takes the mean of each sensor over the hours in which it
answered.

    python examples/classes/masked.py
"""

from typing import Any

import torch
from torch import Tensor

from subclasses import TensorSubclass, inner

aten = torch.ops.aten


class Masked(TensorSubclass, fallback="views"):
    """`values` where `mask` is True; `values` is differentiable to read."""

    values: Tensor = inner(differentiable=True)
    mask: Tensor = inner(dtype=torch.bool)

    def __new__(cls, values: Tensor, mask: Tensor) -> "Masked":
        if values.shape != mask.shape:
            raise ValueError(f"values of size {list(values.shape)} with a mask of size {list(mask.shape)}")
        return super().__new__(cls, values, mask)

    def filled(self, value: float) -> Tensor:
        """A plain tensor with a value for the missing entries."""
        return self.unwrap("values").masked_fill(~self.mask, value)


def present(x: Any) -> Any:
    """An operand in which missing entries hold a number at which no op gives a NaN or has a derivative of NaN."""
    if not isinstance(x, Masked):
        return x
    return x.filled(0.5 if x.is_floating_point() else 1)


def masked(values: Tensor, *operands: Any) -> Masked:
    """A result whose entries are present where all operands have an entry."""
    mask = None
    for x in operands:
        if isinstance(x, Masked):
            mask = x.mask if mask is None else mask & x.mask
    assert mask is not None
    return Masked(values, mask.expand(values.shape).clone())


@Masked.implements(
    *(torch.abs, torch.neg, torch.exp, torch.log, torch.sqrt, torch.square, torch.reciprocal, torch.relu),
    *(torch.sigmoid, torch.tanh, torch.clamp, torch.isfinite, torch.isnan),
    *(torch.add, torch.sub, torch.rsub, torch.mul, torch.div, torch.pow, torch.maximum, torch.minimum),
    *(torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge),
)
def elementwise(func, *args, out=None, **kwargs):
    if out is not None:
        return Masked.unruled(func, *args, out=out, **kwargs)
    return masked(func(*map(present, args), **kwargs), *args)


@Masked.implements(torch.sum)
def total(func, x, dim=None, keepdim=False, *, dtype=None):
    return Masked(x.filled(0).sum(dim, keepdim, dtype=dtype), count(x, dim, keepdim) > 0)


@Masked.implements(torch.mean)
def mean(func, x, dim=None, keepdim=False):
    n = count(x, dim, keepdim)
    return Masked(x.filled(0).sum(dim, keepdim) / n.clamp(min=1), n > 0)


def count(x: Masked, dim: Any = None, keepdim: bool = False) -> Tensor:
    return x.mask.sum(dim, keepdim)


@Masked.implements(aten.zeros_like, aten.new_zeros)
def zeros(func, x, *args, **kwargs):
    values = func(x.values, *args, **kwargs)
    return Masked(values, torch.ones_like(values, dtype=torch.bool))


def main() -> None:
    readings = torch.tensor([[20.0, 21.0, torch.nan], [torch.nan, 18.0, 19.0]], requires_grad=True)
    x = Masked(readings, readings.isfinite())
    means: Any = (x * 1.8 + 32).mean(1)
    (gradient,) = torch.autograd.grad(means.values.sum(), readings)
    print("means", means.values.detach())
    print("gradient", gradient)


if __name__ == "__main__":
    main()
