"""Parameters whose inner tensors are wrappers, trained beside the innermost tensors as separate parameters."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor, nn

import desugar
from subclasses import DispatchError, Outer, TensorSubclass, inner
from subclasses.spec.values import POINT
from tests.subclasses.subjects import LowRank


class ByRow(TensorSubclass, fallback="materialize", trainable=True):
    base: Tensor = inner()
    scale: Tensor = inner()

    def materialize(self):
        return self.base * 1 * self.scale


class Pair(TensorSubclass, fallback="map"):
    a: Tensor = inner(differentiable=True)
    b: Tensor = inner(differentiable=True)


class Frozen(LowRank, trainable=False):
    pass


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
DOORS = {
    "eager": lambda fn: fn,
    "stock": lambda fn: torch.compile(fn, backend="aot_eager"),
    "desugar.compile": lambda fn: desugar.compile(fn, backend="eager"),
    "backend": lambda fn: torch.compile(fn, backend="desugar", options={"backend": "eager"}),
}
OPTIMIZERS = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.1),
    "AdamW one by one": lambda ps: torch.optim.AdamW(ps, lr=0.1, foreach=False),
    "AdamW fused": lambda ps: torch.optim.AdamW(ps, lr=0.1, fused=True),
}


def make(case):
    generator = torch.Generator().manual_seed(1)
    sizes = ((4, 2), (2, 3), (4, 1), (4, 3))
    return nn.Parameter(CASES[case][0](*[torch.randn(size, generator=generator) for size in sizes]))


def innermost(x):
    if not isinstance(x, TensorSubclass):
        return [x.detach().clone()]
    return [t for name in x._layout.present for t in innermost(x.__dict__[name])]


def train(parameters, loss, make_optimizer):
    optimizer = make_optimizer(parameters)
    for _ in range(3):
        optimizer.zero_grad()
        loss().backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()


def check_trained(case, p, loss, make_optimizer=OPTIMIZERS["AdamW"]):
    separate = [nn.Parameter(t) for t in innermost(p)]
    train(separate, lambda: CASES[case][2](*separate), make_optimizer)
    train([p], lambda: loss(p), make_optimizer)
    for got, wanted in zip(innermost(p), separate, strict=True):
        torch.testing.assert_close(got, wanted.detach(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", CASES)
def test_optimizers_update_the_innermost_tensors(case, optimizer):
    check_trained(case, make(case), CASES[case][1], OPTIMIZERS[optimizer])


@pytest.mark.sweep(4)
@pytest.mark.parametrize("door", ["stock", "desugar.compile", "backend"])
@pytest.mark.parametrize("case", CASES)
def test_compiled_losses(case, door):
    check_trained(case, make(case), DOORS[door](CASES[case][1]))


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
@pytest.mark.parametrize("case", CASES)
def test_copies_train_as_well(case, change):
    check_trained(case, change(make(case)), CASES[case][1])


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


@pytest.mark.parametrize("cls", [ByRow, Pair])
def test_a_step_of_a_class_inside_that_cannot_train_is_refused(cls):
    frozen = Frozen(torch.randn(4, 2), torch.randn(2, 3))
    p = nn.Parameter(cls(frozen, torch.randn(4, 3)))
    before = innermost(p)
    with pytest.raises(DispatchError, match=rf"a Parameter is a {cls.__name__} with a Frozen as \w+: "):
        step_of(p)
    assert all(map(torch.equal, innermost(p), before))


class Permutation(TensorSubclass, fallback="materialize"):
    """A permutation matrix by its indices, which no optimizer changes."""

    order: Tensor = inner(dtype=torch.int64)

    @staticmethod
    def outer(order):
        return Outer((order.shape[0],) * 2, dtype=torch.float32)

    def materialize(self):
        return torch.eye(self.order.shape[0])[self.order]


class Permuted(TensorSubclass, fallback="materialize", trainable=True):
    weight: Tensor = inner()
    permutation: Tensor = inner()

    def materialize(self):
        return self.weight @ self.permutation.materialize()


def test_a_class_of_integers_inside_is_not_told_to_train():
    """Its declaration with ``trainable=True`` would be refused."""
    x = Permuted(torch.ones(2, 2), Permutation(torch.tensor([1, 0])))
    with pytest.raises(DispatchError, match="a Permuted with a Permutation as permutation") as caught:
        step_of(nn.Parameter(x))
    assert "trainable=True" not in str(caught.value)
    assert "let the outer class hold the inner tensors and call Permutation(self.order) in its" in str(
        caught.value
    )
    assert "trainable=True" not in refusal_of(Permutation(torch.tensor([1, 0])))


def step_of(p):
    p.grad = torch.ones(p.shape)
    torch.optim.SGD([p], lr=0.1).step()


def refusal_of(x):
    with pytest.raises(DispatchError) as caught:
        step_of(nn.Parameter(x))
    return str(caught.value)
