"""Faults of a rule that no error tells: each is found by one promise, and mended by what the report says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import subclasses
from subclasses import TensorSubclass, inner
from subclasses.testing import examine
from subclasses.testing.runner import PROMISES

aten = torch.ops.aten


def plain(t):
    return t.materialize() if isinstance(t, TensorSubclass) else t


class Halves(TensorSubclass, fallback="materialize"):
    """A tensor as a sum of two."""

    coarse: Tensor = inner()
    fine: Tensor = inner()

    def materialize(self):
        return self.coarse + self.fine


@Halves.implements(aten.mul.Tensor)
def _(func, x, y):
    x, y = (x, y) if isinstance(x, Halves) else (y, x)
    return type(x)(x.coarse * plain(y), x.fine * plain(y))


def with_rule(key, rule):
    cls = type("Ruled", (Halves,), {"__doc__": "One more rule."})
    cls.implements(key)(rule)
    return cls


def outcome(cls, promise):
    others = {p.name for p in PROMISES} - {promise}
    report = examine(lambda: cls(torch.randn(4, 6), torch.randn(4, 6)), paths={}, skip=others)
    return next(o for o in report.outcomes if o.promise.name == promise)


# ---- rules, each wrong in one way and right ------------------------------------------------------------------


def handing_on(func, x):
    return type(x)(x.coarse, func(plain(x)) - x.coarse)


def copying(func, x):
    return type(x)(x.coarse.clone(), func(plain(x)) - x.coarse)


def handing_on_a_view(func, x):
    return type(x)(x.coarse.view(x.shape), func(plain(x)) - x.coarse)


def plain_inner(func, x):
    return x.coarse


def plain_copy(func, x):
    return func(plain(x))


def detaching_one(func, x):
    return type(x)(-x.coarse, -x.fine.detach())


def without_gradients(func, x):
    with torch.no_grad():
        return negating(func, x)


def negating(func, x):
    return type(x)(-x.coarse, -x.fine)


def half_a_view(func, x, *args):
    return type(x)(func(x.coarse, *args), func(x.fine, *args).clone())


def a_view(func, x, *args):
    return type(x)(func(x.coarse, *args), func(x.fine, *args))


def along_rows(func, x, dim, *args):
    return a_view(func, x, 0, *args)


def counting_from_the_front(func, x, *dims):
    return a_view(func, x, *(max(dim, 0) for dim in dims))


def without_alpha(func, x, y, alpha=1):
    return plain(x) + plain(y)


def with_alpha(func, x, y, alpha=1):
    return plain(x) + plain(y) * alpha


def differing_without_alpha(func, x, y, alpha=1):
    return plain(x) - plain(y)


def without_rounding(func, x, y, rounding_mode=None):
    return torch.div(plain(x), plain(y))


def with_rounding(func, x, y, rounding_mode=None):
    return func(plain(x), plain(y), rounding_mode=rounding_mode)


def without_keepdim(func, x, dim=None, keepdim=False, dtype=None):
    return func(plain(x), dim, dtype=dtype)


def without_dtype(func, x, dim=None, keepdim=False, dtype=None):
    return func(plain(x), dim, keepdim)


def whole_sum(func, x, dim=None, keepdim=False, dtype=None):
    return func(plain(x), dim, keepdim, dtype=dtype)


def reducing_without_dim_kept(func, x, dim, keepdim, **kwargs):
    return func(plain(x), dim, **kwargs)


def reducing(func, x, dim, keepdim, **kwargs):
    return func(plain(x), dim, keepdim=keepdim, **kwargs)


MEMORY = ["hands on memory of its operand (y.coarse in that of x.coarse)", "return x.coarse.clone()"]


# The promise, what the rule is for, the wrong rule, the right one, words of the report.
def of_the_first_row(func, x, dim, index):
    return plain(x).select(dim, 0)


def of_positive_numbers(func, x, y):
    return plain(x) * (plain(y) if isinstance(y, Tensor) else abs(y))


def from_the_left(func, x, y, alpha=1):
    x, y = (x, y) if isinstance(x, TensorSubclass) else (y, x)
    return plain(x) - plain(y) * alpha


FAULTS = {
    "an inner tensor handed on": ("own_memory", aten.cos.default, handing_on, copying, MEMORY),
    "a view of an inner tensor": ("own_memory", aten.cos.default, handing_on_a_view, copying, MEMORY),
    "an inner tensor in place of a plain result": (
        "own_memory",
        aten.exp.default,
        plain_inner,
        plain_copy,
        ["y = x.exp(); y.mul_(2) changed x: coarse", "(y in that of x.coarse)"],
    ),
    "one of two detached": (
        "read_gradients",
        aten.neg.default,
        detaching_one,
        negating,
        ["the gradient of coarse, fine through -x is wrong", "calls detach()"],
    ),
    "all computed without gradients": (
        "read_gradients",
        aten.neg.default,
        without_gradients,
        negating,
        [
            "the gradient of coarse, fine through -x is refused",
            "mend: without_gradients (",
            "computes its result without derivatives: use ops that have them",
            "skip={'read_gradients'}",
        ],
    ),
    "one of two copied in a view": (
        "writes_to_views",
        aten.select.int,
        half_a_view,
        a_view,
        ["y = x[0]; y.mul_(2)", "written to it: fine:", "none of them a copy"],
    ),
    "a dim ignored": (
        "values",
        aten.select.int,
        along_rows,
        a_view,
        ["x[:, 0] raised", "returned a Ruled of size (6,) for 1, 0, where the view has size (4,)"],
    ),
    "a negative dim of one op": (
        "views",
        aten.unsqueeze.default,
        counting_from_the_front,
        a_view,
        ["x.unsqueeze(-1) raised", "of size (1, 4, 6) for -1, where the view has size (4, 6, 1)"],
    ),
    "negative dims of a transposition": (
        "views",
        aten.transpose.int,
        counting_from_the_front,
        a_view,
        ["x.transpose(-2, -1) raised"],
    ),
    "alpha dropped": (
        "keyword_arguments",
        aten.add,
        without_alpha,
        with_alpha,
        [
            "torch.add(x, x, alpha=2) is not what",
            "an alpha=, rounding_mode=, keepdim= or dtype= that is dropped",
        ],
    ),
    "alpha of sub dropped": (
        "keyword_arguments",
        aten.sub,
        differing_without_alpha,
        lambda func, x, y, alpha=1: plain(x) - plain(y) * alpha,
        ["torch.sub(x, x, alpha=2) is not what"],
    ),
    "another row taken": (
        "keyword_arguments",
        aten.select.int,
        of_the_first_row,
        lambda func, x, *args: func(plain(x), *args),
        ["x[-1] is not what", "look at of_the_first_row ("],
    ),
    "a sign dropped": (
        "keyword_arguments",
        aten.mul.Tensor,
        of_positive_numbers,
        lambda func, x, y: func(plain(x), plain(y) if isinstance(y, Tensor) else y),
        [
            "x * -2 is not what",
            "look at of_positive_numbers (",
            "a negative number, or operands in the other order",
        ],
    ),
    "operands exchanged": (
        "keyword_arguments",
        aten.sub,
        from_the_left,
        lambda func, x, y, alpha=1: plain(x) - plain(y) * alpha,
        ["plain - x is not what", "look at from_the_left ("],
    ),
    "rounding_mode dropped": (
        "keyword_arguments",
        aten.div,
        without_rounding,
        with_rounding,
        ['torch.div(x, 0.3, rounding_mode="floor") is not what'],
    ),
    "keepdim dropped": (
        "keyword_arguments",
        aten.sum.dim_IntList,
        without_keepdim,
        whole_sum,
        ["x.sum(0, keepdim=True) raised", "for [0], True, where the result has size (1, 6)"],
    ),
    "dtype dropped": (
        "keyword_arguments",
        aten.sum.dim_IntList,
        without_dtype,
        whole_sum,
        ["x.sum(-1, dtype=torch.float64) gave torch.float32, its reference torch.float64"],
    ),
    "keepdim of a family dropped": (
        "keyword_arguments",
        subclasses.reductions,
        reducing_without_dim_kept,
        reducing,
        ["x.sum(0, keepdim=True) raised", "for [0], True, where the result has size (1, 6)"],
    ),
}


@pytest.mark.sweep(10)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_silent_fault_is_found_and_mended(fault):
    promise, key, wrong, right, words = FAULTS[fault]
    found = outcome(with_rule(key, wrong), promise)
    assert found.state == "broken"
    assert all(word in str(found) for word in words), str(found)
    assert outcome(with_rule(key, right), promise).state == "kept"


@pytest.mark.slow
def test_the_rule_that_hands_on_an_inner_tensor_is_named():
    found = outcome(with_rule(aten.cos.default, handing_on), "own_memory")
    assert found.mend.startswith("handing_on (") and found.detail.startswith(
        "y = aten.cos.default(x); y.mul_(2)"
    )


def test_memory_that_no_write_reaches_may_be_shared():
    """Of a table that all results have in common, say: no op writes to it."""

    class Labelled(TensorSubclass):
        held: Tensor = inner()
        labels: Tensor = inner(dtype=torch.int64)

        def materialize(self):
            return self.held

    @Labelled.implements(subclasses.arithmetic)
    def _(func, x, y):
        labels = x.labels if isinstance(x, Labelled) else y.labels
        x, y = (t.held if isinstance(t, Labelled) else t for t in (x, y))
        return Labelled(func(x, y), labels)

    others = {p.name for p in PROMISES} - {"own_memory"}
    labels = torch.arange(24).view(4, 6)
    report = examine(lambda: Labelled(torch.randn(4, 6), labels.clone()), paths={}, skip=others)
    assert report.broken == [] and [o.promise.name for o in report.of("kept")] == ["own_memory"]


def test_results_that_round_have_no_gradient_to_compare():
    class Rounded(TensorSubclass, fallback="materialize"):
        held: Tensor = inner()

        def materialize(self):
            return self.held

    @Rounded.implements(aten.neg.default)
    def _(func, x):
        return Rounded((func(x.held) * 1e7).round() / 1e7)

    others = {p.name for p in PROMISES} - {"read_gradients"}
    report = examine(lambda: Rounded(torch.randn(4, 6)), paths={}, skip=others)
    assert report.broken == [] and [o.promise.name for o in report.of("kept")] == ["read_gradients"]


def test_a_result_without_gradients_that_has_none_for_a_plain_tensor_is_right():
    def floor(func, x):
        with torch.no_grad():
            return type(x)(func(plain(x)), torch.zeros_like(x.fine))

    assert outcome(with_rule(aten.floor.default, floor), "read_gradients").state == "kept"


class Signs(Halves):
    """With the gradient of a straight-through estimator."""

    def materialize(self):
        return self.fine + (self.coarse.sign() - self.coarse).detach() + self.coarse


class Smooth(Halves):
    def materialize(self):
        return self.fine + self.coarse.tanh()


@pytest.mark.slow
def test_a_straight_through_estimator_is_told_from_a_rule_that_loses_gradients():
    found = outcome(Signs, "read_gradients")
    assert found.state == "broken" and "what materialize() gives of x has another gradient" in found.detail
    assert "straight-through estimator: skip={'read_gradients'}" in found.mend
    assert outcome(Smooth, "read_gradients").state == "kept"


def test_a_rule_that_the_kit_has_no_call_for_is_called_by_its_schema():
    def wrong(func, x, y):
        return func(plain(x), plain(y)) + 1

    found = outcome(with_rule(torch.hypot, wrong), "values")
    assert "hypot(x, plain) is not what its reference gives" in found.detail
    assert "hypot(x, x) is not what its reference gives" in found.detail
    assert (
        "aten.cos.default(x) is not what"
        in outcome(with_rule(aten.cos, lambda func, x: func(x.coarse)), "values").detail
    )
