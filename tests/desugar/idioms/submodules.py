"""Idioms of modules in modules: containers, hooks, methods that are replaced, losses."""

from __future__ import annotations

import copy
import functools
import types

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from tests.desugar.classes import Pair, make
from tests.desugar.idioms.modules import Block, Outer, wrapped
from tests.desugar.idioms.running import idiom, raised
from tests.desugar.judge import backward

# -------------------------------------------------------------------------------------------------- submodules


@idiom
def module_swapped(compile_):
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    fn = compile_(model)
    yield fn(make(Tensor, 2, 3))
    model[1] = nn.Tanh()
    yield fn(make(Tensor, 2, 3))
    model[0] = wrapped(nn.Linear(3, 3))
    yield fn(make(TwoTensor, 2, 3))
    model.append(nn.Sigmoid())
    yield fn(make(TwoTensor, 2, 3))
    del model[1]
    yield fn(make(TwoTensor, 2, 3))


@idiom
def module_list_grows(compile_):
    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([wrapped(Block())])

        def forward(self, x):
            for n, layer in enumerate(self.layers):
                x = layer(x) + n
            return x, len(self.layers), sum(1 for _ in self.children())

    stack = Stack()
    fn = compile_(stack)
    for _ in range(3):
        yield fn(make(TwoTensor, 2, 3))
        stack.layers.append(wrapped(Block()))
    stack.layers = stack.layers[:1]
    yield fn(make(TwoTensor, 2, 3))


@idiom
def module_and_parameter_containers(compile_):
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleDict({"a": wrapped(Block()), "b": nn.Identity()})
            self.scales = nn.ParameterList([torch.ones(3), torch.full((3,), 2.0)])
            self.shifts = nn.ParameterDict({"a": make(TwoTensor, 3)})

        def forward(self, x, name):
            y = self.experts[name](x) if name in self.experts else x
            for scale in self.scales:
                y = y * scale
            return y + self.shifts[name] if name in self.shifts else y

    module = Experts()
    fn = compile_(module)
    for name in ("a", "b", "c"):
        yield fn(make(TwoTensor, 2, 3), name)
    module.experts["c"] = nn.Tanh()
    module.scales.append(torch.zeros(3))
    module.shifts["b"] = torch.ones(3)
    for name in ("a", "b", "c"):
        yield fn(make(TwoTensor, 2, 3), name)


@idiom
def walking_a_module(compile_):
    class Walking(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = wrapped(Block()), wrapped(Block())

        def forward(self, x):
            for name, child in self.named_children():
                x = child(x) if name != "skipped" else x
            norm = sum((p * p).sum() for p in self.parameters())
            names = [name for name, _ in self.named_parameters()], [name for name, _ in self.named_buffers()]
            return x, norm, names, self.training, len(list(self.modules()))

    module = Walking()
    fn = compile_(module)
    yield fn(make(TwoTensor, 2, 3))
    module.skipped = wrapped(Block())
    yield fn(make(TwoTensor, 2, 3))
    module.two = None
    yield fn(make(TwoTensor, 2, 3))


@idiom
def adapter_switched_off(compile_):
    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.base, self.down = nn.Linear(3, 3), nn.Linear(3, 3)
            self.enabled = True

        def forward(self, x):
            return self.base(x) + self.down(x) if self.enabled else self.base(x)

    adapted = wrapped(Adapted())
    model = nn.Sequential(adapted)
    fn = compile_(model)
    for enabled in (True, False, True):
        adapted.enabled = enabled
        yield fn(make(TwoTensor, 2, 3))


# ------------------------------------------------------------------------------------------- hooks and methods


@idiom
def hooks_of_the_module(compile_):
    block, x, seen = wrapped(Block()), make(TwoTensor, 2, 3), []
    fn = compile_(block)
    yield fn(x)
    pre = block.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    yield fn(x)
    post = block.register_forward_hook(lambda module, args, out: (seen.append(len(args)), out + 1)[1])
    yield fn(x), seen
    pre.remove()
    yield fn(x), seen
    post.remove()
    yield fn(x), seen


@idiom
def hooks_of_a_nested_module(compile_):
    outer, x = wrapped(Outer()).eval(), make(TwoTensor, 2, 3)
    fn = compile_(outer)
    yield fn(x)
    handle = outer.block.register_forward_hook(lambda module, args, out: out * 10)
    yield fn(x)
    handle.remove()
    yield fn(x)


@idiom
def hooks_of_a_nested_module_guarded(compile_):
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
        found = list(hooks_of_a_nested_module(compile_))
    yield found


@idiom
def hooks_before_the_first_call(compile_):
    outer, kept = wrapped(Outer()).eval(), {}

    def keep(module, args, out):
        kept[type(module).__name__] = out

    for module in outer.modules():
        module.register_forward_hook(keep)
    fn = compile_(outer)
    for _ in range(3):
        yield fn(make(TwoTensor, 2, 3)), kept


@idiom
def backward_hook_of_a_module(compile_):
    block = Block()
    fn = compile_(block)
    for scale in (2, 3):
        handle = block.register_full_backward_hook(lambda module, given, out, n=scale: (given[0] * n,))
        x = make(Tensor, 2, 3, grad=True)
        out = fn(x)
        backward(out)
        handle.remove()
        yield out, x, block.weight


@idiom
def forward_replaced(compile_):
    block, x = wrapped(Block()), make(TwoTensor, 2, 3)
    fn = compile_(block)
    yield fn(x)
    block.forward = types.MethodType(lambda self, x: x * self.weight, block)
    yield fn(x)
    first = block.forward
    block.forward = lambda x: first(x) + 1
    yield fn(x)
    del block.forward
    yield fn(x)


@idiom
def forward_of_a_nested_module_replaced(compile_):
    outer, x = wrapped(Outer()).eval(), make(TwoTensor, 2, 3)
    fn = compile_(outer)
    yield fn(x)
    outer.block.forward = lambda x: x * 3
    yield fn(x)
    del outer.block.forward
    yield fn(x)


@idiom
def forward_of_a_nested_class_replaced(compile_):
    outer, x, first = wrapped(Outer()).eval(), make(TwoTensor, 2, 3), Block.forward
    fn = compile_(outer)
    yield fn(x)
    Block.forward = lambda self, x: x * 5
    try:
        out = fn(x)
    finally:
        Block.forward = first
    yield out
    yield fn(x)


@idiom
def forward_of_a_class_replaced(compile_):
    block, x, first = wrapped(Block()), make(TwoTensor, 2, 3), Block.forward
    fn = compile_(block)
    yield fn(x)
    Block.forward = lambda self, x: x * 5
    try:
        out = fn(x)
    finally:
        Block.forward = first
    yield out
    yield fn(x)


@idiom
def forward_compiled_in_place(compile_):
    outer, x = wrapped(Outer()).eval(), make(TwoTensor, 2, 3)
    outer.block.forward = compile_(outer.block.forward)
    for outer.block.scale in (2.0, 3.0, 4.0):
        yield outer(x)


@idiom
def compiled_submodule(compile_):
    outer, x = wrapped(Outer()).eval(), make(TwoTensor, 2, 3)
    block = outer.block
    fn = compile_(block)
    whole = compile_(lambda x: fn(x) + outer(x))
    for block.scale in (2.0, 3.0):
        yield fn(x), whole(x)


@idiom
def one_function_for_many_modules(compile_):
    blocks = [wrapped(Block()) for _ in range(3)]
    fn, x = compile_(lambda block, x: block(x) * block.scale), make(TwoTensor, 2, 3)
    for block in (*blocks, copy.deepcopy(blocks[0]), blocks[1]):
        yield fn(block, x)


@idiom
def methods_of_a_module(compile_):
    class Coder(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.cached = wrapped(nn.Linear(3, 3)), functools.cache(lambda n: n * 2)

        def encode(self, x, scale=1.0):
            return self.linear(x) * scale

        def forward(self, x):
            return self.encode(self.encode(x), scale=2.0) @ self.linear.weight.t()

        @property
        def width(self):
            return self.linear.in_features

    module = Coder()
    encode, fn = compile_(module.encode), compile_(lambda x: module(x) * module.width)
    for _ in range(2):
        x = make(TwoTensor, 2, 3)
        yield encode(x), encode(x, scale=3.0), fn(x)
        module.linear = wrapped(nn.Linear(3, 3, bias=False))


@idiom
def recurrent_state(compile_):
    cell, x = nn.GRUCell(3, 3), make(Tensor, 2, 3)
    fn, state = compile_(lambda x, h: cell(x, h)), None
    for _ in range(3):
        state = fn(x, state)
        yield state


@idiom
def missing_attribute(compile_):
    block, x = Block(), make(Pair, 2, 3)
    fn = compile_(lambda x: x * block.factor)
    block.factor = 2.0
    yield fn(x)
    del block.factor
    yield raised(fn, x)
    block.factor = 3.0
    yield fn(x)


@idiom
def loss_with_targets(compile_):
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5))
    fn = compile_(lambda x, y, smooth: F.cross_entropy(model(x), y, label_smoothing=smooth))
    for smooth in (0.0, 0.1, 0.2):
        model.zero_grad()
        loss = fn(make(Tensor, 4, 3), torch.tensor([0, 1, 2, 3]), smooth)
        loss.backward()
        yield loss, list(model.parameters())
