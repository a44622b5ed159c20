"""Dynamo's names in those of the user."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from desugar import _torch as private
from desugar.recording import listeners
from desugar.recording.user_names import function_name, leaf_names, readable
from subclasses.ragged import JaggedTensor
from tests.doors import by_torch

NAMES = [
    ("L['x']", "x"),
    ("L['xs'][0]", "xs[0]"),
    ("L['d']['q'][0].values", "d['q'][0].values"),
    ("L['self']._modules['layer']._parameters['weight']", "self.layer.weight"),
    ("L['self']._modules['layers']._modules['0']._buffers['mean']", "self.layers[0].mean"),
    ("L['self'].__dict__['p']", "self.p"),
    ("L['self']._parameters['odd-name']", "self._parameters['odd-name']"),
    ("G['K']", "K"),
    ("G['__import___main__'].K", "K"),
    ("G['__import_torch_dot_nn_dot_modules_dot_linear'].F.linear", "torch.nn.modules.linear.F.linear"),
    ("G['__builtins_dict___2']['len']", "len"),
    (
        "dict(type(G['net']).__dict__)['forward'].__kwdefaults__['scale']",
        "type(net).forward.__kwdefaults__['scale']",
    ),
    ("L['x'].size()[0] == 1 + L['y'].stride()[1]", "x.size(0) == 1 + y.stride(1)"),
    ("L['j']._max_length_carrier.size()[0]", "j.max_length"),
]


@pytest.mark.parametrize(("dynamos", "users"), NAMES)
def test_expressions(dynamos, users):
    assert readable(dynamos) == users
    without_scope = re.sub(r"L\['(\w+)'\]", r"\1", dynamos)  # as reasons of recompilations have it
    assert readable(without_scope) == users


class Plain(nn.Module):
    def forward(self, x, module): ...


class Any(nn.Module):
    def forward(self, x, *more, module=None, **rest): ...


@pytest.mark.parametrize(
    ("module", "dynamos", "users"),
    [
        (nn.ReLU(), "L['module'].inplace == False", "self.inplace == False"),
        (Plain(), "L['module'].a + L['module_1'].b", "module.a + self.b"),
        (Any(), "module.a + args[0] + args[2] + kwargs['module']", "self.a + x + more[1] + module"),
        (Any(), "x.module == 'module' and kwargs['b'].args[0]", "x.module == 'module' and b.args[0]"),
    ],
)
def test_names_in_the_call_of_a_module(module, dynamos, users):
    assert readable(dynamos, module) == users
    assert readable("module.a + args[0]") == "module.a + args[0]", "of a function, these are the user's own"


class Layer(nn.Linear):
    def forward(self, x, *, scale):
        return super().forward(x) * scale


SCALE, LAYER = torch.ones(3), Layer(3, 3)


def fn(xs, d, n):
    return LAYER(xs[0], scale=SCALE) + d["j"].values.sum() * n


def test_leaves_and_functions():
    found, j = [], JaggedTensor.from_tensors([torch.ones(2, 3), torch.ones(1, 3)])
    with listeners.listen(lambda r: found.append((leaf_names(r.graph), function_name(r.fn, r.graph)))):
        for n in (2.5, 3.5):
            by_torch(fn)([torch.ones(2, 3)], {"j": j}, n)
    names, function = found[0]
    assert function == "fn" and set(names) >= {"xs[0]", "LAYER.weight", "LAYER.bias", "SCALE"}
    assert any(name.startswith("d['j']") for name in names)
    assert list(map(function_name, (LAYER, fn, None))) == ["Layer", "fn", "a graph"]


def test_which_leaves_come_from_parameters():
    found = {}

    def note(recording):
        nodes = recording.graph.graph.find_nodes(op="placeholder")
        names = leaf_names(recording.graph)
        found.update({name: private.is_argument(node) for name, node in zip(names, nodes, strict=True)})

    with listeners.listen(note):
        by_torch(lambda x, by: x * SCALE + by["k"])(torch.ones(3), {"k": torch.ones(3)})
    assert found == {"x": True, "SCALE": False, "by['k']": True}
