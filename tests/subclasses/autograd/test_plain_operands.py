"""Plain operands of mapped ops: their gradients are plain, the sum over inner tensors."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subclasses import inner, static
from tests.doors import COMPILED, DOORS
from tests.subclasses.autograd.judge import agree, agreeing, numbers
from tests.subclasses.subjects import declare

Wind = declare(
    keywords={"fallback": "map"}, east=inner(differentiable=True), north=inner(differentiable=True)
)
# A norm by a rule, which makes a plain tensor of values.
Measured = declare(
    Wind,
    rules={
        torch.ops.aten.linalg_vector_norm: lambda func, x, *args: func(torch.hypot(x.east, x.north), *args)
    },
)

# A function of a value and a plain tensor, and the size of the latter.
CALLS = {
    "product": (lambda x, w: x * w, 4),
    "two uses": (lambda x, w: (x * w) + w, 4),
    "two operands": (lambda x, w: torch.addcmul(x, w, w), (3, 4)),
    "linear": (lambda x, w: F.linear(x, w), (5, 4)),
    "matmul": (lambda x, w: x @ w, (4, 2)),
    "layer_norm": (lambda x, w: F.layer_norm(x, (4,), w), 4),
    "cat": (lambda x, w: torch.cat([x, w]), (2, 4)),
    "where": (lambda x, w: torch.where(w > 1, w, x), (3, 4)),
    "computed": (lambda x, w: x * w.sin(), (3, 4)),
    "a view": (lambda x, w: x * w[1], (2, 4)),
    "empty": (lambda x, w: x[:0] * w, 4),
}


def leaves(size):
    return [t.requires_grad_() for t in numbers((3, 4), (3, 4), size)]


def loss(x):
    return 2 * x.east.sum() + x.north.square().sum()


MADE = {
    "leaf": lambda w: w,
    "computed": lambda w: w * 3,
    "view": lambda w: w.flatten(),
}


def check(calls, made, door="eager"):
    """Calls with operands of their own, and uses of one operand, in one function that may be compiled.

    Args:
        calls: Names of `CALLS`.
        made: Names of `MADE`. As weight decay by a loss, each operand is used beside the value.
        door: The way in which it runs.
    """

    def run(x, w, *others):
        return (
            [CALLS[name][0](x, t) for name, t in zip(calls, others, strict=True)],
            [x * MADE[name](w) for name in made],
            [t for name in made for t in (MADE[name](w).exp(), MADE[name](w) * w)],
        )

    compiled = DOORS[door](run)

    def of_values(east, north, *others):
        values, products, plain = compiled(Wind(east, north), *others)
        return [*(t for x in (*values, *products) for t in x.unwrap()), *plain]

    def of_tensors(east, north, *others):
        (first, more, plain), (second, others, _) = run(east, *others), run(north, *others)
        return [*(t for pair in zip([*first, *more], [*second, *others], strict=True) for t in pair), *plain]

    agree(of_values, of_tensors, numbers((3, 4), (3, 4), 4, *(CALLS[name][1] for name in calls)))


# One graph has all calls.
@pytest.mark.parametrize(
    ("calls", "made", "door"),
    [
        *(([name], [], "eager") for name in CALLS),
        *(([], [name], "eager") for name in MADE),  # a plain gradient of the same operand counts once
        *(
            pytest.param(list(CALLS), list(MADE), door, marks=() if door == "desugar" else pytest.mark.slow)
            for door in COMPILED
        ),
    ],
)
def test_the_gradient_is_the_sum_over_inner_tensors(calls, made, door):
    check(calls, made, door)


def normed(norm_of, cls):
    def fn(east, north):
        x = cls(east * 1.0, north * 1.0)
        return (x / norm_of(x)).east

    return fn


test_an_operand_that_was_computed_from_inner_tensors = agreeing(
    {
        name: (
            normed(norm_of, cls),
            lambda east, north: east / torch.hypot(east, north).norm(),
            [(3, 4), (3, 4)],
        )
        for name, cls, norm_of in (
            ("by fields", Wind, lambda x: (x.east.square() + x.north.square()).sum().sqrt()),
            ("by a rule", Measured, torch.norm),
        )
    }
)
test_a_second_derivative = agreeing(
    {
        "a product": (
            lambda east, north, w: (Wind(east, north).sin() * w.sin()).unwrap(),
            lambda east, north, w: (east.sin() * w.sin(), north.sin() * w.sin()),
            [(3, 4), (3, 4), 4],
        )
    },
    {"eager": DOORS["eager"]},
    twice=["eager"],
)


def test_an_optimizer_steps_the_weights_that_a_value_went_through():
    layer, (east, north, _) = nn.Linear(4, 2, dtype=torch.float64), leaves(1)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    before = loss(layer(Wind(east, north)))
    before.backward()
    assert all(type(p.grad) is Tensor for p in layer.parameters())
    optimizer.step()
    assert loss(layer(Wind(east, north))) < before


def test_one_hook_for_many_calls():
    east, north, w = leaves(4)
    for _ in range(5):
        Wind(east, north) * w
    assert len(w._backward_hooks) == 1
    with torch.no_grad():
        Wind(east, north) * w.detach().requires_grad_()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda w: pickle.loads(pickle.dumps(w))])
@pytest.mark.parametrize("make", [lambda w: w, nn.Parameter])
def test_a_copy_of_an_operand_has_a_hook_of_its_own(make, copied):
    east, north, w = leaves(4)
    w = make(w.detach().requires_grad_())
    loss(Wind(east, north) * w).backward()
    w.grad, expected = None, w.grad
    other = copied(w)
    loss(Wind(east, north) * other).backward()
    torch.testing.assert_close(other.grad, expected)


Marked = declare(
    keywords={"fallback": "map"},
    one=inner(differentiable=True),
    two=inner(differentiable=True),
    mark=static(),
)


def of_several(x, y, w):
    """An operand of values of two classes, of two marks, and of a value that holds another."""
    values = Wind(x, y), Marked(x, y, mark=1), Marked(y, x, mark=2), Marked(Wind(x, y), y, mark=3)
    (wind, one, two, three) = [value * w for value in values]
    return [*wind.unwrap(), one.two, two.two, *three.one.unwrap(), three.two]


test_an_operand_of_several_values = agreeing(
    {
        "values": (
            of_several,
            lambda x, y, w: [x * w, y * w, y * w, x * w, x * w, y * w, y * w],
            [(3, 4), (3, 4), 4],
        )
    }
)


def test_hooks_get_the_plain_gradient():
    east, north, w = leaves(4)
    w.register_hook(lambda g: g.clamp(-1.0, 1.0))
    product = Wind(east, north) * w
    (5 * product.east.sum() - 5 * product.north.sum()).backward()
    torch.testing.assert_close(w.grad, (5 * (east - north).detach().sum(0)).clamp(-1.0, 1.0))
