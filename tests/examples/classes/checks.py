"""Checks that the tests of several classes of the gallery share, and tests that many of them have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

Make = Callable[[], Any]


def check_gradients(
    got: Any,
    expected: Any,
    leaves: Sequence[Tensor],
    loss: Callable[[Any], Tensor] = lambda t: t.square().sum(),
) -> None:
    """Compares values, and the gradients of a loss of them."""
    torch.testing.assert_close(got, expected)
    options = {"allow_unused": True, "materialize_grads": True, "retain_graph": True}
    torch.testing.assert_close(
        *[torch.autograd.grad(loss(value), leaves, **options) for value in (got, expected)]
    )


def inners_of(x: Any) -> list[Tensor]:
    """The inner tensors of a declared class, or of one by hand."""
    return [getattr(x, name) for name in x.__tensor_flatten__()[0]]


def refused(
    classes: Mapping[str, tuple[Sequence[Make], Mapping[str, tuple[Any, str | None, Sequence[Any]]]]],
) -> Any:
    """A test of ``(error, words, calls)``: each call with a value raises, and changes no inner tensor."""
    every = {
        f"{name}, {case}, {number}": (make, *of_case)
        for name, (makes, cases) in classes.items()
        for case, of_case in cases.items()
        for number, make in enumerate(makes)
    }

    @pytest.mark.parametrize("name", every)
    def test(name):
        make, error, words, calls = every[name]
        x = make()
        before = [t.clone() for t in inners_of(x)]
        for call in calls:
            with pytest.raises(error, match=words):
                call(x)
        assert all(map(torch.equal, inners_of(x), before))

    return test


def converted(
    classes: Mapping[str, tuple[Sequence[Make], Sequence[torch.dtype], Callable[[Any], Any]]],
) -> Any:
    """A test that a converted value keeps its class and metadata, and that results have its dtype.

    Inner tensors of the dtype of the value are converted, all others are kept; of a class with a `float_dtype` all.
    """
    every = {
        f"{name}, {number}, {dtype}": (make, dtype, results)
        for name, (makes, dtypes, results) in classes.items()
        for number, make in enumerate(makes)
        for dtype in dtypes
    }

    @pytest.mark.parametrize("name", every)
    def test(name):
        make, dtype, results = every[name]
        x = make()
        y = x.to(dtype)
        assert type(y) is type(x) and y.shape == x.shape
        kept = hasattr(x, "float_dtype")  # the dtype is metadata
        for before, t in zip(inners_of(x), inners_of(y), strict=True):
            assert t.dtype == dtype if before.dtype == x.dtype and not kept else torch.equal(t, before)
        for z in (y, y.clone(), *results(y)):
            assert z.dtype == dtype
            assert type(z) is not type(x) or kept or dtype in [t.dtype for t in inners_of(z)]

    return test


def agreeing(cases: Mapping[str, tuple[Sequence[Make], Callable[[Any], Sequence[tuple[Any, Any]]]]]) -> Any:
    """A test of ``(makes, pairs)``; `pairs` returns results of a value, each with its expected value."""
    every = {
        f"{name}, {n}": (make, pairs)
        for name, (makes, pairs) in cases.items()
        for n, make in enumerate(makes)
    }

    @pytest.mark.parametrize("name", every)
    def test(name):
        make, pairs = every[name]
        for got, expected in pairs(make()):
            torch.testing.assert_close(got, expected)

    return test


def formulas(cases: Mapping[str, Any], sweep: int = 1) -> Any:
    """A test of ``(leaves, wrap, function, plain, read, kept, loss)``: a function and its gradients are the plain ones.

    The function takes the values that ``wrap`` makes of leaves, ``plain`` takes the leaves. ``read`` gives the numbers
    of a result, and ``kept`` its attributes.
    """

    @pytest.mark.sweep(sweep)
    @pytest.mark.parametrize("name", cases)
    def test(name, way):
        make_leaves, wrap, function, plain, read, kept, loss = cases[name]
        leaves = [t.requires_grad_() for t in make_leaves()]
        got = way(function)(*wrap(*leaves))
        assert all(getattr(got, attribute) == value for attribute, value in kept.items())
        check_gradients(read(got), plain(*leaves), leaves, loss)

    return test


def normal(*sizes: Sequence[int], dtype: torch.dtype = torch.float64) -> Callable[[], list[Tensor]]:
    """Random leaves of these sizes."""
    return lambda: [torch.randn(size, dtype=dtype) for size in sizes]


def positive(*sizes: Sequence[int], least: float = 0.5) -> Callable[[], list[Tensor]]:
    """Random leaves of these sizes, all above 0."""
    return lambda: [torch.rand(size, dtype=torch.float64) + least for size in sizes]
