"""What autograd saved of inner tensors is stale after a write: by a rule, through a view, or to its base."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from subclasses import TensorSubclass, inner
from tests.doors import DOORS
from tests.subclasses.autograd.judge import agree, numbers
from tests.subclasses.subjects import declare

aten = torch.ops.aten

# ---- views and their bases -----------------------------------------------------------------------------------

Mapped = declare(keywords={"fallback": "map"})
Views = declare(keywords={"fallback": "views"}, rules={aten.mul.Tensor: lambda func, x, y: Views(x.held * y)})
Ruled = declare(
    keywords={"fallback": "materialize", "trainable": True},
    materialize=lambda self: self.held * 2,
    rules=dict.fromkeys([aten.slice, aten.select], lambda func, x, *args: Ruled(func(x.held, *args))),
)
Box = declare(keywords={"fallback": "map"})

VIEWS = {
    "slice": lambda x: x[:1],
    "select": lambda x: x[0],
    "detach": lambda x: x.detach(),
    "of a view": lambda x: x[:2][:1],
}


def check_stale(loss):
    with pytest.raises(RuntimeError, match=r"in-?place|modified"):
        loss.backward()


def innermost(x):
    return innermost(x.unwrap("held")) if isinstance(x, TensorSubclass) else x


@pytest.mark.parametrize("cls", [Mapped, Views, Ruled, Box])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("written", ["the base", "the view"])
def test_a_write_to_one_is_seen_by_what_was_saved_of_the_other(cls, view, written):
    held = torch.tensor([3.0, 4.0, 5.0])
    x = Box(Mapped(held)) if cls is Box else cls(held)
    with torch.no_grad():
        y = VIEWS[view](x)
    saved, other = (y, x) if written == "the base" else (x, y)
    leaf = torch.tensor(2.0, requires_grad=True)
    loss = (leaf * innermost(saved)).sum()  # saves the inner tensor of one
    with torch.no_grad():
        (other.unwrap("held") if cls is Ruled else other).mul_(10)
    check_stale(loss)


def test_views_that_are_not_written_to_are_not_stale():
    x = Mapped(torch.tensor([3.0, 4.0])).requires_grad_()
    ((innermost(x[:1]) ** 2).sum() + (innermost(x) ** 2).sum()).backward()
    assert x.grad.held.tolist() == [12, 8]


def test_a_value_inside_of_a_parameter_that_changed_is_noticed():
    Outer = declare(
        keywords={"fallback": "materialize", "trainable": True},
        materialize=lambda self: self.held.materialize() if isinstance(self.held, Ruled) else self.held,
    )
    w = nn.Parameter(Outer(Ruled(torch.tensor([3.0]))))
    loss = (innermost(w) ** 2).sum()
    with torch.no_grad():
        w.mul_(10)
    check_stale(loss)


# ---- a rule that writes ----------------------------------------------------------------------------------------

WRITES = {
    aten.add_.Tensor: lambda w: w.add_(torch.ones(3, 4)),
    aten.copy_.default: lambda w: w.copy_(torch.ones(3, 4)),
    aten.fill_.Scalar: lambda w: w.fill_(2.0),
    aten.zero_.default: lambda w: w.zero_(),
}


def linear(func, x, w, bias=None):
    change, base = w.unwrap()
    return func(x, base, bias) + func(x, change)


@pytest.mark.sweep(12)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("fallback", ["materialize", "map", "error"])
@pytest.mark.parametrize("op", WRITES, ids=str)
def test_a_write_by_a_rule_between_forward_and_backward_is_refused(op, fallback, door):
    write = lambda func, x, *operands, **options: (func(x.change, *operands, **options), x)[1]  # noqa: E731
    Delta = declare(
        keywords={"fallback": fallback},
        change=inner(),
        base=inner(),
        materialize=lambda self: self.base + self.change,
        rules={F.linear: linear, op: write},
    )
    w, x = Delta(torch.ones(3, 4), torch.zeros(3, 4)), torch.ones(2, 4, requires_grad=True)
    out = DOORS[door](F.linear)(x, w).sum()
    WRITES[op](w)
    check_stale(out)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("alias", [False, True])
def test_a_write_that_follows_from_a_rule_leaves_alone_what_the_rule_passes_on(alias, door):
    def multiply(func, x, y):
        return Indexed(x.values * y, x.index.view_as(x.index) if alias else x.index)

    def fn(values):
        x = Indexed(values * 1, index)
        x.mul_(2.0)
        return x.unwrap("values")

    Indexed = declare(values=inner(), index=inner(dtype=torch.int64), rules={aten.mul: multiply})
    index = torch.tensor([2, 0, 1])
    agree(fn, lambda values: 2 * values, numbers(3), door=door)
    assert index._version == 0
