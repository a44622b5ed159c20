"""Rules for families: each expression reaches the rule with the operands as they are written."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import subclasses
from subclasses import SpecError, TensorSubclass
from subclasses.rules.families import Family
from tests.subclasses.subjects import MODES, declare
from tests.tables import giving, raising

aten = torch.ops.aten

DOORS = {name: MODES[name] for name in ("eager", "stock", "desugar")}


CALLS: list[tuple] = []


def held(x):
    return x.held if isinstance(x, TensorSubclass) else x


def combine(func, x, y):
    CALLS.append((func, x, y))
    return Held(func(*(t if isinstance(t, Tensor) else torch.as_tensor(t) for t in map(held, (x, y)))))


def reduce(func, x, dim, keepdim, **kwargs):
    CALLS.append((func, dim, keepdim, kwargs))
    return func(x.held, dim, keepdim=keepdim, **kwargs)


# Represents its inner tensor, so that the plain tensor is the judge.
Held = declare(
    name="Held",
    materialize=lambda self: self.held,
    rules={
        subclasses.arithmetic: combine,
        subclasses.comparisons: combine,
        subclasses.reductions: reduce,
    },
)


PLAIN = torch.tensor([[0.5, -2.0, 3.0], [1.5, 4.0, -1.0]])
TWO = {
    "x + 2": lambda x: x + 2,
    "2 + x": lambda x: 2 + x,
    "x - 2": lambda x: x - 2,
    "2 - x": lambda x: 2 - x,
    "x * 2": lambda x: x * 2,
    "2 * x": lambda x: 2 * x,
    "x / 2": lambda x: x / 2,
    "2 / x": lambda x: 2 / x,
    "x - x": lambda x: x - x * 3,
    "plain - x": lambda x: PLAIN - x,
    "x / plain": lambda x: x / PLAIN,
    "plain / x": lambda x: PLAIN / x,
    "-x": lambda x: -x,
    "reciprocal": lambda x: x.reciprocal(),
    "sub alpha": lambda x: x.sub(x * 2, alpha=3),
    "add alpha": lambda x: torch.add(PLAIN, x, alpha=2),
    "rsub": lambda x: torch.rsub(x, 5, alpha=2),
    "rsub of tensors": lambda x: torch.rsub(x, PLAIN),
    "by a number in a tensor": lambda x: x * torch.tensor(3.0),
    "broadcast": lambda x: x - torch.ones(3),
    "x == 3": lambda x: x == 3,
    "x != plain": lambda x: x != PLAIN,
    "1 < x": lambda x: x > 1,
    "x <= 1": lambda x: x <= 1,
    "plain >= x": lambda x: x <= PLAIN,
    "lt": lambda x: torch.lt(x, 0.5),
}


def scale(x):
    y = x * 1
    y -= 1
    y *= x
    y /= 2
    y += PLAIN
    return y.neg_()


TWO["in-place forms"] = scale


def one_by_one_and_compiled_at_once(calls):
    """The cases of a table by door: each alone in eager mode, and all in one graph of each compiler."""
    cases = [("eager", [name]) for name in calls] + [(door, [*calls]) for door in DOORS if door != "eager"]
    return pytest.mark.parametrize(("door", "names"), cases, ids=str)


@one_by_one_and_compiled_at_once(TWO)
def test_two_operands(door, names):
    found = DOORS[door](lambda x: [TWO[name](x) for name in names], fullgraph=True)(Held(PLAIN.clone()))
    assert {type(got) for got in found} == {Held}
    torch.testing.assert_close([got.held for got in found], [TWO[name](PLAIN) for name in names])


@pytest.mark.parametrize("door", DOORS)
def test_gradients(door):
    def fn(x):
        return (2 / x - (3 - x) * x).sum(0)

    mine, theirs = PLAIN.clone().requires_grad_(), PLAIN.clone().requires_grad_()
    DOORS[door](fn, fullgraph=True)(Held(mine)).sum().backward()
    fn(theirs).sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad)


def test_the_operands_stand_as_in_the_expression():
    x = Held(PLAIN)
    for run, func, left in (
        (lambda: 2 - x, torch.sub, 2),
        (lambda: 1 / x, torch.div, 1),
        (lambda: PLAIN - x, torch.sub, PLAIN),
        (lambda: x - 2, torch.sub, x),
        (lambda: x > 3, torch.gt, x),
    ):
        CALLS.clear()
        run()
        assert CALLS[0][0] is func and (CALLS[0][1] is left or CALLS[0][1] == left)


def test_out_forms_follow():
    x, out = Held(PLAIN), Held(torch.empty(2, 3))
    assert torch.sub(x, 2, out=out) is out
    torch.testing.assert_close(out.held, PLAIN - 2)


REDUCED = {
    "sum": (lambda x: x.sum(), (0, 1)),
    "sum of a dim": (lambda x: x.sum(-1), (1,)),
    "sum of two": (lambda x: x.sum((1, 0), keepdim=True), (0, 1)),
    "sum of none": (lambda x: x.sum([]), (0, 1)),
    "mean": (lambda x: x.mean(), (0, 1)),
    "mean of a dim": (lambda x: torch.mean(x, 0, keepdim=True), (0,)),
    "amax": (lambda x: x.amax(), (0, 1)),
    "amin": (lambda x: x.amin(-2), (0,)),
    "max": (lambda x: x.max(), (0, 1)),
    "min": (lambda x: torch.min(x), (0, 1)),
    "logsumexp": (lambda x: torch.logsumexp(x, 1), (1,)),
    "any": (lambda x: x.any(), (0, 1)),
    "all": (lambda x: torch.all(x, 1), (1,)),
    "all of two": (lambda x: torch.all(x, (0, 1)), (0, 1)),
    "var": (lambda x: x.var(), (0, 1)),
    "std": (lambda x: x.std(1, correction=0), (1,)),
}


@one_by_one_and_compiled_at_once(REDUCED)
def test_reductions(door, names):
    CALLS.clear()
    found = DOORS[door](lambda x: [REDUCED[name][0](x) for name in names], fullgraph=True)(Held(PLAIN))
    torch.testing.assert_close(found, [REDUCED[name][0](PLAIN) for name in names])
    assert {call[1] for call in CALLS} == {REDUCED[name][1] for name in names}


def test_options_that_were_given_arrive():
    CALLS.clear()
    Held(PLAIN).sum(dtype=torch.float64)
    assert [(torch.sum, (0, 1), False, {"dtype": torch.float64})] == CALLS


@pytest.mark.sweep(4)
@pytest.mark.parametrize("dim", [2, -3, (0, 0), (1, -1), [0, 5]])
@pytest.mark.parametrize("name", ["sum", "mean", "amax", "any", "all", "logsumexp", "std", "var"])
def test_dims_that_a_plain_tensor_refuses(name, dim):
    with pytest.raises((IndexError, RuntimeError)) as refused:
        getattr(PLAIN, name)(dim)
    for door in DOORS if name in ("sum", "std") else ["eager"]:
        with pytest.raises(type(refused.value)) as caught:
            DOORS[door](lambda x: getattr(x, name)(dim), fullgraph=True)(Held(PLAIN))
        assert str(refused.value).partition("(")[0] in str(caught.value)


SCALAR = Held(torch.tensor(3.0))
test_no_dims = giving(
    {
        **{
            f"{name} of {dims}": (
                lambda name=name, dims=dims: getattr(Held(PLAIN), name)(dims).tolist(),
                getattr(PLAIN, name)(dims).tolist(),
            )
            for name in ("any", "all", "sum", "amax", "mean")
            for dims in ((), [])
        },
        "keepdim by place, of a sum": (
            lambda: declare(rules=BY_PLACE)(PLAIN).sum(1).tolist(),
            PLAIN.sum(1).tolist(),
        ),
        **{f"{dim} of a scalar": (lambda dim=dim: SCALAR.sum(dim).item(), 3) for dim in (0, -1, (0,))},
    }
)


# The third argument of ``torch.std`` is ``unbiased``: a rule that passes keepdim there is told so.
BY_PLACE = {subclasses.reductions: lambda func, x, dim, keepdim, **kw: func(x.held, dim, keepdim, **kw)}
test_dims_that_a_reduction_refuses = raising(
    [
        *(
            (
                lambda name=name: getattr(declare(rules=BY_PLACE)(PLAIN), name)(),
                TypeError,
                "correction=int",
            )
            for name in ("std", "var")
        ),
        (lambda: SCALAR.sum(1), IndexError, r"expected to be in range of \[-1, 0\], but got 1"),
    ]
)


# ---- registration ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [True, False])
def test_a_rule_for_an_op_precedes_that_of_its_family_in_any_order(first):
    family = (subclasses.arithmetic, lambda func, x, y: Own(x.held + 1))
    own = (aten.mul.Tensor if first else aten.mul, lambda func, x, y: Own(x.held + 100))
    Own = declare(name="Own", rules=dict([own, family] if first else [family, own]))
    x = Own(torch.zeros(1))
    assert (x * 2).held.item() == 100 and (x + 2).held.item() == 1
    with pytest.raises(SpecError, match=r"Own has two rules for aten\.add\.Tensor"):
        Own.implements(subclasses.arithmetic)(combine)


CHILD = declare(Held, rules={subclasses.arithmetic: lambda func, x, y: type(x)(x.held * 0)})
test_a_rule_of_a_child_precedes_that_of_its_base = giving(
    {
        "of a child": (lambda: (CHILD(PLAIN) + 1).held.any().item(), False),
        "of its base": (lambda: type(Held(PLAIN) + 1), Held),
    }
)


STEPS = subclasses.coverage(Held).steps
test_coverage_tells_of_it = giving(
    {
        "another op of the family": (lambda: STEPS["aten.rsub.Scalar"], "rule"),
        "a function of one": (lambda: STEPS["aten.reciprocal.default"], "rule"),
        "in place": (
            lambda: STEPS["aten.sub_.Tensor"].startswith("derived from aten.sub.Tensor"),
            True,
        ),
        "options that were given": (
            lambda: Held(PLAIN).sum(dtype=torch.float64),
            PLAIN.sum(dtype=torch.float64),
        ),
        "a number": (lambda: Held(torch.tensor(3.0)).sum().item(), 3),
        "no rows": (lambda: Held(torch.ones(0, 2)).sum(0).tolist(), [0, 0]),
    }
)
test_an_op_of_no_family = raising([(lambda: Held(PLAIN).exp(), r"no rule for aten\.exp")])


def test_every_op_of_a_family_exists_and_is_in_no_other():
    families = [subclasses.arithmetic, subclasses.comparisons, subclasses.reductions]
    ops = [op for family in families for op in family.entries]
    assert len(ops) == len(set(ops)) and all(isinstance(f, Family) for f in families)


# ---- arguments that a rule does not take --------------------------------------------------------------------


def untaken(func, *args, **kwargs):
    return NotImplemented


# Its rules take nothing.
Some = declare(
    name="Some",
    rules=dict.fromkeys((subclasses.arithmetic, subclasses.reductions, aten.cos, aten.hypot), untaken),
)


test_what_a_rule_does_not_take_is_an_error_that_names_the_rule = raising(
    [
        (
            lambda call=call: call(Some(torch.ones(2))),
            r"aten\.\w+\.\w+ on a Some: the rule untaken \(.*test_families.py:\d+\) returned NotImplemented",
        )
        for call in (lambda x: x.max(), lambda x: x.sum(0), torch.cos, lambda x: x.cos_())
    ]
)


class Other:
    def __rsub__(self, x):
        return "asked"


def divide_in_place(x):
    x /= 2


test_operators_leave_it_to_python = raising(
    [
        (
            lambda: divide_in_place(Some(torch.ones(2))),
            TypeError,
            r"unsupported operand type\(s\) for /=: 'Some' and 'int'",
        ),
        (
            lambda: 2 / Some(torch.ones(2)),
            TypeError,
            r"unsupported operand type\(s\) for /: 'int' and 'Some'",
        ),
    ]
)


Right = declare(rules={aten.hypot: lambda func, x, y: y.held})
test_an_operand_on_the_other_side_is_asked = giving(
    {
        "of any class": (lambda: Some(torch.ones(2)) - Other(), "asked"),
        "declared": (
            lambda: torch.hypot(Some(torch.ones(2)), Right(torch.full((2,), 3.0))).tolist(),
            [3, 3],
        ),
    }
)
