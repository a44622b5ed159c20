"""A backward that runs the function again, because a gradient has another type than the traced one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import desugar
import subclasses
from subclasses import TensorSubclass, inner
from tests.desugar.judge import WAYS


class Tripled(TensorSubclass, fallback="materialize", kind="structure"):
    """Results of `+` and `*` are of the class, and all other ops make plain gradients of them."""

    third: Tensor = inner()

    def materialize(self):
        return self.third * 3


@Tripled.implements(subclasses.arithmetic)
def _(func, x, y):
    if func in (torch.add, torch.sub):
        return Tripled(func(*(t.third if isinstance(t, Tripled) else t / 3 for t in (x, y))))
    return Tripled(func(*(t.third if isinstance(t, Tripled) else t for t in (x, y))))


@pytest.mark.parametrize("way", WAYS)
def test_arguments_that_nobody_keeps(way):
    """Plain gradients are common for such a class, so the program keeps what it needs to run again."""

    def gradient(call):
        p = torch.full((3,), 0.5, requires_grad=True)
        return torch.autograd.grad(call(Tripled(p * 1)).exp().sum(), p)[0]

    def fn(x):
        return x * 2

    assert torch.equal(gradient(fn), gradient(WAYS[way](fn)))


READ = {
    "as a whole": (lambda x: x.exp(), torch.exp),
    "materialized": (lambda x: x.materialize(), lambda t: t),
    "by its inner tensor": (lambda x: x.unwrap("third").sin(), lambda t: (t / 3).sin()),
    "both": (lambda x: x.exp() + x.unwrap("third"), lambda t: t.exp() + t / 3),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize("fn", [lambda x, q: x + q, lambda x, q: x + q.sum(), lambda x, q: x * q])
def test_the_gradient_of_a_plain_operand(fn, read):
    """It is plain, whatever gradients the result gets."""

    def gradients(call, read, wrap):
        p, q = torch.full((3,), 0.5, requires_grad=True), torch.arange(1.0, 4.0, requires_grad=True)
        return torch.autograd.grad(read(call(wrap(p), q)).sum(), (p, q))

    of_values, of_plain = READ[read]
    for call in (fn, desugar.compile(fn, backend="eager")):
        got = gradients(call, of_values, lambda p: Tripled(p * 1))
        torch.testing.assert_close(got, gradients(fn, of_plain, lambda p: 3 * p))


@pytest.mark.parametrize("door", WAYS)
def test_a_gradient_with_a_conjugate_bit(door):
    """What uses a result of a class as a whole gives plain gradients, which formulas of complex numbers conjugate."""

    class Twice(TensorSubclass, fallback="materialize"):
        held: Tensor = inner()

        def materialize(self):
            return self.held * 2

    held = torch.complex(torch.rand(3), torch.rand(3)).requires_grad_()
    weight = torch.complex(torch.rand(3), torch.rand(3))
    gradients = []
    for call in (lambda f: f, WAYS[door]):
        result = call(lambda t: Twice(t * t))(held)
        gradients += torch.autograd.grad((result.conj() * weight).real.sum(), held, retain_graph=True)
        gradients += torch.autograd.grad(result, held, weight.conj())
    torch.testing.assert_close(gradients[:2], gradients[2:])
