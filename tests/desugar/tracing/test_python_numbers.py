"""Python floats that change from call to call, in programs that Inductor compiles."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import desugar
from tests.desugar.classes import Pair, make
from tests.desugar.judge import judge

VALUES = (1.5, 2.0, 3.5, -0.5, 7.0, 1.5)


def in_place(x, t):
    y = x.clone()
    y.mul_(t)
    y += t
    return y


FUNCTIONS = {
    "product": (lambda x, t: x * t, 2),
    "quotient": (lambda x, t: t / x, 2),
    "comparison": (lambda x, t: torch.where(x > t, x, -x), 2),
    "in place": (in_place, 2),
    "a number as a result": (lambda x, t: (x * t, t + 1.0), len(set(VALUES))),
    "an op of numbers": (lambda x, t: x.clamp(max=t), len(set(VALUES))),
    "a branch": (lambda x, t: x if t > 2 else x * t, 3),
}

COMPILERS = ["inductor", "eager"]


def _call(fn, t, *, grad, dtype):
    x = torch.tensor([-2.0, 0.25, 1.0, 3.0], dtype=dtype).requires_grad_(grad)
    out = fn(x, t)
    first = out[0] if isinstance(out, tuple) else out
    return out, torch.autograd.grad(first.sum(), x)[0] if grad else None


@pytest.mark.sweep(28)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("backend", COMPILERS)
def test_changing_float(backend, name, grad):
    fn, most = FUNCTIONS[name]
    compiled = desugar.compile(fn, backend=backend)
    for dtype in (torch.float32, torch.bfloat16)[: 1 if backend == "inductor" else 2]:
        for t in VALUES:
            got, expected = (_call(f, t, grad=grad, dtype=dtype) for f in (compiled, fn))
            torch.testing.assert_close(got, expected)
        assert len(compiled.programs) <= most * (1 if dtype is torch.float32 else 2)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = 1.5

    def forward(self, x):
        return self.linear(x) * self.scale


WAYS = pytest.mark.parametrize("way", [desugar.compile, lambda fn: torch.compile(fn, backend="desugar")])


@pytest.mark.slow
@WAYS
def test_float_attribute(way):
    model, x = Scaled(), torch.randn(2, 4)
    compiled = way(model)
    for model.scale in VALUES:
        torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.slow
@WAYS
def test_float_and_wrapper(way):
    fn = lambda x, t: x * t + x  # noqa: E731
    compiled = way(fn)
    for t in VALUES:
        judge(fn, lambda t=t: (make(Pair, 3), t), compiled)


@pytest.mark.slow
def test_dynamic_from_the_first_call():
    compiled = desugar.compile(lambda x, t: x * t, dynamic=True)
    x = torch.randn(3, requires_grad=True)
    for t in VALUES:
        (gradient,) = torch.autograd.grad(compiled(x, t).sum(), x)
        assert gradient.tolist() == [t] * 3
    assert len(compiled.programs) == 1


@pytest.mark.slow
def test_second_derivative():
    compiled = desugar.compile(lambda x, t: (x * t) ** 2)
    for t in VALUES[:4]:
        x = torch.tensor([1.0, -2.0], requires_grad=True)
        (first,) = torch.autograd.grad(compiled(x, t).sum(), x, create_graph=True)
        torch.testing.assert_close(first, 2 * x * t * t)
        (second,) = torch.autograd.grad(first.sum(), x)
        torch.testing.assert_close(second, torch.full_like(x, 2 * t * t))
