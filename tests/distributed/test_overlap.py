"""`DistributedDataParallel` reduces the gradients of a bucket before the next bucket's gradients are computed."""
# DDP compares the annotations of its hook with classes, so they are not postponed here.

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import desugar

LAYERS, WIDTH, BUCKET_MB = 4, 512, 1  # a bucket for each layer; the first is never smaller than that


@pytest.fixture(autouse=True)
def ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def noting(events: list[str]) -> Callable[..., Any]:
    """A backend that runs plain graphs as they are, and notes each run."""

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            events.append("graph")
            return graph(*args)

        return run

    return backend


def reducing(model: nn.Module, events: list[str]) -> DistributedDataParallel:
    def reduce(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        events.append("reduce")
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    parallel = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)
    parallel.register_comm_hook(None, reduce)
    return parallel


class Layers(nn.Module):
    def __init__(self, compile_: Callable[[nn.Module], nn.Module] = lambda layer: layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(compile_(nn.Linear(WIDTH, WIDTH)) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def each_compiled(events: list[str]) -> nn.Module:
    return Layers(lambda layer: desugar.compile(layer, backend=noting(events)))


WAYS: dict[str, Callable[[list[str]], nn.Module]] = {
    "compiled, then DDP": lambda e: reducing(desugar.compile(Layers(), backend=noting(e)), e),
    "DDP, then compiled": lambda e: desugar.compile(reducing(Layers(), e), backend=noting(e)),
    "each layer compiled, then DDP": lambda e: reducing(each_compiled(e), e),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("way", WAYS)
def test_a_bucket_is_reduced_before_the_next_is_computed(way: str) -> None:
    events: list[str] = []
    model = WAYS[way](events)
    for step in range(4):
        y = model(torch.randn(2, WIDTH))
        events.clear()
        y.sum().backward()
        if (
            step > 0
        ):  # DDP makes its buckets after the first step; the last one has what the others have no room for
            assert events == [*["graph", "reduce"] * LAYERS, "reduce"]
