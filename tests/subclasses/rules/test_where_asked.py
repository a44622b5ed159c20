"""Rules are called alike in eager mode and in compiled code, by whatever name and with whatever arguments."""

import operator
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import subclasses
from subclasses import DispatchError, SpecError, TensorSubclass, inner
from tests.subclasses.subjects import MODES, declare
from tests.tables import giving, raising

aten = torch.ops.aten


One = declare(
    name="One",
    keywords={"fallback": "materialize", "kind": "structure"},
    raw=inner(),
    materialize=lambda self: self.raw * 1,
)


def with_rule(key, rule, **keywords):
    return declare(One, name="Ruled", rules={key: rule}, keywords=keywords)


# ---- overloads ---------------------------------------------------------------------------------------------

REDUCING = {
    "x.f(0)": lambda x, name: getattr(x, name)(0),
    "torch.f(x, 1)": lambda x, name: getattr(torch, name)(x, 1),
    "torch.f(x, -1, False)": lambda x, name: getattr(torch, name)(x, -1, False),
    "torch.f(x, False)": lambda x, name: getattr(torch, name)(x, False),
    "torch.f(x, dim=0)": lambda x, name: getattr(torch, name)(x, dim=0),
}


@pytest.mark.sweep(18)
@pytest.mark.parametrize("door", MODES)
@pytest.mark.parametrize("call", REDUCING)
@pytest.mark.parametrize("name", ["var", "std", "var_mean", "std_mean"])
def test_a_dim_is_no_flag(name, call, door):
    """The dispatcher takes the 0 of ``x.var(0)`` for ``unbiased=False``."""
    if call == "x.f(0)" and not hasattr(Tensor, name):
        pytest.skip("no method")
    cls = with_rule(getattr(aten, name), lambda func, x, *args, **kwargs: func(x.raw, *args, **kwargs))
    plain, run = torch.arange(6.0).view(3, 2), REDUCING[call]
    torch.testing.assert_close(MODES[door](lambda x: run(x, name))(cls(plain)), run(plain, name))


# ---- functions ---------------------------------------------------------------------------------------------

CALLS = {
    "F.pad": (F.pad, lambda x: F.pad(x, (1, 1))),
    "F.pad by a module": (F.pad, nn.ConstantPad1d(1, 0.0)),
    "F.pad by reflection": (F.pad, lambda x: F.pad(x, (1, 1), mode="reflect")),
    "F.rms_norm": (F.rms_norm, lambda x: F.rms_norm(x, (4,))),
    "F.rms_norm by a module": (F.rms_norm, nn.RMSNorm(4)),
    "torch.rms_norm": (torch.rms_norm, nn.RMSNorm(4)),
    "F.threshold": (F.threshold, nn.Threshold(1.0, 0.0)),
    "F.dropout of nothing": (F.dropout, lambda x: F.dropout(x, 0.0)),
    "F.dropout in evaluation": (F.dropout, lambda x: F.dropout(x, 0.5, False)),
    "nn.Dropout in evaluation": (F.dropout, nn.Dropout(0.5).eval()),
    "torch.dropout": (torch.dropout, lambda x: torch.dropout(x, 0.5, False)),
    "the op dropout": (aten.dropout.default, lambda x: F.dropout(x, 0.5, False)),
    "F.multilabel_margin_loss": (
        F.multilabel_margin_loss,
        lambda x: F.multilabel_margin_loss(x, torch.zeros(3, 4, dtype=torch.int64)),
    ),
}


@pytest.mark.sweep(12)
@pytest.mark.parametrize("door", MODES)
@pytest.mark.parametrize("call", CALLS)
def test_a_rule_for_a_function(call, door):
    key, run = CALLS[call]
    cls = with_rule(key, lambda func, x, *args, **kwargs: torch.full((2,), 7.0))
    assert MODES[door](run)(cls(torch.ones(3, 4))).tolist() == [7, 7]


@pytest.mark.parametrize("door", MODES)
def test_functions_on_plain_tensors_stay_as_they_are(door):
    with_rule(F.pad, lambda func, x, *args, **kwargs: x)

    def run(x):
        return F.threshold(F.rms_norm(F.pad(x, (1, 1), value=2.0), (6,)), 0.5, 0.0), F.dropout(x, 0.0)

    x = torch.rand(3, 4, requires_grad=True)
    got, expected = MODES[door](run)(x), run(x)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(*(torch.autograd.grad(t[0].sum(), x) for t in (got, expected)))


# ---- views and sizes ---------------------------------------------------------------------------------------


@pytest.mark.sweep(2)
@pytest.mark.parametrize("door", ["eager", "inside", "desugar"])
@pytest.mark.parametrize("fallback", ["materialize", "error"])
def test_a_column_where_the_number_of_rows_is_a_symbol(fallback, door):
    """PyTorch takes a slice of all rows first, where it does not know their number."""
    cls = with_rule(aten.select.int, lambda func, x, *args: type(x)(func(x.raw, *args)), fallback=fallback)
    column = MODES[door](lambda x: x[:, 1])
    for rows in (3, 4, 5, 1):
        x = cls(torch.randn(rows, 2))
        y = column(x)
        assert type(y) is cls and torch.equal(y.raw, x.raw[:, 1])


# ---- equality ----------------------------------------------------------------------------------------------


def equals(func, x, y):
    both = isinstance(x, TensorSubclass) and isinstance(y, TensorSubclass)
    return func(x.held, y.held) if both else NotImplemented


@pytest.mark.sweep(3)
@pytest.mark.parametrize("door", MODES)
@pytest.mark.parametrize(
    "keys", [[subclasses.comparisons], [torch.eq, torch.ne]], ids=["family", "functions"]
)
def test_equality_that_a_rule_leaves_is_no_bool(keys, door):
    x, plain = declare(name="Own", rules=dict.fromkeys(keys, equals))(torch.ones(3)), torch.ones(3)
    assert MODES[door](lambda x: x == x)(x).tolist() == [True] * 3
    for wrong in (lambda x: x == plain, lambda x: plain == x, lambda x: x != 2, lambda x: torch.eq(x, 2)):
        with pytest.raises(Exception, match=r"(eq|ne).* on an Own: the rule .* returned NotImplemented"):
            MODES[door](wrong)(x)
    with pytest.raises(DispatchError, match="returned NotImplemented"):
        _ = x == plain
    assert (x == None, x != "x") == (False, True)  # noqa: E711 - Python's own, as of any tensor


# ---- indexing ----------------------------------------------------------------------------------------------


@pytest.fixture
def indexed():
    return with_rule(aten.index, lambda func, x, indices: type(x)(func(x.raw, indices)))


@pytest.mark.parametrize("door", ["eager", "inside", "desugar"])
def test_second_derivatives_of_an_index(indexed, door):
    rows, leaf = torch.tensor([0, 0, 2]), torch.arange(1.0, 7).view(3, 2).requires_grad_()

    def penalized(y):
        loss = y.pow(3).sum()
        (g,) = torch.autograd.grad(loss, leaf, create_graph=True)
        return torch.autograd.grad(loss + g.square().sum(), leaf)[0]

    x = indexed(leaf)  # which a second derivative runs the function with again
    torch.testing.assert_close(
        penalized(MODES[door](lambda x: x[rows])(x).unwrap("raw")), penalized(leaf[rows])
    )


def test_hooks_on_what_is_indexed(indexed):
    met, x = [], indexed(torch.ones(3, 2, requires_grad=True))
    for take in (lambda: x[torch.tensor([0])], lambda: x[torch.tensor([True, False, True])]):
        y = take()
        y.register_hook(lambda g: met.append(type(g)))
        y.unwrap("raw").sum().backward()
    assert met == [indexed.Cotangent, indexed.Cotangent]


DOORS = {name: MODES[name] for name in ("eager", "desugar")}
# ---- rules for functions that write to an argument ---------------------------------------------------------

first = (torch.tensor([0]),)
WRITES = {
    "x.mul_(y)": (Tensor.mul_, lambda z: z.mul_(3)),
    "x[i] = y": (Tensor.__setitem__, lambda z: z.__setitem__(0, 0.0)),
    "x &= y": (Tensor.__iand__, lambda z: z.__iand__(3)),
    "x **= y": (Tensor.__ipow__, lambda z: z.__ipow__(3)),
    "x <<= y": (Tensor.__ilshift__, lambda z: z.__ilshift__(1)),
    "torch.relu_": (torch.relu_, torch.relu_),
    "F.hardtanh_": (F.hardtanh_, F.hardtanh_),
    "torch.index_put_": (torch.index_put_, lambda z: torch.index_put_(z, first, torch.tensor(0.0))),
    "inplace=True": (F.relu, lambda z: F.relu(z, inplace=True)),
    "inplace by position": (F.elu, lambda z: F.elu(z, 1.0, True)),
    "out=": (torch.add, lambda z: torch.add(z, 1, out=z)),
}


def halving(func, x, *args, **kwargs):
    x.held.mul_(0.5)
    return x


def five_times(func, x, *args, **kwargs):
    return type(x)(x.held * 5)


def ruled(key, rule):
    return declare(
        name="Ruled", rules={torch.ops.aten.mul: lambda func, x, y: type(x)(func(x.held, y)), key: rule}
    )


@pytest.mark.sweep(12)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", WRITES)
def test_a_write_that_autograd_does_not_see_is_an_error(name, door):
    key, call = WRITES[name]
    Ruled = ruled(key, halving)

    def f(x):
        z = x * 1.0
        call(z)
        return z

    with pytest.raises(Exception, match=r"the rule halving .* where autograd does not see it"):
        DOORS[door](f)(Ruled(torch.ones(2, requires_grad=True)))
    assert DOORS[door](f)(Ruled(torch.ones(2))).held.tolist() == [0.5, 0.5]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", [name for name in WRITES if name != "x[i] = y"])
def test_a_write_that_would_be_lost_is_an_error(name, door):
    key, call = WRITES[name]
    x = ruled(key, five_times)(torch.ones(2))
    with pytest.raises(
        Exception, match=r"returned a value with memory of its own, in place of the Ruled to write to"
    ):
        DOORS[door](lambda x: call(x))(x)
    assert x.held.tolist() == [1.0, 1.0]


test_what_is_advised_instead = raising(
    {
        name: (
            lambda name=name: WRITES[name][1](
                ruled(WRITES[name][0], halving)(torch.ones(2, requires_grad=True) * 1)
            ),
            re.escape(advice),
        )
        for name, advice in {
            "x.mul_(y)": "torch.ops.aten.mul_)",
            "x **= y": "torch.ops.aten.pow_)",
            "x &= y": "as torch.bitwise_and does",
            "x[i] = y": "torch.ops.aten.copy_), and select, slice",
            "inplace=True": "torch.ops.aten.relu_)",
            "out=": "as torch.add does",
        }.items()
    }
)


test_a_function_that_is_not_asked_to_write_may_return_a_new_value = giving(
    {
        f"{options}": (
            lambda options=options: F.relu(
                ruled(F.relu, five_times)(torch.ones(2, requires_grad=True)), **options
            ).held.tolist(),
            [5.0, 5.0],
        )
        for options in ({}, {"inplace": False})
    }
)


HELD = declare(name="Held", held=inner(differentiable=True))
BITS = declare(
    HELD,
    rules={
        torch.bitwise_and: lambda func, a, b: BITS(torch.minimum(a.held, b.held)),
        torch.bitwise_not: lambda func, a: BITS(1 - a.held),
    },
)
# Their ops have no derivative, so the advice is a rule for the function.
test_operators_of_bits_without_a_rule = raising(
    [
        *(
            (
                lambda operation=operation: operation(*[HELD(torch.rand(2, requires_grad=True))] * 2),
                words,
            )
            for operation, words in (
                (
                    torch.ops.aten.bitwise_and,
                    r"@Held\.implements\(torch\.bitwise_and\): the op has no derivative",
                ),
                (
                    operator.iand,
                    r"write x = torch\.bitwise_and\(x, \.\.\.\), with a rule for that function",
                ),
            )
        ),
        (
            lambda: declare(name="Bits", __invert__=lambda self: self),
            SpecError,
            r"Bits\.__invert__ .*@Bits\.implements\(torch\.bitwise_not\)",
        ),
    ]
)


def test_operators_of_bits_on_numbers():
    x = BITS(torch.rand(2, requires_grad=True))
    for found in (~x, torch.bitwise_not(x), x.bitwise_not()):
        torch.testing.assert_close(found.held, 1 - x.held)
    assert ((~x) & x).held.requires_grad
