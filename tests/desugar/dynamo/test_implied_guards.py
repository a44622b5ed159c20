"""Guards that an unchanged module implies, and guards that prove nothing new; all others stay."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import desugar
from desugar import _torch as private
from desugar.dynamo.implied_guards import has_fixed_metadata, has_fixed_names
from subclasses import TensorSubclass, inner, static
from tests.desugar.classes import Pair, Tagged, TwoTensor, make
from tests.desugar.dynamo.test_entry import entry_of
from tests.desugar.dynamo.test_module_guards import assert_follows, doubled, noted, warm

RANKS = 2


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    _clear_sharding_prop_cache()  # it has specs with the mesh of another test
    yield init_device_mesh("cpu", (RANKS,))
    _clear_sharding_prop_cache()
    dist.destroy_process_group()


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        y = self.down(self.up(x).relu())
        return y if self.up.weight.requires_grad else y + 100


def parallel(mesh: DeviceMesh) -> MLP:
    """Tensor-parallel layers without a collective: each rank keeps its part of the sum."""
    torch.manual_seed(0)
    styles = {"up": ColwiseParallel(), "down": RowwiseParallel(output_layouts=Partial())}
    return parallelize_module(MLP(), mesh, styles)


def scaled(module, args, out, factor=1.0, *, by=None):
    return out * factor * (1.0 if by is None else by)


def hook_with_cell(factor):
    def hook(module, args, out):
        return out * factor

    return hook


def hook_of_function(function, items):
    def hook(module, args, out):
        return function(out) + items[0]

    return hook


def add_hooks(net):
    """Adds a hook of each kind, and returns them by name."""

    def shift(out):
        return out + 1.0

    hooks = {
        "cell": hook_with_cell(2.0),
        "partial": functools.partial(scaled, factor=3.0),
        "plain": types.FunctionType(doubled.__code__, globals()),
        "nested": hook_of_function(shift, (0.5, "unused")),
    }
    for hook in hooks.values():
        net.down.register_forward_hook(hook)
    return hooks


def tripled(module, args, out):
    return out * 3


def shifted_more(out):
    return out + 5.0


def set_cell(function, number, value):
    function.__closure__[number].cell_contents = value


def replace_parameter(net, hooks):
    weight = net.up.weight
    net.up.weight = nn.Parameter(distribute_tensor(torch.zeros(8, 4), weight.device_mesh, weight.placements))


def replace_placement(net, hooks):
    bias = net.down.bias
    local = torch.full((4,), 5.0)
    net.down.bias = nn.Parameter(DTensor.from_local(local, bias.device_mesh, [Partial()], run_check=False))


def replace_mesh(net, hooks):
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    for layer in (net.up, net.down):
        for name, p in list(layer.named_parameters()):
            moved = DTensor.from_local(p.to_local().detach() + 1, mesh, p.placements, run_check=False)
            setattr(layer, name, nn.Parameter(moved))
    for layer in (net.up, net.down):
        del layer._distribute_module_applied
        layer._forward_pre_hooks.clear()
        layer._forward_hooks.clear()
    parallelize_module(
        net, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel(output_layouts=Partial())}
    )


CHANGES = {
    "a hook more": lambda net, hooks: net.up.register_forward_hook(doubled),
    "a hook before, more": lambda net, hooks: net.up.register_forward_pre_hook(
        lambda m, args: (args[0] + 1,)
    ),
    "a hook less": lambda net, hooks: net.down._forward_hooks.popitem(),
    "another hook": lambda net, hooks: net.down._forward_hooks.update(
        {max(net.down._forward_hooks): hook_with_cell(11.0)}
    ),
    "the code of a hook": lambda net, hooks: setattr(hooks["plain"], "__code__", tripled.__code__),
    "a cell of a hook": lambda net, hooks: set_cell(hooks["cell"], 0, 5.0),
    "a function in a cell": lambda net, hooks: set_cell(hooks["nested"], 0, shifted_more),
    "the code of a function in a cell": lambda net, hooks: setattr(
        hooks["nested"].__closure__[0].cell_contents, "__code__", shifted_more.__code__
    ),
    "a tuple in a cell": lambda net, hooks: set_cell(hooks["nested"], 1, (9.0, "unused")),
    "a partial": lambda net, hooks: hooks["partial"].__setstate__((scaled, (), {"factor": 5.0}, {})),
    "a keyword of a partial": lambda net, hooks: hooks["partial"].keywords.update(by=7.0),
    "a parameter": replace_parameter,
    "a placement": replace_placement,
    "a mesh": replace_mesh,
    "a local tensor": lambda net, hooks: setattr(net.up.weight, "_local_tensor", torch.zeros(4, 4)),
    "the data of a local tensor": lambda net, hooks: setattr(
        net.up.weight._local_tensor, "data", torch.zeros(4, 4).t()
    ),
    "gradients": lambda net, hooks: net.up.weight.requires_grad_(False),
}


@pytest.mark.sweep(34)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_noticed(mesh, name, grad):
    net, x = parallel(mesh), torch.randn(2, 4)
    hooks = add_hooks(net)
    with torch.set_grad_enabled(grad):
        compiled = warm(net, x)
        CHANGES[name](net, hooks)
        assert not noted(compiled).unchanged.holds()
        assert_follows(compiled, net, x)


def set_in_place(holder, name, value):
    """Sets an attribute such that no method of the class is told."""
    vars(holder)[name] = value


IN_PLACE = {
    "placements": lambda net: set_in_place(net.up.weight._spec, "placements", (Replicate(),)),
    "placements, by attribute": lambda net: setattr(net.up.weight._spec, "placements", (Replicate(),)),
    "spec": lambda net: setattr(net.up.weight, "_spec", net.down.weight._spec),
    "class": lambda net: setattr(net.up.weight, "__class__", type("Other", (DTensor,), {})),
    "mesh": lambda net: set_in_place(net.up.weight.device_mesh, "_mesh_dim_names", ("other",)),
}


@pytest.mark.sweep(5)
@pytest.mark.parametrize("name", IN_PLACE)
def test_what_dynamo_compares_is_compared(mesh, name):
    """Changes after which eager mode itself may fail: all of Dynamo's guards are asked, and do not hold."""
    net, x = parallel(mesh), torch.randn(2, 4)
    compiled = warm(net, x)
    (code,), frame = entry_of(compiled)._accepted, entry_of(compiled)._frame((x,), {})
    assert code.check(frame) and code.module.hold()
    IN_PLACE[name](net)
    assert not code.check(frame) and not code.module.hold()


def test_the_rest_has_no_guard_on_the_module_but_its_type(mesh):
    compiled = warm(parallel(mesh), torch.randn(2, 4))
    text = str(torch._dynamo.guards.GuardManagerWrapper(noted(compiled).split.rest))
    first, *rest = (
        line for line in text.splitlines() if "L['module']" in line and "GuardManager" not in line
    )
    assert "TYPE_MATCH" in first and "device_mesh" not in text
    # From 2.15 on, Dynamo also guards what the dictionaries of the layers' classes do not contain.
    assert not rest or torch.__version__ >= "2.15"


class Shared(nn.Module):
    """Reads one object from two places, of which one is not the module's."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))
        self.kept = torch.ones(4)

    def forward(self, x, other):
        for layer in self.layers:
            x = layer(x)
        return x + self.kept if other is self.kept else x - other


@pytest.mark.slow
def test_one_object_read_from_two_places():
    net, x = Shared(), torch.randn(2, 4)
    compiled = desugar.compile(net, backend="eager")
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
    assert [(a.cls, a.name) for a in found.split.of_classes] == [(nn.Module, "_compiled_call_impl")]
    assert found.hold()
    monkeypatch.setattr(nn.Module, "_compiled_call_impl", lambda self, x: x * 7)
    assert not found.hold()
    torch.testing.assert_close(compiled(x), net(x))


# ---- guards that prove nothing new ---------------------------------------------------------------------------


class Unit(TensorSubclass, fallback="map"):
    data_: torch.Tensor = inner()
    unit: str = static(default="m")


class Own(TensorSubclass, fallback="map"):
    data_: torch.Tensor = inner()

    def __metadata_guard__(self, other):
        return True


def fn(x):
    return x * 2


def guards_of(fn):
    (entry,) = private.cache_entries(fn.__code__)
    return str(entry.guard_manager)


@pytest.mark.parametrize("cls", [Pair, TwoTensor])
def test_classes_without_metadata(cls):
    desugar.compile(fn, backend="eager")(x := make(cls, 2))
    assert has_fixed_metadata(x) and has_fixed_names(x)
    text = guards_of(fn)
    assert "__tensor_flatten__" not in text and "___check_metadata" not in text
    assert "TYPE_MATCH: ___check_type_id(L['x']" in text and "check_tensor(L['x'].a" in text


def test_metadata_that_may_change_keeps_its_guard():
    compiled = desugar.compile(fn, backend="eager")
    for unit in ("m", "s", "m"):
        assert compiled(Unit(torch.ones(2), unit=unit)).unit == unit
    assert not has_fixed_metadata(Unit(torch.ones(2))) and has_fixed_names(Unit(torch.ones(2)))
    assert len(compiled.programs) == 2


def test_what_an_author_has_written_keeps_its_guards():
    assert not has_fixed_metadata(Own(torch.ones(2))) and not has_fixed_names(Own(torch.ones(2)))
    assert not has_fixed_metadata(make(Tagged, 2)) and not has_fixed_names(make(Tagged, 2))


def test_a_wrapper_inside_of_another():
    compiled = desugar.compile(fn, backend="eager")
    flat, nested = Pair(torch.ones(2), torch.ones(2)), Pair(torch.ones(2), make(Pair, 2))
    assert has_fixed_metadata(flat) and not has_fixed_metadata(nested)
    for x in (flat, nested, flat):
        assert type(compiled(x).b) is type(x.b)
