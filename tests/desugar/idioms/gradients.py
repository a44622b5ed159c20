"""Idioms of gradients: what requires one changes, hooks, backward inside, checkpoints, optimizers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from tests.desugar.classes import make
from tests.desugar.idioms.running import between, idiom, idioms_of_calls, trained
from tests.desugar.judge import backward


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x * scale

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.scale * 10, None


def block(y):
    return F.dropout(y.sin(), 0.5) * y


def toggling(x):
    y = (x * 2).detach().requires_grad_()
    return y, y * 3


def grad_inside(x):
    y = (x * x).sum()
    (grad,) = torch.autograd.grad(y, x)
    return grad * 2


def backward_inside(x):
    y = (x * x).sum()
    y.backward()
    return y.detach()


def assigning_data(x, w):
    w.data = w.data * 2
    return x * w


def detaching(x):
    hidden, cell = (x * 2).chunk(2)
    return hidden * cell, hidden.detach(), cell.detach()


def hooking(x):
    y = x * 2
    y.register_hook(lambda grad: grad * 10)
    return y.sin()


def leaf(cls=TwoTensor):
    return make(cls, 2, 3, grad=True)


idioms_of_calls(
    {
        "requires_grad_toggled": (
            lambda x: (x * x, x.requires_grad),
            lambda fn, x: (trained(fn, x.requires_grad_(flag)) for flag in (False, True, False, True)),
        ),
        "requires_grad_toggled_inside": (toggling, lambda fn, x: (trained(fn, x) for _ in range(2))),
        "gradient_computed_inside": (grad_inside, lambda fn, x: (fn(leaf(Tensor)) for _ in range(2))),
        "backward_inside": (
            backward_inside,
            lambda fn, x: ((fn(x.requires_grad_()), x) for _ in range(2)),
            Tensor,
        ),
        "data_assigned": (
            assigning_data,
            lambda fn, x: ((fn(x, w), w) for w in [nn.Parameter(torch.ones(3))] for _ in range(2)),
        ),
        "detached_parts": (detaching, lambda fn, x: (fn(make(cls, 2, 3)) for cls in (Tensor, TwoTensor))),
        "tensor_hook_inside": (hooking, lambda fn, x: (trained(fn, leaf(Tensor))[1] for _ in range(2))),
        "autograd_function": (
            lambda x, scale: Twice.apply(x, scale) + 1,
            lambda fn, x: (trained(fn, leaf(), scale) for scale in (2.0, 3.0)),
        ),
        "checkpoint_inside": (
            lambda x, keep: block(x) if keep else checkpoint(block, x, use_reentrant=False),
            lambda fn, x: (trained(fn, leaf(), keep) for keep in (False, True, False)),
        ),
        "checkpoint_around": (
            lambda x, n: x.sin() * x * n,
            lambda fn, x: (
                trained(lambda *args: checkpoint(fn, *args, use_reentrant=False), leaf(), n) for n in (1, 2)
            ),
        ),
    }
)


@idiom
def gradient_read_inside(compile_):
    fn = compile_(lambda x: x * 2 if x.grad is None else x * 2 - x.grad)
    x = leaf()
    for _ in range(3):
        yield trained(fn, x)
    x.grad = None
    yield fn(x)


@idiom
def detached_state(compile_):
    state = {"h": torch.zeros(2, 3)}

    def fn(x):
        h = (state["h"] + x).tanh()
        state["h"] = h.detach()
        return h

    fn = compile_(fn)
    return ((*trained(fn, leaf()), state) for _ in range(3))


@idiom
def tensor_hook_of_an_argument(compile_):
    fn, x, seen, handles = compile_(lambda x: x.sin()), leaf(), [], []
    return between(
        lambda: (trained(fn, x), seen),
        lambda: handles.append(x.register_hook(lambda grad: (seen.append(1), grad * 3)[1])),
        lambda: handles[0].remove(),
    )


@idiom
def optimizer_between_calls(compile_):
    w = nn.Parameter(make(TwoTensor, 3, 3))
    optimizer = torch.optim.SGD([w], lr=0.1, momentum=0.9)
    fn = compile_(lambda x: (x @ w).sin())
    for step in range(3):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        out = fn(make(TwoTensor, 2, 3))
        backward(out)
        optimizer.step()
        yield out, w
