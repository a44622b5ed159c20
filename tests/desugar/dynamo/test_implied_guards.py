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
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from desugar import _torch as private
from desugar.dynamo.implied_guards import has_fixed_metadata, has_fixed_names
from subclasses import TensorSubclass, inner, static
from tests.desugar.classes import Pair, Tagged, TwoTensor, make
from tests.desugar.dynamo.test_entry import entry_of
from tests.desugar.dynamo.test_module_guards import assert_follows, doubled, noted, warm
from tests.desugar.judge import by_pass

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


STYLES = {"up": ColwiseParallel(), "down": RowwiseParallel(output_layouts=Partial())}


def parallel(mesh: DeviceMesh) -> MLP:
    """Tensor-parallel layers without a collective: each rank keeps its part of the sum."""
    return parallelize_module(MLP(), mesh, STYLES)


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
    placed = DTensor.from_local(tensor, mesh or like.device_mesh, like.placements, run_check=False)
    return nn.Parameter(placed)


def replace_mesh(net, hooks):
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    for layer in (net.up, net.down):
        for name, p in list(layer.named_parameters()):
            setattr(layer, name, local(p.to_local().detach() + 1, p, mesh))
        del layer._distribute_module_applied
        layer._forward_pre_hooks.clear()
        layer._forward_hooks.clear()
    parallelize_module(net, mesh, STYLES)


CHANGES = {
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
        self.layers, self.kept = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8))), torch.ones(4)

    def forward(self, x, other):
        x = self.layers(x)
        return x + self.kept if other is self.kept else x - other


@pytest.mark.slow
def test_one_object_read_from_two_places():
    net, x = Shared(), torch.randn(2, 4)
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


@pytest.mark.parametrize("cls", [Pair, TwoTensor])
def test_classes_without_metadata(cls):
    fn, x = lambda x: x * 2, make(cls, 2)
    by_pass(fn)(x)
    assert has_fixed_metadata(x) and has_fixed_names(x)
    (entry,) = private.cache_entries(fn.__code__)
    text = str(entry.guard_manager)
    assert "__tensor_flatten__" not in text and "___check_metadata" not in text
    assert "TYPE_MATCH: ___check_type_id(L['x']" in text and "check_tensor(L['x'].a" in text


def test_metadata_that_may_change_keeps_its_guard():
    compiled = by_pass(lambda x: x * 2)
    for unit in ("m", "s", "m"):
        assert compiled(Unit(torch.ones(2), unit=unit)).unit == unit
    assert len(compiled.programs) == 2


@pytest.mark.parametrize(
    ("x", "is_fixed"),
    [
        (Unit(torch.ones(2)), (False, True)),
        (Own(torch.ones(2)), (False, False)),  # which an author has written
        (make(Tagged, 2), (False, False)),
    ],
)
def test_what_is_fixed_by_the_class(x, is_fixed):
    assert (has_fixed_metadata(x), has_fixed_names(x)) == is_fixed


def test_a_wrapper_inside_of_another():
    compiled = by_pass(lambda x: x * 2)
    flat, nested = Pair(torch.ones(2), torch.ones(2)), Pair(torch.ones(2), make(Pair, 2))
    assert has_fixed_metadata(flat) and not has_fixed_metadata(nested)
    for x in (flat, nested, flat):
        assert type(compiled(x).b) is type(x.b)
