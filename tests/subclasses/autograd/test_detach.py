"""`detach` in one step does what the steps of the resolution do."""

import sys

import pytest
import torch
from torch import Tensor, nn

from subclasses import Outer, inner, static
from subclasses.dispatch import resolution
from tests.subclasses.autograd.judge import passing
from tests.subclasses.subjects import Int8Weight, Pair, Tagged, declare

detach = torch.ops.aten.detach.default


def mapped():
    return Pair(torch.randn(3, 2), torch.randn(3, 2))


def weight(zero=None):
    return Int8Weight(torch.ones(3, 2, dtype=torch.int8), torch.rand(1, 2), zero, axis=1)


def noted():
    x = mapped()
    x.__dict__["note"] = 1
    return x


# Without inner tensors.
Sized = declare(
    held=inner(optional=True),
    rows=static(default=2),
    outer=staticmethod(lambda held, rows: Outer((rows,), dtype=torch.float32, device=torch.device("cpu"))),
)
MADE = {
    "mapped": mapped,
    "no optional inner tensor": weight,
    "an optional inner tensor": lambda: weight(torch.rand(3, 1)),
    "metadata": lambda: Tagged(torch.randn(3), tag="t", length=4),
    "no inner tensor": lambda: Sized(None, rows=3),
    "nested": lambda: Pair(mapped(), mapped()),
    "a Parameter": lambda: nn.Parameter(mapped()),
    "a copy of a Parameter": lambda: nn.Parameter(mapped()).detach(),
    "one tensor twice": lambda: Pair(*[torch.randn(2)] * 2),
    "empty": lambda: Pair(torch.randn(0, 2), torch.randn(0, 2)),
    "noted": noted,
}


@pytest.mark.parametrize("mode", ["normal", "inference"])
@pytest.mark.parametrize("made", MADE)
def test_it_is_that_of_all_steps(made, mode, monkeypatch):
    x = MADE[made]()
    with torch.inference_mode(mode == "inference"):
        found = x.detach()
    monkeypatch.setattr(resolution, "in_one_step", lambda cls, run: run)
    slow = resolution.resolve(type(x), detach).run
    monkeypatch.undo()
    assert slow.__qualname__ != resolution.resolve(type(x), detach).run.__qualname__
    monkeypatch.setitem(type(x).__torch_dispatch__.__func__.__globals__["_runs"], detach, slow)
    with torch.inference_mode(mode == "inference"):
        expected = x.detach()
    assert found.__dict__.keys() == expected.__dict__.keys()
    for name in x._layout.present:
        one, other, held = (t.__dict__[name] for t in (found, expected, x))
        assert one is not held and type(one) is type(other)
        assert type(one) is not Tensor or (torch.equal(one, other) and one.data_ptr() == held.data_ptr())
    assert found._layout is x._layout is expected._layout
    assert found.is_inference() == expected.is_inference() and not found.requires_grad
    assert found.untyped_storage()._cdata == x.untyped_storage()._cdata
    version = x._version
    with torch.no_grad():
        found.copy_(found.clone())
    assert (found._version, x._version) == (version + 1, version + 1)


def test_few_other_functions_of_ours_are_called():
    x, called = mapped(), []
    x.detach()

    def note(frame, event, argument):
        if event == "call" and frame.f_globals.get("__name__", "").startswith("subclasses."):
            called.append(frame.f_globals["__name__"])

    sys.setprofile(note)
    try:
        x.detach()
    finally:
        sys.setprofile(None)
    assert set(called) <= {
        "subclasses.autograd.detach",
        "subclasses.op_schemas.aliasing",
        "subclasses._torch",
    }


@pytest.mark.parametrize("same", [True, False])
def test_a_gradient_that_autograd_keeps_has_memory_of_its_own(same):
    x = mapped().requires_grad_()
    gradient = Pair(*[torch.ones(3, 2)] * 2) if same else Pair(torch.ones(3, 2), torch.ones(3, 2))
    (x * 1).backward(gradient)
    x.grad.a.mul_(3)
    assert x.grad.b.eq(1).all() and gradient.a.eq(1).all()


FALLBACKS = {
    "views": {"fallback": "views"},
    "materialize": {"fallback": "materialize"},
    "map": {"fallback": "map", "trainable": False},
    "trained": {"fallback": "views", "trainable": True},
}


def leaf(kind):
    cls = declare(
        keywords=FALLBACKS[kind], held=inner(differentiable=True), materialize=lambda self: self.held * 2
    )
    return cls(torch.ones(2, 3)).requires_grad_()


@pytest.mark.parametrize("kind", FALLBACKS)
def test_gradients_that_are_added_to(kind):
    """The gradients of two values do not share memory, and may be expanded."""
    p, q, given, expanded = leaf(kind), leaf(kind), torch.ones(2, 3), leaf(kind)
    (p.held + q.held).square().sum().backward()
    for _ in range(2):
        p.held.backward(given)
    assert q.grad.held.eq(4).all() and p.grad.held.eq(6).all() and given.eq(1).all()
    for _ in range(3):
        expanded.held.sum().backward()
    assert expanded.grad.held.eq(3).all()


@pytest.mark.parametrize("place", ["leaf", "view", "function"])
@pytest.mark.parametrize("kind", ["views", "trained"])
def test_detach_in_a_hook_shares_memory(kind, place):
    kept = []

    def hook(gradient):
        kept.append(gradient)
        gradient.detach().unwrap("held").mul_(3)
        return gradient if place == "function" else None

    p = leaf(kind)
    y = {"leaf": lambda: p, "view": lambda: p.view(3, 2), "function": lambda: passing(hook)(p)}[place]()
    if place != "function":
        y.register_hook(hook)
    y.held.square().sum().backward()
    assert kept[0].unwrap("held").eq(6).all() and p.grad.held.eq(6).all()
