"""Optimizers do not ask the rules of a class for arithmetic, in eager mode and in compiled steps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import desugar
import subclasses
from subclasses import DispatchError, TensorSubclass, inner


class Mapped(TensorSubclass, fallback="map"):
    """What a step has to do: each op on each inner tensor."""

    radius: Tensor = inner()
    center: Tensor = inner()


class Ball(TensorSubclass, fallback="map"):
    """Radii add up, whatever is done with the centers."""

    radius: Tensor = inner()
    center: Tensor = inner()


@Ball.implements(subclasses.arithmetic)
def _(func, x, y):
    (r, c), (s, d) = ((t.radius, t.center) if isinstance(t, Ball) else (0, t) for t in (x, y))
    radius = r * abs(d) + s * abs(c) if func is torch.mul else r + s
    center = func(c, d)
    return Ball(radius.expand_as(center), center)


class Above(TensorSubclass, fallback="map"):
    """The same for functions, above autograd."""

    radius: Tensor = inner()
    center: Tensor = inner()


@Above.implements(torch.add, torch.sub, torch.mul, torch.div, torch.sqrt)
def _(func, x, *args, **kwargs):
    raise AssertionError(f"an optimizer asked for {func}")


class Product(TensorSubclass, fallback="materialize", trainable=True):
    """A class that cannot be mapped."""

    radius: Tensor = inner()
    center: Tensor = inner()

    def materialize(self):
        return self.radius * self.center


PATHS = {
    "eager": lambda step: step,
    "stock": lambda step: torch.compile(step, backend="aot_eager"),
    "desugar": lambda step: desugar.compile(step, backend="eager"),
}
OPTIMIZERS = {
    "SGD": lambda ps, **kw: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1, **kw),
    "AdamW": lambda ps, **kw: torch.optim.AdamW(ps, lr=0.1, **kw),
    "Adadelta": lambda ps, **kw: torch.optim.Adadelta(ps, lr=0.1, **kw),
    "RAdam": lambda ps, **kw: torch.optim.RAdam(ps, lr=0.1, **kw),
}


def train(cls, optimizer, path, foreach, clip=True):
    generator = torch.Generator().manual_seed(0)
    p = nn.Parameter(cls(*(torch.randn(3, 2, generator=generator) for _ in range(2))))
    optimizer = OPTIMIZERS[optimizer]([p], foreach=foreach)
    step = PATHS[path](lambda: optimizer.step())
    for _ in range(3):
        radius, center = p.unwrap()
        (radius.square() + (radius * center).square()).sum().backward()
        if clip:
            nn.utils.clip_grad_norm_([p], 1.0, foreach=foreach)
        step()
        optimizer.zero_grad()
    return torch.stack(p.detach().unwrap())


@pytest.mark.parametrize("foreach", [False, True], ids=["one by one", "foreach"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("cls", [Ball, Above])
def test_a_step_is_that_of_each_inner_tensor(cls, optimizer, foreach):
    torch.testing.assert_close(
        train(cls, optimizer, "eager", foreach), train(Mapped, optimizer, "eager", foreach)
    )


@pytest.mark.sweep(18)
@pytest.mark.parametrize("foreach", [False, True], ids=["one by one", "foreach"])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("cls", [Ball, Product])
@pytest.mark.parametrize("path", ["stock", "desugar"])
def test_a_compiled_step_is_the_same(cls, optimizer, foreach, path):
    torch.testing.assert_close(
        train(cls, optimizer, path, foreach, clip=False),
        train(Mapped, optimizer, "eager", foreach, clip=False),
    )


def test_values_keep_their_rules():
    x = Ball(torch.ones(2), torch.ones(2))
    p = nn.Parameter(x.clone())
    assert (p - x).detach().radius.tolist() == [2, 2] and x.sub_(x).radius.tolist() == [2, 2]
    with torch.no_grad():
        assert (p - p).radius.tolist() == [2, 2] and p.sub_(p).radius.tolist() == [0, 0]


@pytest.mark.parametrize("cls", [Ball, Product])
def test_a_write_to_a_parameter_in_one_graph_is_refused(cls):
    @torch.compile(backend="aot_eager", fullgraph=True)
    def decay(p):
        with torch.no_grad():
            p.mul_(0.5)

    p = nn.Parameter(cls(torch.ones(2), torch.ones(2)))
    words = r"aten.mul_.Tensor writes to a Parameter of an? \w+ in a compiled function.*keep the optimizer's step out"
    with pytest.raises(torch._dynamo.exc.Unsupported, match=words):
        decay(p)
    assert torch.stack(p.detach().unwrap()).unique().tolist() == [1]


@pytest.mark.parametrize("cls", [Ball, Product])
def test_a_gradient_of_the_users_own(cls):
    p = nn.Parameter(cls(torch.ones(2), torch.ones(2)))
    p.grad = torch.ones(2)
    words = r"A step of an optimizer takes Parameters, .* what torch.zeros_like gives for a Parameter"
    with pytest.raises(DispatchError, match=words):
        torch.optim.SGD([p]).step()
    p.grad = torch.zeros_like(p).add_(1)
    torch.optim.SGD([p], lr=0.5).step()
    assert torch.stack(p.detach().unwrap()).unique().tolist() == [0.5]
