"""Functions over `DTensor`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from subclasses.int8 import Int8Tensor
from tests.distributed.models import Pair
from tests.distributed.world import Case, Run, World, randn

Argument = tuple[tuple[int, ...], Any]  # its size, and how it lies
ROWS, COLUMNS, WHOLE, PARTIAL = Shard(0), Shard(1), Replicate(), Partial()


def called(fn: Callable[..., Any], *given: Iterable[Argument], grad: bool = False) -> Run:
    """Calls of a function, each of these arguments; with `grad`, also the gradients of the sum of its result."""

    def run(world: World) -> Iterator[Any]:
        compiled = world.compile(fn)
        for seed, arguments in enumerate(given):
            xs = [
                world.distribute(randn(*size, seed=seed + 10 * n), placement).requires_grad_(grad)
                for n, (size, placement) in enumerate(arguments)
            ]
            yield (y := compiled(*xs))
            if grad:
                y.sum().backward()
                yield [x.grad for x in xs]
            else:
                yield xs

    return run


def calls(fn: Callable[..., Any], *arguments: Argument, grad: bool = False) -> Run:
    """Two calls of a function."""
    return called(fn, arguments, arguments, grad=grad)


def of_sizes(fn: Callable[[Tensor], Tensor], *sizes: int, grad: bool = False) -> Case:
    """Calls with other numbers of rows, which the two ranks share."""
    return Case(called(fn, *([((n, 4), ROWS)] for n in sizes), grad=grad))


def twice(fn: Callable[..., Any], step: Callable[[World, Any, int], Any]) -> Run:
    """Two steps; each step gets the compiled function and a number, and returns the value to compare."""

    def run(world: World) -> Iterator[Any]:
        compiled = world.compile(fn)
        for seed in range(2):
            yield step(world, compiled, seed)

    return run


def redistributed(x: Tensor, *placements: Any) -> Tensor:
    return x.redistribute(x.device_mesh, placements) if isinstance(x, DTensor) else x


# ---- without gradients ---------------------------------------------------------------------------------------


def elementwise(x, y):
    return (x * y).relu() + 1


def product(x, w):
    return x @ w


def redistribute_inside(x, w):
    return (redistributed(x, WHOLE) @ w).tanh()


def in_place(x):
    x.mul_(2)
    return x.add_(1)


def local_and_back(x):
    if isinstance(x, DTensor):
        return DTensor.from_local(x.to_local().sin(), x.device_mesh, x.placements)
    return x.sin()


def rows_and_gathered(x):
    return x * 2 + redistributed(x, WHOLE).mean(0)


def still_gathered(world: World, compiled: Any, seed: int) -> Any:
    """The argument is the result of a collective that nothing has waited for."""
    x = world.distribute(randn(4, 6, seed=seed), ROWS)
    if world.mesh is not None:
        x = x.redistribute(world.mesh, [WHOLE], async_op=True)
    return compiled(x)


def three_results(x):
    return x + 1, redistributed(x, WHOLE) * 2, x.sum(0)


def on_2d_mesh(world: World) -> Iterator[Any]:
    compiled, mesh = world.compile(lambda x, w: (x @ w).relu()), world.mesh_2d()
    for seed in range(2):
        x = world.distribute(randn(4, 8, seed=seed), Shard(0), Replicate(), mesh=mesh)
        yield compiled(x, world.distribute(randn(8, 6), Replicate(), Shard(1), mesh=mesh))


def of_int8(world: World) -> Iterator[Any]:
    """Each rank has its own rows of the weight."""
    compiled, w = world.compile(lambda x, w: F.linear(x, w).relu()), Int8Tensor.from_float(randn(6, 8))
    if world.mesh is not None:
        w = DTensor.from_local(w.chunk(2)[world.rank], world.mesh, [Shard(0)])
    with torch.no_grad():
        for seed in range(2):
            yield compiled(world.distribute(randn(4, 8, seed=seed), WHOLE), w)


def inside_pair(world: World, compiled: Any, seed: int) -> Any:
    parts = [world.distribute(randn(4, 6, seed=seed + n), ROWS) for n in (0, 10)]
    y = compiled(Pair(*parts), world.distribute(randn(4, 6, seed=seed + 20), ROWS))
    return type(y) is Pair, y.first, y.second


# ---- with gradients ------------------------------------------------------------------------------------------


def parameter(world: World) -> Iterator[Any]:
    model = nn.Linear(8, 6)
    for name, p in list(model.named_parameters()):
        model.register_parameter(name, nn.Parameter(world.distribute(p.detach(), ROWS)))
    compiled = world.compile(model)
    for seed in range(2):
        yield (y := compiled(world.distribute(randn(4, 8, seed=seed), WHOLE)))
        y.square().sum().backward()
        yield [p.grad for p in model.parameters()]


def loss_and_backward(x, w):
    loss = (x @ w).square().sum()
    loss.backward()
    return loss.detach()


def backward_inside(world: World, compiled: Any, seed: int) -> Any:
    w = world.distribute(randn(8, 6), COLUMNS).requires_grad_()
    loss = compiled(world.distribute(randn(4, 8, seed=seed), WHOLE), w)
    return loss, w.grad


def tangents(placement: Any) -> Run:
    """The result is sharded by rows, its gradient lies otherwise."""

    def step(world: World, compiled: Any, seed: int) -> Any:
        x = world.distribute(randn(4, 6, seed=seed), ROWS).requires_grad_()
        compiled(x).backward(world.distribute(randn(4, 6, seed=seed + 5), placement))
        return x.grad

    return twice(double_sine, step)


def fewer_rows_than_ranks(world: World) -> Iterator[Any]:
    """Eager mode replicates the gradient then, and a compiled call shards it as the others; the values are the same."""
    compiled = world.compile(double_sine)
    for n in (3, 2, 1):
        x = world.distribute(randn(n, 4, seed=n), ROWS).requires_grad_()
        compiled(x).sum().backward()
        assert x.grad is not None
        yield x.grad.full_tensor() if isinstance(x.grad, DTensor) else x.grad


def tangents_in_turn(world: World) -> Iterator[Any]:
    """One program, whose gradients lie otherwise each time; first without any."""
    compiled = world.compile(double_sine)
    with torch.no_grad():
        yield compiled(world.distribute(randn(4, 6), ROWS))
    for seed, placement in enumerate((ROWS, WHOLE, COLUMNS, PARTIAL, ROWS)):
        x = world.distribute(randn(4, 6, seed=seed), ROWS).requires_grad_()
        compiled(x).backward(world.distribute(randn(4, 6, seed=seed + 5), placement))
        yield x.grad


def second_derivative(world: World, compiled: Any, seed: int) -> Any:
    x = world.distribute(randn(4, 6, seed=seed), ROWS).requires_grad_()
    (first,) = torch.autograd.grad(compiled(x).sum(), x, create_graph=True)
    first.square().sum().backward()
    return first, x.grad


def partial_result(world: World, compiled: Any, seed: int) -> Any:
    """The result is partial, so its gradient is replicated."""
    x = world.distribute(randn(4, 8, seed=seed), COLUMNS).requires_grad_()
    w = world.distribute(randn(8, 6), ROWS).requires_grad_()
    y = compiled(x, w)
    y.sum().backward()
    return y, x.grad, w.grad


def equal_mesh(world: World) -> Iterator[Any]:
    """Another object for the mesh, after DTensor's cache has results on the first."""
    for seed in range(2):
        mesh = None if world.mesh is None else init_device_mesh("cpu", world.mesh.shape)
        x = world.distribute(randn(4, 6, seed=seed), ROWS, mesh=mesh).requires_grad_()
        y = (world.compile(double_sine) if seed else double_sine)(x)
        y.sum().backward()
        yield y, x.grad


def double_sine(x):
    return x.sin() * 2


PAIR = ((8, 6), ROWS), ((8, 6), ROWS)

CASES = {
    "elementwise": Case(calls(elementwise, *PAIR)),
    "matrix product": Case(calls(product, ((4, 8), WHOLE), ((8, 6), COLUMNS))),
    "matrix product with a `Partial` result": Case(calls(product, ((4, 8), COLUMNS), ((8, 6), ROWS))),
    "`Partial` argument": Case(calls(elementwise, ((8, 6), PARTIAL), ((8, 6), WHOLE))),
    "reduction": Case(calls(lambda x: x.exp().sum(0), ((8, 6), ROWS))),
    "`redistribute` inside": Case(calls(redistribute_inside, ((4, 8), ROWS), ((8, 6), COLUMNS))),
    "uneven shards": Case(calls(elementwise, ((7, 3), ROWS), ((7, 3), ROWS))),
    "sizes that change, even shards": of_sizes(rows_and_gathered, 4, 6, 8, 10),
    "sizes that change, uneven shards": of_sizes(double_sine, 6, 7, 9, 8, 3, 1),
    "sizes that change, uneven shards that are gathered": of_sizes(rows_and_gathered, 7, 9, 11, 5),
    "argument that is still gathered": Case(twice(double_sine, still_gathered)),
    "in place": Case(calls(in_place, ((8, 6), ROWS))),
    "`to_local` and `from_local`": Case(calls(local_and_back, ((8, 6), ROWS))),
    "results of three placements": Case(calls(three_results, ((8, 6), ROWS))),
    "mesh of two dims": Case(on_2d_mesh),
    "of an `Int8Tensor`": Case(of_int8),
    "inside a declared class": Case(twice(lambda p, x: (p * x).relu() + 1, inside_pair)),
    "gradients: leaves": Case(calls(elementwise, *PAIR, grad=True)),
    "gradients: uneven shards": Case(calls(elementwise, ((7, 3), ROWS), ((7, 3), ROWS), grad=True)),
    "gradients: sizes that change, even shards": of_sizes(rows_and_gathered, 4, 6, 8, 10, grad=True),
    "gradients: sizes that change, uneven shards": of_sizes(double_sine, 6, 7, 9, 8, 3, grad=True),
    "gradients: fewer rows than ranks, values": Case(fewer_rows_than_ranks),
    "gradients: `redistribute` inside": Case(
        calls(redistribute_inside, ((4, 8), ROWS), ((8, 6), COLUMNS), grad=True)
    ),
    "gradients: `to_local` and `from_local`": Case(calls(local_and_back, ((8, 6), ROWS), grad=True)),
    "gradients: `Partial` result": Case(twice(product, partial_result)),
    "gradients: parameters": Case(parameter),
    "gradients: `backward` inside": Case(twice(loss_and_backward, backward_inside)),
    "gradients: an equal mesh, made again": Case(equal_mesh),
    "gradients: of the second order": Case(twice(double_sine, second_derivative)),
    "gradients: another placement in each call": Case(tangents_in_turn),
    "gradients: a replicated one for a sharded result": Case(tangents(WHOLE)),
    "gradients: one sharded by columns for rows": Case(tangents(COLUMNS)),
    "gradients: a partial one for a sharded result": Case(tangents(PARTIAL)),
}
