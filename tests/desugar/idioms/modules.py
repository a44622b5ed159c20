"""Idioms of a module: attributes, buffers and parameters that change between calls or inside of one."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.testing._internal.two_tensor import TwoTensor

from tests.desugar.classes import Int8Like, Pair, make
from tests.desugar.idioms.running import between, idiom, trained


class Block(nn.Module):
    """A module with an attribute of every kind that steers its forward."""

    def __init__(self, width=3):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))
        self.register_buffer("offset", torch.zeros(width))
        self.scale, self.steps, self.residual, self.mode, self.inner = 2.0, 0, False, "sin", None

    def forward(self, x):
        y = {"sin": torch.sin, "cos": torch.cos}[self.mode](x * self.weight * self.scale) + self.offset
        y = y if self.inner is None else self.inner(y)
        return x + y if self.residual else y


class Outer(nn.Module):
    """A module around another one."""

    def __init__(self):
        super().__init__()
        self.block = Block()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(self.block(x)) + 1


class Held(nn.Module):
    """A module with given buffers and other attributes, and a forward that a subclass writes."""

    def __init__(self, buffers=None, **attributes):
        super().__init__()
        for name, buffer in (buffers or {}).items():
            self.register_buffer(name, buffer)
        for name, value in attributes.items():
            setattr(self, name, value)


def wrapped(module):
    """The module with every parameter made of a TwoTensor."""
    for owner in module.modules():
        for name, value in list(owner.named_parameters(recurse=False)):
            setattr(owner, name, nn.Parameter(TwoTensor(value.detach().clone(), value.detach() + 1)))
    return module


def settings(module, **values):
    """Changes that each set one attribute of a module."""
    return [lambda name=name, value=value: setattr(module, name, value) for name, value in values.items()]


def buffers(module):
    return dict(module.named_buffers())


# --------------------------------------------------------------------------------------------------- attributes


@idiom
def module_attributes_changed(compile_):
    block, x = Block(), make(TwoTensor, 2, 3)
    fn = compile_(block)
    yield from between(
        lambda: fn(x),
        *settings(block, scale=3.0),
        *settings(block, scale=4, residual=True, mode="cos", inner=torch.neg),
    )
    block.inner = nn.Linear(3, 3)
    yield from between(lambda: fn(make(Tensor, 2, 3)), *settings(block, inner=None))


@idiom
def attributes_of_nested_modules_changed(compile_):
    outer, x = wrapped(Outer()), make(TwoTensor, 2, 3)
    fn = compile_(outer)
    return between(
        lambda: fn(x),
        lambda: (setattr(outer.block, "scale", 5.0), setattr(outer.dropout, "p", 0.0)),
        *settings(outer.block, mode="cos"),
    )


@idiom
def dropout_rate_changed(compile_):
    dropout, x = nn.Dropout(0.5), make(TwoTensor, 4, 8)
    fn = compile_(dropout)
    for dropout.p in (0.5, 0.9, 0.0, 0.1):
        yield fn(x), torch.rand(1)


@idiom
def dropout_of_everything(compile_):
    fn, x = compile_(nn.Dropout(1.0)), make(TwoTensor, 4, 8)
    yield fn(x)
    yield torch.rand(1)


@idiom
def epsilon_changed(compile_):
    norm, x = nn.LayerNorm(3), make(Tensor, 2, 3)
    fn = compile_(norm)
    for norm.eps in (1e-5, 1.0, 10.0, 20.0):
        yield fn(x)


@idiom
def train_and_eval(compile_):
    outer, x = wrapped(Outer()), make(TwoTensor, 2, 3)
    fn = compile_(outer)
    return between(lambda: (fn(x), outer.training), outer.train, outer.eval, outer.train, outer.dropout.eval)


@idiom
def counter_in_forward(compile_):
    class Counting(nn.Module):
        steps, rate = 0, 0.5

        def forward(self, x):
            self.steps += 1
            self.rate *= 0.5
            self.last = x * self.steps
            return self.last * self.rate

    module = Counting()
    fn, nothing = compile_(module), [lambda: None] * 3
    return between(
        lambda: (fn(make(TwoTensor, 2, 3)), module.steps, module.rate, module.last),
        *nothing,
        *settings(module, steps=10),
    )


@idiom
def list_on_a_module(compile_):
    class Recording(Held):
        def forward(self, x):
            self.seen.append(x * 2)
            self.sizes[len(self.seen)] = tuple(x.shape)
            return self.seen[-1] + len(self.seen)

    module = Recording(seen=[], sizes={})
    fn = compile_(module)
    return ((fn(make(Pair, rows, 3)), module.seen, module.sizes) for rows in (2, 3, 4))


@idiom
def lazy_buffer(compile_):
    class Rotary(Held):
        def forward(self, x):
            if self.table is None or len(self.table) < len(x):
                self.table = torch.arange(float(len(x))).unsqueeze(1)
            return x * self.table[: len(x)]

    module = Rotary({"table": None})
    fn = compile_(module)
    return ((fn(make(TwoTensor, rows, 3)), buffers(module)) for rows in (2, 2, 5, 3))


@idiom
def cache_on_a_module(compile_):
    class Attention(Held):
        def forward(self, x):
            self.keys = x if self.keys is None else torch.cat([self.keys, x])
            return x @ self.keys.t()

    module = Attention(keys=None)
    fn = compile_(module)
    for rows in (3, 1, 1, 1):
        yield fn(make(TwoTensor, rows, 4)), module.keys
    module.keys = None
    yield fn(make(TwoTensor, 2, 4)), module.keys


# ----------------------------------------------------------------------------------- buffers and parameters


@idiom
def running_mean(compile_):
    norm = nn.BatchNorm1d(3)
    fn = compile_(norm)
    return between(
        lambda: (fn(make(Tensor, 4, 3)), buffers(norm)),
        *(norm.train, norm.eval, norm.train),
        *settings(norm, momentum=None),
    )


@idiom
def buffers_written(compile_):
    class Average(Held):
        def forward(self, x):
            self.count += 1
            self.mean.lerp_(x.mean(0), 0.5)
            return x - self.mean

    module = Average({"mean": make(TwoTensor, 3), "count": torch.zeros((), dtype=torch.int64)})
    fn = compile_(module)
    for _ in range(3):
        yield fn(make(TwoTensor, 4, 3)), buffers(module)
    module.mean = torch.zeros(3)
    module.count.fill_(10)
    yield fn(make(Tensor, 4, 3)), buffers(module)


@idiom
def buffer_replaced_inside(compile_):
    class Momentum(Held):
        def forward(self, x):
            self.mean = (self.mean + x.mean(0)) / 2
            return x - self.mean

    module = Momentum({"mean": torch.zeros(3)})
    fn = compile_(module)
    return ((fn(make(TwoTensor, 4, 3)), buffers(module)) for _ in range(3))


@idiom
def parameter_replaced(compile_):
    block, x = Block(), make(TwoTensor, 2, 3)
    fn = compile_(block)
    return between(
        lambda: (trained(fn, x), block.weight),
        *settings(block, weight=nn.Parameter(torch.ones(3))),
        *settings(block, weight=nn.Parameter(make(TwoTensor, 3))),
        *settings(block, weight=nn.Parameter(torch.ones(2, 3), requires_grad=False)),
    )


@idiom
def data_of_a_parameter_assigned(compile_):
    block, x = Block(), make(TwoTensor, 2, 3)
    fn = compile_(block)
    return between(
        lambda: fn(x),
        lambda: setattr(block.weight, "data", torch.ones(3)),
        lambda: block.weight.data.mul_(3),
        lambda: torch.no_grad()(block.weight.copy_)(torch.arange(3.0)),
        lambda: setattr(block.weight, "data", block.weight.data.double()),
    )


@idiom
def parameter_frozen_and_thawed(compile_):
    block = wrapped(Block())
    fn = compile_(block)
    for flag in (True, False, True):
        block.requires_grad_(flag)
        block.zero_grad()
        yield trained(fn, make(TwoTensor, 2, 3)), block.weight


@idiom
def tied_parameters(compile_):
    pair = nn.ModuleList([wrapped(Block()), wrapped(Block())])
    fn, x = compile_(lambda x: pair[1](pair[0](x))), make(TwoTensor, 2, 3)
    return between(
        lambda: (trained(fn, x), list(pair.parameters())), *settings(pair[1], weight=pair[0].weight)
    )


@idiom
def state_dict_loaded(compile_):
    block, x = wrapped(Block()), make(TwoTensor, 2, 3)
    fn = compile_(block)
    return between(
        lambda: (fn(x), dict(block.named_parameters())),
        lambda: block.load_state_dict(wrapped(Block()).state_dict()),
        lambda: block.load_state_dict(wrapped(Block()).state_dict(), assign=True),
    )


@idiom
def dtype_of_a_module(compile_):
    outer = wrapped(Outer()).eval()
    fn = compile_(outer)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float32):
        outer.to(dtype)
        yield fn(make(TwoTensor, 2, 3, dtype=dtype)), dict(outer.named_parameters())


@idiom
def quantized_weight(compile_):
    linear, x = nn.Linear(6, 4, bias=False), make(Tensor, 2, 6)
    first, second = (nn.Parameter(make(Int8Like, 4, 6), requires_grad=False) for _ in range(2))
    linear.weight = first
    fn = compile_(linear)
    return between(lambda: fn(x), *settings(linear, weight=second, bias=nn.Parameter(torch.ones(4))))


@idiom
def parametrized_weight(compile_):
    linear, x = parametrizations.weight_norm(nn.Linear(3, 3)), make(Tensor, 2, 3)
    fn = compile_(linear)
    return between(
        lambda: fn(x),
        lambda: torch.no_grad()(linear.parametrizations.weight.original0.mul_)(2),
        lambda: torch.nn.utils.parametrize.remove_parametrizations(linear, "weight"),
    )
