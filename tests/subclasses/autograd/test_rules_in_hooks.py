"""Rules in Python code that the engine calls in a backward: hooks, and what else is no formula of PyTorch's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import subclasses
from subclasses import TensorSubclass, inner

aten = torch.ops.aten


def log_class(key, **keywords):
    """Positive numbers by their logarithms, with a rule for products."""

    class Log(TensorSubclass, fallback="materialize", **keywords):
        log: Tensor = inner()

        def materialize(self):
            return self.log.exp()

    def multiply(func, x, y):
        return Log(sum(t.log if isinstance(t, Log) else t.log() for t in (x, y)))

    def arithmetic(func, x, y, **kwargs):
        return multiply(func, x, y) if func is torch.mul else NotImplemented

    Log.implements(key)(arithmetic if key is subclasses.arithmetic else multiply)
    return Log


KEYS = [aten.mul, aten.mul.Tensor, subclasses.arithmetic]


def tensor_hook(w, run):
    w.register_hook(lambda g: run())
    (w * 1).sum().backward()


def post_accumulate(w, run):
    w.register_post_accumulate_grad_hook(lambda p: run())
    (w * 1).sum().backward()


def node_hooks(w, run):
    y = w * 1
    y.grad_fn.register_hook(lambda *gradients: run())
    y.grad_fn.register_prehook(lambda *gradients: run())
    y.sum().backward()


def multi_grad(w, run):
    torch.autograd.graph.register_multi_grad_hook([w], lambda gradients: run())
    (w * 1).sum().backward()


def saved_tensors(w, run):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: (run(), t)[1]):
        y = (w**2).sum()
    y.backward()


def module_hooks(w, run):
    linear = nn.Linear(3, 3)
    linear.register_full_backward_hook(lambda *gradients: run())
    linear.register_full_backward_pre_hook(lambda *gradients: run())
    linear(w).sum().backward()


def backward_of_a_function(w, run):
    class Calling(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            run()
            return g

    Calling.apply(w).sum().backward()


def forward_with_gradients_in_a_hook(w, run):
    def hook(g):
        with torch.enable_grad():
            run()

    w.register_hook(hook)
    (w * 1).sum().backward()


DOORS = [
    tensor_hook,
    post_accumulate,
    node_hooks,
    multi_grad,
    saved_tensors,
    module_hooks,
    backward_of_a_function,
    forward_with_gradients_in_a_hook,
]


@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("key", KEYS, ids=str)
@pytest.mark.parametrize("door", DOORS)
def test_a_rule_that_meets_a_plain_tensor_keeps_its_result(door, key, trainable):
    cls = log_class(key, trainable=trainable)
    stat, plain, found = cls(torch.full((3,), 200.0)), torch.full((3,), 2.0), []
    w = torch.ones(3, requires_grad=True)
    door(w, lambda: found.append(stat * plain))
    assert found
    for y in found:
        assert type(y) is cls
        torch.testing.assert_close(y.log, torch.full((3,), 200.0) + plain.log())


def test_an_in_place_op_of_a_gradient():
    class Total(TensorSubclass, fallback="materialize"):
        high: Tensor = inner()
        low: Tensor = inner()

        def materialize(self):
            return self.high + self.low

    @Total.implements(aten.add)
    def _(func, x, y, alpha=1):
        plain = y.materialize() if isinstance(y, Total) else y
        return Total(x.high + alpha * plain, x.low)

    total = Total(torch.zeros(3), torch.ones(3))
    w = torch.ones(3, requires_grad=True)
    w.register_hook(lambda g: total.add_(g, alpha=2))
    (3 * w).sum().backward()
    assert total.high.tolist() == [6.0, 6.0, 6.0]


@pytest.mark.parametrize("key", [aten.mul, subclasses.arithmetic], ids=str)
def test_a_formula_still_gives_plain_gradients_to_plain_operands(key):
    cls = log_class(key)
    log, plain = torch.zeros(3), torch.full((3,), 2.0, requires_grad=True)
    (cls(log) * plain).sum().backward()
    assert type(plain.grad) is Tensor
    torch.testing.assert_close(plain.grad, torch.ones(3))
