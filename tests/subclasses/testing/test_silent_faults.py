"""Faults of a rule that no error tells: each is found by one promise, and mended by what the report says."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import subclasses
from subclasses import Outer, TensorSubclass, inner
from tests.subclasses.subjects import declare
from tests.subclasses.testing.faults import finding, of_tensors, plain, ruled

aten = torch.ops.aten


def times(func, x, y):
    x, y = (x, y) if isinstance(x, Halves) else (y, x)
    return type(x)(x.coarse * plain(y), x.fine * plain(y))


# A tensor as a sum of two.
Halves = declare(
    name="Halves",
    keywords={"fallback": "materialize"},
    coarse=inner(),
    fine=inner(),
    materialize=lambda self: self.coarse + self.fine,
    rules={aten.mul.Tensor: times},
)


def with_rule(key, rule, base=Halves, **keywords):
    return of_tensors(ruled(base, {key: rule}, **keywords))


# ---- rules, each wrong in one way; the report names some of them ---------------------------------------------


def handing_on(func, x):
    return type(x)(x.coarse, func(plain(x)) - x.coarse)


def without_gradients(func, x):
    with torch.no_grad():
        return negating(func, x)


def negating(func, x):
    return type(x)(-x.coarse, -x.fine)


def a_view(func, x, *args):
    return type(x)(func(x.coarse, *args), func(x.fine, *args))


def counting_from_the_front(func, x, *dims):
    return a_view(func, x, *(max(dim, 0) for dim in dims))


def with_options(func, x, *args, **options):
    """The right rule for any op on plain tensors."""
    return func(plain(x), *(plain(t) for t in args), **options)


def of_the_first_row(func, x, dim, index):
    return plain(x).select(dim, 0)


def of_positive_numbers(func, x, y):
    return plain(x) * (plain(y) if isinstance(y, Tensor) else abs(y))


def from_the_left(func, x, y, alpha=1):
    x, y = (x, y) if isinstance(x, TensorSubclass) else (y, x)
    return plain(x) - plain(y) * alpha


MEMORY = ["hands on memory of its operand (y.coarse in that of x.coarse)", "return x.coarse.clone()"]


def copying(func, x):
    return type(x)(x.coarse.clone(), func(plain(x)) - x.coarse)


# The promise, what the rule is for, the wrong rule, the right one, words of the report.
FAULTS = {
    "an inner tensor handed on": (
        "own_memory",
        aten.cos.default,
        handing_on,
        copying,
        [*MEMORY, "y = aten.cos.default(x); y.mul_(2)", "mend: handing_on ("],
    ),
    "a view of an inner tensor": (
        "own_memory",
        aten.cos.default,
        lambda func, x: type(x)(x.coarse.view(x.shape), func(plain(x)) - x.coarse),
        copying,
        MEMORY,
    ),
    "an inner tensor in place of a plain result": (
        "own_memory",
        aten.exp.default,
        lambda func, x: x.coarse,
        with_options,
        ["y = x.exp(); y.mul_(2) changed x: coarse", "(y in that of x.coarse)"],
    ),
    "one of two copied in a view": (
        "writes_to_views",
        aten.select.int,
        lambda func, x, *args: type(x)(func(x.coarse, *args), func(x.fine, *args).clone()),
        a_view,
        ["y = x[0]; y.mul_(2)", "written to it: fine:", "none of them a copy"],
    ),
    "a dim ignored": (
        "values",
        aten.select.int,
        lambda func, x, dim, *args: a_view(func, x, 0, *args),
        a_view,
        ["x[:, 0] has shape [6], its reference [4]"],
    ),
    "a negative dim of one op": (
        "views",
        aten.unsqueeze.default,
        counting_from_the_front,
        a_view,
        ["x.unsqueeze(-1) has shape [1, 4, 6], its reference [4, 6, 1]"],
    ),
    "negative dims of a transposition": (
        "views",
        aten.transpose.int,
        counting_from_the_front,
        a_view,
        ["x.transpose(-2, -1) has shape [4, 6], its reference [6, 4]"],
    ),
    "alpha dropped": (
        "keyword_arguments",
        aten.add,
        lambda func, x, y, alpha=1: plain(x) + plain(y),
        with_options,
        [
            "torch.add(x, x, alpha=2) is not what",
            "an alpha=, rounding_mode=, keepdim= or dtype= that is dropped",
        ],
    ),
    "alpha of sub dropped": (
        "keyword_arguments",
        aten.sub,
        lambda func, x, y, alpha=1: plain(x) - plain(y),
        with_options,
        ["torch.sub(x, x, alpha=2) is not what"],
    ),
    "another row taken": (
        "keyword_arguments",
        aten.select.int,
        of_the_first_row,
        with_options,
        ["x[-1] is not what", "look at of_the_first_row ("],
    ),
    "a sign dropped": (
        "keyword_arguments",
        aten.mul.Tensor,
        of_positive_numbers,
        with_options,
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
        with_options,
        ["plain - x is not what", "look at from_the_left ("],
    ),
    "rounding_mode dropped": (
        "keyword_arguments",
        aten.div,
        lambda func, x, y, rounding_mode=None: torch.div(plain(x), plain(y)),
        with_options,
        ['torch.div(x, 0.3, rounding_mode="floor") is not what'],
    ),
    "keepdim dropped": (
        "keyword_arguments",
        aten.sum.dim_IntList,
        lambda func, x, dim=None, keepdim=False, dtype=None: func(plain(x), dim, dtype=dtype),
        with_options,
        ["x.sum(0, keepdim=True) has shape [6], its reference [1, 6]"],
    ),
    "dtype dropped": (
        "keyword_arguments",
        aten.sum.dim_IntList,
        lambda func, x, dim=None, keepdim=False, dtype=None: func(plain(x), dim, keepdim),
        with_options,
        ["x.sum(-1, dtype=torch.float64) gave torch.float32, its reference torch.float64"],
    ),
    "keepdim of a family dropped": (
        "keyword_arguments",
        subclasses.reductions,
        lambda func, x, dim, keepdim, **kwargs: func(plain(x), dim, **kwargs),
        lambda func, x, dim, keepdim, **kwargs: func(plain(x), dim, keepdim=keepdim, **kwargs),
        ["x.sum(0, keepdim=True) has shape [6], its reference [1, 6]"],
    ),
    "an op that the kit has no call for": (
        "values",
        torch.hypot,
        lambda func, x, y: func(plain(x), plain(y)) + 1,
        with_options,
        ["hypot(x, plain) is not what its reference gives", "hypot(x, x) is not what its reference gives"],
    ),
    "an op of one operand that the kit has no call for": (
        "values",
        aten.cos,
        lambda func, x: func(x.coarse),
        with_options,
        ["aten.cos.default(x) is not what"],
    ),
}


test_a_silent_fault_is_found_and_mended = pytest.mark.sweep(10)(
    finding(
        {
            fault: (promise, with_rule(key, wrong), words, with_rule(key, right))
            for fault, (promise, key, wrong, right, words) in FAULTS.items()
        }
    )
)


def same_labels(func, x, y):
    labels = x.labels if isinstance(x, Labelled) else y.labels
    return Labelled(func(plain(x), plain(y)), labels)


Labelled = declare(
    held=inner(),
    labels=inner(dtype=torch.int64),
    materialize=lambda self: self.held,
    rules={subclasses.arithmetic: same_labels},
)
Rounded = declare(keywords={"fallback": "materialize"}, materialize=lambda self: self.held)


@torch.no_grad()
def floor(func, x):
    return type(x)(func(plain(x)), torch.zeros_like(x.fine))


# With the gradient of a straight-through estimator.
Signs = declare(
    Halves, materialize=lambda self: self.fine + (self.coarse.sign() - self.coarse).detach() + self.coarse
)
# With a rule for `mul` that multiplies each of the two.
Smooth = declare(
    Halves, keywords={"kind": "structure"}, materialize=lambda self: self.fine + self.coarse.tanh()
)


def squaring_each(func, x, y):
    """Takes the product of two sums for the sum of two products."""
    one, other = ((t.coarse, t.fine) if isinstance(t, Halves) else (t, t) for t in (x, y))
    return type(x if isinstance(x, Halves) else y)(func(one[0], other[0]), func(one[1], other[1]))


def without_keepdim(func, x, dim=None, keepdim=False, dtype=None):
    return type(x)(x.coarse.sum(dim, dtype=dtype), x.fine.sum(dim, dtype=dtype))


def without_bias(func, x, w, bias=None):
    return func(x, sum(w.unwrap())) if isinstance(w, Halves) else Halves.unruled(func, x, w, bias)


# A class that shows complex numbers and holds real ones, with a gradient for each.
Polar = declare(
    keywords={"fallback": "materialize", "kind": "structure"},
    radius=inner(),
    phase=inner(),
    outer=staticmethod(
        lambda radius: Outer(
            radius.shape, dtype=torch.complex64 if radius.dtype == torch.float32 else torch.complex128
        )
    ),
    materialize=lambda self: torch.complex(self.radius * self.phase.cos(), self.radius * self.phase.sin()),
)


def polar(rule):
    cls = ruled(Polar, {aten.neg.default: rule})
    return lambda: cls(torch.rand(4, 6) + 0.5, torch.randn(4, 6))


test_what_is_found_and_what_is_not_blamed = finding(
    {
        "memory that no write reaches, of a table that all results share": (
            "own_memory",
            None,
            [],
            lambda: Labelled(torch.randn(4, 6), torch.arange(24).view(4, 6)),
        ),
        "a result that rounds": (
            "read_gradients",
            None,
            [],
            of_tensors(
                ruled(
                    Rounded, {aten.neg.default: lambda func, x: type(x)((func(x.held) * 1e7).round() / 1e7)}
                ),
                (4, 6),
            ),
        ),
        "a rule of a representation, which has PyTorch's formula, that computes without gradients": (
            "read_gradients",
            None,
            [],
            with_rule(aten.neg.default, without_gradients),
        ),
        "such a rule of a structure": (
            "inner_gradients",
            with_rule(aten.neg.default, without_gradients, kind="structure"),
            [
                "the result of -x does not require grad",
                "without_gradients (",
                "uses no_grad, behind which",
            ],
        ),
        "a result whose plain tensor has no gradients": (
            "read_gradients",
            None,
            [],
            with_rule(aten.floor.default, floor),
        ),
        "one of two detached, of complex numbers": (
            "read_gradients",
            polar(lambda func, x: type(x)(-x.radius, x.phase.detach())),
            [
                "the gradient of radius, phase through -x is wrong",
                "<lambda> (",
                "uses detach, behind which",
            ],
            polar(lambda func, x: type(x)(-x.radius, x.phase.clone())),
        ),
    }
)
test_gradients_of_another_function = pytest.mark.slow(
    finding(
        {
            "a straight-through estimator": (
                "read_gradients",
                of_tensors(Signs),
                [
                    "what materialize() gives of x has another gradient",
                    "straight-through estimator: skip={'read_gradients'}",
                ],
                of_tensors(Smooth),
            ),
            "a rule of a representation that is another function": (
                "read_gradients",
                of_tensors(ruled(Smooth, {}, kind="representation")),
                ["the gradient of coarse, fine through x * 2 is wrong", "PyTorch's formula for the op"],
            ),
        }
    )
)
# The kit makes a call of each kind.
test_a_rule_that_is_right_for_some_calls_is_found = pytest.mark.slow(
    pytest.mark.sweep(2)(
        finding(
            {
                rule.__name__: ("values", with_rule(key, rule), [call])
                for key, rule, call in (
                    (aten.mul.Tensor, squaring_each, "x * x is not"),
                    (aten.sum, without_keepdim, "has shape [4], its reference [4, 1]"),
                    (F.linear, without_bias, "F.linear(plain, x, bias) is not"),
                )
            }
        )
    )
)
