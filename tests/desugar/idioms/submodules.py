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
from tests.desugar.idioms.modules import Block, Held, Outer, settings, wrapped
from tests.desugar.idioms.running import between, idiom, raised, switched, trained, within


def wrapper(rows=2):
    return make(TwoTensor, rows, 3)


# -------------------------------------------------------------------------------------------------- submodules


@idiom
def module_swapped(compile_):
    model, x = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), make(Tensor, 2, 3)
    fn = compile_(model)
    yield from between(lambda: fn(x), lambda: model.__setitem__(1, nn.Tanh()))
    model[0] = wrapped(nn.Linear(3, 3))
    yield from between(
        lambda: fn(wrapper()), lambda: model.append(nn.Sigmoid()), lambda: model.__delitem__(1)
    )


@idiom
def module_list_grows(compile_):
    class Stack(Held):
        def forward(self, x):
            for n, layer in enumerate(self.layers):
                x = layer(x) + n
            return x, len(self.layers), sum(1 for _ in self.children())

    stack = Stack(layers=nn.ModuleList([wrapped(Block())]))
    fn = compile_(stack)
    return between(
        lambda: fn(wrapper()),
        *[lambda: stack.layers.append(wrapped(Block()))] * 2,
        lambda: setattr(stack, "layers", stack.layers[:1]),
    )


@idiom
def module_and_parameter_containers(compile_):
    class Experts(Held):
        def forward(self, x, name):
            y = self.experts[name](x) if name in self.experts else x
            for scale in self.scales:
                y = y * scale
            return y + self.shifts[name] if name in self.shifts else y

    module = Experts(
        experts=nn.ModuleDict({"a": wrapped(Block()), "b": nn.Identity()}),
        scales=nn.ParameterList([torch.ones(3), torch.full((3,), 2.0)]),
        shifts=nn.ParameterDict({"a": make(TwoTensor, 3)}),
    )
    fn = compile_(module)
    return between(
        lambda: [fn(wrapper(), name) for name in ("a", "b", "c")],
        lambda: (
            module.experts.update({"c": nn.Tanh()}),
            module.scales.append(torch.zeros(3)),
            module.shifts.update({"b": torch.ones(3)}),
        ),
    )


@idiom
def walking_a_module(compile_):
    class Walking(Held):
        def forward(self, x):
            for name, child in self.named_children():
                x = child(x) if name != "skipped" else x
            norm = sum((p * p).sum() for p in self.parameters())
            names = [name for name, _ in self.named_parameters()], [name for name, _ in self.named_buffers()]
            return x, norm, names, self.training, len(list(self.modules()))

    module = Walking(one=wrapped(Block()), two=wrapped(Block()))
    fn = compile_(module)
    return between(lambda: fn(wrapper()), *settings(module, skipped=wrapped(Block()), two=None))


@idiom
def adapter_switched_off(compile_):
    class Adapted(Held):
        def forward(self, x):
            return self.base(x) + self.down(x) if self.enabled else self.base(x)

    adapted = wrapped(Adapted(base=nn.Linear(3, 3), down=nn.Linear(3, 3), enabled=True))
    fn = compile_(nn.Sequential(adapted))
    for adapted.enabled in (True, False, True):
        yield fn(wrapper())


# ------------------------------------------------------------------------------------------- hooks and methods


def compiled_outer(compile_):
    """(a module around another one, in evaluation, what it compiles to)."""
    outer = wrapped(Outer()).eval()
    return outer, compile_(outer)


@idiom
def hooks_of_the_module(compile_):
    block, x, seen, handles = wrapped(Block()), wrapper(), [], []
    fn = compile_(block)
    pre, post = (lambda module, args: (args[0] * 2,)), lambda module, args, out: (seen.append(1), out + 1)[1]
    return between(
        lambda: (fn(x), seen),
        lambda: handles.append(block.register_forward_pre_hook(pre)),
        lambda: handles.append(block.register_forward_hook(post)),
        *(lambda: handles[0].remove(), lambda: handles[1].remove()),
    )


@idiom
def hooks_of_a_nested_module(compile_):
    (outer, fn), x, handles = compiled_outer(compile_), wrapper(), []
    hook = lambda module, args, out: out * 10  # noqa: E731
    return between(
        lambda: fn(x),
        lambda: handles.append(outer.block.register_forward_hook(hook)),
        lambda: handles[0].remove(),
    )


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
        yield fn(wrapper()), kept


@idiom
def backward_hook_of_a_module(compile_):
    block = Block()
    fn = compile_(block)
    for scale in (2, 3):
        handle = block.register_full_backward_hook(lambda module, given, out, n=scale: (given[0] * n,))
        results = trained(fn, make(Tensor, 2, 3, grad=True))
        handle.remove()
        yield results, block.weight


@idiom
def forward_replaced(compile_):
    block, x = wrapped(Block()), wrapper()
    fn, other = compile_(block), types.MethodType(lambda self, x: x * self.weight, block)
    return between(
        lambda: fn(x),
        *settings(block, forward=other),
        *settings(block, forward=lambda x: other(x) + 1),
        lambda: delattr(block, "forward"),
    )


@idiom
def forward_of_a_nested_module_replaced(compile_):
    (outer, fn), x = compiled_outer(compile_), wrapper()
    return between(
        lambda: fn(x),
        *settings(outer.block, forward=lambda x: x * 3),
        lambda: delattr(outer.block, "forward"),
    )


def with_another_forward(fn):
    x, replace = wrapper(), functools.partial(setattr, Block, "forward")
    return within(lambda: fn(x), None, switched(replace, lambda self, x: x * 5, Block.forward), None)


@idiom
def forward_of_a_nested_class_replaced(compile_):
    return with_another_forward(compiled_outer(compile_)[1])


@idiom
def forward_of_a_class_replaced(compile_):
    return with_another_forward(compile_(wrapped(Block())))


@idiom
def forward_compiled_in_place(compile_):
    outer, x = wrapped(Outer()).eval(), wrapper()
    outer.block.forward = compile_(outer.block.forward)
    for outer.block.scale in (2.0, 3.0, 4.0):
        yield outer(x)


@idiom
def compiled_submodule(compile_):
    outer, x = wrapped(Outer()).eval(), wrapper()
    fn = compile_(outer.block)
    whole = compile_(lambda x: fn(x) + outer(x))
    for outer.block.scale in (2.0, 3.0):
        yield fn(x), whole(x)


@idiom
def one_function_for_many_modules(compile_):
    blocks = [wrapped(Block()) for _ in range(3)]
    fn, x = compile_(lambda block, x: block(x) * block.scale), wrapper()
    return (fn(block, x) for block in (*blocks, copy.deepcopy(blocks[0]), blocks[1]))


@idiom
def methods_of_a_module(compile_):
    class Coder(Held):
        def encode(self, x, scale=1.0):
            return self.linear(x) * scale

        def forward(self, x):
            return self.encode(self.encode(x), scale=2.0) @ self.linear.weight.t()

        @property
        def width(self):
            return self.linear.in_features

    module, x = Coder(linear=wrapped(nn.Linear(3, 3)), cached=functools.cache(lambda n: n * 2)), wrapper()
    encode, fn = compile_(module.encode), compile_(lambda x: module(x) * module.width)
    return between(
        lambda: (encode(x), encode(x, scale=3.0), fn(x)),
        *settings(module, linear=wrapped(nn.Linear(3, 3, bias=False))),
    )


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
    fn, block.factor = compile_(lambda x: x * block.factor), 2.0
    return between(lambda: raised(fn, x), lambda: delattr(block, "factor"), *settings(block, factor=3.0))


@idiom
def loss_with_targets(compile_):
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5))
    fn = compile_(lambda x, y, smooth: F.cross_entropy(model(x), y, label_smoothing=smooth))
    for smooth in (0.0, 0.1, 0.2):
        model.zero_grad()
        yield trained(fn, make(Tensor, 4, 3), torch.arange(4), smooth), list(model.parameters())
