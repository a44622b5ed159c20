"""Second derivatives of steps: PyTorch gives zeros without memory, which kernels on inner tensors must not meet."""

import pytest
import torch

import desugar
from subclasses import inner
from tests.doors import DOORS
from tests.subclasses.autograd.judge import agreeing
from tests.subclasses.subjects import declare

aten = torch.ops.aten

FIELDS = {"low": inner(differentiable=True), "high": inner(differentiable=True)}
Mapped = declare(keywords={"fallback": "map"}, **FIELDS)
Interval = declare(**FIELDS)
Interval.implements(aten.abs, aten.sgn, aten.round)(lambda func, x: Interval(func(x.low), func(x.high)))


def zeros_without_memory():
    x = torch.ones(3, requires_grad=True)
    (zeros,) = torch.autograd.grad(x.sgn().sum(), x)
    return zeros


def of_steps(step, cls):
    def by_class(low, high):
        y = step(cls(low * low, high * low))
        return y.low * low, y.high * high

    return by_class


DEEP = {
    name: door for name, door in DOORS.items() if name != "stock"
}  # whose programs have no second derivatives
test_second_derivatives = agreeing(
    {
        f"{step.__name__}, {name}": (
            of_steps(step, cls),
            lambda low, high, step=step: (step(low * low) * low, step(high * low) * high),
            [torch.tensor([-1.0, 1.0]), torch.tensor([2.5, 3.0])],
        )
        for step in (torch.abs, torch.sgn, torch.round)
        for name, cls in {"rules": Interval, "mapped": Mapped}.items()
    },
    DEEP,
    twice=list(DEEP),
)


def test_a_value_may_be_made_of_them():
    x = Mapped(zeros_without_memory(), torch.ones(3)) * 2.0 + 1.0
    assert x.low.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.slow
def test_compiled_kernels_do_not_read_them():
    x = torch.randn(4, requires_grad=True)

    def f(x):
        return x * 3.0 + x.sin()

    compiled = desugar.compile(f)
    assert torch.autograd.grad(compiled(x).sgn().sum(), x)[0].tolist() == [0.0] * 4
    (first,) = torch.autograd.grad(compiled(x).abs().sum(), x, create_graph=True)
    (expected,) = torch.autograd.grad(f(x).abs().sum(), x, create_graph=True)
    torch.testing.assert_close(*(torch.autograd.grad(g.sum(), x) for g in (first, expected)))
    with pytest.raises(
        desugar.DesugarError, match=r"(?s)zeros of size \(3,\) without any .*pass their clone"
    ):
        compiled(zeros_without_memory())
    assert compiled(zeros_without_memory().clone()).tolist() == [0.0] * 3


def test_a_second_derivative_by_one_of_two_arguments():
    """The other argument gets no gradient; the op that made the first one passes its gradient on."""

    def f(x, p):
        return (x - p).abs().sum()

    leaves = [torch.randn(4, requires_grad=True) for _ in range(3)]
    found = []
    for function in (f, desugar.compile(f, backend="eager", fullgraph=True)):
        out = function(leaves[0] * leaves[1], leaves[2])
        (g,) = torch.autograd.grad(out * out, leaves[:1], create_graph=True)
        found.append(torch.autograd.grad(g.square().sum(), leaves[:1]))
    torch.testing.assert_close(*found)
