"""Derivatives under dispatch modes, which see each op below autograd, and rules that hooks call in a backward.

`desugar.explain` records ops with a mode, too, and has to show the program that runs.
"""

import contextlib

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import desugar
import subclasses
from subclasses import inner
from tests.doors import DOORS
from tests.subclasses.autograd.judge import agreeing, passing
from tests.subclasses.subjects import declare

aten = torch.ops.aten


class Logging(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def copy_rule(func, x, y, non_blocking=False):
    numbers, known = (y.numbers, y.known) if isinstance(y, Masked) else (y, torch.ones_like(x.known))
    x.numbers.copy_(numbers)
    x.known.copy_(known)
    return x


# Its rules compute something else than the ops, which tells their derivatives from PyTorch's.
Masked = declare(
    keywords={"fallback": "views"},
    numbers=inner(),
    known=inner(dtype=torch.bool),
    rules={
        aten.mul.Tensor: lambda func, x, y: Masked(x.numbers * y * y, x.known),
        aten.mul_.Tensor: lambda func, x, y: (x.numbers.mul_(y).mul_(y), x)[1],
        aten.mm: lambda func, x, y: Masked((x.numbers @ y.numbers).exp(), x.known),
        aten.add.Tensor: lambda func, x, y: Masked(x.numbers * y.numbers, x.known & y.known),
        aten.copy_: copy_rule,
    },
)


FUNCTIONS = {
    "product": lambda x, y: x * y,
    "in place": lambda x, y: x.mul_(y),
    "copied": lambda x, y: (x.copy_(y), x)[1],
    "view": lambda x, y: x[0].mul_(y[0]),
    "several ops": lambda x, y: torch.matrix_power(x, 3),
}


def operands():
    """A leaf, a value that was made of it, and a plain leaf."""
    a, y = torch.full((2, 2), 0.5, requires_grad=True), torch.full((2, 2), 3.0, requires_grad=True)
    return a, Masked(a * 1, torch.tensor([[True, False], [False, True]])), y


def gradients(function, mode):
    a, x, y = operands()
    with mode:
        out = function(x, y)
        found = torch.autograd.grad(out.unwrap("numbers").sum(), (a, y), allow_unused=True)
    return out.unwrap("numbers"), out.known, *found


@pytest.mark.parametrize("mode", [Logging, lambda: FlopCounterMode(display=False)], ids=["log", "flops"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_derivatives_are_those_of_the_rules(name, mode):
    torch.testing.assert_close(
        gradients(FUNCTIONS[name], mode()), gradients(FUNCTIONS[name], contextlib.nullcontext())
    )


def test_a_mode_sees_the_ops():
    with Logging() as log:
        gradients(FUNCTIONS["in place"], contextlib.nullcontext())
    assert "aten.mul_.Tensor" in log.ops


@pytest.mark.parametrize("mode", [contextlib.nullcontext, Logging])
def test_gradients_are_added_by_inner_tensors(mode):
    """The sum of gradients adds inner tensors, even if the class has a rule for sums of values."""
    a, _, _ = operands()
    x = Masked(a, torch.ones(2, 2, dtype=torch.bool))
    fives = passing(lambda g: Masked(torch.full((2, 2), 5.0), g.known))
    with mode():
        sum(fives(x).unwrap("numbers") for _ in range(2)).sum().backward()
    assert a.grad.tolist() == [[10.0, 10.0], [10.0, 10.0]]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", ["in place", "copied", "view"])
def test_explain_shows_the_program_that_runs(name):
    _, x, y = operands()
    graph = next(g for g in desugar.explain(FUNCTIONS[name], x, y).program.graphs if "backward" in g.name)
    backward = desugar.trace(FUNCTIONS[name], x, y).backward
    ops = [n.target.__name__ for n in backward.graph.nodes if n.op == "call_function"]
    assert graph.text.count("torch.ops.") == len(ops)
    assert all(op in graph.text for op in ops)


@pytest.mark.parametrize("door", [door for door in DOORS if door != "stock"])
def test_what_is_overwritten_gets_zeros(door):
    _, known, *found = gradients(DOORS[door](FUNCTIONS["copied"]), contextlib.nullcontext())
    torch.testing.assert_close(found, [torch.zeros(2, 2), torch.ones(2, 2)])
    assert bool(known.all())


# ---- rules in Python code that the engine calls in a backward --------------------------------------------------


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
    "a function": lambda w, run: passing(lambda g: (run(), g)[1])(w * 2).sum().backward(),
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
        return Total(x.high + alpha * (y.materialize() if isinstance(y, Total) else y), x.low)

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


test_a_formula_still_gives_plain_gradients_to_plain_operands = agreeing(
    {
        str(key): (
            lambda plain, cls=cls: (cls(torch.zeros(3)) * plain).sum(),
            lambda plain: plain.sum(),
            [torch.full((3,), 2.0)],
        )
        for key, cls in ((key, log_class(key)) for key in (aten.mul, subclasses.arithmetic))
    },
    {"eager": DOORS["eager"]},
)
