"""Benchmarks calls with DTensors: the time of a call beside its kernels and collectives.

    python -m bench.dtensors                 # about three minutes; writes bench/results/dtensors.*

The tensors are small, so that most of a call is the handling of arguments and results. No collective is timed.

*elementwise*: four ops on two DTensors.   *in and out*: eight DTensors, each doubled.
*MLP*: two tensor-parallel layers (`parallelize_module`) on a plain input; each rank keeps its part of the sum.

*training* is a forward, and the gradients of arguments or parameters with a given gradient of the result. The ways are
timed in turns, in one process and one thread; before that, all results are compared.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import desugar
from bench.report import Row, print_rows, save_rows
from bench.timing import describe_machine, time_side_by_side

RESULTS = Path(__file__).parent / "results"
NAME = "dtensors"
RANKS, SIZE, WIDTH = 8, (16, 8), 16
WAYS: dict[str, Callable[[Any], Any]] = {
    "eager": lambda fn: fn,
    "torch.compile": torch.compile,
    "desugar.compile": desugar.compile,
    'torch.compile(backend="desugar")': lambda fn: torch.compile(fn, backend="desugar"),
}
STOCK = "torch.compile"
Call = Callable[[], Any]


# ---------------------------------------------------------------------------------------------------------
# the functions
# ---------------------------------------------------------------------------------------------------------


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


def four_ops(a: Tensor, b: Tensor) -> Tensor:
    return ((a + b) * 2 - a).relu()


def double_all(*tensors: Tensor) -> list[Tensor]:
    return [t * 2 for t in tensors]


def make_cases(mesh: DeviceMesh) -> dict[str, tuple[Any, tuple[Tensor, ...], list[Tensor]]]:
    """Returns the cases by name: a function or module, its arguments, and the tensors that get gradients."""

    def rows() -> Tensor:
        return distribute_tensor(torch.randn(*SIZE), mesh, [Shard(0)])

    pair, eight = (rows(), rows()), tuple(rows() for _ in range(8))
    styles = {"up": ColwiseParallel(), "down": RowwiseParallel(output_layouts=Partial())}
    mlp = parallelize_module(MLP(), mesh, styles)
    return {
        "elementwise": (four_ops, pair, [pair[0]]),
        "in and out": (double_all, eight, list(eight)),
        "MLP": (mlp, (torch.randn(4, WIDTH),), list(mlp.parameters())),
    }


def in_inference(fn: Any, args: tuple[Tensor, ...]) -> Call:
    return torch.no_grad()(lambda: fn(*args))


def in_training(fn: Any, args: tuple[Tensor, ...], wanted: list[Tensor]) -> Call:
    """Returns a forward and a backward."""
    for t in wanted:
        t.requires_grad_()
    results = _as_list(fn(*args))
    cotangents = [torch.ones_like(r) for r in results]
    return lambda: torch.autograd.grad(_as_list(fn(*args)), wanted, cotangents)


def _as_list(results: Any) -> list[Tensor]:
    return list(results) if isinstance(results, list | tuple) else [results]


# ---------------------------------------------------------------------------------------------------------
# measuring
# ---------------------------------------------------------------------------------------------------------


def check_equal(calls: dict[str, Call]) -> None:
    """Raises AssertionError if the local parts of results, or of gradients, differ."""
    expected = _local_parts(calls["eager"]())
    for call in calls.values():
        torch.testing.assert_close(_local_parts(call()), expected)


def _local_parts(results: Any) -> list[Tensor]:
    return [t.to_local() if isinstance(t, DTensor) else t for t in _as_list(results)]


def measure() -> list[Row]:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (RANKS,))
    rows: list[Row] = []
    for name in make_cases(mesh):
        for mode in ("inference", "training"):
            torch.compiler.reset()
            fn, args, wanted = make_cases(mesh)[name]
            calls = {}
            for way, compile_ in WAYS.items():
                made = compile_(fn)
                calls[way] = (
                    in_inference(made, args) if mode == "inference" else in_training(made, args, wanted)
                )
            check_equal(calls)
            timings = time_side_by_side(calls)
            stock = timings[STOCK].median
            rows += [
                Row(f"{name}, {mode}", way, t, {"/ torch.compile": t.median / stock}, ours="desugar" in way)
                for way, t in timings.items()
            ]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    rows = measure()
    print_rows(rows)
    save_rows(rows, describe_machine(), options.out / f"{NAME}.json", command=f"bench.{NAME}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
