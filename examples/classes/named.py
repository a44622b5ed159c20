"""A tensor whose dimensions have names.

Operands are aligned by name, in any order: a dimension that one of them lacks is broadcast. Reductions take a
name or a position. Names are static metadata, so that compiled code aligns nothing at run time. An op without a rule
is an error, as it would not know the names of its result. The script multiplies and standardizes two tables.

    python examples/classes/named.py
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import subclasses
from subclasses import Outer, TensorSubclass, inner, static


def by_name(reduction: Callable[..., Any]) -> Any:
    """A method that takes names: PyTorch's own functions take only positions, and call the rule."""

    def method(self: "Named", dim: Any = None, keepdim: bool = False) -> "Named":
        return reduction(self, self.positions(dim), keepdim=keepdim)

    return method


class Named(TensorSubclass):
    """`values`, differentiable to read, with a name for each dimension in `dims`."""

    values: Tensor = inner(differentiable=True)
    dims: tuple[str, ...] = static()

    sum, mean, std, var = map(by_name, (torch.sum, torch.mean, torch.std, torch.var))
    amax, amin, any, all = map(by_name, (torch.amax, torch.amin, torch.any, torch.all))

    @staticmethod
    def outer(values, dims) -> Outer:
        if len(set(dims)) != values.ndim or len(dims) != values.ndim:
            raise ValueError(f"{values.ndim} dimensions need as many different names, not {dims}")
        return Outer(values.shape, values.stride(), storage_offset=values.storage_offset())

    def positions(self, dim: Any) -> tuple[int, ...]:
        """Positions from 0 of a name or a position, of several, or of all for None."""
        if dim is None:
            return tuple(range(self.ndim))
        if isinstance(dim, tuple | list):
            return tuple(p for d in dim for p in self.positions(d))
        if isinstance(dim, str) and dim not in self.dims:
            raise ValueError(f"no dimension {dim} among {self.dims}")
        return (self.dims.index(dim) if isinstance(dim, str) else range(self.ndim)[dim],)

    def order(self, *dims: str) -> "Named":
        """The same in another order of dimensions, with new ones of size 1."""
        here = [d for d in dims if d in self.dims]
        values = self.values.permute(self.positions(here))  # raises where a dimension is left out
        return Named(values[tuple(slice(None) if d in here else None for d in dims)], dims=dims)

    def at(self, **indices: int | slice) -> "Named":
        """Entries of some dimensions; an int drops its dimension."""
        index: list[Any] = [slice(None)] * self.ndim
        for name, i in indices.items():
            index[self.positions(name)[0]] = i
        dims = tuple(d for d, i in zip(self.dims, index, strict=True) if isinstance(i, slice))
        return Named(self.values[tuple(index)], dims=dims)


@Named.implements(subclasses.reductions)
def reduce(func, x, dim, keepdim, **kwargs):
    dims = tuple(name for i, name in enumerate(x.dims) if keepdim or i not in dim)
    return Named(func(x.values, dim, keepdim=keepdim, **kwargs), dims=dims)


@Named.implements(
    *(torch.add, torch.sub, torch.rsub, torch.mul, torch.div, torch.pow, torch.maximum, torch.minimum),
    *(torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge, torch.where),
    *(torch.exp, torch.log, torch.sqrt, torch.square, torch.neg, torch.abs, torch.relu, torch.tanh),
    torch.reciprocal,  # 2 / x is 2 * x.reciprocal()
)
def elementwise(func, *args, **kwargs):
    if "out" in kwargs:
        return Named.unruled(func, *args, **kwargs)
    dims = tuple(dict.fromkeys(d for x in args if isinstance(x, Named) for d in x.dims))
    return Named(func(*(aligned(x, dims) for x in args), **kwargs), dims=dims)


def aligned(x: Any, dims: tuple[str, ...]) -> Any:
    if isinstance(x, Named):
        return x.order(*dims).unwrap("values")
    if isinstance(x, Tensor) and x.ndim:
        raise NotImplementedError(f"a plain tensor of {x.ndim} dimensions, which have no names")
    return x


def main() -> None:
    torch.manual_seed(0)
    sold: Any = Named(torch.rand(100, 3), dims=("day", "shop"))
    price = Named(torch.rand(4, 3), dims=("product", "shop"))
    income: Any = (sold * price).sum("shop")
    centred = income - income.mean("day")
    standard = centred / (centred**2).mean("day").sqrt()
    print(f"dims {standard.dims}, variances", (standard**2).mean("day").values)


if __name__ == "__main__":
    main()
