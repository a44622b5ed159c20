"""Transforms of ``torch.func`` beside values of a structure with rules, and tangents in forward mode."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from subclasses import DispatchError
from tests.subclasses.subjects import LowRank, Pair, Scaled, declare
from tests.tables import giving, raising

aten = torch.ops.aten


def product(func, x, y):
    value, plain = (x, y) if isinstance(x, Squaring) else (y, x)
    return Squaring(value.held * plain**2)


# Its product is another than PyTorch's formula is about.
Squaring = declare(
    rules={
        aten.mul.Tensor: product,
        aten.sum: lambda func, x, *args: func(x.held, *args),
        aten.gt: lambda func, x, y: func(x.held, y),
    }
)

TRANSFORMS = {
    "grad": lambda f, t: torch.func.grad(f)(t),
    "vjp": lambda f, t: torch.func.vjp(f, t)[1](torch.ones(())),
    "jvp": lambda f, t: torch.func.jvp(f, (t,), (torch.ones_like(t),)),
    "jvp of a batch": lambda f, t: torch.func.jvp(
        lambda t: torch.vmap(f)(t[None]).sum(), (t,), (torch.ones_like(t),)
    ),
    "jacrev": lambda f, t: torch.func.jacrev(f)(t),
    "a batch of gradients": lambda f, t: torch.vmap(torch.func.grad(f))(t[None]),
    "a gradient of a batch": lambda f, t: torch.func.grad(lambda t: torch.vmap(f)(t[None]).sum())(t),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("order", ["x * t", "t * x"])
def test_an_op_beside_what_is_differentiated_is_refused(name, order):
    x, t = Squaring(torch.tensor([1.0, 2.0])), torch.tensor([3.0, 4.0])
    with pytest.raises(
        DispatchError, match=r"transform of torch\.func .*torch\.autograd\.grad, or compute with"
    ):
        TRANSFORMS[name](lambda t: (x * t if order == "x * t" else t * x).sum(), t)
    by_inner = TRANSFORMS["grad"](lambda t: (x.unwrap("held") * t**2).sum(), t)
    leaf = t.clone().requires_grad_()
    torch.testing.assert_close(by_inner, *torch.autograd.grad((x * leaf).sum(), leaf))


test_a_batch_without_derivatives_runs_the_rule = giving(
    {
        "vmap": (
            lambda: torch.vmap(lambda t: (Squaring(torch.tensor([1.0, 2.0])) * t).sum())(
                torch.tensor([[3.0, 4.0], [1.0, 1.0]])
            ).tolist(),
            [9 + 32, 3],
        )
    }
)
WITHOUT = {
    "a comparison": lambda x, t: (t * (x.unwrap("held") * 0 + (x > t))).sum(),
    "a size": lambda x, t: t.expand_as(x).sum(),
    "a detached operand": lambda x, t: (t * (x * t.detach()).sum()).sum(),
}


@pytest.mark.parametrize("name", WITHOUT)
def test_what_has_no_derivative_is_not_refused(name):
    x, t = Squaring(torch.tensor([1.0, 8.0])), torch.tensor([3.0, 4.0])
    leaf = t.clone().requires_grad_()
    expected = torch.autograd.grad(WITHOUT[name](x, leaf), leaf)
    torch.testing.assert_close(torch.func.grad(lambda t: WITHOUT[name](x, t))(t), *expected)


# ---- forward mode: tangents are kept above autograd, and refused where they would be lost ----------------------

PRIMALS, TANGENTS = torch.arange(1.0, 5).reshape(2, 2), torch.ones(2, 2)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x * 2,
        lambda x: x.sin(),
        lambda x: x @ torch.ones(2, 1),
        lambda x: 2 - x,
        lambda x: torch.cat([x, x]),
        lambda x: x.clone(),
    ],
)
@pytest.mark.parametrize(
    "make", [lambda t: Scaled(t, torch.tensor(3.0)), lambda t: LowRank(t, t), lambda t: Pair(t, t)]
)
def test_an_op_below_autograd_is_refused(make, call):
    with forward_ad.dual_level():
        x = make(forward_ad.make_dual(PRIMALS, TANGENTS))
        with pytest.raises(
            DispatchError, match=r"is a dual tensor of torch\.autograd\.forward_ad.* would lose the tangent"
        ):
            call(x)
        assert type(call(make(PRIMALS))) in (Tensor, type(x))  # without a tangent


def test_what_is_computed_above_autograd_keeps_tangents():
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(PRIMALS, TANGENTS)
        got = Scaled(dual, torch.tensor(3.0)).materialize() * 2
        assert torch.equal(forward_ad.unpack_dual(got).tangent, 6 * TANGENTS)
        (a, b) = Pair(dual, PRIMALS).unwrap()
        assert torch.equal(forward_ad.unpack_dual(a * b).tangent, PRIMALS)
        assert forward_ad.unpack_dual(Pair(dual, dual).detach().a).tangent is None


def duals(make):
    """Makes something of a dual tensor."""
    with forward_ad.dual_level():
        return make(forward_ad.make_dual(PRIMALS.clone().requires_grad_(), TANGENTS))


def of_a_dual_value(dual):
    return forward_ad.make_dual(Pair(PRIMALS, PRIMALS).requires_grad_(), Pair(TANGENTS, TANGENTS)).unwrap("a")


WITH_GRAD = r"requires grad too .* torch\.autograd\.functional\.jvp"
test_a_dual_tensor_that_requires_grad_is_refused = raising(
    {
        "an inner tensor": (lambda: duals(lambda dual: Pair(dual, PRIMALS)), WITH_GRAD),
        "a value": (lambda: duals(of_a_dual_value), WITH_GRAD),
        "an op, by gradcheck": (
            lambda: torch.autograd.gradcheck(
                lambda t: Scaled(t, torch.tensor(3.0).double()) * 2,
                (PRIMALS.double().requires_grad_(),),
                check_forward_ad=True,
                check_backward_ad=False,
            ),
            "dual tensor",
        ),
    }
)


def test_functions_of_autograd_do_instead():
    _, tangent = torch.autograd.functional.jvp(lambda t: (Pair(t, t) * 2).unwrap("a"), PRIMALS, TANGENTS)
    assert torch.equal(tangent, 2 * TANGENTS)


def test_a_rule_for_a_function_keeps_tangents():
    Ruled = declare(rules={torch.sin: lambda func, x: func(x.unwrap("held")) * 2})
    t = PRIMALS.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda t: Ruled(t).sin(), (t,), check_forward_ad=True)
