"""A fault of a rule is told once, by its own cause, and what is no fault is not told."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from subclasses import Outer, inner
from tests.subclasses.subjects import LowRank, declare
from tests.subclasses.testing.faults import finding, of_tensors, outcomes, ruled

# ---- integers alone ------------------------------------------------------------------------------------------


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
                [f"{wrong.__name__} (", "does not use padding_idx="],
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
