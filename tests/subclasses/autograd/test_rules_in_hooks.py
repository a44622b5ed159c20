"""Rules in Python code that the engine calls in a backward: hooks, and what else is no formula of PyTorch's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import subclasses
from subclasses import inner
from tests.subclasses.subjects import declare

aten = torch.ops.aten


def log_class(key, **keywords):
    """Positive numbers by their logarithms, with a rule for products."""

    def multiply(func, x, y, **kwargs):
        if key is subclasses.arithmetic and func is not torch.mul:
            return NotImplemented
        return Log(sum(t.log if isinstance(t, Log) else t.log() for t in (x, y)))

    Log = declare(
        keywords={"fallback": "materialize", **keywords},
        log=inner(),
        materialize=lambda self: self.log.exp(),
        rules={key: multiply},
    )
    return Log


def once(w):
    (w * 1).sum().backward()


def node_hooks(w, run):
    y = w * 1
    y.grad_fn.register_hook(lambda *gradients: run())
    y.grad_fn.register_prehook(lambda *gradients: run())
    y.sum().backward()


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


HOOKS = {
    "tensor": lambda w, run: (w.register_hook(lambda g: run()), once(w)),
    "post accumulate": lambda w, run: (w.register_post_accumulate_grad_hook(lambda p: run()), once(w)),
    "node": node_hooks,
    "multi grad": lambda w, run: (
        torch.autograd.graph.register_multi_grad_hook([w], lambda gradients: run()),
        once(w),
    ),
    "saved tensors": saved_tensors,
    "module": module_hooks,
    "a function": backward_of_a_function,
    "with gradients": lambda w, run: (w.register_hook(lambda g: torch.enable_grad()(run)()), once(w)),
}


@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("key", [aten.mul, aten.mul.Tensor, subclasses.arithmetic], ids=str)
@pytest.mark.parametrize("hook", HOOKS)
def test_a_rule_that_meets_a_plain_tensor_keeps_its_result(hook, key, trainable):
    cls = log_class(key, trainable=trainable)
    stat, plain, found = cls(torch.full((3,), 200.0)), torch.full((3,), 2.0), []
    HOOKS[hook](torch.ones(3, requires_grad=True), lambda: found.append(stat * plain))
    assert found and {type(y) for y in found} == {cls}
    for y in found:
        torch.testing.assert_close(y.log, torch.full((3,), 200.0) + plain.log())


def test_an_in_place_op_of_a_gradient():
    def add(func, x, y, alpha=1):
        plain = y.materialize() if isinstance(y, Total) else y
        return Total(x.high + alpha * plain, x.low)

    Total = declare(
        keywords={"fallback": "materialize"},
        high=inner(),
        low=inner(),
        materialize=lambda self: self.high + self.low,
        rules={aten.add: add},
    )
    total, w = Total(torch.zeros(3), torch.ones(3)), torch.ones(3, requires_grad=True)
    w.register_hook(lambda g: total.add_(g, alpha=2))
    (3 * w).sum().backward()
    assert total.high.tolist() == [6.0, 6.0, 6.0]


@pytest.mark.parametrize("key", [aten.mul, subclasses.arithmetic], ids=str)
def test_a_formula_still_gives_plain_gradients_to_plain_operands(key):
    plain = torch.full((3,), 2.0, requires_grad=True)
    (log_class(key)(torch.zeros(3)) * plain).sum().backward()
    assert type(plain.grad) is Tensor
    torch.testing.assert_close(plain.grad, torch.ones(3))
