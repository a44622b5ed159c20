"""Callers that do not ask a rule for a function: its op is not mapped there.

A transform of ``torch.func``, and another function that computes by the same op.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import desugar
from subclasses import DispatchError, SpecError, TensorSubclass, inner

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
DOORS = {
    "eager": lambda fn: fn,
    "stock": lambda fn: torch.compile(fn, backend="aot_eager"),
    "backend": lambda fn: torch.compile(fn, backend="desugar", options={"backend": "eager"}),
    "desugar.compile": lambda fn: desugar.compile(fn, backend="eager"),
}
doors = pytest.mark.parametrize("door", DOORS)


@pytest.mark.sweep(12)
@doors
@pytest.mark.parametrize("call", CALLS)
def test_an_op_of_a_ruled_function_is_refused_in_a_transform(call, door):
    value = pair()(torch.tensor([1.0, 2.0, 4.0]), torch.zeros(3))
    words = r"aten.std.correction on a Pair arrived without .*transform .*implements\(torch.ops.aten.std.correction\)"
    if call != "vmap":  # the product is refused before
        words = r"mul on a Pair and a tensor by which a transform of torch.func .* differentiates"
    with pytest.raises(DispatchError, match=words):
        DOORS[door](lambda value: CALLS[call](lambda x: (value * x).std()))(value)


@doors
def test_an_op_of_a_ruled_function_is_refused_inside_of_a_class_that_maps_it(door):
    class Outer(TensorSubclass, fallback="map"):
        held: Tensor = inner()

    value = Outer(pair()(torch.tensor([1.0, 2.0, 4.0]), torch.zeros(3)))
    with pytest.raises(
        DispatchError, match=r"aten.std.correction on a Pair arrived without the function std"
    ):
        DOORS[door](torch.std)(value)


@pytest.mark.sweep(2)
@doors
def test_the_rule_that_the_error_names_is_asked(door):
    Pair = pair()
    Pair.implements(torch.ops.aten.std.correction)(
        lambda func, x, *args, **kwargs: (x.plus - x.minus).abs().mean(*args[:1])
    )
    value = Pair(torch.tensor([1.0, 2.0, 4.0]), torch.zeros(3))
    found = DOORS[door](lambda value: torch.vmap(lambda x: (value * x).std())(X))(value)
    torch.testing.assert_close(found, torch.stack([(value * x).std() for x in X]))


@pytest.mark.sweep(2)
@doors
def test_a_value_from_outside_asks_its_rule_inside(door):
    value = pair()(torch.tensor([1.0, 2.0, 6.0]), torch.zeros(3))
    found = DOORS[door](lambda value: torch.vmap(lambda x: x.sum() * value.std())(X))(value)
    assert found.tolist() == [9, 36]


@pytest.mark.sweep(2)
@doors
def test_a_rule_may_map_the_op_of_its_own_function(door):
    Pair = pair()

    @Pair.implements(torch.var)
    def rule(func, x, *args, **kwargs):
        return torch.ops.aten.var.correction(x, None).plus * 2

    value = Pair(torch.tensor([1.0, 2.0, 6.0]), torch.zeros(3))
    found = DOORS[door](lambda value: torch.vmap(lambda x: x.sum() * value.var())(X))(value)
    torch.testing.assert_close(found, X.sum(1) * value.plus.var() * 2)


@pytest.mark.sweep(2)
@doors
def test_other_ops_are_mapped_in_a_transform(door):
    value = pair()(torch.tensor([1.0, 2.0, 4.0]), torch.zeros(3))
    found = DOORS[door](lambda value: torch.vmap(lambda x: (value * x).sin())(X))(value)
    torch.testing.assert_close(found.plus, (value.plus * X).sin())


def test_the_op_by_its_own_name_is_mapped():
    value = pair()(torch.tensor([1.0, 2.0, 4.0]), torch.zeros(3))
    assert torch.ops.aten.std.correction(value, None).plus.item() == pytest.approx(value.plus.std().item())


# ---- other functions ---------------------------------------------------------------------------------------


def wind(key, fallback="map"):
    class Wind(TensorSubclass, fallback=fallback):
        east: Tensor = inner(differentiable=True)
        north: Tensor = inner(differentiable=True)

    @Wind.implements(*key if isinstance(key, tuple) else (key,))
    def rule(func, x, *args, **kwargs):
        return func(torch.hypot(*x.unwrap()), *args, **kwargs)

    return Wind(torch.full((2,), 3.0), torch.full((2,), 4.0))


NORMS = {
    "linalg.norm": torch.linalg.norm,
    "matrix_norm": lambda x: torch.linalg.matrix_norm(x[None]),
    "cosine_similarity": lambda x: torch.cosine_similarity(x, x, dim=0),
}


@pytest.mark.sweep(2)
@doors
@pytest.mark.parametrize("norm", NORMS)
def test_an_op_of_a_ruled_function_is_refused_in_another_function(norm, door):
    value = wind(torch.linalg.vector_norm)
    assert torch.linalg.vector_norm(value).item() == pytest.approx(50**0.5)
    words = (
        r"computes by aten.linalg_vector_norm.default, for which the rule of the function "
        r"torch.linalg.vector_norm is not asked.*@Wind.implements\(torch.ops.aten.linalg_vector_norm.default\)"
    )
    with pytest.raises(DispatchError, match=words):
        DOORS[door](lambda value: NORMS[norm](value))(value)


@pytest.mark.sweep(2)
@doors
@pytest.mark.parametrize("norm", ["linalg.norm", "x.norm", "torch.norm"])
def test_a_rule_for_the_op_is_asked_by_all(norm, door):
    value = wind(torch.ops.aten.linalg_vector_norm)
    norms = NORMS | {"x.norm": lambda x: x.norm(), "torch.norm": torch.norm}
    assert DOORS[door](lambda value: norms[norm](value))(value).item() == pytest.approx(50**0.5)


def test_a_sum_by_a_function_is_refused_in_einsum():
    value = wind(torch.sum)
    assert value.sum() == torch.sum(value) == 10
    with pytest.raises(
        DispatchError, match=r"torch.einsum on a Wind computes by aten.sum.dim_IntList, .*torch.sum"
    ):
        torch.einsum("a->", value)


def test_the_derivative_of_another_function_maps():
    value = wind(torch.sum).detach().requires_grad_()
    value.expand(3, 2).cos().unwrap()[0].sum().backward()
    torch.testing.assert_close(value.grad.east, -3 * torch.full((2,), 3.0).sin())


def test_a_rule_for_an_op_by_which_its_function_does_not_compute():
    aten = torch.ops.aten
    words = (
        r"torch.norm and the method call no rule for aten.norm, since they compute by aten.linalg_vector_norm"
    )
    with pytest.raises(SpecError, match=words):
        wind(aten.norm)
    assert torch.norm(wind((aten.norm, aten.linalg_vector_norm))).item() == pytest.approx(50**0.5)
