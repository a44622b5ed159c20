"""Idioms of modules: attributes, buffers and parameters that change, containers, hooks, methods, losses."""

from __future__ import annotations

import copy
import functools
import types

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.testing._internal.two_tensor import TwoTensor

from tests.desugar.classes import Int8Like, Pair, make
from tests.desugar.idioms.running import (
    IDIOMS,
    again,
    calling,
    idiom,
    idioms_of_calls,
    idioms_of_changes,
    put,
    raised,
    switched,
    trained,
    within,
    wrapper,
)


class Block(nn.Module):
    """A module with an attribute of every kind that steers its forward."""

    def __init__(self, width=3):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))
        self.register_buffer("offset", torch.zeros(width))
        self.scale, self.steps, self.residual, self.mode, self.inner = 2.0, 0, False, "sin", None
        self.seen = []

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


def wrapped_block():
    return wrapped(Block())


def wrapped_outer():
    return wrapped(Outer())


def buffers(module):
    return dict(module.named_buffers())


# --------------------------------------------------------------------------------------------------- attributes


class Counting(nn.Module):
    steps, rate = 0, 0.5

    def forward(self, x):
        self.steps += 1
        self.rate *= 0.5
        self.last = x * self.steps
        return self.last * self.rate


class Recording(Held):
    def forward(self, x):
        self.seen.append(x * 2)
        self.sizes[len(self.seen)] = tuple(x.shape)
        return self.seen[-1] + len(self.seen)


class Rotary(Held):
    def forward(self, x):
        if self.table is None or len(self.table) < len(x):
            self.table = torch.arange(float(len(x))).unsqueeze(1)
        return x * self.table[: len(x)]


class Attention(Held):
    def forward(self, x):
        self.keys = x if self.keys is None else torch.cat([self.keys, x])
        return x @ self.keys.t()


idioms_of_calls(
    {"dropout_of_everything": (nn.Dropout(1.0), lambda fn, x: (fn(x), torch.rand(1)), TwoTensor, 4, 8)}
)
idioms_of_changes(
    {
        "module_attributes_changed": (
            Block,
            *(None, calling),
            *(put(scale=3.0), put(scale=4), put(residual=True), put(mode="cos"), put(inner=torch.neg)),
        ),
        "submodule_of_a_module_set": (
            Block,
            *(None, lambda fn, block: fn(make(Tensor, 2, 3))),
            *(lambda block: setattr(block, "inner", nn.Linear(3, 3)), put(inner=None)),
        ),
        "attributes_of_nested_modules_changed": (
            wrapped_outer,
            *(None, calling),
            lambda outer: (setattr(outer.block, "scale", 5.0), setattr(outer.dropout, "p", 0.0)),
            lambda outer: setattr(outer.block, "mode", "cos"),
        ),
        "dropout_rate_changed": (
            nn.Dropout,
            *(None, lambda fn, dropout: (fn(make(TwoTensor, 4, 8)), torch.rand(1))),
            *(put(p=0.9), put(p=0.0), put(p=0.1)),
        ),
        "epsilon_changed": (
            lambda: nn.LayerNorm(3),
            *(None, lambda fn, norm: fn(make(Tensor, 2, 3))),
            *(put(eps=1.0), put(eps=10.0), put(eps=20.0)),
        ),
        "train_and_eval": (
            wrapped_outer,
            *(None, lambda fn, outer: (fn(wrapper()), outer.training)),
            *(nn.Module.train, nn.Module.eval, nn.Module.train, lambda outer: outer.dropout.eval()),
        ),
        "counter_in_forward": (
            Counting,
            *(None, lambda fn, module: (fn(wrapper()), module.steps, module.rate, module.last)),
            *(again, again, again, put(steps=10)),
        ),
        "list_on_a_module": (
            lambda: Recording(seen=[], sizes={}),
            None,
            lambda fn, module: ((fn(make(Pair, n, 3)), module.seen, module.sizes) for n in (2, 3, 4)),
        ),
        "lazy_buffer": (
            lambda: Rotary({"table": None}),
            None,
            lambda fn, module: ((fn(wrapper(rows)), buffers(module)) for rows in (2, 2, 5, 3)),
        ),
        "cache_on_a_module": (
            lambda: Attention(keys=None),
            None,
            lambda fn, module: ((fn(make(TwoTensor, rows, 4)), module.keys) for rows in (3, 1, 1, 1)),
            put(keys=None),
        ),
    }
)


# ----------------------------------------------------------------------------------- buffers and parameters


class Average(Held):
    def forward(self, x):
        self.count += 1
        self.mean.lerp_(x.mean(0), 0.5)
        return x - self.mean


class Momentum(Held):
    def forward(self, x):
        self.mean = (self.mean + x.mean(0)) / 2
        return x - self.mean


def set_weight(make_weight, grad=True):
    """A change that gives a module another weight."""
    return lambda module: setattr(module, "weight", nn.Parameter(make_weight(), requires_grad=grad))


def cast(dtype):
    return lambda module: module.to(dtype)


idioms_of_changes(
    {
        "running_mean": (
            lambda: nn.BatchNorm1d(3),
            *(None, lambda fn, norm: (fn(make(Tensor, 4, 3)), buffers(norm))),
            *(nn.Module.train, nn.Module.eval, nn.Module.train, put(momentum=None)),
        ),
        "buffers_written": (
            lambda: Average({"mean": make(TwoTensor, 3), "count": torch.zeros((), dtype=torch.int64)}),
            *(None, lambda fn, module: (fn(make(type(module.mean), 4, 3)), buffers(module))),
            *(again, again),
            lambda module: (setattr(module, "mean", torch.zeros(3)), module.count.fill_(10)),
        ),
        "buffer_replaced_inside": (
            lambda: Momentum({"mean": torch.zeros(3)}),
            *(None, lambda fn, module: (fn(wrapper(4)), buffers(module))),
            *(again, again),
        ),
        "parameter_replaced": (
            Block,
            *(None, lambda fn, block: (trained(fn, wrapper()), block.weight)),
            set_weight(lambda: torch.ones(3)),
            set_weight(lambda: make(TwoTensor, 3)),
            set_weight(lambda: torch.ones(2, 3), grad=False),
        ),
        "data_of_a_parameter_assigned": (
            Block,
            *(None, calling),
            lambda block: setattr(block.weight, "data", torch.ones(3)),
            lambda block: block.weight.data.mul_(3),
            lambda block: torch.no_grad()(block.weight.copy_)(torch.arange(3.0)),
            lambda block: setattr(block.weight, "data", block.weight.data.double()),
        ),
        "parameter_frozen_and_thawed": (
            wrapped_block,
            *(None, lambda fn, block: (trained(fn, wrapper()), block.weight)),
            *(
                lambda block, flag=flag: (block.requires_grad_(flag), block.zero_grad())
                for flag in (False, True)
            ),
        ),
        "tied_parameters": (
            lambda: nn.ModuleList([wrapped_block(), wrapped_block()]),
            lambda pair: lambda x: pair[1](pair[0](x)),
            lambda fn, pair: (trained(fn, wrapper()), list(pair.parameters())),
            lambda pair: setattr(pair[1], "weight", pair[0].weight),
        ),
        "state_dict_loaded": (
            wrapped_block,
            *(None, lambda fn, block: (fn(wrapper()), dict(block.named_parameters()))),
            lambda block: block.load_state_dict(wrapped_block().state_dict()),
            lambda block: block.load_state_dict(wrapped_block().state_dict(), assign=True),
        ),
        "dtype_of_a_module": (
            lambda: wrapped_outer().eval(),
            None,
            lambda fn, outer: (
                fn(make(TwoTensor, 2, 3, dtype=outer.block.weight.dtype)),
                dict(outer.named_parameters()),
            ),
            *(cast(torch.float64), cast(torch.bfloat16), cast(torch.float32)),
        ),
        "quantized_weight": (
            lambda: nn.Linear(6, 4, bias=False),
            *(None, lambda fn, linear: fn(make(Tensor, 2, 6))),
            *[set_weight(lambda: make(Int8Like, 4, 6), grad=False)] * 2,
            lambda linear: setattr(linear, "bias", nn.Parameter(torch.ones(4))),
        ),
        "parametrized_weight": (
            lambda: parametrizations.weight_norm(nn.Linear(3, 3)),
            *(None, lambda fn, linear: fn(make(Tensor, 2, 3))),
            lambda linear: torch.no_grad()(linear.parametrizations.weight.original0.mul_)(2),
            lambda linear: parametrize.remove_parametrizations(linear, "weight"),
        ),
    }
)


# ---- modules in modules --------------------------------------------------------------------------------------

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
