"""Idioms of gradients: what requires one changes, hooks, backward inside, checkpoints, optimizers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from tests.desugar.classes import make
from tests.desugar.idioms.running import idiom
from tests.desugar.judge import backward


@idiom
def requires_grad_toggled(compile_):
    fn, x = compile_(lambda x: (x * x, x.requires_grad)), make(TwoTensor, 2, 3)
    for flag in (False, True, False, True):
        out = fn(x.requires_grad_(flag))
        backward(out)
        yield out, x


@idiom
def requires_grad_toggled_inside(compile_):
    def fn(x):
        y = (x * 2).detach().requires_grad_()
        return y, y * 3

    fn = compile_(fn)
    for _ in range(2):
        y, z = fn(make(TwoTensor, 2, 3))
        backward(z)
        yield y, z


@idiom
def gradient_read_inside(compile_):
    def fn(x):
        return x * 2 if x.grad is None else x * 2 - x.grad

    fn, x = compile_(fn), make(TwoTensor, 2, 3, grad=True)
    for _ in range(3):
        out = fn(x)
        yield out
        backward(out)
    x.grad = None
    yield fn(x)


@idiom
def gradient_computed_inside(compile_):
    def fn(x):
        y = (x * x).sum()
        (grad,) = torch.autograd.grad(y, x)
        return grad * 2

    fn = compile_(fn)
    for _ in range(2):
        yield fn(make(Tensor, 2, 3, grad=True))


@idiom
def backward_inside(compile_):
    def fn(x):
        y = (x * x).sum()
        y.backward()
        return y.detach()

    fn, x = compile_(fn), make(Tensor, 2, 3, grad=True)
    for _ in range(2):
        yield fn(x), x


@idiom
def data_assigned(compile_):
    def fn(x, w):
        w.data = w.data * 2
        return x * w

    fn, w = compile_(fn), nn.Parameter(torch.ones(3))
    for _ in range(2):
        yield fn(make(TwoTensor, 2, 3), w), w


@idiom
def detached_state(compile_):
    state = {"h": torch.zeros(2, 3)}

    def fn(x):
        h = (state["h"] + x).tanh()
        state["h"] = h.detach()
        return h

    fn = compile_(fn)
    for _ in range(3):
        x = make(TwoTensor, 2, 3, grad=True)
        out = fn(x)
        backward(out)
        yield out, state, x


@idiom
def detached_parts(compile_):
    def fn(x):
        hidden, cell = (x * 2).chunk(2)
        return hidden * cell, hidden.detach(), cell.detach()

    fn = compile_(fn)
    for cls in (Tensor, TwoTensor):
        yield fn(make(cls, 2, 3))


@idiom
def tensor_hook_inside(compile_):
    def fn(x):
        y = x * 2
        y.register_hook(lambda grad: grad * 10)
        return y.sin()

    fn = compile_(fn)
    for _ in range(2):
        x = make(Tensor, 2, 3, grad=True)
        backward(fn(x))
        yield x


@idiom
def tensor_hook_of_an_argument(compile_):
    fn, x, seen = compile_(lambda x: x.sin()), make(TwoTensor, 2, 3, grad=True), []
    backward(fn(x))
    yield x
    handle = x.register_hook(lambda grad: (seen.append(1), grad * 3)[1])
    backward(fn(x))
    yield x, seen
    handle.remove()
    backward(fn(x))
    yield x, seen


@idiom
def autograd_function(compile_):
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, scale):
            ctx.scale = scale
            return x * scale

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.scale * 10, None

    fn = compile_(lambda x, scale: Twice.apply(x, scale) + 1)
    for scale in (2.0, 3.0):
        x = make(TwoTensor, 2, 3, grad=True)
        out = fn(x, scale)
        backward(out)
        yield out, x


@idiom
def checkpoint_inside(compile_):
    def fn(x, keep):
        block = lambda y: F.dropout(y.sin(), 0.5) * y  # noqa: E731
        return block(x) if keep else checkpoint(block, x, use_reentrant=False)

    fn = compile_(fn)
    for keep in (False, True, False):
        x = make(TwoTensor, 2, 3, grad=True)
        out = fn(x, keep)
        backward(out)
        yield out, x


@idiom
def checkpoint_around(compile_):
    fn = compile_(lambda x, n: x.sin() * x * n)
    for n in (1, 2):
        x = make(TwoTensor, 2, 3, grad=True)
        out = checkpoint(fn, x, n, use_reentrant=False)
        backward(out)
        yield out, x


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
