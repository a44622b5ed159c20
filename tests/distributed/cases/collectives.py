"""Functions that talk to the other rank."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch import Tensor

from subclasses.int8 import Int8Tensor
from tests.distributed.models import Pair
from tests.distributed.world import RANKS, Case, Run, World, randn

Make = Callable[[int, int], Any]  # the argument of a rank in a call


def plain(rank: int, seed: int) -> Tensor:
    return randn(4, 6, seed=10 * rank + seed)


def pair(rank: int, seed: int) -> Pair:
    return Pair(plain(rank, seed), plain(rank + RANKS, seed))


def int8(rank: int, seed: int) -> Int8Tensor:
    return Int8Tensor.from_float(plain(rank, seed))


def talks(fn: Callable[[Any], Any], make: Make, expected: Callable[[list[Any]], Any]) -> Case:
    """Two calls of a function; `expected` makes the result of one call from the arguments of all ranks."""

    def run(world: World) -> Iterator[Any]:
        compiled = world.compile(fn)
        for seed in range(2):
            yield compiled(make(world.rank, seed))

    def alone(world: World) -> Iterator[Any]:
        for seed in range(2):
            yield expected([make(rank, seed) for rank in range(RANKS)])

    return Case(run, alone)


# ---- functional ----------------------------------------------------------------------------------------------


def functional_sum(x):
    return fc.all_reduce(x * 2, "sum", dist.group.WORLD) + 1


def functional_gather(x):
    return fc.all_gather_tensor(x * 2, 0, dist.group.WORLD) + 1


def functional_scatter(x):
    """Scattered by rows and gathered again, so that all ranks have one result."""
    part = fc.reduce_scatter_tensor(x * 2, "sum", 0, dist.group.WORLD)
    return fc.all_gather_tensor(part.relu(), 0, dist.group.WORLD)


def gather_with_gradient(world: World) -> Iterator[Any]:
    def loss(x):
        rows = fc.all_gather_tensor_autograd(x, 0, dist.group.WORLD)
        return (rows * rows).sum()

    compiled = world.compile(loss)
    for seed in range(2):
        x = plain(world.rank, seed).requires_grad_()
        yield (y := compiled(x))
        y.backward()
        yield world.all_rows(x.grad)


def gather_with_gradient_alone(world: World) -> Iterator[Any]:
    for seed in range(2):
        rows = torch.cat([plain(rank, seed) for rank in range(RANKS)])
        yield (rows * rows).sum(), rows * 2 * RANKS


# ---- in place ------------------------------------------------------------------------------------------------


def sum_in_place(x):
    y = x * 2
    dist.all_reduce(y)
    return y + 1


def sum_of_argument(x):
    dist.all_reduce(x)
    return x + 1, x


def maximum_later(x):
    y = x * 2
    work = dist.all_reduce(y, dist.ReduceOp.MAX, async_op=True)
    work.wait()
    return y + 1


def gather_in_place(x):
    rows = x.new_empty(x.shape[0] * RANKS, x.shape[1])
    dist.all_gather_into_tensor(rows, x * 2)
    return rows + 1


def gather_list(x):
    parts = [torch.empty_like(x) for _ in range(RANKS)]
    dist.all_gather(parts, x * 2)
    return torch.cat(parts) + 1


def scatter_in_place(x):
    part = x.new_empty(x.shape[0] // RANKS, x.shape[1])
    dist.reduce_scatter_tensor(part, x * 2)
    rows = torch.empty_like(x)
    dist.all_gather_into_tensor(rows, part.relu())
    return rows


def broadcast(x):
    dist.broadcast(x, 1)
    return x * 2


# ---- two by two, and one that raises -------------------------------------------------------------------------


def send(x):
    """From the first rank to the second."""
    work = dist.isend(x, 1) if dist.get_rank() == 0 else dist.irecv(x, 0)
    work.wait()
    return x * 2


def one_raises(step: Callable[[Tensor, Any], Tensor]) -> Run:
    """The second call of the second rank fails before it talks; the first rank, which waits, has an error too."""

    def run(world: World) -> Iterator[Any]:
        group = dist.new_group(timeout=datetime.timedelta(seconds=1))
        compiled = world.compile(lambda x: step(x, group))
        yield compiled(plain(world.rank, 0))
        start = time.monotonic()
        said = error_of(lambda: compiled(randn(4, 5) if world.rank == 1 else plain(0, 1)))
        yield ("size" if world.rank == 1 else "imed out") in said, time.monotonic() - start < 10
        dist.barrier()

    return run


def one_raises_alone(world: World) -> Iterator[Any]:
    yield total([plain(rank, 0) for rank in range(RANKS)]) + 1
    yield True, True


def error_of(call: Callable[[], Any]) -> str:
    """The error message of a call, or an empty string."""
    try:
        call()
    except (RuntimeError, TypeError) as error:
        return str(error)
    return ""


def functional_step(x: Tensor, group: Any) -> Tensor:
    return fc.all_reduce((x + torch.zeros(6)) * 2, "sum", group) + 1


def step_in_place(x: Tensor, group: Any) -> Tensor:
    y = (x + torch.zeros(6)) * 2
    dist.all_reduce(y, group=group)
    return y + 1


# ---- expected values of the ranks ----------------------------------------------------------------------------


def total(xs: list[Any]) -> Any:
    return xs[0] * 2 + xs[1] * 2


def rows_of(xs: list[Any]) -> Any:
    return torch.cat([x * 2 for x in xs]) + 1


def total_of_argument(xs: list[Any]) -> Any:
    return xs[0] + xs[1] + 1, xs[0] + xs[1]


CASES = {
    "functional `all_reduce`": talks(functional_sum, plain, lambda xs: total(xs) + 1),
    "functional `all_gather_tensor`": talks(functional_gather, plain, rows_of),
    "functional `reduce_scatter_tensor`": talks(functional_scatter, plain, lambda xs: total(xs).relu()),
    "functional `all_gather_tensor`, with a gradient": Case(gather_with_gradient, gather_with_gradient_alone),
    "functional `all_reduce` of a mapping class": talks(functional_sum, pair, lambda xs: total(xs) + 1),
    "functional `all_reduce` of an `Int8Tensor`": talks(
        lambda x: fc.all_reduce(x, "sum", dist.group.WORLD),
        int8,
        lambda xs: xs[0].dequantize() + xs[1].dequantize(),
    ),
    "`all_reduce`": talks(sum_in_place, plain, lambda xs: total(xs) + 1),
    "`all_reduce` of an argument": talks(sum_of_argument, plain, total_of_argument),
    "`all_reduce` with `async_op`": talks(maximum_later, plain, lambda xs: torch.maximum(*xs) * 2 + 1),
    "`all_reduce` of a mapping class": talks(sum_in_place, pair, lambda xs: total(xs) + 1),
    "`all_reduce` of an `Int8Tensor`": talks(
        sum_of_argument, int8, lambda xs: total_of_argument([x.dequantize() for x in xs])
    ),
    "`all_gather_into_tensor`": talks(gather_in_place, plain, rows_of),
    "`all_gather_into_tensor` of a mapping class": talks(gather_in_place, pair, rows_of),
    "`all_gather`": talks(gather_list, plain, rows_of),
    "`reduce_scatter_tensor`": talks(scatter_in_place, plain, lambda xs: total(xs).relu()),
    **{
        f"{name}{of}": talks(fn, make, expected)
        for name, fn, expected in (
            ("`broadcast`", broadcast, lambda xs: xs[-1] * 2),
            ("`isend` and `irecv`", send, lambda xs: xs[0] * 2),
        )
        for of, make in {"": plain, " of a mapping class": pair, " of an `Int8Tensor`": int8}.items()
    },
    "functional: one rank raises": Case(one_raises(functional_step), one_raises_alone),
    "in place: one rank raises": Case(one_raises(step_in_place), one_raises_alone),
}
