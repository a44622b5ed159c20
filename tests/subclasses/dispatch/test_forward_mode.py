"""Tangents of inner tensors in forward-mode differentiation: kept above autograd, refused where they would be lost."""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from subclasses import DispatchError
from tests.subclasses.subjects import LowRank, Pair, Scaled, declare

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
        dropped = Pair(dual, dual).detach().a
        assert forward_ad.unpack_dual(dropped).tangent is None


def test_a_dual_tensor_that_requires_grad_is_refused_with_what_to_do_instead():
    leaf = PRIMALS.clone().requires_grad_()
    match = r"requires grad too .* torch\.autograd\.functional\.jvp"
    with forward_ad.dual_level():
        with pytest.raises(DispatchError, match=match):
            Pair(forward_ad.make_dual(leaf, TANGENTS), PRIMALS)
        x = Pair(PRIMALS, PRIMALS).requires_grad_()
        with pytest.raises(DispatchError, match=match):
            forward_ad.make_dual(x, Pair(TANGENTS, TANGENTS)).unwrap("a")
    _, tangent = torch.autograd.functional.jvp(lambda t: (Pair(t, t) * 2).unwrap("a"), PRIMALS, TANGENTS)
    assert torch.equal(tangent, 2 * TANGENTS)


def test_a_rule_for_a_function_keeps_tangents():
    Ruled = declare(rules={torch.sin: lambda func, x: func(x.unwrap("held")) * 2})
    t = PRIMALS.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda t: Ruled(t).sin(), (t,), check_forward_ad=True)
    with pytest.raises(DispatchError, match="dual tensor"):
        torch.autograd.gradcheck(
            lambda t: Scaled(t, torch.tensor(3.0).double()) * 2,
            (t,),
            check_forward_ad=True,
            check_backward_ad=False,
        )
