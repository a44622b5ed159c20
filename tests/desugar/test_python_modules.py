"""What forward does to its module, what is done to the module between calls, and modules of other kinds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import desugar
from tests.desugar.classes import Pair, make
from tests.desugar.idioms.running import DOORS
from tests.desugar.judge import by_pass, judge
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


@EVERY_DOOR
def test_a_table_that_is_made_when_it_is_first_needed(door):
    module = Table()
    compiled = door(module)
    for count, size in enumerate((3, 3, 2, 5, 5, 4), 1):
        assert compiled(torch.ones(size)).tolist() == [float(n) for n in range(size)]
        assert type(module.table) is torch.Tensor and len(module.table) >= size
        assert module.calls == count


@EVERY_DOOR
def test_state_that_is_replaced_at_every_call(door):
    module = Cache()
    compiled = door(module)
    for count in (1, 2, 3):
        earlier = module.keys
        assert compiled(torch.ones(3)).tolist() == [2.0 * count] * 3
        assert module.keys is not earlier and module.keys.tolist() == [count] * 3
        assert dict(module.named_buffers())["keys"] is module.keys


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


@pytest.mark.parametrize("on_compiled", [False, True])
def test_a_hook_registered_later(on_compiled):
    module, x = nn.Linear(3, 3), make(Pair, 2, 3)
    compiled = by_pass(module)
    compiled(x)
    (compiled if on_compiled else module).register_forward_hook(lambda module, args, out: out * 2)
    torch.testing.assert_close(compiled(x).a, module(x).a)


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_a_backward_hook_registered_later(register):
    module, x = nn.Linear(3, 3), torch.ones(2, 3, requires_grad=True)
    compiled = by_pass(lambda x: module(x).sum())
    (before,) = torch.autograd.grad(compiled(x), x)
    handle = getattr(module, register)(lambda module, *grads: (grads[0][0] * 2,))
    (doubled,) = torch.autograd.grad(compiled(x), x)
    assert torch.equal(doubled, before * 2)
    handle.remove()
    assert torch.equal(torch.autograd.grad(compiled(x), x)[0], before)


# ---- what is replaced between calls --------------------------------------------------------------------------


@pytest.mark.sweep(6)
@EVERY_DOOR
@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.__setitem__(1, nn.Tanh()),
        lambda m: m.append(nn.Linear(3, 2)),
        lambda m: m.__setitem__(0, nn.Linear(3, 3)),
        lambda m: m.__delitem__(1),
        lambda m: setattr(m[0], "weight", nn.Parameter(torch.zeros(3, 3))),
    ],
    ids=["other", "more", "same kind", "fewer", "parameter"],
)
@pytest.mark.parametrize("bound", [False, True])
def test_a_submodule_replaced(change, bound, door):
    module, x = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), make(Pair, 2, 3)
    compiled = door(module.forward if bound else module)
    compiled(x)
    change(module)
    torch.testing.assert_close(compiled(x).a, module(x).a)


class Decorated(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    @by_pass
    def forward(self, x):
        return nn.functional.dropout(x * self.weight, 0.9, self.training)


def test_a_decorated_forward_sees_eval_and_new_parameters():
    model = Decorated()
    assert (model(torch.ones(3)) != 1).all()
    assert model.eval()(torch.ones(3)).tolist() == [1, 1, 1]
    model.weight = nn.Parameter(torch.zeros(3))
    assert model(torch.ones(3)).tolist() == [0, 0, 0]


@EVERY_DOOR
def test_modules_in_a_list(door):
    layers = nn.ModuleList([nn.Linear(3, 3), nn.Dropout(0.0)])
    judge(lambda x: layers[1](layers[0](x)), make_args, way=door, calls=2)


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
