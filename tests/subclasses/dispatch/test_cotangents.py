"""Cotangents: the computations of rules and formulas with them, and the sums of cotangents."""

import operator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import subclasses
from subclasses import DispatchError, Outer, TensorSubclass, inner
from tests.doors import DOORS, by_desugar, by_stock, eager
from tests.subclasses.autograd.judge import agree, agreeing, numbers
from tests.subclasses.subjects import declare
from tests.tables import giving

aten = torch.ops.aten


# Represents the exponential of its inner tensor, so the sum of two values is not the sum of their inner tensors.
Log = declare(
    keywords={"fallback": "materialize", "kind": "structure"},
    logs=inner(differentiable=True, shape="..."),
    materialize=lambda self: self.logs.exp(),
)
# A class without a fallback, and without rules for the ops that autograd itself calls.
Bare = declare(values=inner(differentiable=True))


def of_views(held):
    x = Log(held)
    return x[0].logs * 2, x.logs, x.t()[1].unwrap("logs")


test_a_view_and_the_whole = agreeing(
    {"views": (of_views, lambda held: (held[0] * 2, held, held[:, 1]), [(2, 3)])},
    {"eager": eager, "stock": partial(by_stock, fullgraph=True), "desugar": partial(by_desugar, strict=True)},
)
test_a_list_of_operands = agreeing(
    {
        "two": (
            lambda held: (torch.cat([Log(held)] * 2).logs, Log(held).logs),
            lambda held: (torch.cat([held, held]), held),
            [2],
        )
    },
    {"eager": eager},
)


def test_a_rule_that_returns_an_operand_leaves_it_as_it_is():
    kept = Log(torch.ones(2))
    x = declare(Log, rules={aten.sin.default: lambda func, x: kept})(torch.ones(2)).requires_grad_()
    x.logs.sum().backward()
    assert x.grad._layout.cotangent and not kept._layout.cotangent


@pytest.mark.parametrize("reduce", [torch.sum, torch.mean])
def test_the_gradient_of_a_leaf_without_a_rule_for_what_autograd_calls(reduce):
    x = Bare(torch.ones(2, 3)).requires_grad_()
    for _ in range(2):
        reduce(x.values).backward()
    expected = torch.full((2, 3), 2.0 if reduce is torch.sum else 2 / 6)
    torch.testing.assert_close(x.grad.values, expected)
    assert x.grad.values.is_contiguous()


def by_name(func, x, y):
    return Named(x.values + y.values if func is torch.add else x.values * 0)


Named = declare(Bare, rules={torch.add: by_name, torch.sub: by_name})
test_numbers_of_results = giving(
    {
        "a cotangent divided by a number": (
            lambda: aten.div.Scalar(Log(torch.ones(2)).cotangent(torch.ones(2)), 4).logs.tolist(),
            [0.25, 0.25],
        ),
        # The rule gets `torch.add`, whichever name of that function the user calls.
        **{
            name: (lambda add=add: add(Named(torch.ones(1)), Named(torch.ones(1))).values.item(), 2)
            for name, add in {
                "torch.add": torch.add,
                "Tensor.add": Tensor.add,
                "Tensor.__add__": Tensor.__add__,
                "operator.add": operator.add,
            }.items()
        },
    }
)


# ---- cotangents that a rule materializes ---------------------------------------------------------------------


def pointwise(func, x, *args):
    if isinstance(x, Repeated) and not any(isinstance(a, Tensor) for a in args):
        return Repeated(func(x.numbers, *args))
    return func(*(a.materialize() if isinstance(a, Repeated) else a for a in (x, *args)))


# Its value repeats each number; its gradient belongs to the numbers.
Repeated = declare(
    keywords={"fallback": "materialize", "kind": "structure"},
    numbers=inner(shape="n"),
    outer=staticmethod(lambda numbers: Outer((2 * numbers.shape[0],))),
    materialize=lambda self: self.numbers.repeat(2),
    rules={torch.Tag.pointwise: pointwise, torch.sum: lambda func, x: func(x.unwrap("numbers")) * 2},
)


def test_a_rule_that_would_materialize_a_cotangent_is_derived():
    """The rule is derived, since the tensor that a cotangent represents is not its derivative.

    The gradient was once too large by the number of repeats.
    """
    (held,) = numbers(2)
    leaf = held.clone().requires_grad_()
    x = Repeated(leaf)
    cotangent = torch.autograd.grad(x.unwrap("numbers").sum(), x)[0]
    x.sigmoid().backward(cotangent)
    torch.testing.assert_close(leaf.grad, held.sigmoid() * (1 - held.sigmoid()))
    # Reads the inner tensor of the rule's result: the rule's derivative.
    agree(lambda t: Repeated(t).sigmoid().sum(), lambda t: t.repeat(2).sigmoid().sum(), [held])


def test_a_gradient_is_not_materialized():
    x = Repeated(torch.ones(2)).requires_grad_()
    x.unwrap("numbers").sum().backward()
    with pytest.raises(
        DispatchError, match="which does not represent a plain tensor; read its inner tensors instead"
    ):
        x.grad.materialize()
    assert x.grad.numbers.tolist() == [1, 1] and x.materialize().tolist() == [1, 1, 1, 1]


# ---- cotangents of a class with a rule for + -----------------------------------------------------------------


def logs_with(kind):
    """A class of logarithms, whose sum is ``logaddexp``, by a rule of a kind."""

    def add(func, x, y, *, alpha=1):
        if kind == "family" and func is not torch.add:
            return NotImplemented
        logs = [t.unwrap("log") if kind == "function" else t.log for t in (x, y)]
        return Logs(torch.logaddexp(*logs))

    key = {
        "op": torch.ops.aten.add.Tensor,
        "family": subclasses.arithmetic,
        "tag": torch.Tag.pointwise,
        "function": torch.add,
    }.get(kind)
    Logs = declare(keywords={"fallback": "views"}, log=inner(), rules={key: add} if key else {})
    return Logs


READS = {
    "twice": lambda x: x.unwrap("log").sum() + 2 * x.unwrap("log").sum(),
    "of a view": lambda x: x.view(2).unwrap("log").sum() + 2 * x.unwrap("log").sum(),
    "of two views": lambda x: x.view(2).unwrap("log").sum() + 2 * x.view(1, 2).unwrap("log").sum(),
}


LOGS = {kind: logs_with(kind) for kind in ("none", "op", "family", "tag", "function")}


test_cotangents_are_added_whatever_the_rule_of_addition_says = agreeing(
    {
        f"{name}, {kind}": (lambda h, read=read, cls=cls: read(cls(h)), lambda h: 3 * h.sum(), [2])
        for kind, cls in LOGS.items()
        for name, read in READS.items()
    },
    {"eager": eager, "desugar": partial(by_desugar, fullgraph=True)},
)


@pytest.mark.parametrize("kind", LOGS)
def test_gradients_accumulate_whatever_the_rule_of_addition_says(kind):
    x = LOGS[kind](torch.zeros(2)).requires_grad_()
    for _ in range(2):
        x.unwrap("log").sum().backward()
    assert x.grad.log.tolist() == [2, 2]


def angle(cls, raw):
    return super(Angle, cls).__new__(cls, torch.remainder(raw, 6.0))


def by_numbers(func, x, y):
    return type(x)(func(x.raw, y.raw if isinstance(y, TensorSubclass) else y))


Angle = declare(
    keywords={"fallback": "views"}, raw=inner(), __new__=angle, rules={subclasses.arithmetic: by_numbers}
)
Length = declare(raw=inner(), rules={subclasses.arithmetic: by_numbers})
ARITHMETIC = {
    "double": (Angle, lambda x: 2 * x),
    "negative": (Angle, lambda x: -x),
    "sum": (Angle, lambda x: x + x),
    "half": (Angle, lambda x: x / 2),
    "two products": (Angle, lambda x: x * 1 + x * 2),
    "a cube": (Length, lambda x: x * x * x + x),
}


@pytest.mark.parametrize("name", ARITHMETIC)
def test_a_constructor_that_normalizes_leaves_gradients_alone(name):
    """And the author's rule answers for the product of a cotangent and a value, of a derivative of a product."""
    cls, call = ARITHMETIC[name]

    def gradient(made, read):
        start = torch.tensor([0.5, 1.0], requires_grad=True)
        return torch.autograd.grad((-read(call(made(start)))).sum(), start)

    torch.testing.assert_close(
        gradient(cls, lambda x: x.unwrap("raw")), gradient(lambda t: t, lambda t: t), rtol=0, atol=0
    )


# ---- derivatives of mapped ops of a class with rules: PyTorch's formulas do not call its rules -----------------


def product(func, x, y):
    a, b = (x.low, x.high) if isinstance(x, Interval) else (x, x)
    c, d = (y.low, y.high) if isinstance(y, Interval) else (y, y)
    products = torch.stack(torch.broadcast_tensors(a * c, a * d, b * c, b * d))
    return Interval(products.amin(0), products.amax(0))


def comparison(func, x, y):
    """Whether it is certain."""
    if not isinstance(y, Interval):
        return func(x.low, y) & func(x.high, y)
    return func(x.high, y.low) if func in (torch.lt, torch.le) else func(x.low, y.high)


ENDS = {"low": inner(), "high": inner()}
Interval = declare(
    keywords={"fallback": "map"}, rules={aten.mul: product, subclasses.comparisons: comparison}, **ENDS
)
# Has no rule for an op of a vector space.
Compared = declare(keywords={"fallback": "map"}, rules={subclasses.comparisons: comparison}, **ENDS)


def through_a_view(x):
    y = x + 0
    y[:2].atan_()
    return y


CASES = {
    "pow": lambda x: x.pow(3),
    "atan": torch.atan,
    "erf": torch.erf,
    "clamp": lambda x: x.clamp(-1, 1),
    "clamp by a tensor": lambda x: torch.clamp(x, torch.tensor(-1.0, dtype=torch.float64)),
    "prod": lambda x: x.prod(0),
    "hardtanh": F.hardtanh,
    "tanh in place": lambda x: (x + 0).tanh_(),
    "pow in place": lambda x: (x + 0).pow_(3),
    "clamp in place": lambda x: (x + 0).clamp_(-1, 1),
    "through a view": through_a_view,
    "twice": lambda x: x.atan().clamp(-1, 1).pow(3),
}
LOW = torch.tensor([-3.0, -2.0, 0.5, 0.2], dtype=torch.float64)
HIGH = LOW + torch.tensor([2.5, 3.0, 1.5, 0.1], dtype=torch.float64)


test_gradients_are_those_of_each_inner_tensor = agreeing(
    {
        f"{case}, {name}": (
            lambda low, high, fn=fn, cls=cls: fn(cls(low, high)).unwrap(),
            lambda low, high, fn=fn: (fn(low), fn(high)),
            [LOW, HIGH],
        )
        for case, fn in CASES.items()
        for name, cls in {"interval": Interval, "compared": Compared}.items()
    }
)
Cubed, Boxed = declare(keywords={"fallback": "map"}), declare(keywords={"fallback": "map"})


def innermost(x):
    return innermost(x.unwrap("held")) if isinstance(x, TensorSubclass) else x


@pytest.mark.parametrize("door", ["eager", "inside", "desugar"])
@pytest.mark.parametrize("nested", [False, True])
def test_the_gradient_of_a_parameter_is_differentiated_again(nested, door):
    p = Cubed(torch.tensor([3.0]))
    p = nn.Parameter(Boxed(p) if nested else p)
    y = DOORS[door](lambda w: innermost(w * w * w))(p).sum()
    (d,) = torch.autograd.grad(y, p, create_graph=True)
    (y + innermost(d).sum()).backward()
    assert innermost(p.grad).item() == 27 + 18


def attention(x, w):
    x = F.layer_norm(x, x.shape[-1:], w[0, 0])
    return F.conv1d(F.scaled_dot_product_attention(x, x + 1, x, is_causal=True).flatten(0, 1), w)


# PyTorch's formula for attention leaves it to its kernel to see that a gradient is absent.
test_attention_and_other_ops_of_several_operands = agreeing(
    {
        "attention": (
            lambda a, b, v, w: attention(Interval(a, b), Interval(v, w)).unwrap(),
            lambda a, b, v, w: (attention(a, v), attention(b, w)),
            [*((2, 3, 4, 8),) * 2, *((8, 4, 8),) * 2],
        )
    }
)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
@pytest.mark.parametrize(
    "fn", [lambda x: x.double(), lambda x: x.double() * 2, lambda x: (x * 2).bfloat16(), lambda x: x.half()]
)
def test_a_change_of_dtype_beside_integers_and_a_rule(fn, dtype):
    """The backward converts the cotangent, in which integers stay what they are."""
    Known = declare(
        keywords={"fallback": "map"},
        held=inner(),
        known=inner(dtype=dtype),
        rules={aten.mul: lambda func, x, y: Known(func(x.held, y), x.known.clone())},
    )

    def changed(t):
        y = fn(Known(t, torch.ones(3, dtype=dtype)))
        assert y.known.dtype == dtype
        return y.unwrap("held")

    agree(changed, fn, [torch.ones(3)])
