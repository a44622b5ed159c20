"""``derivative="formula"``: a rule of a structure whose derivative is PyTorch's formula for the op."""

import math

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from subclasses import DispatchError, SpecError, inner
from tests.doors import COMPILED, DOORS
from tests.subclasses.autograd.judge import agree, agreeing, passing
from tests.subclasses.subjects import declare
from tests.tables import raising

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
    """Rounds, which has no gradient in autograd; the formula is the derivative of the exact product."""
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


def of_logs(name):
    """A function of logarithms, and the same of the numbers."""
    fn, plain = FUNCTIONS[name]
    return lambda a, b: fn(Log(a), Log(b)), lambda a, b: plain(a.exp(), b.exp()), leaves()


test_the_gradient_is_that_of_the_exact_op = agreeing({name: of_logs(name) for name in FUNCTIONS}, **CLOSE)
test_second_derivatives_are_by_the_formula_too = agreeing(
    {"a product": of_logs("a product")}, {"eager": DOORS["eager"]}, twice=["eager"], **CLOSE
)


def product(a, b):
    return a.exp() * b.exp()


def test_a_leaf_has_a_gradient_for_each_inner_tensor():
    x, y = (Log(t.detach()).requires_grad_() for t in leaves())
    (x * y).materialize().sum().backward()
    assert type(x.grad) is Log.Cotangent
    torch.testing.assert_close(
        x.grad.log, x.materialize().detach() * y.materialize().detach(), rtol=1e-3, atol=1e-3
    )


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


# Ways to a result by a formula that lose its mark: a gradient by inner tensors reaches the formula all the same.
AROUND = {
    "checkpoint": lambda x: checkpoint(lambda z: z.materialize().sin(), x * 3.0, use_reentrant=True),
    "a value that holds it": lambda x: Box(x * 3.0).unwrap("held").materialize(),
    "an autograd function": lambda x: passing(lambda g: g)(x * 3.0).materialize(),
    "a mapped op of a value that holds one": lambda x: (Box(x) * 3.0).unwrap("held").materialize(),
}


test_the_formula_scales_no_gradient_by_inner_tensors = raising(
    {
        name: (
            lambda call=call: call(Times(leaves()[0])).sum().backward(),
            r"aten\.mul\.\w+ on .*Cotangent: PyTorch's formula",
        )
        for name, call in AROUND.items()
    }
)


COPIES = {
    "clone": lambda z: z.clone(),
    "to": lambda z: z.to(torch.float64),
    "contiguous": lambda z: z.contiguous(),
    "detach and back": lambda z: z.alias() if hasattr(z, "alias") else z.view_as(z),
}


Other = declare(
    keywords={"fallback": "materialize", "kind": "structure"}, materialize=lambda self: self.held * 2
)
Own = declare(Log)
Own.implements(aten.exp.default, derivative="formula")(lambda func, x: Other(x.log.exp().exp() / 2))
test_a_copy_of_a_result_is_one_too = agreeing(
    {
        **{
            name: (lambda a, b, copy=copy: copy(Log(a) * Log(b)).materialize(), product, leaves())
            for name, copy in COPIES.items()
        },
        "a value of another class": (
            lambda a: Own(a).exp().materialize(),
            lambda a: a.exp().exp(),
            leaves()[:1],
        ),
    },
    {"eager": DOORS["eager"]},
    check_dtype=False,
    **CLOSE,
)


REFUSED = [
    (Log, (torch.mul,), "formula", "autograd differentiates a rule for"),
    (Log, (aten.linear.default,), "formula", "name an op that PyTorch does not decompose"),
    (Log, (aten.sinh.default,), "exact", 'expected derivative="formula" or None'),
    (Box, (aten.sinh.default,), "formula", r"has no materialize\(\) or maps ops"),
]


test_what_is_refused = raising(
    [
        (lambda cls=cls, ops=ops, how=how: cls.implements(*ops, derivative=how), SpecError, words)
        for cls, ops, how, words in REFUSED
    ]
)
