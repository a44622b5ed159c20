"""A fault of a rule is told once, by its own cause, and what is no fault is not told."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from subclasses import Outer, TensorSubclass, inner
from subclasses.testing import examine
from subclasses.testing.runner import PROMISES
from tests.subclasses.subjects import LowRank


def examined(make, *promises, **options):
    others = {p.name for p in PROMISES} - {*promises, "readable"}
    return {o.promise.name: o for o in examine(make, paths={}, skip=others, **options).outcomes}


# ---- integers alone ------------------------------------------------------------------------------------------


class Permutation(TensorSubclass):
    """A matrix of zeros and ones by the places of the ones: no inner tensor is differentiable."""

    places: Tensor = inner(dtype=torch.int64)

    @staticmethod
    def outer(places):
        return Outer((len(places), len(places)), dtype=torch.float32)


def matrix(x):
    return F.one_hot(x.places, len(x.places)).float()


def permutation(**rules):
    cls = type("Permutation", (Permutation,), {"__doc__": "With rules."})
    for key, rule in rules.items():
        cls.implements(functools.reduce(getattr, key.split("_", 1), torch))(rule)
    return lambda: cls(torch.tensor([1, 0, 2, 3, 4]))


def product(func, a, b):
    value = a if isinstance(a, Permutation) else b
    (places,) = value.unwrap()
    if isinstance(a, Permutation) and isinstance(b, Permutation):
        return type(value)(b.places[places])
    return b[places] if value is a else a[..., places.argsort()]


def test_a_value_of_integers_has_no_gradient_to_lose():
    make = permutation(matmul=product)
    found = examined(make, "values", "gradients", "two_value_gradients", reference=matrix)
    assert found["values"].state == "kept"
    for name in ("gradients", "two_value_gradients"):
        assert (found[name].state, found[name].detail) == ("skipped", "no inner tensor is differentiable")


# ---- rules for functions of torch.linalg ---------------------------------------------------------------------

INVERSES = {
    "right": lambda func, x: type(x)(x.places.argsort()),
    "wrong": lambda func, x: type(x)(x.places.flip(0)),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("inverse", INVERSES)
@pytest.mark.parametrize(
    "key", [torch.linalg.inv, torch.ops.aten.linalg_inv, torch.ops.aten.linalg_inv.default], ids=str
)
def test_a_rule_for_a_function_of_linalg_is_called(key, inverse):
    cls = type("Inverted", (Permutation,), {"__doc__": "With a rule."})
    cls.implements(key)(INVERSES[inverse])
    found = examined(lambda: cls(torch.tensor([2, 0, 1, 4, 3])), "values", "rules_tried", reference=matrix)
    assert found["values"].state == {"right": "kept", "wrong": "broken"}[inverse]
    assert found["rules_tried"].state == "kept"


# ---- options that a rule drops -------------------------------------------------------------------------------


class Scaled(TensorSubclass, fallback="materialize", dtype_from="scale"):
    codes: Tensor = inner(dtype=torch.int8)
    scale: Tensor = inner()

    def materialize(self):
        return self.codes * self.scale


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


@pytest.mark.sweep(4)
@pytest.mark.parametrize("rule", [drops, does_not_read, uses, hands_on])
def test_an_option_that_a_rule_does_not_use_is_named(rule):
    cls = type("Ruled", (Scaled,), {"__doc__": "With a rule."})
    cls.implements(F.embedding)(rule)
    make = lambda: cls(torch.randint(1, 9, (4, 6), dtype=torch.int8), torch.rand(4, 1))  # noqa: E731
    found = examined(make, "inner_gradients")["inner_gradients"]
    if rule in (uses, hands_on):
        assert found.state == "kept", found
    else:
        assert found.state == "broken"
        assert f"{rule.__name__} (" in found.mend and "does not use padding_idx=" in found.mend


# ---- wrong values --------------------------------------------------------------------------------------------


def ruled(key, rule):
    cls = type("Ruled", (LowRank,), {"__doc__": "With a rule."})
    cls.implements(key)(rule)
    return lambda: cls(torch.randn(4, 2), torch.randn(2, 5))


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
    def without_bias(func, x, w, bias=None):
        return func(x, w.unwrap("left") @ w.unwrap("right"))

    found = examined(ruled(F.linear, without_bias), "values", *OF_RIGHT_VALUES)
    assert found["values"].state == "broken" and "F.linear(plain, x, bias)" in found["values"].detail
    assert [name for name in OF_RIGHT_VALUES if found[name].state == "broken"] == []


def test_a_promise_whose_calls_all_have_wrong_values_is_not_kept():
    class Doubled(TensorSubclass):
        held: Tensor = inner(differentiable=True)

    Doubled.implements(torch.exp)(lambda func, x: Doubled(x.unwrap("held") * 2))
    found = examined(
        lambda: Doubled(torch.randn(4, 6)), "values", "autocast", "gradients", reference=lambda x: x.held
    )
    assert found["values"].state == "broken"
    assert found["gradients"].state in ("skipped", "kept")


@pytest.mark.parametrize(("place", "told"), [(0, "x * plain"), (1, "plain * x")])
def test_a_product_is_tried_from_both_sides(place, told):
    def scales(func, *operands):
        value, plain = operands[place], operands[1 - place]
        if not isinstance(value, LowRank) or not isinstance(plain, Tensor) or isinstance(plain, LowRank):
            return LowRank.unruled(func, *operands)
        return type(value)(value.unwrap("left") * 2, value.unwrap("right"))

    found = examined(ruled(torch.mul, scales), "values")["values"]
    assert found.state == "broken" and told in found.detail


# ---- memory of a trainable class -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("shares", [True, False])
def test_a_result_that_an_optimizer_would_change_with_its_operand(shares):
    def scaled(func, x, y):
        if not isinstance(x, LowRank) or isinstance(y, Tensor):
            return NotImplemented
        return type(x)(x.left * y, x.right if shares else x.right.clone())

    found = examined(ruled(torch.ops.aten.mul, scaled), "own_memory")["own_memory"]
    assert found.state == ("broken" if shares else "kept")
    if shares:
        assert "a step of an optimizer on nn.Parameter(y) changed x: right" in found.detail
        assert "scaled (" in found.mend and "return x.right.clone()" in found.mend


@pytest.mark.parametrize(
    ("key", "copy"), [(torch.abs, 'x.unwrap("held").clone()'), (torch.ops.aten.abs, "x.held.clone()")]
)
def test_the_copy_that_is_advised_keeps_the_gradient(key, copy):
    class Positive(TensorSubclass, fallback="materialize"):
        held: Tensor = inner()

        def materialize(self):
            return self.held * 1

    Positive.implements(key)(lambda func, x: x.unwrap("held"))
    mend = examined(lambda: Positive(torch.rand(4, 6)), "own_memory")["own_memory"].mend
    assert mend.endswith(f"return {copy}")
