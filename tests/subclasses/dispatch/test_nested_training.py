"""Parameters whose inner tensors are wrappers, trained beside the innermost tensors as separate parameters."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from subclasses import DispatchError, Outer, inner
from subclasses.spec.values import POINT
from tests.doors import COMPILED, DOORS
from tests.subclasses.dispatch.training import check_trained, innermost
from tests.subclasses.subjects import LowRank, Pair, declare

ByRow = declare(
    __module__=__name__,
    name="ByRow",
    keywords={"fallback": "materialize", "trainable": True},
    base=inner(),
    scale=inner(),
    materialize=lambda self: self.base * 1 * self.scale,
)
Frozen = declare(LowRank, name="Frozen", keywords={"trainable": False})
X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


def of_rows(a, whole):
    return (whole * X).sin().sum() + a.sum()


def of_pair(a, b):
    return (a * X).sum() + (X @ b.T).sin().sum()


# How a value is made of tensors, the loss of the Parameter, and that of the tensors.
CASES = {
    "two deep": (
        lambda a, b, s, t: ByRow(LowRank(a, b), s),
        lambda p: of_rows(p.unwrap("base"), p),
        lambda a, b, s: of_rows(a @ b, a @ b * s),
    ),
    "three deep": (
        lambda a, b, s, t: ByRow(ByRow(LowRank(a, b), s), t),
        lambda p: of_rows(p.unwrap("base"), p),
        lambda a, b, s, t: of_rows(a @ b * s, a @ b * s * t),
    ),
    "mapped": (
        lambda a, b, s, t: Pair(LowRank(a, b), LowRank(a + 1, b - 1)),
        lambda p: of_pair(*p.unwrap()),
        lambda a, b, c, d: of_pair(a @ b, c @ d),
    ),
}
cases = pytest.mark.parametrize("case", CASES)


def make(case):
    generator = torch.Generator().manual_seed(1)
    sizes = ((4, 2), (2, 3), (4, 1), (4, 3))
    return nn.Parameter(CASES[case][0](*[torch.randn(size, generator=generator) for size in sizes]))


@pytest.mark.parametrize(
    ("optimizer", "how"),
    [("SGD", {}), ("AdamW", {}), ("AdamW", {"foreach": False}), ("AdamW", {"fused": True})],
)
@cases
def test_optimizers_update_the_innermost_tensors(case, optimizer, how):
    check_trained(make(case), *CASES[case][1:], optimizer, **how)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("door", COMPILED)
@cases
def test_compiled_losses(case, door):
    _, loss, plain = CASES[case]
    check_trained(make(case), COMPILED[door](loss), plain)


def loaded(p):
    file = io.BytesIO()
    torch.save(p, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def moved(p):
    module = nn.Module()
    module.p = p
    return module.to(torch.float64).to(torch.float32).p


@pytest.mark.parametrize("change", [copy.deepcopy, loaded, moved])
@cases
def test_copies_train_as_well(case, change):
    check_trained(change(make(case)), *CASES[case][1:])


@pytest.mark.parametrize("door", DOORS)
def test_a_gradient_is_one_at_every_depth(door):
    p = make("two deep")
    CASES["two deep"][1](p).backward()
    doubled = DOORS[door](lambda g: g * 2)(p.grad)
    assert type(doubled.base) is LowRank.Cotangent and doubled._layout.cotangent
    torch.testing.assert_close(doubled.base.left, p.grad.base.left * 2)


def test_the_value_that_a_parameter_is_made_of_keeps_its_meaning():
    base = LowRank(torch.randn(4, 2), torch.randn(2, 3))
    p = nn.Parameter(ByRow(base, torch.ones(4, 1)))
    assert POINT in p.__dict__["base"].__dict__ and POINT not in base.__dict__
    with pytest.raises(DispatchError, match="writing to what it materializes to would be lost"):
        base.mul_(2)


def refusal_of(x):
    """What a step on a Parameter says, which leaves it as it was."""
    p = nn.Parameter(x)
    p.grad, before = torch.ones(p.shape), innermost(p)
    with pytest.raises(DispatchError) as caught:
        torch.optim.SGD([p], lr=0.1).step()
    assert all(map(torch.equal, innermost(p), before))
    return str(caught.value)


@pytest.mark.parametrize("cls", [ByRow, Pair])
def test_a_step_of_a_class_inside_that_cannot_train_is_refused(cls):
    text = refusal_of(cls(Frozen(torch.randn(4, 2), torch.randn(2, 3)), torch.randn(4, 3)))
    name = "base" if cls is ByRow else "a"
    assert f"a Parameter is a {cls.__name__} with a Frozen as {name}: " in text


def test_a_class_of_integers_inside_is_not_told_to_train():
    """Its declaration with ``trainable=True`` would be refused."""
    # A permutation matrix by its indices, which no optimizer changes.
    Permutation = declare(
        name="Permutation",
        keywords={"fallback": "materialize"},
        order=inner(dtype=torch.int64),
        outer=staticmethod(lambda order: Outer((order.shape[0],) * 2, dtype=torch.float32)),
        materialize=lambda self: torch.eye(self.order.shape[0])[self.order],
    )
    Permuted = declare(
        name="Permuted",
        keywords={"fallback": "materialize", "trainable": True},
        weight=inner(),
        permutation=inner(),
        materialize=lambda self: self.weight @ self.permutation.materialize(),
    )
    permutation = Permutation(torch.tensor([1, 0]))
    text = refusal_of(Permuted(torch.ones(2, 2), permutation))
    assert "a Permuted with a Permutation as permutation" in text and "trainable=True" not in text
    assert "let the outer class hold the inner tensors and call Permutation(self.order) in its" in text
    assert "trainable=True" not in refusal_of(permutation)
