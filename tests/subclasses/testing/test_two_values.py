"""Rules that take one operand for another: found with a second value, whose numbers are others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from subclasses import DispatchError, Outer, TensorSubclass, dynamic, inner
from tests.subclasses.subjects import Pair
from tests.subclasses.testing.faults import check_found, check_kept, of_tensors, outcome, plain, ruled

aten = torch.ops.aten


class Halves(TensorSubclass, fallback="materialize"):
    """A tensor as a sum of two."""

    whole: Tensor = inner()
    rest: Tensor = inner()

    def materialize(self):
        return self.whole + self.rest


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


@pytest.mark.sweep(7)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_rule_that_takes_one_operand_for_another_is_found(fault):
    key, wrong, right, words = FAULTS[fault]
    check_found(with_rule(key, wrong), "two_values", words)
    check_kept(with_rule(key, right), "two_values")


@pytest.mark.sweep(3)
@pytest.mark.parametrize("key", [torch.mul, torch.matmul, torch.hypot])
def test_a_rule_that_loses_the_gradient_of_the_right_operand_is_found(key):
    check_found(with_rule(key, reading_raw), "two_value_gradients", ["by y is lost", "reads the raw .whole"])
    check_kept(with_rule(key, comparing(lambda x, y: y)), "two_value_gradients")


# ---- the second value ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("whole", [lambda: torch.arange(16.0).view(4, 4), lambda: torch.randn(4, 4)])
def test_a_factory_that_gives_the_same_inner_tensors_is_changed(whole):
    key, *rules, words = FAULTS["a field of the left operand twice"]
    wrong, right = (ruled(Halves, {key: rule}) for rule in rules)
    check_found(lambda: wrong(whole(), torch.ones(4, 4)), "two_values", words[:1])
    check_kept(lambda: right(whole(), torch.ones(4, 4)), "two_values")


class Classes(TensorSubclass, fallback="materialize", dtype_from="scale", size_from="index"):
    """Entries of a table, in which other indices need not exist."""

    index: Tensor = inner(dtype=torch.int64)
    scale: Tensor = inner()

    def materialize(self):
        return self.index * self.scale


def test_without_a_second_value_the_promise_is_not_tried():
    found = outcome(lambda: Classes(torch.zeros(4, 4, dtype=torch.int64), torch.ones(())), "two_values")
    assert found.state == "skipped" and "let it draw random numbers" in found.detail


@pytest.mark.slow
def test_ops_that_a_class_refuses_break_no_promise():
    def refusing(func, *args, **kwargs):
        raise DispatchError("no sums of two of these")

    check_kept(with_rule(aten.add, refusing), "two_values")


@pytest.mark.slow
def test_each_inner_tensor_of_a_mapped_class_is_compared():
    check_kept(of_tensors(Pair), "two_values", "two_value_gradients")


# ---- integers that the factory gives equal -------------------------------------------------------------------


class Runs(TensorSubclass, dtype_from="values", fallback="materialize"):
    """Numbers, each repeated."""

    values: Tensor = inner()
    counts: Tensor = inner(dtype=torch.int64)
    total: int = dynamic()

    @staticmethod
    def outer(values, total):
        return Outer((total,))

    def materialize(self):
        return torch.repeat_interleave(self.values, self.counts, output_size=self.total)


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
