"""Compares functions of values with functions of plain tensors: results, and first and second gradients."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.doors import DOORS


def gradients(out: Any, leaves: Sequence[Tensor], *, twice: bool = False, zeros: bool = True) -> list[Any]:
    """Returns the gradients of a weighted sum of results, and the gradients of the sum of their squares.

    Args:
        out: A plain tensor, or several.
        leaves: The tensors by which it is differentiated.
        twice: Whether second gradients follow.
        zeros: Whether a gradient that is absent is zero; it is None otherwise.
    """
    outs = out if isinstance(out, list | tuple) else [out]
    total = sum((t * torch.linspace(1, 2, t.numel()).reshape(t.shape)).sum() for t in outs if t.requires_grad)
    first = torch.autograd.grad(total, leaves, create_graph=twice, allow_unused=True, materialize_grads=zeros)
    if not twice or not any(g.requires_grad for g in first if g is not None):
        return list(first)
    squares = sum(g.square().sum() for g in first if g is not None)
    return [*first, *torch.autograd.grad(squares, leaves, allow_unused=True, materialize_grads=True)]


def agree(
    fn: Callable[..., Any],
    plain: Callable[..., Any],
    numbers: Sequence[Tensor],
    *,
    door: str | Callable[..., Any] = "eager",
    twice: bool = False,
    zeros: bool = True,
    **close: Any,
) -> None:
    """Runs two functions of plain leaves twice; their results and gradients are the same, and plain.

    Args:
        fn: The function that makes values of the leaves. It returns a plain tensor, or several.
        plain: The judge.
        numbers: The data of the leaves.
        door: The way in which `fn` runs: a name of `tests.doors`, or a function.
        twice: Whether second gradients are compared.
        zeros: Whether an absent gradient equals one of zeros.
        close: Options of `torch.testing.assert_close`.
    """
    run = DOORS[door](fn) if isinstance(door, str) else door(fn)
    for _ in range(2):
        sides = []
        for f in (run, plain):
            leaves = [t.detach().clone().requires_grad_() for t in numbers]
            out = f(*leaves)
            sides.append((out, gradients(out, leaves, twice=twice, zeros=zeros)))
        assert all(g is None or type(g) is Tensor for g in sides[0][1])
        torch.testing.assert_close(*sides, **close)


def numbers(*sizes: Any, dtype: torch.dtype = torch.float64, seed: int = 3) -> list[Tensor]:
    """Returns positive random tensors of several sizes."""
    make = torch.Generator().manual_seed(seed)
    return [torch.rand(size, dtype=dtype, generator=make) + 0.5 for size in sizes]


def passing(backward: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns an autograd function that returns its argument; its backward returns ``backward(gradient)``."""

    class Passing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return backward(gradient)

    return Passing.apply


def joined(cases: Iterable[tuple[Any, ...]]) -> tuple[Any, Any, list[Tensor]]:
    """Returns one function for all cases, the same without the classes, and the data of the leaves of both."""
    cases = list(cases)

    def of(which: int) -> Callable[..., list[Any]]:
        def run(*leaves: Tensor) -> list[Any]:
            found, rest = [], list(leaves)
            for case in cases:
                out = case[which](*(rest.pop(0) for _ in case[2]))
                found += out if isinstance(out, list | tuple) else [out]
            return found

        return run

    sizes = [size for case in cases for size in case[2]]
    return of(0), of(1), sizes if isinstance(sizes[0], Tensor) else numbers(*sizes)


def agreeing(
    cases: Mapping[str, tuple[Any, ...]],
    doors: Mapping[str, Callable[..., Any]] = DOORS,
    *,
    twice: Sequence[str] = (),
    **how: Any,
) -> Any:
    """A test of ``(fn, plain, sizes)``: each case runs in eager mode, and one of them compiled.

    A slow test of each way to compile runs all cases as one function.

    Args:
        cases: A function of leaves, the same without the classes, and the sizes of the leaves, or their data.
        doors: The ways in which the functions run, by name.
        twice: The ways in which second gradients are compared.
        how: Options of `agree`.
    """
    compiled = [door for door in doors if door != "eager"]
    alone = [(name, "eager") for name in cases if "eager" in doors]
    # Chosen without regard to the order, and the same in every run.
    chosen = [(name, door) for name in cases for door in compiled]
    one = sorted(chosen, key=lambda pair: zlib.crc32(repr((pair, *cases)).encode()))[:1]
    together = [pytest.param("all", door, marks=pytest.mark.slow) for door in compiled]

    @pytest.mark.parametrize(("name", "door"), [*alone, *one, *together])
    def test(name: str, door: str) -> None:
        agree(
            *joined(cases.values() if name == "all" else [cases[name]]),
            door=doors[door],
            twice=door in twice,
            **how,
        )

    return test
