"""Idioms of modules in modules: containers, hooks, methods that are replaced, losses."""

from __future__ import annotations

import copy
import functools
import types

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.desugar.classes import Pair, make
from tests.desugar.idioms.modules import (
    Block,
    Held,
    wrapped,
    wrapped_block,
    wrapped_outer,
)
from tests.desugar.idioms.running import (
    IDIOMS,
    again,
    calling,
    idiom,
    idioms_of_changes,
    put,
    raised,
    switched,
    trained,
    within,
    wrapper,
)

# -------------------------------------------------------------------------------------------------- submodules


class Stack(Held):
    def forward(self, x):
        for n, layer in enumerate(self.layers):
            x = layer(x) + n
        return x, len(self.layers), sum(1 for _ in self.children())


class Experts(Held):
    def forward(self, x, name):
        y = self.experts[name](x) if name in self.experts else x
        for scale in self.scales:
            y = y * scale
        return y + self.shifts[name] if name in self.shifts else y


class Walking(Held):
    def forward(self, x):
        for name, child in self.named_children():
            x = child(x) if name != "skipped" else x
        norm = sum((p * p).sum() for p in self.parameters())
        names = [name for name, _ in self.named_parameters()], [name for name, _ in self.named_buffers()]
        return x, norm, names, self.training, len(list(self.modules()))


class Adapted(Held):
    def forward(self, x):
        return self.base(x) + self.down(x) if self.enabled else self.base(x)


idioms_of_changes(
    {
        "module_swapped": (
            lambda: nn.Sequential(nn.Linear(3, 3), nn.ReLU()),
            *(None, lambda fn, model: fn(make(Tensor, 2, 3))),
            lambda model: model.__setitem__(1, nn.Tanh()),
            lambda model: model.append(nn.Sigmoid()),
            lambda model: model.__delitem__(1),
        ),
        "module_swapped_for_one_of_wrappers": (
            lambda: nn.Sequential(wrapped(nn.Linear(3, 3)), nn.ReLU()),
            *(None, calling),
            lambda model: model.__setitem__(0, wrapped(nn.Linear(3, 3))),
            lambda model: model.append(nn.Sigmoid()),
        ),
        "module_list_grows": (
            lambda: Stack(layers=nn.ModuleList([wrapped_block()])),
            *(None, calling),
            *[lambda stack: stack.layers.append(wrapped_block())] * 2,
            lambda stack: setattr(stack, "layers", stack.layers[:1]),
        ),
        "module_and_parameter_containers": (
            lambda: Experts(
                experts=nn.ModuleDict({"a": wrapped_block(), "b": nn.Identity()}),
                scales=nn.ParameterList([torch.ones(3), torch.full((3,), 2.0)]),
                shifts=nn.ParameterDict({"a": wrapper()[0].detach()}),
            ),
            *(None, lambda fn, module: [fn(wrapper(), name) for name in ("a", "b", "c")]),
            lambda module: (
                module.experts.update({"c": nn.Tanh()}),
                module.scales.append(torch.zeros(3)),
                module.shifts.update({"b": torch.ones(3)}),
            ),
        ),
        "walking_a_module": (
            lambda: Walking(one=wrapped_block(), two=wrapped_block()),
            *(None, calling),
            *(lambda module: setattr(module, "skipped", wrapped_block()), put(two=None)),
        ),
        "adapter_switched_off": (
            lambda: wrapped(Adapted(base=nn.Linear(3, 3), down=nn.Linear(3, 3), enabled=True)),
            *(nn.Sequential, calling),
            *(put(enabled=False), put(enabled=True)),
        ),
    }
)

# ------------------------------------------------------------------------------------------- hooks and methods


def in_evaluation():
    return wrapped_outer().eval()


def doubling(module, args):
    return (args[0] * 2,)


def noting(module, args, out):
    module.seen.append(1)
    return out + 1


def tenfold(module, args, out):
    return out * 10


def keeping_all_outputs():
    """A module whose hooks keep what each module in it returns."""
    outer = in_evaluation()
    outer.kept = {}
    for module in outer.modules():
        module.register_forward_hook(
            lambda module, args, out: outer.kept.update({type(module).__name__: out})
        )
    return outer


def through_a_backward_hook(fn, block):
    for scale in (2, 3):
        handle = block.register_full_backward_hook(lambda module, given, out, n=scale: (given[0] * n,))
        results = trained(fn, make(Tensor, 2, 3, grad=True))
        handle.remove()
        yield results, block.weight


def times_weight(block, x):
    return x * block.weight


def with_another_forward(fn, held):
    replace = functools.partial(setattr, Block, "forward")
    return within(lambda: fn(wrapper()), None, switched(replace, lambda self, x: x * 5, Block.forward), None)


class Coder(Held):
    def encode(self, x, scale=1.0):
        return self.linear(x) * scale

    def forward(self, x):
        return self.encode(self.encode(x), scale=2.0) @ self.linear.weight.t()

    @property
    def width(self):
        return self.linear.in_features


def with_a_factor():
    block = Block()
    block.factor = 2.0
    return block


def states_of(fn, cell):
    state = None
    for _ in range(3):
        state = fn(make(Tensor, 2, 3), state)
        yield state


def losses_of(fn, model):
    for smooth in (0.0, 0.1, 0.2):
        model.zero_grad()
        yield trained(fn, make(Tensor, 4, 3), torch.arange(4), smooth), list(model.parameters())


idioms_of_changes(
    {
        "hooks_of_the_module": (
            wrapped_block,
            *(None, lambda fn, block: (fn(wrapper()), block.seen)),
            lambda block: block.register_forward_pre_hook(doubling),
            lambda block: block.register_forward_hook(noting),
            lambda block: block._forward_pre_hooks.popitem(),
            lambda block: block._forward_hooks.popitem(),
        ),
        "hooks_of_a_nested_module": (
            in_evaluation,
            *(None, calling),
            lambda outer: outer.block.register_forward_hook(tenfold),
            lambda outer: outer.block._forward_hooks.popitem(),
        ),
        "hooks_before_the_first_call": (
            keeping_all_outputs,
            *(None, lambda fn, outer: (fn(wrapper()), outer.kept)),
            *(again, again),
        ),
        "backward_hook_of_a_module": (Block, None, through_a_backward_hook),
        "forward_replaced": (
            wrapped_block,
            *(None, calling),
            lambda block: setattr(block, "forward", types.MethodType(times_weight, block)),
            lambda block: setattr(block, "forward", lambda x: times_weight(block, x) + 1),
            lambda block: delattr(block, "forward"),
        ),
        "forward_of_a_nested_module_replaced": (
            in_evaluation,
            *(None, calling),
            lambda outer: setattr(outer.block, "forward", lambda x: x * 3),
            lambda outer: delattr(outer.block, "forward"),
        ),
        "forward_of_a_nested_class_replaced": (in_evaluation, None, with_another_forward),
        "forward_of_a_class_replaced": (wrapped_block, None, with_another_forward),
        "one_function_for_many_modules": (
            lambda: [wrapped_block() for _ in range(3)],
            lambda blocks: lambda block, x: block(x) * block.scale,
            lambda fn, blocks: (fn(b, wrapper()) for b in (*blocks, copy.deepcopy(blocks[0]), blocks[1])),
        ),
        "method_of_a_module": (
            lambda: Coder(linear=wrapped(nn.Linear(3, 3))),
            lambda module: module.encode,
            lambda fn, module: (fn(wrapper()), fn(wrapper(), scale=3.0)),
            lambda module: setattr(module, "linear", wrapped(nn.Linear(3, 3, bias=False))),
        ),
        "methods_and_a_property_of_a_module": (
            lambda: Coder(linear=wrapped(nn.Linear(3, 3)), cached=functools.cache(lambda n: n * 2)),
            lambda module: lambda x: module(x) * module.width,
            calling,
            lambda module: setattr(module, "linear", wrapped(nn.Linear(3, 3, bias=False))),
        ),
        "recurrent_state": (lambda: nn.GRUCell(3, 3), lambda cell: lambda x, h: cell(x, h), states_of),
        "missing_attribute": (
            with_a_factor,
            lambda block: lambda x: x * block.factor,
            lambda fn, block: raised(fn, make(Pair, 2, 3)),
            *(lambda block: delattr(block, "factor"), put(factor=3.0)),
        ),
        "loss_with_targets": (
            lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5)),
            lambda model: lambda x, y, smooth: F.cross_entropy(model(x), y, label_smoothing=smooth),
            losses_of,
        ),
    }
)


@idiom
def hooks_of_a_nested_module_guarded(compile_):
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
        found = list(IDIOMS["hooks_of_a_nested_module"](compile_))
    yield found


@idiom
def forward_compiled_in_place(compile_):
    outer, x = in_evaluation(), wrapper()
    outer.block.forward = compile_(outer.block.forward)
    for outer.block.scale in (2.0, 3.0, 4.0):
        yield outer(x)


@idiom
def compiled_submodule(compile_):
    outer, x = in_evaluation(), wrapper()
    fn = compile_(outer.block)
    whole = compile_(lambda x: fn(x) + outer(x))
    for outer.block.scale in (2.0, 3.0):
        yield fn(x), whole(x)
