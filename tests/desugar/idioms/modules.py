"""Idioms of modules, objects and tensors: changes to them between calls, hooks, copies, branches on data."""

from __future__ import annotations

import copy
import dataclasses
import functools
import types
import weakref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.testing._internal.two_tensor import TwoTensor

from subclasses import TensorSubclass
from subclasses.ragged import JaggedTensor
from tests.desugar.classes import Beside, Halves, Int8Like, Labeled, Nested, Pair, Tagged, make
from tests.desugar.idioms.running import (
    IDIOMS,
    again,
    between,
    calling,
    idiom,
    idioms_of_calls,
    idioms_of_changes,
    put,
    raised,
    trained,
    within,
    wrapper,
)
from tests.desugar.judge import switched
from tests.modules import Held


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


class Outer(Held):
    """A module around another one."""

    def forward(self, x):
        return self.dropout(self.block(x)) + 1


def wrapped(module):
    """The module with every parameter made of a TwoTensor."""
    for owner in module.modules():
        for name, value in list(owner.named_parameters(recurse=False)):
            setattr(owner, name, nn.Parameter(TwoTensor(value.detach().clone(), value.detach() + 1)))
    return module


def wrapped_block():
    return wrapped(Block())


def wrapped_outer():
    return wrapped(Outer(block=Block(), dropout=nn.Dropout(0.5)))


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


def noting(module, args, out):
    module.seen.append(1)
    return out + 1


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
            lambda block: block.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
            lambda block: block.register_forward_hook(noting),
            lambda block: block._forward_pre_hooks.popitem(),
            lambda block: block._forward_hooks.popitem(),
        ),
        "hooks_of_a_nested_module": (
            in_evaluation,
            *(None, calling),
            lambda outer: outer.block.register_forward_hook(lambda module, args, out: out * 10),
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


# ---- objects and tensors --------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Settings:
    scale: float = 2.0
    names: list = dataclasses.field(default_factory=list)


class Box:
    """A plain object with every kind of member."""

    factor = 2.0

    def __init__(self, scale=1.0):
        self.scale, self.calls, self.history = scale, 0, []

    def method(self, x):
        self.calls += 1
        return x * self.scale * self.factor

    @property
    def doubled(self):
        return self.scale * 2

    @doubled.setter
    def doubled(self, value):
        self.scale = value / 2

    @staticmethod
    def static(x):
        return x + 1

    @classmethod
    def of_class(cls, x):
        return x * cls.factor

    def __call__(self, x):
        self.history.append(x)
        return x * len(self.history)


class Other(Box):
    """A class that has another attribute of its own."""

    factor = 7.0


# ------------------------------------------------------------------------------------- members and attributes


def counting(x, box):
    box.calls += 1
    box.last = x * box.calls
    return box.last + 1


def setting_a_property(x, box):
    box.doubled = box.doubled + 1
    return x * box.doubled


def by_name(x, box, name):
    if not hasattr(box, name):
        setattr(box, name, x)
        return x * getattr(box, "missing", 2)
    y = getattr(box, name) + x
    delattr(box, name)
    return y


def of_a_dataclass(x, settings):
    settings.names.append(x.dim())
    other = dataclasses.replace(settings, scale=settings.scale + 1)
    return x * settings.scale + other.scale


def copying_deeply(settings, x):
    other = copy.deepcopy(settings)
    other.names.append("inside")
    return x * settings.scale, other


idioms_of_calls(
    {
        "attribute_of_an_argument": (
            lambda x, box: x * box.scale,
            lambda fn, x: (fn(x, box) for box in [Box()] for box.scale in (1.0, 2.0, 3, 5.0)),
        ),
        "attribute_of_another_argument": (
            lambda x, box: x * box.scale,
            lambda fn, x: (fn(x, Box(scale)) for scale in (1.0, 5.0)),
        ),
        "counter_of_an_argument": (
            counting,
            lambda fn, x: ((fn(x, box), vars(box)) for box in [Box()] for _ in range(4)),
            Pair,
        ),
        "static_method": (Box.static, lambda fn, x: fn(x), Pair),
        "class_method": (Box.of_class, lambda fn, x: fn(x), Pair),
        "inherited_class_method": (Other.of_class, lambda fn, x: fn(x), Pair),
        "property_with_a_setter": (
            setting_a_property,
            lambda fn, x: ((fn(x, box), box.scale) for box in [Box()] for _ in range(3)),
        ),
        "attributes_by_name": (
            by_name,
            lambda fn, x: (
                (fn(x, box, name), vars(box)) for box in [Box()] for name in ("a", "a", "b", "b", "a")
            ),
            Pair,
        ),
        "attributes_by_name_beside_another": (
            by_name,
            lambda fn, x: ((fn(x, box, "b"), vars(box)) for box in [Box()] for box.missing in (10, 11)),
            Pair,
        ),
        "dataclass_argument": (
            of_a_dataclass,
            lambda fn, x: (
                (fn(x, settings), settings)
                for one in [Settings()]
                for settings, settings.scale in ((one, 2.0), (one, 3.0), (Settings(names=["a"]), 5.0))
            ),
            Pair,
        ),
        "object_made_inside": (
            lambda x, scale: Box(scale) if scale > 2 else Settings(x * scale),
            lambda fn, x: (vars(fn(x, scale)) for scale in (1.0, 3.0, 2.0)),
            Pair,
        ),
        "deep_copy_of_an_argument": (
            copying_deeply,
            lambda fn, x: (
                (fn(settings, x), settings) for settings in [Settings()] for settings.scale in (1.0, 2.0)
            ),
        ),
    }
)


def set_factor(value):
    return lambda held: setattr(Box, "factor", value)


idioms_of_changes(
    {
        "method_of_an_object": (
            Box,
            *(lambda box: box.method, lambda fn, box: (fn(wrapper()), box.calls)),
            *(put(scale=3.0), set_factor(5.0), set_factor(2.0)),
        ),
        "callable_object": (
            Box,
            *(lambda box: lambda x: box(x), lambda fn, box: (fn(wrapper()), box.history), again, again),
        ),
        "weak_reference": (
            lambda: (lambda box: {"box": box, "ref": weakref.ref(box)})(Box(2.0)),
            lambda held: lambda x, ref: x if ref() is None else x * ref().scale,
            lambda fn, held: fn(make(Pair, 2, 3), held["ref"]),
            lambda held: setattr(held["box"], "scale", 3.0),
            lambda held: held.pop("box") and None,
        ),
    }
)

# ------------------------------------------------------------------------- attributes and metadata of tensors


def tagging(x):
    x.tag = getattr(x, "tag", 0) + 1
    y = x * x.tag
    y.origin = "inside"
    return y


def of_its_type(x):
    kinds = (
        type(x) is Tensor,
        isinstance(x, TwoTensor),
        isinstance(x, TensorSubclass),
        issubclass(type(x), Tensor),
    )
    if type(x) is Tensor:
        return x * 2, kinds
    return (x + 1 if isinstance(x, (Pair, Halves)) else x - 1), type(x).__name__


idioms_of_calls(
    {
        "attribute_of_a_tensor": (
            tagging,
            lambda fn, x: between(
                lambda: [(y, x.tag, getattr(y, "origin", None)) for y in [fn(x)]],
                *(lambda: None, lambda: None, lambda: setattr(x, "tag", 10)),
            ),
            Tensor,
        ),
        "attribute_of_a_wrapper": (
            lambda x: x * getattr(x, "importance", 2.0),
            lambda fn, x: between(
                lambda: fn(x),
                lambda: setattr(x, "importance", 3.0),
                lambda: setattr(x, "importance", 4.0),
                lambda: delattr(x, "importance"),
            ),
        ),
        "metadata_of_an_argument": (
            lambda x: x * x.count if x.label == "x" else x + x.count,
            lambda fn, x: (
                fn(Labeled(x.data_, extra, label=label, count=count))
                for extra, label, count in (
                    *((x.extra, "x", 3), (x.extra, "y", 3), (x.extra, "x", 4)),
                    *((x.extra, "x", 5), (x.extra, "z", 3), (None, "x", 2)),
                )
            ),
            Labeled,
        ),
        "metadata_changed_by_hand": (
            lambda x: (x * 2, x.tag),
            lambda fn, x: (fn(x) for x.tag in ("left", "right", "left", "other")),
            Tagged,
        ),
        "inner_tensor_replaced_between_calls": (
            lambda x: (x * 2, x.a + 1),
            lambda fn, x: between(
                lambda: fn(x), lambda: setattr(x, "a", torch.ones(2, 3)), lambda: x.b.fill_(4)
            ),
        ),
        "type_checks": (
            of_its_type,
            lambda fn, x: (
                fn(make(cls, 2, 6)) for cls in (Tensor, TwoTensor, Pair, Halves, Tensor, Beside, Nested)
            ),
        ),
    }
)


# ------------------------------------------------------------------------------------------------ data in Python


def while_on_data(x):
    steps = 0
    while x.abs().max() > 0.1:
        x = x / 2
        steps += 1
    return x, steps


idioms_of_calls(
    {
        "while_on_data": (
            while_on_data,
            lambda fn, x: ((fn(make(Tensor, 2, 3) * scale), fn(x * scale)[1]) for scale in (1, 4, 0.01)),
        ),
        "tolist_and_loop": (
            lambda x, lengths: [
                part * n for n, part in zip(lengths.tolist(), x.split(lengths.tolist()), strict=True)
            ],
            lambda fn, x: (fn(x, torch.tensor(lengths)) for lengths in ([2, 1], [1, 2], [1, 1, 1])),
            *(TwoTensor, 3, 2),
        ),
        "nonzero_and_masks": (
            lambda x: (x[x > 0], x.nonzero(), x.clamp(min=0).unique().numel()),
            lambda fn, x: (fn(make(Tensor, 3, 4)) for _ in range(3)),
        ),
        "numpy_inside": (
            lambda x, y: (x * torch.from_numpy(y.numpy() * 2), float(y.numpy().sum())),
            lambda fn, x: (fn(make(TwoTensor, 2, n), torch.arange(float(n))) for n in (3, 4)),
        ),
        "iterating_over_a_tensor": (
            lambda x: ([row * 2 for row in x], sum(x), len(x), x[0] in [None]),
            lambda fn, x: (fn(make(TwoTensor, rows, 3)) for rows in (2, 3, 1)),
        ),
        "tensor_equality_as_a_bool": (
            lambda x, y: x * 2 if torch.equal(x, y) else x + y,
            lambda fn, x: (fn(x, x.clone()), fn(x, x + 1), fn(x, x)),
        ),
    }
)

# ----------------------------------------------------------------------------------------------------- writes


def writing_by_position(cache, x, position):
    cache[position : position + len(x)] = x
    return cache[: position + len(x)].sum(0)


def swapping(state):
    state[0], state[1] = state[1] * 2, state[0]
    return state[0] + state[1]


idioms_of_calls(
    {
        "cache_written_by_position": (
            writing_by_position,
            lambda fn, x: (
                (fn(x, make(TwoTensor, rows, 4), position), x)
                for position, rows in ((0, 3), (3, 1), (4, 1), (5, 2))
            ),
            *(TwoTensor, 8, 4),
        ),
        "swapped_every_call": (
            swapping,
            lambda fn, x: ((fn(state), state) for state in [[x, make(Pair, 2, 3)]] for _ in range(3)),
            Pair,
        ),
    }
)


# ------------------------------------------------------------------------------------- keys, classes and types


class Doubling(Tensor):
    """Runs a function, whatever the op."""

    @staticmethod
    def __new__(cls, data, run):
        return torch.Tensor._make_wrapper_subclass(cls, data.size())

    def __init__(self, data, run):
        self.data_, self.run = data, run

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return list(args[0].run(args[0].data_))


def copying_a_tensor(x):
    one, two = copy.copy(x), copy.deepcopy(x)
    two.mul_(2)
    return one, two, one is x


idioms_of_calls(
    {
        "called_inside_a_dispatch": (
            lambda x: (x * 2).unbind(),
            lambda fn, x: (Doubling(make(Tensor, n, 3), fn).unbind() for n in (2, 3)),
        ),
        "type_changes_between_calls": (
            lambda x: (x * 2 + 1).sum(0),
            lambda fn, x: (
                trained(fn, make(cls, 2, 6, grad=True))
                for cls in (Tensor, TwoTensor, Pair, Tagged, Labeled, Halves, Tensor, TwoTensor)
            ),
        ),
        "copies_of_a_tensor": (copying_a_tensor, lambda fn, x: ((fn(y), y) for y in (make(Tensor, 2, 3), x))),
        "copy_of_a_declared_tensor": (
            lambda x: copy.copy(x) * 2,
            lambda fn, x: (fn(make(Pair, 2, 3)) for _ in range(2)),
        ),
        "deep_copy_of_a_declared_tensor": (
            lambda x: copy.deepcopy(x).mul_(2),
            lambda fn, x: ((fn(x), x) for x in (make(Pair, 2, 3), make(Pair, 2, 3))),
        ),
        "ragged_rows_of_new_lengths": (
            lambda x, scale: ((x * scale).sum(1), x.values, len(x)),
            lambda fn, x: (
                fn(JaggedTensor.from_tensors([torch.randn(n, 3) for n in lengths]), len(lengths))
                for lengths in ((2, 3), (1, 4, 2), (5,), (2, 2), (3, 1, 1, 1))
            ),
        ),
        "dtype_changes_between_calls": (
            lambda x, y: (x * y).to(torch.float32) if x.dtype.is_floating_point else x + y,
            lambda fn, x: (
                [
                    fn(z, y)
                    for dtype in (torch.float32, torch.float64, torch.bfloat16)
                    for z in [x.to(dtype)]
                    for y in (z, torch.ones(3), 2)
                ],
                fn(torch.arange(3), 2),
                raised(fn, torch.arange(3), None),
            ),
        ),
    }
)


idioms_of_changes(
    {
        "weak_dictionary_of_tensors": (
            weakref.WeakKeyDictionary,
            lambda known: lambda x, box: (known.update({box: known.get(box, 0) + 1}), x * known[box])[1],
            lambda fn, known: (
                (fn(make(Pair, 2, 3), boxes[n]), list(known.values()))
                for boxes in [[nn.Identity(), nn.Identity()]]
                for n in (0, 1, 0)
            ),
        ),
        "identity_as_a_key": (
            dict,
            lambda known: lambda x: (lambda y: y if known.setdefault(id(x), len(known)) else y * 2)(x + 1),
            lambda fn, known: (
                (fn(value), list(known.values())) for x, y in [(wrapper(), wrapper())] for value in (x, y, x)
            ),
        ),
    }
)
