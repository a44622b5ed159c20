"""``Cls.Cotangent``: its definition, the operations that keep it, and the calls that mix it with values."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from subclasses import DispatchError, inner, static
from subclasses.ragged import JaggedTensor
from tests.doors import DOORS
from tests.subclasses.dispatch.training import saved
from tests.subclasses.subjects import LowRank, Pair, declare

aten = torch.ops.aten


def multiplied(func, x, y):
    if not (isinstance(x, Turn) and isinstance(y, Turn)):
        return NotImplemented
    return Turn(x.cosine * y.cosine - x.sine * y.sine, x.cosine * y.sine + x.sine * y.cosine)


# A complex number of modulus one, whose product is a rule.
Turn = declare(
    __module__=__name__,
    name="Turn",
    keywords={"fallback": "map"},
    cosine=inner(),
    sine=inner(),
    unit=static(default="rad"),
    rules={aten.mul.Tensor: multiplied},
)
Heir = declare(Turn)  # inherits the fields and the rules


def turn(cls=Turn, **metadata):
    return cls(torch.tensor([3.0, 1.0]), torch.tensor([4.0, 0.0]), **metadata)


def test_each_class_has_one_of_its_own():
    assert Turn.Cotangent is Turn.Cotangent is Turn.Cotangent.Cotangent
    assert issubclass(Turn.Cotangent, Turn) and Turn.Cotangent is not Turn
    assert Heir.Cotangent is not Turn.Cotangent and issubclass(Heir.Cotangent, Heir)
    assert JaggedTensor.Cotangent is JaggedTensor
    assert Turn.Cotangent.__qualname__ == "Turn.Cotangent" and Turn.Cotangent.__module__ == __name__
    assert "derivatives" in Turn.Cotangent.__doc__


def test_it_has_the_metadata_of_its_value():
    g = turn(unit="deg").cotangent(sine=torch.tensor([1.0, 2.0]))
    assert type(g) is Turn.Cotangent and g.unit == "deg" and not g.requires_grad
    assert g.cosine.tolist() == [0, 0] and g.sine.tolist() == [1, 2]
    assert repr(g).startswith("Turn.Cotangent(")


COPIES = {
    "save": saved,
    "pickle": lambda g: pickle.loads(pickle.dumps(g)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "clone": lambda g: g.clone(),
    "detach": lambda g: g.detach(),
    "float64": lambda g: g.double(),
    "sum": lambda g: g + g - g,
    "zeros": lambda g: g + torch.zeros_like(g),
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("make", [turn, lambda: LowRank(torch.ones(3, 2), torch.ones(2, 4))])
def test_a_copy_is_a_cotangent(make, how):
    x = make()
    g = x.cotangent(*[torch.randn(t.shape) for t in x.unwrap()])
    new = COPIES[how](g)
    assert type(new) is type(x).Cotangent
    torch.testing.assert_close(new.unwrap(), g.unwrap(), check_dtype=False)


def test_a_formula_combines_it_with_values_and_a_caller_does_not():
    """The rule rotates values, whereas autograd multiplies a cotangent by products of inner tensors."""
    x, other = turn().requires_grad_(), turn()
    x.exp().backward(x.cotangent(torch.ones(2), torch.ones(2)))
    torch.testing.assert_close(x.grad.cosine, x.detach().cosine.exp())
    g = x.grad
    for call in (
        lambda: g * other,
        lambda: other * g,
        lambda: torch.add(other, g),
        lambda: g.addcmul(g, other),
    ):
        with pytest.raises(DispatchError, match=r"a Turn\.Cotangent beside a Turn.*g\.unwrap\(\)"):
            call()
    assert (2 * g - g / 2).sine.tolist() == pytest.approx((1.5 * g.sine).tolist())


# A class with a rule for functions, which is about values.
Trained = declare(
    LowRank,
    keywords={"trainable": True},
    rules=dict.fromkeys(
        [torch.add, torch.mul, torch.sqrt],
        lambda func, *args, **kwargs: func(
            *(x.materialize() if isinstance(x, Trained) else x for x in args), **kwargs
        ),
    ),
)


def check_steps(p, foreach, loss, door="eager"):
    """Three steps of AdamW on a leaf are those on its inner tensors, by the loss of the latter."""
    plain = [t.detach().clone().requires_grad_() for t in p.detach().unwrap()]
    steps = [torch.optim.AdamW(ps, lr=0.1, foreach=foreach) for ps in ([p], plain)]
    step = DOORS[door](lambda: steps[0].step())
    for _ in range(3):
        for one in (p.unwrap(), plain):
            loss(*one).backward()
        step()
        steps[1].step()
        for optimizer in steps:
            optimizer.zero_grad()
    torch.testing.assert_close(list(p.detach().unwrap()), [t.detach() for t in plain], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("leaf", "cls"), [(nn.Parameter, Turn), (nn.Parameter, Pair), (lambda x: x.requires_grad_(), Pair)]
)
@pytest.mark.parametrize("foreach", [False, True])
def test_an_optimizer_steps_a_leaf_by_it(leaf, cls, foreach):
    check_steps(leaf(turn(cls)), foreach, lambda a, b: a.exp().sum() + (b**2).sum())


@pytest.mark.sweep(16)
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("door", DOORS)
def test_a_compiled_step_of_adamw(door, foreach):
    """AdamW multiplies inner tensors and takes their roots, also where Dynamo inlines the rules."""
    p = nn.Parameter(Trained(torch.randn(4, 2), torch.randn(2, 4)))
    inputs = torch.randn(5, 4)
    check_steps(p, foreach, lambda left, right: F.linear(inputs, left @ right).square().sum(), door)
