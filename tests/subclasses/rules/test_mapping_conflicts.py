"""Callers that do not ask a rule for a function: its op is not mapped there.

A transform of ``torch.func``, and another function that computes by the same op.
"""

import pytest
import torch

from subclasses import DispatchError, SpecError, TensorSubclass, inner
from tests.subclasses.subjects import MODES as DOORS, declare
from tests.tables import giving, raising

aten = torch.ops.aten
X = torch.arange(6.0).reshape(2, 3)


def _parts(t):
    return (t.plus, t.minus) if isinstance(t, TensorSubclass) else (t, t)


def product(func, x, y):
    both = zip(_parts(x), _parts(y), strict=True)
    return next(type(t) for t in (x, y) if isinstance(t, TensorSubclass))(*(func(*each) for each in both))


def deviation(func, x, *args, **kwargs):
    plus, minus = x.unwrap()
    return (plus - minus).abs().mean()


def pair(*numbers, **rules):
    rules = {torch.std: deviation, aten.mul: product} | {getattr(torch, n): rule for n, rule in rules.items()}
    cls = declare(name="Pair", keywords={"fallback": "map"}, plus=inner(), minus=inner(), rules=rules)
    return cls(torch.tensor(numbers or [1.0, 2.0, 4.0]), torch.zeros(3))


CALLS = {
    "vmap": lambda f: torch.vmap(f)(X),
    "grad": lambda f: torch.func.grad(f)(X[1]),
    "jvp": lambda f: torch.func.jvp(f, (X[1],), (torch.ones(3),)),
    "jacrev": lambda f: torch.func.jacrev(f)(X[1]),
}
doors = pytest.mark.parametrize("door", DOORS)


@pytest.mark.sweep(24)
@doors
@pytest.mark.parametrize("call", CALLS)
def test_an_op_of_a_ruled_function_is_refused_in_a_transform(call, door):
    words = r"aten.std.correction on a Pair arrived without .*transform .*implements\(torch.ops.aten.std.correction\)"
    if call != "vmap":  # the product is refused before
        words = r"mul on a Pair and a tensor by which a transform of torch.func .* differentiates"
    with pytest.raises(DispatchError, match=words):
        DOORS[door](lambda value: CALLS[call](lambda x: (value * x).std()))(pair())


def structure():
    """A value with a rule for a function that computes no op of its materialized tensor."""
    return declare(
        name="Pair",
        keywords={"kind": "structure", "fallback": "materialize"},
        plus=inner(),
        materialize=lambda self: self.plus * 1,
        rules={torch.std: lambda func, x: x.plus.sum()},
    )(torch.ones(2, 3))


test_an_op_of_a_ruled_function_is_refused_inside = raising(
    {
        f"{name}, {door}": (
            lambda call=call, way=way: call(way),
            r"aten.std.\w+ on a Pair arrived without the function std",
        )
        for name, call in {
            "a class that maps it": lambda way: way(torch.std)(declare(keywords={"fallback": "map"})(pair())),
            "a transform of a structure": lambda way: way(torch.vmap(torch.std))(structure()),
        }.items()
        for door, way in DOORS.items()
    }
)


# A value, a function of it and of a row, and a function of the inner tensor that gives the results under vmap.
IN_VMAP = {
    "the rule that the error names": (
        lambda: declare(
            type(pair()),
            rules={
                aten.std.correction: lambda func, x, *args, **kwargs: (x.plus - x.minus).abs().mean(*args[:1])
            },
        )(*pair().unwrap()),
        lambda value, x: (value * x).std(),
        lambda plus: (plus * X).abs().mean(1),
    ),
    "a value from outside": (
        lambda: pair(1.0, 2.0, 6.0),
        lambda value, x: x.sum() * value.std(),
        lambda plus: torch.tensor([9.0, 36.0]),
    ),
    "a rule that maps the op of its own function": (
        lambda: pair(1.0, 2.0, 6.0, var=lambda func, x, *_, **__: aten.var.correction(x, None).plus * 2),
        lambda value, x: x.sum() * value.var(),
        lambda plus: X.sum(1) * plus.var() * 2,
    ),
    "other ops, which are mapped": (
        pair,
        lambda value, x: (value * x).sin(),
        lambda plus: (plus * X).sin(),
    ),
}


@pytest.mark.sweep(4)
@doors
@pytest.mark.parametrize("case", IN_VMAP)
def test_what_is_right_in_a_transform(case, door):
    make, function, expected = IN_VMAP[case]
    value = make()
    found = DOORS[door](lambda value: torch.vmap(lambda x: function(value, x))(X))(value)
    torch.testing.assert_close(_parts(found)[0], expected(value.plus))


# ---- other functions ---------------------------------------------------------------------------------------


def wind(*keys):
    rule = lambda func, x, *args, **kwargs: func(torch.hypot(*x.unwrap()), *args, **kwargs)  # noqa: E731
    fields = {name: inner(differentiable=True) for name in ("east", "north")}
    cls = declare(name="Wind", keywords={"fallback": "map"}, **fields)
    cls.implements(*keys)(rule)
    return cls(torch.full((2,), 3.0), torch.full((2,), 4.0))


NORMS = {
    "linalg.norm": torch.linalg.norm,
    "matrix_norm": lambda x: torch.linalg.matrix_norm(x[None]),
    "cosine_similarity": lambda x: torch.cosine_similarity(x, x, dim=0),
    "x.norm": lambda x: x.norm(),
    "torch.norm": torch.norm,
}


@pytest.mark.sweep(4)
@doors
@pytest.mark.parametrize("norm", ["linalg.norm", "matrix_norm", "cosine_similarity"])
def test_an_op_of_a_ruled_function_is_refused_in_another_function(norm, door):
    value = wind(torch.linalg.vector_norm)
    assert torch.linalg.vector_norm(value).item() == pytest.approx(50**0.5)
    words = (
        r"computes by aten.linalg_vector_norm.default, for which the rule of the function "
        r"torch.linalg.vector_norm is not called.*@Wind.implements\(torch.ops.aten.linalg_vector_norm.default\)"
    )
    with pytest.raises(DispatchError, match=words):
        DOORS[door](lambda value: NORMS[norm](value))(value)


@pytest.mark.sweep(4)
@doors
@pytest.mark.parametrize("norm", ["linalg.norm", "x.norm", "torch.norm"])
def test_a_rule_for_the_op_is_asked_by_all(norm, door):
    value = wind(aten.linalg_vector_norm)
    assert DOORS[door](lambda value: NORMS[norm](value))(value).item() == pytest.approx(50**0.5)


def test_the_derivative_of_another_function_maps():
    value = wind(torch.sum).detach().requires_grad_()
    value.expand(3, 2).cos().unwrap()[0].sum().backward()
    torch.testing.assert_close(value.grad.east, -3 * torch.full((2,), 3.0).sin())


test_what_another_function_computes_by = raising(
    [
        (
            lambda: torch.einsum("a->", wind(torch.sum)),
            r"torch.einsum on a Wind computes by aten.sum.dim_IntList, .*torch.sum",
        ),
        (
            lambda: wind(aten.norm),
            SpecError,
            r"torch.norm and the method call no rule for aten.norm, since they compute by aten.linalg_vector_norm",
        ),
    ]
)
test_functions_with_their_rules = giving(
    {
        "a method": (lambda: wind(torch.sum).sum(), 10),
        "a function": (lambda: torch.sum(wind(torch.sum)), 10),
        "two ops of a function": (
            lambda: torch.norm(wind(aten.norm, aten.linalg_vector_norm)).item(),
            pytest.approx(50**0.5),
        ),
        "an op by its own name, which is mapped": (
            lambda: aten.std.correction(pair(), None).plus.item(),
            pytest.approx(pair().plus.std().item()),
        ),
    }
)
