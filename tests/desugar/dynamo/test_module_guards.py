"""Guards of large modules: they notice every change, and a call without a change takes the fast path."""

from __future__ import annotations

import copy
import functools
import gc
import types
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from desugar import _torch as torch_private
from desugar.dynamo.implied_guards import ModuleSnapshot, has_fixed_metadata, has_fixed_names
from subclasses import TensorSubclass, inner, static
from tests.desugar.classes import Pair, Tagged, TwoTensor, make
from tests.desugar.dynamo.test_entry import direct, entry_of, is_direct
from tests.desugar.judge import by_pass
from tests.modules import Held


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
    """The module guards of the newest code, recorded by the objects that they read."""
    return entry_of(compiled)._accepted[0].module


def warm(net, x):
    """Compiles a module, whose second call goes straight on."""
    compiled = by_pass(net)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), net(x))
    assert is_direct(compiled, x) and noted(compiled) is not None
    return compiled


def assert_follows(compiled, net, x):
    """The compiled module computes the same result as the module does now, and calls take the fast path again."""
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


class Weighted(Pair):
    """A wrapper with an attribute of its class."""

    bonus = 1.0


def config(**values):
    """No module: nobody tells when something in it changes."""
    return SimpleNamespace(factor=2.0, **values)


class Reader(Net):
    """Reads values of its configuration, lists, dicts, parameters, classes, and a module that it has not registered."""

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


@pytest.mark.sweep(52)
@pytest.mark.parametrize(
    ("make_net", "change"),
    [
        *(
            pytest.param(functools.partial(Net, declared), change, id=f"{name}, {declared}")
            for name, change in CHANGES.items()
            for declared in (False, True)
        ),
        *(pytest.param(Reader, change, id=f"held: {name}") for name, change in HELD.items()),
    ],
)
def test_changes_are_noticed(make_net, change, monkeypatch):
    """Of those that others hold, no dictionary of the module says that they have changed."""
    monkeypatch.setattr(Reader, "shared", 1.0)
    monkeypatch.setattr(Weighted, "bonus", 1.0)
    net, x = make_net(), torch.randn(2, 4)
    compiled = warm(net, x)
    change(net)
    assert_follows(compiled, net, x.to(net.layers[0].up.weight.dtype))


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
    found, other = ModuleSnapshot.of(net, unshare=True), ModuleSnapshot.of(net, unshare=True)
    assert vars(net.layers[0]) is own and list(own) == names
    net.train()
    assert found.still_holds() and other.still_holds()
    net.layers[0].scale = 0.25
    assert own["scale"] == 0.25 and not found.still_holds() and not other.still_holds()


def test_a_mode_that_is_set_at_each_step_keeps_the_guards():
    net, x = Net(), torch.randn(2, 4)
    compiled = by_pass(net)
    for step in range(8):
        net.train()
        assert is_direct(compiled, x) == (step > 0) or step == 1
    assert not noted(compiled).is_given_up and noted(compiled).snapshot.uses[0] > 4


@pytest.mark.parametrize("number", [0, 63, 64, 199])
def test_each_dictionary_of_many_is_compared(number):
    dicts = [{"a": n} for n in range(200)]
    is_unchanged, other = (torch_private.unchanged_guards(dicts, [], []) for _ in range(2))
    assert all(check() for _ in range(3) for check in (is_unchanged, other))
    del other  # the guards of a check outlive the guards of another check
    for change in (lambda held: held.update(b=2), lambda held: held.pop("b")):
        change(dicts[number])
        assert not is_unchanged()
    assert torch_private.unchanged_guards(dicts, [], [])()


def test_a_check_may_end_before_what_it_compares_and_after():
    holder = nn.Linear(2, 2)
    is_unchanged, held = (
        torch_private.unchanged_guards([holder._parameters], [holder], []),
        weakref.ref(holder),
    )
    assert is_unchanged()
    del holder
    assert is_unchanged()
    del is_unchanged
    gc.collect()
    assert held() is None


# ---- guards that an unchanged module implies ------------------------------------------------------------------------

RANKS = 2


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    _clear_sharding_prop_cache()  # it has specs with the mesh of another test
    yield init_device_mesh("cpu", (RANKS,))
    _clear_sharding_prop_cache()
    dist.destroy_process_group()


class MLP(Held):
    def forward(self, x):
        y = self.down(self.up(x).relu())
        return y if self.up.weight.requires_grad else y + 100


STYLES = {"up": ColwiseParallel(), "down": RowwiseParallel(output_layouts=Partial())}


def parallel(mesh: DeviceMesh) -> MLP:
    """Tensor-parallel layers without a collective: each rank keeps its part of the sum."""
    return parallelize_module(MLP(up=nn.Linear(4, 8), down=nn.Linear(8, 4)), mesh, STYLES)


def scaled(module, args, out, factor=1.0, *, by=None):
    return out * factor * (1.0 if by is None else by)


def add_hooks(net):
    """Adds a hook of each kind, and returns them by name."""

    def with_cell(factor):
        return lambda module, args, out: out * factor

    def of_function(function, items):
        return lambda module, args, out: function(out) + items[0]

    hooks = {
        "cell": with_cell(2.0),
        "partial": functools.partial(scaled, factor=3.0),
        "plain": types.FunctionType(doubled.__code__, globals()),
        "nested": of_function(lambda out: out + 1.0, (0.5, "unused")),
    }
    for hook in hooks.values():
        net.down.register_forward_hook(hook)
    return hooks


shifted_more = lambda out: out + 5.0  # noqa: E731


def local(tensor, like, mesh=None):
    """A parameter with a local tensor, placed as another."""
    return nn.Parameter(
        DTensor.from_local(tensor, mesh or like.device_mesh, like.placements, run_check=False)
    )


def replace_mesh(net, hooks):
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    for layer in (net.up, net.down):
        for name, p in list(layer.named_parameters()):
            setattr(layer, name, local(p.to_local().detach() + 1, p, mesh))
        del layer._distribute_module_applied
        layer._forward_pre_hooks.clear()
        layer._forward_hooks.clear()
    parallelize_module(net, mesh, STYLES)


IMPLIED_CHANGES = {
    "a hook more": lambda net, hooks: net.up.register_forward_hook(doubled),
    "a hook before, more": lambda net, hooks: net.up.register_forward_pre_hook(
        lambda m, args: (args[0] + 1,)
    ),
    "a hook less": lambda net, hooks: net.down._forward_hooks.popitem(),
    "another hook": lambda net, hooks: net.down._forward_hooks.update(
        {max(net.down._forward_hooks): lambda module, args, out: out * 11.0}
    ),
    "the code of a hook": lambda net, hooks: setattr(
        hooks["plain"], "__code__", (lambda module, args, out: out * 3).__code__
    ),
    "a cell of a hook": lambda net, hooks: setattr(hooks["cell"].__closure__[0], "cell_contents", 5.0),
    "a function in a cell": lambda net, hooks: setattr(
        hooks["nested"].__closure__[0], "cell_contents", shifted_more
    ),
    "the code of a function in a cell": lambda net, hooks: setattr(
        hooks["nested"].__closure__[0].cell_contents, "__code__", shifted_more.__code__
    ),
    "a tuple in a cell": lambda net, hooks: setattr(
        hooks["nested"].__closure__[1], "cell_contents", (9.0, "unused")
    ),
    "a partial": lambda net, hooks: hooks["partial"].__setstate__((scaled, (), {"factor": 5.0}, {})),
    "a keyword of a partial": lambda net, hooks: hooks["partial"].keywords.update(by=7.0),
    "a parameter": lambda net, hooks: setattr(net.up, "weight", local(torch.zeros(4, 4), net.up.weight)),
    "a placement": lambda net, hooks: setattr(
        net.down,
        "bias",
        nn.Parameter(
            DTensor.from_local(torch.full((4,), 5.0), net.down.bias.device_mesh, [Partial()], run_check=False)
        ),
    ),
    "a mesh": replace_mesh,
    "a local tensor": lambda net, hooks: setattr(net.up.weight, "_local_tensor", torch.zeros(4, 4)),
    "the data of a local tensor": lambda net, hooks: setattr(
        net.up.weight._local_tensor, "data", torch.zeros(4, 4).t()
    ),
    "gradients": lambda net, hooks: net.up.weight.requires_grad_(False),
}


@pytest.mark.sweep(68)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", IMPLIED_CHANGES)
def test_changes_are_noticed_implied(mesh, name, grad):
    net, x = parallel(mesh), torch.randn(2, 4)
    hooks = add_hooks(net)
    with torch.set_grad_enabled(grad):
        compiled = warm(net, x)
        IMPLIED_CHANGES[name](net, hooks)
        assert not noted(compiled).snapshot.still_holds()
        assert_follows(compiled, net, x)


# Of the first and the last, no method of the class is told.
IN_PLACE = {
    "placements": lambda net: vars(net.up.weight._spec).update(placements=(Replicate(),)),
    "placements, by attribute": lambda net: setattr(net.up.weight._spec, "placements", (Replicate(),)),
    "spec": lambda net: setattr(net.up.weight, "_spec", net.down.weight._spec),
    "class": lambda net: setattr(net.up.weight, "__class__", type("Other", (DTensor,), {})),
    "mesh": lambda net: vars(net.up.weight.device_mesh).update(_mesh_dim_names=("other",)),
}


@pytest.mark.sweep(5)
@pytest.mark.parametrize("name", IN_PLACE)
def test_what_dynamo_compares_is_compared(mesh, name):
    """After these changes, eager mode itself may fail. All guards of Dynamo run, and do not hold."""
    net, x = parallel(mesh), torch.randn(2, 4)
    compiled = warm(net, x)
    (code,), frame = entry_of(compiled)._accepted, entry_of(compiled)._frame((x,), {})
    assert code.check(frame) and code.module.snapshot.still_holds()
    IN_PLACE[name](net)
    assert not code.check(frame) and not code.module.snapshot.still_holds()


def test_the_rest_has_no_guard_on_the_module_but_its_type(mesh):
    compiled = warm(parallel(mesh), torch.randn(2, 4))
    text = str(torch._dynamo.guards.GuardManagerWrapper(noted(compiled).remaining.rest))
    first, *rest = (
        line for line in text.splitlines() if "L['module']" in line and "GuardManager" not in line
    )
    assert "TYPE_MATCH" in first and "device_mesh" not in text
    # From 2.15 on, Dynamo also guards what the dictionaries of the layers' classes do not contain.
    assert not rest or torch.__version__ >= "2.15"


class Shared(Held):
    """Reads one object from two places, of which one is not the module's."""

    def forward(self, x, other):
        x = self.layers(x)
        return x + self.kept if other is self.kept else x - other


@pytest.mark.slow
def test_one_object_read_from_two_places():
    net = Shared(layers=nn.Sequential(*(nn.Linear(4, 4) for _ in range(8))), kept=torch.ones(4))
    x = torch.randn(2, 4)
    compiled = by_pass(net)
    for other in (net.kept, torch.ones(4), net.kept, net.kept.clone()):
        for _ in range(2):
            torch.testing.assert_close(compiled(x, other), net(x, other))


@pytest.mark.slow
def test_an_attribute_of_a_base_class(monkeypatch):
    """`nn.Module` reads one for each layer with a hook; the recorded state compares it once."""
    net, x = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6))), torch.randn(2, 4)
    for layer in net:
        layer.register_forward_hook(doubled)
    compiled = warm(net, x)
    found = noted(compiled)
    assert [(a.cls, a.name) for a in found.remaining.of_classes] == [(nn.Module, "_compiled_call_impl")]
    assert found.snapshot.still_holds()
    monkeypatch.setattr(nn.Module, "_compiled_call_impl", lambda self, x: x * 7)
    assert not found.snapshot.still_holds()
    torch.testing.assert_close(compiled(x), net(x))


# ---- guards that prove nothing new ---------------------------------------------------------------------------


class Unit(TensorSubclass, fallback="map"):
    data_: torch.Tensor = inner()
    unit: str = static(default="m")


class Own(TensorSubclass, fallback="map"):
    data_: torch.Tensor = inner()

    def __metadata_guard__(self, other):
        return True


@pytest.mark.parametrize("cls", [Pair, TwoTensor])
def test_classes_without_metadata(cls):
    fn, x = lambda x: x * 2, make(cls, 2)
    by_pass(fn)(x)
    assert has_fixed_metadata(x) and has_fixed_names(x)
    (entry,) = torch_private.cache_entries(fn.__code__)
    text = str(entry.guard_manager)
    assert "__tensor_flatten__" not in text and "___check_metadata" not in text
    assert "TYPE_MATCH: ___check_type_id(L['x']" in text and "check_tensor(L['x'].a" in text


@pytest.mark.parametrize(
    ("x", "is_fixed"),
    [
        (Unit(torch.ones(2)), (False, True)),
        (Own(torch.ones(2)), (False, False)),  # which an author has written
        (make(Tagged, 2), (False, False)),
        (Pair(torch.ones(2), make(Pair, 2)), (False, True)),  # with a wrapper inside
    ],
)
def test_what_is_fixed_by_the_class(x, is_fixed):
    assert (has_fixed_metadata(x), has_fixed_names(x)) == is_fixed
