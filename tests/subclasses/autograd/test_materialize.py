"""`materialize()`: of values that hold no tensor with a gradient, and of Parameters that changed since."""

from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from subclasses import Outer, inner
from tests import doors
from tests.subclasses.subjects import LowRank, Scaled, declare
from tests.tables import giving, raising

DOORS = {name: partial(door, fullgraph=True) for name, door in doors.DOORS.items()}
DOORS["desugar"] = partial(DOORS["desugar"], strict=True)
every_door = pytest.mark.parametrize("door", DOORS)


def multiply(func, x, y):
    x, y = (t.materialize() if isinstance(t, Fixed) else t for t in (x, y))
    return Fixed((x * y * 256).round().to(torch.int16))


# Numbers in 256ths.
Fixed = declare(
    keywords={"fallback": "materialize"},
    rules={torch.ops.aten.mul.Tensor: multiply},
    raw=inner(dtype=torch.int16),
    outer=staticmethod(lambda raw: Outer(raw.shape, dtype=torch.float32)),
    materialize=lambda self: self.raw.float() / 256,
)


def fixed(size=2):
    return Fixed((torch.arange(1, size + 1) * 256).short()).requires_grad_()


@pytest.mark.sweep(2)
@every_door
@pytest.mark.parametrize("size", [0, 1, 3])
def test_a_leaf_gets_a_gradient(door, size):
    x, y = fixed(size), torch.randn(size, requires_grad=True)
    compiled = DOORS[door](lambda x, y: (x.materialize().exp() * y).sum())
    for _ in range(2):
        x.grad = y.grad = None
        compiled(x, y).backward()
        exp = x.detach().materialize().exp()
        torch.testing.assert_close((x.grad, y.grad), (exp * y.detach(), exp))


def gradients_of_product():
    x, y = fixed(), torch.tensor([2.0, 3.0], requires_grad=True)
    (x * y).materialize().sum().backward()
    return x.grad.tolist(), y.grad.tolist()


def two_derivatives():
    x = fixed()
    (grad,) = torch.autograd.grad(x.materialize().pow(3).sum(), x, create_graph=True)
    return grad.tolist(), torch.autograd.grad(grad.sum(), x)[0].tolist()


def weighted(t):
    return (t * FIXED.materialize()).sum()


scaled, FIXED, BATCH = (
    partial(lambda: Scaled(torch.ones(2), torch.tensor(3.0)).requires_grad_()),
    fixed(),
    torch.arange(6.0).reshape(3, 2),
)
test_gradients = giving(
    {
        "of what a rule made": (gradients_of_product, ([2, 3], [1, 2])),
        "twice": (two_derivatives, ([3, 12], [6, 12])),
        "of a copy": (
            lambda: torch.autograd.grad(FIXED.clone().square().sum(), FIXED)[0].tolist(),
            [2, 4],
        ),
        "plain, of an argument of stock torch.compile": (
            lambda: torch.autograd.grad(
                torch.compile(lambda x: x * 2 + x, backend="aot_eager")(x := scaled()).sum(), x
            )[0].tolist(),
            [3, 3],
        ),
        "vmap, a value from outside": (lambda: torch.vmap(weighted)(BATCH).tolist(), [2, 8, 14]),
        "grad, a value from outside": (lambda: torch.func.grad(weighted)(BATCH[1]).tolist(), [1, 2]),
    }
)


@pytest.mark.sweep(3)
@every_door
def test_no_gradient_where_none_is_wanted(door):
    compiled = DOORS[door](lambda x: x.materialize())
    assert compiled(fixed()).requires_grad and not compiled(fixed().detach()).requires_grad
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert not compiled(fixed()).requires_grad


# ---- a Parameter that a function materialized: its backward needs the inner tensors of the forward --------------

X = torch.ones(1, 2)


def make():
    return nn.Parameter(LowRank(torch.ones(2, 1), torch.ones(1, 2)))


CHANGES = {
    "a step": lambda w: torch.optim.SGD([w], lr=0.1).step(),
    "in place": lambda w: w.mul_(2),
    "an inner tensor": lambda w: w.right.mul_(2),
    "an assignment": lambda w: setattr(w, "left", w.left * 2),
    "data": lambda w: setattr(w, "data", LowRank(w.left * 2, w.right.clone())),
}
CALLS = {
    "a method": lambda w: w.square(),
    "a function": lambda w: F.linear(X, w),
    "a list": lambda w: torch.cat([w, torch.zeros(1, 2)]),
    "a keyword": lambda w: F.linear(X, weight=w),
    "several results": lambda w: torch.stack(w.square().unbind()),
    "an operand": lambda w: X + w,
    "autocast": lambda w: torch.autocast("cpu", torch.bfloat16)(F.linear)(X, w).float(),
}


def change_between(call, change):
    """Gradients before a change and after it, of two equal forwards."""
    w = make()
    first, second = call(w).sum(), call(w).sum()
    first.backward()
    with torch.no_grad():
        change(w)
    before, w.grad = w.grad, None
    second.backward()
    return list(before.unwrap()), list(w.grad.unwrap())


# A write is refused, unless autocast made a copy first.
WRITES = [pair for pair in product(CALLS, ("a step", "in place", "an inner tensor")) if pair[0] != "autocast"]


@pytest.mark.parametrize(("name", "changed"), sorted({*product(CALLS, CHANGES)} - {*WRITES}))
def test_a_backward_has_the_inner_tensors_of_its_forward(name, changed):
    torch.testing.assert_close(*change_between(CALLS[name], CHANGES[changed]))


test_a_write_between_forward_and_backward_is_refused = raising(
    {
        **{
            f"{name}, {changed}": (
                lambda name=name, changed=changed: change_between(CALLS[name], CHANGES[changed]),
                RuntimeError,
                "modified by an inplace operation",
            )
            for name, changed in WRITES
        },
        # Compiled functions refuse it because of the tensors that they saved.
        **{
            door: (
                lambda door=door: change_between(
                    DOORS[door](lambda w: F.linear(X, w).square().sum()), CHANGES["a step"]
                ),
                RuntimeError,
                "modified by an inplace operation",
            )
            for door in ("inside", "desugar")
        },
    }
)


@pytest.mark.parametrize("call", CALLS)
def test_several_steps_and_backwards_without_a_change_are_those_of_the_inner_tensors(call):
    w, inners = make(), [torch.ones(2, 1).requires_grad_(), torch.ones(1, 2).requires_grad_()]
    for _ in range(3):
        for value in (w, LowRank(*inners)):
            loss = CALLS[call](value).square().sum() + CALLS[call](value).sum()
            loss.backward(retain_graph=True)
            loss.backward()
        torch.testing.assert_close([w.grad.left, w.grad.right], [t.grad for t in inners])
        for leaves in ([w], inners):
            torch.optim.SGD(leaves, lr=0.01).step()
            torch.optim.SGD(leaves, lr=0.01).zero_grad()


def test_what_needs_no_gradient_of_the_parameter_is_no_business_of_its_own():
    frozen, x = make().requires_grad_(False), X.clone().requires_grad_()
    out = F.linear(x, frozen)
    frozen.right.mul_(3)
    out.sum().backward()
    assert x.grad.tolist() == [[2, 2]]
    w = make()
    with torch.no_grad():
        w.left.mul_(2)
        assert F.linear(X, w).tolist() == [[4, 4]]
    evaluated = F.linear(X, w)
    with torch.no_grad():
        w.left.mul_(2)
    del evaluated  # whose backward never runs
    F.linear(X, w).sum().backward()
    assert w.grad.right.tolist() == [[8, 8]]


def test_a_checkpointed_forward_is_checked_against_the_one_that_runs_again():
    w, x = make(), X.clone().requires_grad_()
    torch.utils.checkpoint.checkpoint(
        lambda x: F.linear(x, w).square(), x, use_reentrant=False
    ).sum().backward()
    assert w.grad.left.tolist() == [[8], [8]]
