"""A transform of ``torch.func`` does not ask a rule for a function; an op is not mapped where that rule exists."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from subclasses import DispatchError, TensorSubclass, inner

X = torch.arange(6.0).reshape(2, 3)


def pair(fallback="map"):
    class Pair(TensorSubclass, fallback=fallback):
        plus: Tensor = inner()
        minus: Tensor = inner()

    @Pair.implements(torch.std)
    def rule(func, x, *args, **kwargs):
        plus, minus = x.unwrap()
        return (plus - minus).abs().mean()

    @Pair.implements(torch.ops.aten.mul)
    def product(func, x, y):
        return Pair(*(func(*operands) for operands in zip(*(_parts(t) for t in (x, y)), strict=True)))

    def _parts(t):
        return (t.plus, t.minus) if isinstance(t, Pair) else (t, t)

    return Pair


CALLS = {
    "vmap": lambda f: torch.vmap(f)(X),
    "grad": lambda f: torch.func.grad(f)(X[1]),
    "jvp": lambda f: torch.func.jvp(f, (X[1],), (torch.ones(3),)),
    "jacrev": lambda f: torch.func.jacrev(f)(X[1]),
}


@pytest.mark.parametrize("call", CALLS)
def test_an_op_of_a_ruled_function_is_refused_in_a_transform(call):
    value = pair()(torch.tensor([1.0, 2.0, 4.0]), torch.zeros(3))
    words = (
        r"aten.std.correction on a Pair inside of a transform .*implements\(torch.ops.aten.std.correction\)"
    )
    with pytest.raises(DispatchError, match=words):
        CALLS[call](lambda x: (value * x).std())


def test_the_rule_that_the_error_names_is_asked():
    Pair = pair()
    Pair.implements(torch.ops.aten.std.correction)(
        lambda func, x, *args, **kwargs: (x.plus - x.minus).abs().mean(*args[:1])
    )
    value = Pair(torch.tensor([1.0, 2.0, 4.0]), torch.zeros(3))
    found = torch.vmap(lambda x: (value * x).std())(X)
    torch.testing.assert_close(found, torch.stack([(value * x).std() for x in X]))


def test_a_value_from_outside_asks_its_rule_inside():
    value = pair()(torch.tensor([1.0, 2.0, 6.0]), torch.zeros(3))
    assert torch.vmap(lambda x: x.sum() * value.std())(X).tolist() == [9, 36]


def test_other_ops_are_mapped_in_a_transform():
    value = pair()(torch.tensor([1.0, 2.0, 4.0]), torch.zeros(3))
    found = torch.vmap(lambda x: (value * x).sin())(X)
    torch.testing.assert_close(found.plus, (value.plus * X).sin())


def test_the_op_by_its_own_name_is_mapped():
    value = pair()(torch.tensor([1.0, 2.0, 4.0]), torch.zeros(3))
    assert torch.ops.aten.std.correction(value, None).plus.item() == pytest.approx(value.plus.std().item())
