"""Rules that take one operand for another: found with a second value, whose numbers are others."""

from __future__ import annotations

import pytest
import torch

from subclasses import DispatchError, Outer, TensorSubclass, dynamic, inner
from tests.subclasses.subjects import Pair, declare
from tests.subclasses.testing.faults import finding, of_tensors, outcome, plain, ruled

aten = torch.ops.aten


# A tensor as a sum of two.
Halves = declare(
    keywords={"fallback": "materialize"},
    whole=inner(),
    rest=inner(),
    materialize=lambda self: self.whole + self.rest,
)


def is_value(x):
    return isinstance(x, Halves)


def with_rule(key, rule):
    return of_tensors(ruled(Halves, {key: rule}), (4, 4), (4, 4))


# ---- rules, each wrong in one way and right ------------------------------------------------------------------


def adding(rest):
    def add(func, x, y, alpha=1):
        if not (is_value(x) and is_value(y)):
            return func(plain(x), plain(y), alpha=alpha)
        return type(x)(x.whole + alpha * y.whole, x.rest + alpha * rest(x, y))

    return add


def joining(rest):
    def join(func, tensors, dim=0):
        if not all(map(is_value, tensors)):
            return func([plain(t) for t in tensors], dim)
        return type(tensors[0])(func([t.whole for t in tensors], dim), func(rest(tensors), dim))

    return join


def comparing(right):
    def maximum(func, x, y):
        return func(plain(x), plain(right(x, y)))

    return maximum


def choosing(rest):
    def where(func, mask, x, y):
        if not (is_value(x) and is_value(y)):
            return func(plain(mask), plain(x), plain(y))
        return type(x)(func(mask, x.whole, y.whole), func(plain(mask), x.rest, rest(x, y)))

    return where


def multiplying(order):
    return lambda func, x, y: func(*(plain(t) for t in order(x, y)))


def reading_raw(func, x, y):
    """Above autograd, where the fields carry no gradients."""
    y = y.whole + y.rest if is_value(y) else y
    return func(plain(x), y)


# What the rule is for, the wrong rule, the right one, words of the report.
FAULTS = {
    "a field of the left operand twice": (
        aten.add,
        adding(lambda x, y: x.rest),
        adding(lambda x, y: y.rest),
        ["x + y is not what its reference gives", "and not from x.field twice"],
    ),
    "the first field of several": (
        aten.cat,
        joining(lambda tensors: [tensors[0].rest for _ in tensors]),
        joining(lambda tensors: [t.rest for t in tensors]),
        ["torch.cat([x, y]) is not", "torch.cat([x, y], -1) is not"],
    ),
    "the first field of a stack": (
        aten.stack,
        joining(lambda tensors: [tensors[0].rest for _ in tensors]),
        joining(lambda tensors: [t.rest for t in tensors]),
        ["torch.stack([x, y]) is not", "torch.stack([x, y], -1) is not"],
    ),
    "the right operand ignored": (
        aten.maximum,
        comparing(lambda x, y: x),
        comparing(lambda x, y: y),
        ["torch.maximum(x, y) is not"],
    ),
    "the second choice ignored": (
        aten.where.self,
        choosing(lambda x, y: x.rest),
        choosing(lambda x, y: y.rest),
        ["torch.where(mask, x, y) is not"],
    ),
    "a product in the wrong order": (
        torch.matmul,
        multiplying(lambda x, y: (y, x) if is_value(x) and is_value(y) else (x, y)),
        multiplying(lambda x, y: (x, y)),
        ["x @ y is not"],
    ),
    "an op that the kit has no call for": (
        torch.hypot,
        multiplying(lambda x, y: (x, x) if is_value(x) and is_value(y) else (x, y)),
        multiplying(lambda x, y: (x, y)),
        ["hypot(x, y) is not"],
    ),
}


test_a_rule_that_takes_one_operand_for_another_is_found = pytest.mark.sweep(7)(
    finding(
        {
            fault: ("two_values", with_rule(key, wrong), words, with_rule(key, right))
            for fault, (key, wrong, right, words) in FAULTS.items()
        }
    )
)
test_a_rule_that_loses_the_gradient_of_the_right_operand_is_found = pytest.mark.sweep(3)(
    finding(
        {
            key.__name__: (
                "two_value_gradients",
                with_rule(key, reading_raw),
                ["by y is lost", "reads the raw .whole"],
                with_rule(key, comparing(lambda x, y: y)),
            )
            for key in (torch.mul, torch.matmul, torch.hypot)
        }
    )
)


# ---- the second value ----------------------------------------------------------------------------------------


def of_whole(rule, whole):
    cls = ruled(Halves, {aten.add: rule})
    return lambda: cls(whole(), torch.ones(4, 4))


def refusing(func, *args, **kwargs):
    raise DispatchError("no sums of two of these")


WRONG, RIGHT, WORDS = FAULTS["a field of the left operand twice"][1:]
test_the_second_value = pytest.mark.slow(
    finding(
        {
            **{
                f"a factory that gives the same inner tensors, {name}": (
                    "two_values",
                    of_whole(WRONG, whole),
                    WORDS[:1],
                    of_whole(RIGHT, whole),
                )
                for name, whole in {
                    "both": lambda: torch.arange(16.0).view(4, 4),
                    "one": lambda: torch.randn(4, 4),
                }.items()
            },
            "ops that a class refuses": ("two_values", None, [], with_rule(aten.add, refusing)),
            "each inner tensor of a mapped class": ("two_values", None, [], of_tensors(Pair)),
            "gradients of a mapped class": ("two_value_gradients", None, [], of_tensors(Pair)),
        }
    )
)

# Entries of a table, in which other indices need not exist.
Classes = declare(
    keywords={"fallback": "materialize", "dtype_from": "scale", "size_from": "index"},
    index=inner(dtype=torch.int64),
    scale=inner(),
    materialize=lambda self: self.index * self.scale,
)


def test_without_a_second_value_the_promise_is_not_tried():
    found = outcome(lambda: Classes(torch.zeros(4, 4, dtype=torch.int64), torch.ones(())), "two_values")
    assert found.state == "skipped" and "let it draw random numbers" in found.detail


# ---- integers that the factory gives equal -------------------------------------------------------------------


# Numbers, each repeated.
Runs = declare(
    keywords={"dtype_from": "values", "fallback": "materialize"},
    values=inner(),
    counts=inner(dtype=torch.int64),
    total=dynamic(),
    outer=staticmethod(lambda values, total: Outer((total,))),
    materialize=lambda self: torch.repeat_interleave(self.values, self.counts, output_size=self.total),
)


def adding_runs(looks, refuses):
    def add(func, x, y, alpha=1):
        if isinstance(x, TensorSubclass) and isinstance(y, TensorSubclass):
            if not looks or torch.equal(x.counts, y.counts):
                return type(x)(x.values + alpha * y.values, x.counts, total=x.total)
            if refuses:
                raise DispatchError("runs of other lengths")
        return func(plain(x), plain(y), alpha=alpha)

    return add


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("looks", "refuses"), [(False, False), (True, True), (True, False)])
def test_other_integers_of_the_right_operand(looks, refuses):
    cls = ruled(Runs, {aten.add.Tensor: adding_runs(looks, refuses)})
    made = outcome(lambda: cls(torch.randn(4), torch.tensor([2, 1, 3, 2]), total=8), "two_values")
    assert (made.state == "kept") == looks
    assert looks or "x + y, where y holds other integers" in made.detail
