"""Measures the cost of a declared class in eager mode against a minimal hand-written class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from bench.subjects import SHAPE, Pair
from subclasses import TensorSubclass, inner


class HandPair(Tensor):
    """A pair with only what one op needs: no views, no in-place ops, no checks, no keyword arguments."""

    a: Tensor
    b: Tensor

    @staticmethod
    def __new__(cls, a: Tensor, b: Tensor) -> HandPair:
        self = Tensor._make_wrapper_subclass(cls, a.shape, a.stride(), dtype=a.dtype, device=a.device)
        self.a, self.b = a, b
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        of_a = [x.a if type(x) is cls else x for x in args]
        of_b = [x.b if type(x) is cls else x for x in args]
        return cls(func(*of_a), func(*of_b))


def bare_wrapper(cls: type[Tensor], a: Tensor, b: Tensor) -> Callable[[], Tensor]:
    """Returns a call of `_make_wrapper_subclass` with constants and stores: the lower bound of an unflatten."""
    size, stride, dtype, device = a.size(), a.stride(), a.dtype, a.device

    def call() -> Tensor:
        self: Any = Tensor._make_wrapper_subclass(cls, size, stride, dtype=dtype, device=device)
        self.a, self.b = a, b
        return self

    return call


def unflatten(x: Any) -> Callable[[], Tensor]:
    """Returns a call of `__tensor_unflatten__` on the parts of `x`."""
    names, context = x.__tensor_flatten__()
    inners, make = {name: getattr(x, name) for name in names}, type(x).__tensor_unflatten__
    size, stride = x.size(), x.stride()
    return lambda: make(inners, context, size, stride)


class DeclaredPair(TensorSubclass, fallback="materialize"):
    """A value whose inner tensors are read with gradients, by ``unwrap`` and by ``materialize``."""

    a: Tensor = inner(differentiable=True)
    b: Tensor = inner()

    def materialize(self) -> Tensor:
        return self.a * self.b


class BareRead(torch.autograd.Function):
    """The least that a differentiable read of an inner tensor costs: a function that returns it."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Tensor:
        return x.a.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return HandPair(gradient, torch.zeros_like(gradient))


def make_reads() -> dict[tuple[str, str], Callable[[], Any]]:
    """Returns reads of inner tensors by (operation, class), to be timed with and without grad as they say."""
    a, b = torch.rand(SHAPE), torch.rand(SHAPE)
    hand, declared = HandPair(a, b).requires_grad_(), DeclaredPair(a.clone().requires_grad_(), b)
    raw: Any = DeclaredPair(a, b)

    return {
        ("x.unwrap('a'), with grad", "bare function"): lambda: BareRead.apply(hand),
        ("x.unwrap('a'), with grad", "declared"): lambda: declared.unwrap("a"),
        ("x.a, with grad", "declared"): lambda: declared.a,
        ("x.materialize(), without grad", "two plain tensors"): lambda: a * b,
        ("x.materialize(), without grad", "declared"): raw.materialize,
    }


def make_calls() -> dict[tuple[str, str], Callable[[], Any]]:
    """Returns calls by (operation, class)."""
    a, b = torch.rand(SHAPE), torch.rand(SHAPE)
    hand, two = HandPair(a, b), TwoTensor(a, b)
    pair: Any = Pair(a, b)
    return {
        ("x * 2", "two plain tensors"): lambda: (a * 2, b * 2),
        ("x * 2", "leanest by hand"): lambda: hand * 2,
        ("x * 2", "TwoTensor"): lambda: two * 2,
        ("x * 2", "declared"): lambda: pair * 2,
        ("x.view(-1)", "TwoTensor"): lambda: two.view(-1),
        ("x.view(-1)", "declared"): lambda: pair.view(-1),
        ("unflatten", "bare wrapper"): bare_wrapper(HandPair, a, b),
        ("unflatten", "TwoTensor"): unflatten(two),
        ("unflatten", "declared"): unflatten(pair),
        ("Cls(a, b)", "leanest by hand"): lambda: HandPair(a, b),
        ("Cls(a, b)", "TwoTensor"): lambda: TwoTensor(a, b),
        ("Cls(a, b)", "declared"): lambda: Pair(a, b),
        ("flatten", "TwoTensor"): two.__tensor_flatten__,
        ("flatten", "declared"): pair.__tensor_flatten__,
    }
