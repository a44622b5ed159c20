"""Faults of a rule without an error: one promise finds each fault, and the report's advice fixes it."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import subclasses
from subclasses import DispatchError, Outer, TensorSubclass, dynamic, inner
from tests.subclasses.subjects import LowRank, Pair, declare
from tests.subclasses.testing.faults import finding, of_tensors, outcome, outcomes, plain, ruled

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


MEMORY = ["hands on memory of its operand (y.coarse in the memory of x.coarse)", "return x.coarse.clone()"]


def copying(func, x):
    return type(x)(x.coarse.clone(), func(plain(x)) - x.coarse)


# The promise, the op of the rule, the wrong rule, the right one, words of the report.
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
        ["y = x.exp(); y.mul_(2) changed x: coarse", "(y in the memory of x.coarse)"],
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
        ["x[:, 0] is not what its reference gives: shape [6] instead of [4]"],
    ),
    "a negative dim of one op": (
        "views",
        aten.unsqueeze.default,
        counting_from_the_front,
        a_view,
        ["x.unsqueeze(-1) is not what its reference gives: shape [1, 4, 6] instead of [4, 6, 1]"],
    ),
    "negative dims of a transposition": (
        "views",
        aten.transpose.int,
        counting_from_the_front,
        a_view,
        ["x.transpose(-2, -1) is not what its reference gives: shape [4, 6] instead of [6, 4]"],
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
        ["x.sum(0, keepdim=True) is not what its reference gives: shape [6] instead of [1, 6]"],
    ),
    "dtype dropped": (
        "keyword_arguments",
        aten.sum.dim_IntList,
        lambda func, x, dim=None, keepdim=False, dtype=None: func(plain(x), dim, keepdim),
        with_options,
        ["x.sum(-1, dtype=torch.float64) is not what", "torch.float32 instead of torch.float64"],
    ),
    "keepdim of a family dropped": (
        "keyword_arguments",
        subclasses.reductions,
        lambda func, x, dim, keepdim, **kwargs: func(plain(x), dim, **kwargs),
        lambda func, x, dim, keepdim, **kwargs: func(plain(x), dim, keepdim=keepdim, **kwargs),
        ["x.sum(0, keepdim=True) is not what its reference gives: shape [6] instead of [1, 6]"],
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


# Entries of which some are missing; a product in place with another value has the entries of both.
Sifted = declare(
    keywords={"fallback": "materialize"},
    values=inner(),
    mask=inner(dtype=torch.bool),
    materialize=lambda self: self.values * self.mask,
    rules={aten.mul_: lambda func, x, y: (x.values.mul_(plain(y)), x.mask.mul_(plain(y) != 0), x)[-1]},
)


def sifted(mask_of_result):
    cls = ruled(Sifted, {aten.neg: lambda func, x: type(x)(-x.values, mask_of_result(x.mask))})
    return lambda: cls(torch.randn(4, 6), torch.rand(4, 6) > 0.5)


test_what_is_found_and_what_is_not_blamed = pytest.mark.sweep(2)(
    finding(
        {
            "memory that no write reaches, of a table that all results share": (
                "own_memory",
                None,
                [],
                lambda: Labelled(torch.randn(4, 6), torch.arange(24).view(4, 6)),
            ),
            "memory that only a write of another value reaches": (
                "own_memory",
                sifted(lambda mask: mask),
                ["y = -x; y.mul_(another value) changed x: mask", "return x.mask.clone()"],
                sifted(Tensor.clone),
            ),
            "a result that rounds": (
                "inner_gradients",
                None,
                [],
                of_tensors(
                    ruled(
                        Rounded,
                        {aten.neg.default: lambda func, x: type(x)((func(x.held) * 1e7).round() / 1e7)},
                    ),
                    (4, 6),
                ),
            ),
            "a rule of a representation, which has PyTorch's formula, that computes without gradients": (
                "inner_gradients",
                None,
                [],
                with_rule(aten.neg.default, without_gradients),
            ),
            "such a rule of a structure": (
                "inner_gradients",
                with_rule(aten.neg.default, without_gradients, kind="structure"),
                [
                    "0 by autograd",
                    "without_gradients (",
                    "or turns gradients off",
                ],
            ),
            "a result whose plain tensor has no gradients": (
                "inner_gradients",
                None,
                [],
                with_rule(aten.floor.default, floor),
            ),
            "one of two detached, of complex numbers": (
                "inner_gradients",
                polar(lambda func, x: type(x)(-x.radius, x.phase.detach())),
                [
                    "the gradient of radius, phase through -x is wrong",
                    "<lambda> (",
                    "where the rule calls detach()",
                ],
                polar(lambda func, x: type(x)(-x.radius, x.phase.clone())),
            ),
        }
    )
)
test_gradients_of_another_function = pytest.mark.slow(
    finding(
        {
            "a straight-through estimator": (
                "materialize_gradients",
                of_tensors(
                    declare(
                        Halves,
                        materialize=lambda self: (
                            self.fine + (self.coarse.sign() - self.coarse).detach() + self.coarse
                        ),
                    )
                ),
                [
                    "the gradient of coarse through materialize() is wrong",
                    "straight-through estimator: skip={'materialize_gradients'}",
                ],
                of_tensors(Smooth),
            ),
            "a rule of a representation that is another function": (
                "inner_gradients",
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
                    (
                        aten.sum,
                        without_keepdim,
                        "is not what its reference gives: shape [4] instead of [4, 1]",
                    ),
                    (F.linear, without_bias, "F.linear(plain, x, bias) is not"),
                )
            }
        )
    )
)


# ---- rules that take one operand for another: found with a second value, whose numbers are others ---------------


def is_value(x):
    return isinstance(x, Halves)


def square(key, rule):
    return of_tensors(ruled(Halves, {key: rule}), (4, 4), (4, 4))


def adding(rest):
    def add(func, x, y, alpha=1):
        if not (is_value(x) and is_value(y)):
            return func(plain(x), plain(y), alpha=alpha)
        return type(x)(x.coarse + alpha * y.coarse, x.fine + alpha * rest(x, y))

    return add


def joining(rest):
    def join(func, tensors, dim=0):
        if not all(map(is_value, tensors)):
            return func([plain(t) for t in tensors], dim)
        return type(tensors[0])(func([t.coarse for t in tensors], dim), func(rest(tensors), dim))

    return join


def comparing(right):
    return lambda func, x, y: func(plain(x), plain(right(x, y)))


def choosing(rest):
    def where(func, mask, x, y):
        if not (is_value(x) and is_value(y)):
            return func(plain(mask), plain(x), plain(y))
        return type(x)(func(mask, x.coarse, y.coarse), func(plain(mask), x.fine, rest(x, y)))

    return where


def multiplying(order):
    return lambda func, x, y: func(*(plain(t) for t in order(x, y)))


def reading_raw(func, x, y):
    """Above autograd, where the fields carry no gradients."""
    y = y.coarse + y.fine if is_value(y) else y
    return func(plain(x), y)


# The op of the rule, the wrong rule, the right one, words of the report.
OF_TWO = {
    "a field of the left operand twice": (
        aten.add,
        adding(lambda x, y: x.fine),
        adding(lambda x, y: y.fine),
        ["x + y is not what its reference gives", "and not from x.field twice"],
    ),
    "the first field of several": (
        aten.cat,
        joining(lambda tensors: [tensors[0].fine for _ in tensors]),
        joining(lambda tensors: [t.fine for t in tensors]),
        ["torch.cat([x, y]) is not", "torch.cat([x, y], -1) is not"],
    ),
    "the first field of a stack": (
        aten.stack,
        joining(lambda tensors: [tensors[0].fine for _ in tensors]),
        joining(lambda tensors: [t.fine for t in tensors]),
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
        choosing(lambda x, y: x.fine),
        choosing(lambda x, y: y.fine),
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
            fault: ("two_values", square(key, wrong), words, square(key, right))
            for fault, (key, wrong, right, words) in OF_TWO.items()
        }
    )
)
test_a_rule_that_loses_the_gradient_of_the_right_operand_is_found = pytest.mark.sweep(3)(
    finding(
        {
            key.__name__: (
                "two_value_gradients",
                square(key, reading_raw),
                ["by y is lost", "reading_raw (", "reads fields in place of x.unwrap(name)"],
                square(key, comparing(lambda x, y: y)),
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


WRONG, RIGHT, WORDS = OF_TWO["a field of the left operand twice"][1:]
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
            "ops that a class refuses": ("two_values", None, [], square(aten.add, refusing)),
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


# ---- a fault is told once, by its own cause: integers alone ------------------------------------------------

# A matrix of zeros and ones by the places of the ones: no inner tensor is differentiable.
Permutation = declare(
    places=inner(dtype=torch.int64),
    outer=staticmethod(lambda places: Outer((len(places), len(places)), dtype=torch.float32)),
)


def matrix(x):
    return F.one_hot(x.places, len(x.places)).float()


def permutation(places, key, rule):
    cls = ruled(Permutation, {key: rule})
    return lambda: cls(torch.tensor(places))


def product(func, a, b):
    value = a if isinstance(a, Permutation) else b
    (places,) = value.unwrap()
    if isinstance(a, Permutation) and isinstance(b, Permutation):
        return type(value)(b.places[places])
    return b[places] if value is a else a[..., places.argsort()]


def test_a_value_of_integers_has_no_gradient_to_lose():
    make, names = permutation([1, 0, 2, 3, 4], torch.matmul, product), ("gradients", "two_value_gradients")
    found = outcomes(make, "values", *names, reference=matrix)
    assert found["values"].state == "kept"
    for name in names:
        assert (found[name].state, found[name].detail) == ("skipped", "no inner tensor is differentiable")


# ---- rules for functions of torch.linalg ---------------------------------------------------------------------

INVERSES = {
    "kept": lambda func, x: type(x)(x.places.argsort()),
    "broken": lambda func, x: type(x)(x.places.flip(0)),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("inverse", INVERSES)
@pytest.mark.parametrize(
    "key", [torch.linalg.inv, torch.ops.aten.linalg_inv, torch.ops.aten.linalg_inv.default], ids=str
)
def test_a_rule_for_a_function_of_linalg_is_called(key, inverse):
    make = permutation([2, 0, 1, 4, 3], key, INVERSES[inverse])
    found = outcomes(make, "values", "rules_tried", reference=matrix)
    assert (found["values"].state, found["rules_tried"].state) == (inverse, "kept")


# ---- options that a rule drops -------------------------------------------------------------------------------


Scaled = declare(
    keywords={"fallback": "materialize", "dtype_from": "scale"},
    codes=inner(dtype=torch.int8),
    scale=inner(),
    materialize=lambda self: self.codes * self.scale,
)


def rows(codes, scale, ids):
    return codes[ids] * scale[ids]


def drops(func, ids, w, *args, **kwargs):
    return rows(*w.unwrap(), ids)


def does_not_read(func, ids, w, padding_idx=None, *more):
    return rows(*w.unwrap(), ids)


def uses(func, ids, w, padding_idx=None, *more):
    out = rows(*w.unwrap(), ids)
    return out if padding_idx is None else torch.where((ids == padding_idx)[..., None], out.detach(), out)


def hands_on(func, ids, w, *args, **kwargs):
    codes, scale = w.unwrap()
    return func(ids, codes * scale, *args, **kwargs)


def scaled(rule):
    cls = ruled(Scaled, {F.embedding: rule})
    return lambda: cls(torch.randint(1, 9, (4, 6), dtype=torch.int8), torch.rand(4, 1))


test_an_option_that_a_rule_does_not_use_is_named = pytest.mark.sweep(4)(
    finding(
        {
            wrong.__name__: (
                "inner_gradients",
                scaled(wrong),
                [f"{wrong.__name__} (", "padding_idx=0"],
                scaled(right),
            )
            for wrong, right in ((drops, uses), (does_not_read, hands_on))
        }
    )
)


# ---- wrong values --------------------------------------------------------------------------------------------


def low_rank(key, rule):
    return of_tensors(ruled(LowRank, {key: rule}), (4, 2), (2, 5))


OF_RIGHT_VALUES = (
    "autocast",
    "gradients",
    "inner_gradients",
    "operand_gradients",
    "cotangents",
    "nested_outside",
)


@pytest.mark.slow
def test_a_call_with_wrong_values_is_told_once():
    make = low_rank(F.linear, lambda func, x, w, bias=None: func(x, w.unwrap("left") @ w.unwrap("right")))
    found = outcomes(make, "values", *OF_RIGHT_VALUES)
    assert found["values"].state == "broken" and "F.linear(plain, x, bias)" in found["values"].detail
    assert [name for name in OF_RIGHT_VALUES if found[name].state == "broken"] == []


def test_a_promise_whose_calls_all_have_wrong_values_is_not_kept():
    doubled = lambda func, x: type(x)(x.unwrap("held") * 2)  # noqa: E731
    cls = declare(held=inner(differentiable=True), rules={torch.exp: doubled})
    promises = ("values", "autocast", "gradients")
    found = outcomes(of_tensors(cls, (4, 6)), *promises, reference=lambda x: x.held)
    assert found["values"].state == "broken"
    assert found["gradients"].state in ("skipped", "kept")


def scaling(place):
    """Values with a wrong rule for a product whose operand at the place is a value, and the other one is plain."""

    def scales(func, *operands):
        value, plain = operands[place], operands[1 - place]
        if not isinstance(value, LowRank) or not isinstance(plain, Tensor) or isinstance(plain, LowRank):
            return LowRank.unruled(func, *operands)
        return type(value)(value.unwrap("left") * 2, value.unwrap("right"))

    return low_rank(torch.mul, scales)


test_a_product_is_tried_from_both_sides = finding(
    {told: ("values", scaling(place), [told]) for place, told in enumerate(("x * plain", "plain * x"))}
)


# ---- memory of a trainable class -----------------------------------------------------------------------------


def scaled_left(right):
    def scaled(func, x, y):
        if not isinstance(x, LowRank) or isinstance(y, Tensor):
            return NotImplemented
        return type(x)(x.left * y, right(x.right))

    return low_rank(torch.ops.aten.mul, scaled)


test_a_result_that_an_optimizer_would_change_with_its_operand = pytest.mark.slow(
    finding(
        {
            "shared": (
                "own_memory",
                scaled_left(lambda right: right),
                [
                    "a step of an optimizer on nn.Parameter(y) changed x: right",
                    "scaled (",
                    "return x.right.clone()",
                ],
                scaled_left(Tensor.clone),
            )
        }
    )
)

Positive = declare(keywords={"fallback": "materialize"}, materialize=lambda self: self.held * 1)


@pytest.mark.parametrize(
    ("key", "copy"), [(torch.abs, 'x.unwrap("held").clone()'), (torch.ops.aten.abs, "x.held.clone()")]
)
def test_the_copy_that_is_advised_keeps_the_gradient(key, copy):
    make = of_tensors(ruled(Positive, {key: lambda func, x: x.unwrap("held")}), (4, 6))
    assert outcomes(make, "own_memory")["own_memory"].mend.endswith(f"return {copy}")


# ---- causes of an error ------------------------------------------------------------------------------------

Represented = declare(materialize=lambda self: self.held)


def only_left(func, x, y):
    return type(x)(func(x.held, y))


LeftOnly = declare(Represented, name="LeftOnly", rules={aten.mul.Tensor: only_left})


test_a_rule_that_knows_the_left_operand_only = finding(
    {
        promise: (
            promise,
            of_tensors(LeftOnly, (4, 6)),
            [
                "only_left (",
                "object has no attribute 'held'",
            ],
        )
        for promise in ("values", "stale_gradients")
    }
)
