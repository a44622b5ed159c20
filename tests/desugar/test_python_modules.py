"""What forward does to its module, what is done to the module between calls, and modules of other kinds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import desugar
from tests.desugar.idioms.running import DOORS
from tests.desugar.judge import judge
from tests.desugar.refusing import strictly

EVERY_DOOR = pytest.mark.parametrize("door", [strictly, DOORS["torch.compile"]])


def make_args():
    return (torch.randn(2, 3, requires_grad=True),)


# ---- what forward sets ---------------------------------------------------------------------------------------


class Table(nn.Module):
    """Makes a table when it is first called, or grows it, and counts its calls."""

    def __init__(self):
        super().__init__()
        self.table, self.calls = None, 0

    def forward(self, x):
        self.calls += 1
        if self.table is None or len(self.table) < len(x):
            self.table = torch.arange(float(len(x)))
        return x * self.table[: len(x)]


class Cache(nn.Module):
    """Sets a buffer to a new tensor at every call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("keys", torch.zeros(3))

    def forward(self, x):
        self.keys = self.keys + x
        return self.keys * 2


@pytest.mark.parametrize("kind", [Table, Cache])
def test_trace_leaves_the_module_alone(kind):
    module = kind()
    before = vars(module) | dict(module.named_buffers())
    desugar.trace(module, torch.ones(3))
    after = vars(module) | dict(module.named_buffers())
    assert all(after[name] is value for name, value in before.items()) and len(after) == len(before)
    assert kind is Table or module.keys.tolist() == [0, 0, 0]


class Fails(Table):
    def forward(self, x):
        super().forward(x)
        self.register_buffer("late", x)
        raise KeyError("inside")


@EVERY_DOOR
def test_what_an_error_leaves_behind(door):
    x, found = torch.ones(3), []
    for make_called in (lambda module: module, door):
        module = Fails()
        called = make_called(module)
        for _ in range(2):
            with pytest.raises(KeyError, match="inside"):
                called(x)
        found.append((module.table.tolist(), module.calls, dict(module.named_buffers())["late"] is x))
    assert found[0] == found[1]


# ---- hooks ---------------------------------------------------------------------------------------------------


@EVERY_DOOR
def test_a_hook_that_stores_activations(door):
    stored: list[torch.Tensor] = []
    module, x = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.ones(1, 2)
    handle = module[0].register_forward_hook(lambda module, args, out: stored.append(out.detach()))
    compiled = door(module)
    for count in (1, 2, 3):
        out = compiled(x)
        assert len(stored) == count and torch.equal(out, stored[-1].relu())
    handle.remove()
    compiled(x)
    # Dynamo by itself guards no hooks of nested modules (config.skip_nnmodule_hook_guards).
    assert len(stored) == 3 or door is not strictly
    judge(module, lambda: (torch.randn(1, 2),), compiled)


# ---- scripted modules ----------------------------------------------------------------------------------------

SCRIPTED = {
    "linear": lambda: nn.Linear(3, 3),
    "batch norm": lambda: nn.Sequential(nn.BatchNorm1d(3)),
    "activations": lambda: nn.Sequential(nn.Tanh(), nn.GELU()),
    "softmax": lambda: nn.Softmax(-1),
}


@pytest.mark.sweep(2)
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@EVERY_DOOR
@pytest.mark.parametrize("name", SCRIPTED)
def test_scripted_modules(name, door):
    scripted = torch.jit.script(SCRIPTED[name]().eval())
    model = nn.Sequential(nn.Tanh(), scripted)
    compiled = judge(model, make_args, way=door, calls=2)
    judge(lambda x: scripted(x * 2) * 2, make_args, way=door, calls=2)
    model[1] = nn.Linear(3, 3)
    judge(model, make_args, compiled)
