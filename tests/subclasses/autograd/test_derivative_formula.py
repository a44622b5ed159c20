"""``derivative="formula"``: a rule of a structure whose derivative is PyTorch's formula for the op."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import subclasses
from subclasses import DispatchError, SpecError, inner
from tests.doors import COMPILED
from tests.subclasses.autograd.judge import agree
from tests.subclasses.subjects import declare

aten = torch.ops.aten


# Positive numbers by their logarithms; a product by a formula, a sum by autograd.
Log = declare(
    name="Log",
    keywords={"fallback": "materialize", "kind": "structure"},
    log=inner(),
    materialize=lambda self: self.log.exp(),
    rules={
        aten.add.Tensor: lambda func, x, y: Log(torch.logaddexp(x.log, y.log)),
        aten.sqrt.default: lambda func, x: Log(x.log / 2),
    },
)


@Log.implements(aten.mul.Tensor, derivative="formula")
def rounded(func, x, y):
    """Rounds, which autograd would give no gradient; the formula is that of the exact product."""
    if not (isinstance(x, Log) and isinstance(y, Log)):
        return func(*(t.materialize() if isinstance(t, Log) else t for t in (x, y)))
    return Log((x.log + y.log).round(decimals=3))


CLOSE = {"rtol": 3e-3, "atol": 1e-3}


def leaves():
    return [torch.tensor(v, requires_grad=True) for v in ([0.5, 1.25, -0.25], [1.0, 0.5, 2.0])]


FUNCTIONS = {
    "a product": (lambda x, y: (x * y).materialize(), lambda x, y: x * y),
    "a product of a sum": (lambda x, y: ((x + y) * y).materialize(), lambda x, y: (x + y) * y),
    "a product that is read by an op": (lambda x, y: torch.sin(x * y), lambda x, y: torch.sin(x * y)),
    "a view of a product": (lambda x, y: (x * y)[1:], lambda x, y: (x * y)[1:]),
    "two products": (lambda x, y: (x * y * x).materialize(), lambda x, y: x * y * x),
    "a product beside inner tensors": (
        lambda x, y: (x * y).materialize() + x.unwrap("log"),
        lambda x, y: x * y + x.log(),
    ),
    "a product with a plain tensor": (lambda x, y: x * y.materialize(), lambda x, y: x * y),
    "in place": (lambda x, y: (x * y).mul_(y).materialize(), lambda x, y: x * y * y),
}


def check(names, **how):
    agree(
        lambda a, b: [FUNCTIONS[name][0](Log(a), Log(b)) for name in names],
        lambda a, b: [FUNCTIONS[name][1](a.exp(), b.exp()) for name in names],
        leaves(),
        **how,
        **CLOSE,
    )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_gradient_is_that_of_the_exact_op(name):
    """Second derivatives are by the formula too."""
    check([name], twice=name == "a product")


@pytest.mark.parametrize("door", COMPILED)
def test_compiled_gradients(door):
    check(list(FUNCTIONS), door=door)


def product(a, b):
    return a.exp() * b.exp()


def test_a_leaf_has_a_gradient_for_each_inner_tensor():
    x, y = (Log(t.detach()).requires_grad_() for t in leaves())
    (x * y).materialize().sum().backward()
    assert type(x.grad) is Log.Cotangent
    exact = x.materialize().detach() * y.materialize().detach()
    torch.testing.assert_close(x.grad.log, exact, rtol=1e-3, atol=1e-3)


UNREADABLE = {
    "unwrap": lambda x, y: (x * y).unwrap("log"),
    "a rule that autograd differentiates": lambda x, y: (x * y) + x,
    "a clone, then unwrap": lambda x, y: (x * y).clone().unwrap("log"),
    "a write": lambda x, y: (x * y).add_(y),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_inner_tensors_of_a_result_are_not_read_where_gradients_are_recorded(name):
    x, y = map(Log, leaves())
    with pytest.raises(DispatchError, match=r"that a rule for an op made.*x\.materialize\(\)"):
        UNREADABLE[name](x, y)
    with torch.no_grad():
        UNREADABLE[name](x, y)


def test_a_rule_that_autograd_differentiates_calls_no_such_op_on_its_operands():
    rules = dict.fromkeys([aten.square.default, aten.sinh.default], lambda func, x: x * x)
    x = declare(Log, name="Own", rules=rules)(leaves()[0])
    with pytest.raises(DispatchError, match=r"aten.mul.Tensor on an Own inside of a rule"):
        torch.sinh(x)
    with torch.no_grad():
        torch.testing.assert_close(torch.sinh(x).log, 2 * x.log)


@pytest.mark.parametrize("door", COMPILED)
def test_a_result_in_a_compiled_function(door):
    """Its gradient is plain; stock ``torch.compile`` returns no such result."""
    run = COMPILED[door](lambda a, b: Log(a) * Log(b))
    if door == "stock":
        with pytest.raises(Exception, match=r"desugar\.compile"):
            run(*leaves())
        return
    agree(lambda a, b: run(a, b).materialize(), product, leaves(), **CLOSE)


# With a rule for a number, by which the formula scales the gradient of the product.
Times = declare(Log)


@Times.implements(aten.mul.Tensor, derivative="formula")
def times(func, x, y):
    return Times(x.log + math.log(y)) if not isinstance(y, Tensor) else rounded(func, x, y)


Box = declare(keywords={"fallback": "map"}, held=inner(), annotations={"held": Times})


class Passed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


# Ways to a result by a formula that lose its mark: a gradient by inner tensors reaches the formula all the same.
AROUND = {
    "checkpoint": lambda x: checkpoint(lambda z: z.materialize().sin(), x * 3.0, use_reentrant=True),
    "a value that holds it": lambda x: Box(x * 3.0).unwrap("held").materialize(),
    "an autograd function": lambda x: Passed.apply(x * 3.0).materialize(),
    "a mapped op of a value that holds one": lambda x: (Box(x) * 3.0).unwrap("held").materialize(),
}


@pytest.mark.parametrize("name", AROUND)
def test_the_formula_scales_no_gradient_by_inner_tensors(name):
    with pytest.raises(DispatchError, match=r"aten\.mul\.\w+ on .*Cotangent: PyTorch's formula"):
        AROUND[name](Times(leaves()[0])).sum().backward()


COPIES = {
    "clone": lambda z: z.clone(),
    "to": lambda z: z.to(torch.float64),
    "contiguous": lambda z: z.contiguous(),
    "detach and back": lambda z: z.alias() if hasattr(z, "alias") else z.view_as(z),
}


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_of_a_result_is_one_too(name):
    agree(
        lambda a, b: COPIES[name](Log(a) * Log(b)).materialize(),
        product,
        leaves(),
        check_dtype=False,
        **CLOSE,
    )


def test_a_rule_may_return_a_value_of_another_class():
    Other = declare(
        keywords={"fallback": "materialize", "kind": "structure"}, materialize=lambda self: self.held * 2
    )
    Own = declare(Log)
    Own.implements(aten.exp.default, derivative="formula")(lambda func, x: Other(x.log.exp().exp() / 2))
    agree(lambda a: Own(a).exp().materialize(), lambda a: a.exp().exp(), leaves()[:1])


REFUSED = [
    (Log, (torch.mul,), "formula", "autograd differentiates a rule for"),
    (Log, (aten.linear.default,), "formula", "name an op that PyTorch does not decompose"),
    (Log, (aten.sinh.default,), "exact", 'expected derivative="formula" or None'),
    (Box, (aten.sinh.default,), "formula", r"has no materialize\(\) or maps ops"),
]


@pytest.mark.parametrize(("cls", "ops", "derivative", "words"), REFUSED)
def test_what_is_refused(cls, ops, derivative, words):
    with pytest.raises(SpecError, match=words):
        cls.implements(*ops, derivative=derivative)
    assert subclasses.coverage(Log)
