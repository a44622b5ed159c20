"""How many programs serve sizes, placements and meshes; on eight ranks that do not talk."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

import desugar
from tests.desugar.classes import Pair

WORLD = 8
ROWS = Shard(0)
SIZES = (2, 3, 5, 7, 11)  # rows of each rank


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    _clear_sharding_prop_cache()  # it has specs with the mesh of another test
    yield init_device_mesh("cpu", (WORLD,))
    _clear_sharding_prop_cache()
    dist.destroy_process_group()


def placed(mesh, n, placement):
    """A tensor of `n` rows a rank if it is sharded by rows."""
    if placement == Partial():
        return DTensor.from_local(torch.randn(n * mesh.size(), 8), mesh, [placement])
    return distribute_tensor(torch.randn(n * mesh.size(), 8), mesh, [placement])


def activation(x, w):
    return (x @ w).relu() + 1


def judge(compiled, mesh, n, grad, placement):
    """One call, compared with eager mode."""
    x, w = placed(mesh, n, placement), distribute_tensor(torch.randn(8, 4), mesh, [Replicate()])
    sides = []
    for fn in (activation, compiled):
        args = [t.detach().requires_grad_(grad) for t in (x, w)]
        y = fn(*args)
        if grad:
            y.sum().backward()
        sides.append([y, *(t.grad for t in args if grad)])
    for got, want in zip(*sides[::-1], strict=True):
        assert (got.placements, got.shape, got.requires_grad) == (
            want.placements,
            want.shape,
            want.requires_grad,
        )
        torch.testing.assert_close(got.to_local(), want.to_local())


with_and_without_gradients = pytest.mark.parametrize("grad", [False, True])


def of_sizes(mesh):
    return [(mesh, n, ROWS) for n in SIZES]


def equal_meshes(mesh):
    return [(mesh, 3, ROWS), *((init_device_mesh("cpu", (WORLD,)), 3, ROWS) for _ in range(2))]


def other_meshes(mesh):
    part = init_device_mesh("cpu", (2, 4), mesh_dim_names=("a", "b"))["b"]
    return [(mesh, 3, ROWS), (part, 3, ROWS)]


# `dynamic=`, the meshes, sizes and placements of calls, and how many programs there are after each.
CALLS = {
    "sizes": (None, of_sizes, [1, 2, 2, 2, 2]),
    "sizes, dynamic": (True, of_sizes, [1] * 5),
    "sizes, static": (False, of_sizes, [1, 2, 3, 4, 5]),
    **{
        f"placements, {placement}": (
            None,
            lambda mesh, placement=placement: [
                (mesh, 3, lies) for lies in (ROWS, ROWS, placement, placement)
            ],
            [1, 1, 2, 2],
        )
        for placement in (Replicate(), Shard(1), Partial())
    },
    "equal meshes": (None, equal_meshes, [1, 1, 1]),
    "other meshes": (None, other_meshes, [1, 2]),
}


@pytest.mark.sweep(4)
@with_and_without_gradients
@pytest.mark.parametrize("case", CALLS)
def test_programs_of_calls(mesh, grad, case):
    dynamic, calls, counts = CALLS[case]
    compiled = desugar.compile(activation, backend="eager", dynamic=dynamic)
    for (of_call, n, placement), count in zip(calls(mesh), counts, strict=True):
        judge(compiled, of_call, n, grad, placement)
        assert len(compiled.programs) == count


def double(x):
    return x * 2 + 1


def pair(mesh, rows, size):
    """A declared value that holds two DTensors."""
    return Pair(of_local(mesh, rows, size), of_local(mesh, rows, size))


def of_local(mesh, rows, size, width=4):
    """This rank's rows of a tensor of another number of rows."""
    return DTensor.from_local(torch.randn(rows, width), mesh, [ROWS], shape=(size, width), stride=(width, 1))


def shapes(x):
    """The sizes of a value and of its inner values."""
    inside = (x.a, x.b) if isinstance(x, Pair) else [x.to_local()] if isinstance(x, DTensor) else []
    return x.shape, *map(shapes, inside)


# A function, its arguments for a number, the numbers of calls, and how many programs there are, if it is known.
OTHER_RANKS = {
    **{
        # Two numbers of rows, of which this rank has as many: the program of one does not serve the other.
        f"a size that changes on other ranks alone, {grad}": (
            torch.sin,
            lambda mesh, size, grad=grad: (of_local(mesh, 3, size).requires_grad_(grad),),
            (24, 23, 22),
            None,
        )
        for grad in (False, True)
    },
    # Rank 0 has more rows than the last one, which a program must not take for a rule.
    "uneven shards": (
        activation,
        lambda mesh, n: (
            of_local(mesh, n, n * WORLD - 1, 6),
            DTensor.from_local(torch.ones(6, 4), mesh, [Replicate()]),
        ),
        SIZES,
        2,
    ),
    "a size that changes on other ranks alone, inside a class": (
        double,
        lambda mesh, size: (pair(mesh, 3, size),),
        (24, 23, 22, 17),
        None,
    ),
}


@pytest.mark.parametrize("case", OTHER_RANKS)
def test_sizes_of_other_ranks(mesh, case):
    fn, make, numbers, programs = OTHER_RANKS[case]
    compiled = desugar.compile(fn, backend="eager")
    for number in numbers:
        args = make(mesh, number)
        assert shapes(compiled(*args)) == shapes(fn(*args))
    assert programs in (None, len(compiled.programs))


@pytest.mark.sweep(30)
@with_and_without_gradients
@pytest.mark.parametrize(("dynamic", "programs"), [(None, 2), (True, 1), (False, len(SIZES))])
@pytest.mark.parametrize("make", [lambda x: x, lambda x: Pair(x, x.detach() + 1)])
def test_programs_of_a_class_that_holds_dtensors(mesh, grad, dynamic, programs, make):
    compiled = desugar.compile(double, backend="eager", dynamic=dynamic)
    for n in SIZES:
        x = make(pair(mesh, n, n * WORLD)).requires_grad_(grad)
        got, want = compiled(x), double(x)
        assert got.shape == want.shape and got.requires_grad == grad
        while isinstance(got, Pair):
            got, want = got.a, want.a
        assert (got.placements, got.shape) == (want.placements, want.shape)
        torch.testing.assert_close(got.to_local(), want.to_local())
    assert len(compiled.programs) == programs
