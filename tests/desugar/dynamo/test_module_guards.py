"""Guards of large modules by what they read: every change is noticed, and a call without one goes straight on."""

from __future__ import annotations

import copy
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from desugar import _torch as private
from desugar.dynamo.module_guards import Unchanged
from tests.desugar.classes import Pair, make
from tests.desugar.dynamo.test_entry import direct, entry_of, is_direct
from tests.desugar.judge import by_pass


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.act, self.scale = nn.LayerNorm(4), nn.Linear(4, 4), nn.ReLU(), 0.5

    def forward(self, x):
        return x + self.act(self.up(self.norm(x))) * self.scale


class Net(nn.Module):
    def __init__(self, declared=False):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.register_buffer("shift", torch.zeros(4))
        self.sizes = [1, 2]
        self.weight = nn.Parameter(make(Pair, 4), requires_grad=False) if declared else None

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        x = x + self.shift * len(self.sizes)
        return x if self.weight is None else x * self.weight.a


def noted(compiled):
    """The guards that are noted by what they read, of the newest code."""
    return entry_of(compiled)._accepted[0].module


def warm(net, x):
    """Compiles a module, whose second call goes straight on."""
    compiled = by_pass(net)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), net(x))
    assert is_direct(compiled, x) and noted(compiled) is not None
    return compiled


def assert_follows(compiled, net, x):
    """What was compiled does what the module does now, and a call goes straight on again."""
    for _ in range(3):
        got, want = compiled(x), net(x)
        torch.testing.assert_close(got, want)
        assert got.requires_grad == want.requires_grad
    assert is_direct(compiled, x)


def doubled(module, args, out):
    return out * 2


CHANGES = {
    "a number": lambda net: setattr(net.layers[3], "scale", 0.25),
    "a parameter": lambda net: setattr(net.layers[0].up, "weight", nn.Parameter(torch.zeros(4, 4))),
    "a parameter's data": lambda net: setattr(net.layers[0].up.weight, "data", torch.zeros(4, 4)),
    "a table of parameters": lambda net: net.layers[0].up._parameters.update(bias=None),
    "a layer": lambda net: net.layers[1]._modules.update(act=nn.GELU()),
    "a layer less": lambda net: net.layers.__delitem__(3),
    "a layer more": lambda net: net.layers.append(Block()),
    "the class of a layer": lambda net: setattr(
        net.layers[2].up,
        "__class__",
        type("Tripled", (nn.Linear,), {"forward": lambda s, x: nn.Linear.forward(s, x) * 3}),
    ),
    "a hook": lambda net: net.layers[1].up.register_forward_hook(doubled),
    "a hook by hand": lambda net: net.layers[1].act._forward_hooks.update({7: doubled}),
    "a dictionary": lambda net: setattr(net.layers[0], "__dict__", vars(net.layers[1])),
    "a forward": lambda net: setattr(net.layers[0], "forward", lambda x: x * 5),
    "a dtype": lambda net: net.double(),
    "gradients": lambda net: net.layers[0].up.weight.requires_grad_(False),
    "eval": lambda net: net.eval(),
    "a buffer": lambda net: setattr(net, "shift", torch.ones(4)),
    "a list": lambda net: net.sizes.append(3),
    "in place": lambda net: net.layers[0].up.weight.data.mul_(2),
}


@pytest.mark.sweep(36)
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("declared", [False, True])
def test_changes_are_noticed(name, declared):
    net, x = Net(declared), torch.randn(2, 4)
    compiled = warm(net, x)
    CHANGES[name](net)
    assert_follows(compiled, net, x.to(net.layers[0].up.weight.dtype))


class Weighted(Pair):
    """A wrapper with an attribute of its class."""

    bonus = 1.0


def config(**values):
    """No module: nobody tells when something in it changes."""
    return SimpleNamespace(factor=2.0, **values)


class Reader(Net):
    """Reads what is held by its configuration, lists, dicts, parameters, a module it has not registered, classes."""

    shared = 1.0

    def __init__(self):
        super().__init__()
        self.pair = nn.Parameter(Weighted(torch.ones(4), torch.ones(4)), requires_grad=False)
        for holder in (self.pair, self.layers[0].up.weight, *self.layers):
            holder.config, holder.listed = config(), [1.0]
        self.config, self.listed, self.nested = config(inner=config()), [1.0, 2.0], {"a": {"b": 3.0}}
        self._my_hooks = {"c": 4.0}
        object.__setattr__(self, "apart", Block())

    def forward(self, x):
        x = super().forward(x) * self.config.factor + self.config.inner.factor + self.listed[1]
        x = x + self.nested["a"]["b"] + self._my_hooks["c"] + self.apart.scale + self.shared + self.pair.bonus
        for holder in (self.pair, self.layers[0].up.weight, *self.layers):
            x = x * holder.config.factor + holder.listed[0]
        return x * self.pair.a


HELD = {
    "an object": lambda net: setattr(net.config, "factor", 7.0),
    "an object in an object": lambda net: setattr(net.config.inner, "factor", 7.0),
    "a list": lambda net: net.listed.__setitem__(1, 7.0),
    "a dict in a dict": lambda net: net.nested["a"].update(b=7.0),
    "a dict": lambda net: net._my_hooks.update(c=7.0),
    "an object of a layer": lambda net: setattr(net.layers[1].config, "factor", 7.0),
    "a list of a layer": lambda net: net.layers[2].listed.__setitem__(0, 7.0),
    "a module that is not registered": lambda net: setattr(net.apart, "scale", 7.0),
    "the class": lambda net: setattr(type(net), "shared", 7.0),
    "the class of a wrapper": lambda net: setattr(Weighted, "bonus", 7.0),
    "an object of a wrapper": lambda net: setattr(net.pair.config, "factor", 7.0),
    "a list of a wrapper": lambda net: net.pair.listed.__setitem__(0, 7.0),
    "an inner tensor of a wrapper": lambda net: setattr(net.pair, "a", torch.full((4,), 7.0)),
    "an object of a parameter": lambda net: setattr(net.layers[0].up.weight.config, "factor", 7.0),
    "a list of a parameter": lambda net: net.layers[0].up.weight.listed.__setitem__(0, 7.0),
    "the object itself": lambda net: setattr(net, "config", copy.deepcopy(net.config)),
}


@pytest.mark.sweep(16)
@pytest.mark.parametrize("name", HELD)
def test_what_is_held_by_others_is_looked_at(name, monkeypatch):
    """Of these no dictionary of the module says that they have changed, nor do they change any of it."""
    monkeypatch.setattr(Reader, "shared", 1.0)
    monkeypatch.setattr(Weighted, "bonus", 1.0)
    net, x = Reader(), torch.randn(2, 4)
    compiled = warm(net, x)
    HELD[name](net)
    assert_follows(compiled, net, x)


@pytest.mark.slow
def test_a_parameter_as_the_argument():
    net = Net()
    compiled, own = by_pass(net), nn.Parameter(torch.randn(4))
    for x in (torch.randn(4), own, net.layers[0].up.bias, torch.randn(4)):
        for _ in range(2):
            torch.testing.assert_close(compiled(x), net(x))


@pytest.mark.slow
def test_training_goes_straight_on():
    net = Net()
    compiled, optimizer = by_pass(net), torch.optim.SGD(net.parameters(), 0.1)
    for step in range(4):
        out, went = direct(compiled, torch.randn(2, 4))
        out.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert went == (step > 0)


@pytest.mark.slow
def test_a_module_that_changes_all_the_time_has_dynamos_guards():
    class Counting(Net):
        last = None

        def forward(self, x):
            self.last = x.detach()
            return super().forward(x)

    net, x = Counting(), torch.randn(2, 4)
    compiled = by_pass(net)
    for _ in range(12):
        torch.testing.assert_close(compiled(x), Net.forward(net, x))
    assert torch.equal(net.last, x) and is_direct(compiled, x)
    assert noted(compiled) is None or noted(compiled).is_given_up


@pytest.mark.slow
def test_a_function_that_holds_a_module():
    net, x = Net(), torch.randn(2, 4)
    fn = lambda x: net(x) * 2  # noqa: E731
    compiled = warm(fn, x)
    assert noted(compiled).module is net
    net = Net()
    torch.testing.assert_close(compiled(x), fn(x))


def test_a_write_through_the_object_is_a_change_and_the_same_value_is_none():
    net = Net()
    own, names = vars(net.layers[0]), list(vars(net.layers[0]))
    found, other = Unchanged.of(net, unshare=True), Unchanged.of(net, unshare=True)
    assert vars(net.layers[0]) is own and list(own) == names
    net.train()
    assert found.holds() and other.holds()
    net.layers[0].scale = 0.25
    assert own["scale"] == 0.25 and not found.holds() and not other.holds()


def test_a_mode_that_is_set_at_each_step_keeps_the_guards():
    net, x = Net(), torch.randn(2, 4)
    compiled = by_pass(net)
    for step in range(8):
        net.train()
        assert is_direct(compiled, x) == (step > 0) or step == 1
    assert not noted(compiled).is_given_up and noted(compiled).unchanged.uses[0] > 4


@pytest.mark.parametrize("number", [0, 63, 64, 199])
def test_each_dictionary_of_many_is_compared(number):
    dicts = [{"a": n} for n in range(200)]
    is_unchanged, other = (private.unchanged_guards(dicts, [], []) for _ in range(2))
    assert all(check() for _ in range(3) for check in (is_unchanged, other))
    del other  # the guards of one check do not end with those of another
    for change in (lambda held: held.update(b=2), lambda held: held.pop("b")):
        change(dicts[number])
        assert not is_unchanged()
    assert private.unchanged_guards(dicts, [], [])()


def test_a_check_may_end_before_what_it_compares_and_after():
    holder = nn.Linear(2, 2)
    is_unchanged, held = private.unchanged_guards([holder._parameters], [holder], []), weakref.ref(holder)
    assert is_unchanged()
    del holder
    assert is_unchanged()
    del is_unchanged
    gc.collect()
    assert held() is None
