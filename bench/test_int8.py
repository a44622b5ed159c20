"""Benchmarks int8 linear layers against torchao's, on the same weights; `compare_int8` measures both in one run.

python -m bench.test_int8                       # 1024 × 1024, batch 16: medians and ratios
python -m pytest bench/test_int8.py --benchmark-enable
"""

from __future__ import annotations

import copy
import importlib.util
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import desugar
from bench.timing import Timing, describe_machine, time_side_by_side
from subclasses.int8 import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_

FEATURES, BATCH = 1024, 16
HAS_TORCHAO = importlib.util.find_spec("torchao") is not None
COMPILERS = {"torch.compile": torch.compile, "desugar.compile": desugar.compile}

# ---------------------------------------------------------------------------------------------------------
# subjects
# ---------------------------------------------------------------------------------------------------------


def quantize_ours(model: nn.Module, kind: str) -> None:
    configs = {"dynamic": Int8DynamicActivationInt8WeightConfig(), "weight-only": Int8WeightOnlyConfig()}
    quantize_(model, configs[kind])


def quantize_theirs(model: nn.Module, kind: str) -> None:
    from torchao import quantization

    configs = {
        "dynamic": quantization.Int8DynamicActivationInt8WeightConfig,
        "weight-only": quantization.Int8WeightOnlyConfig,
    }
    # The default would change Inductor's settings for the whole process.
    quantization.quantize_(model, configs[kind](set_inductor_config=False))


def make_calls(kind: str, batch: int = BATCH, features: int = FEATURES) -> dict[Any, Callable[[], Tensor]]:
    """Returns compiled layers by (library that quantizes, compiler); each has been called once."""
    torch.manual_seed(0)
    layer = nn.Linear(features, features).eval().requires_grad_(False)
    x = torch.randn(batch, features)
    calls: dict[Any, Callable[[], Tensor]] = {("float", "torch.compile"): bind(torch.compile(layer), x)}
    ways = [("ours", quantize_ours)] + [("torchao", quantize_theirs)] * HAS_TORCHAO
    for (who, quantize), (name, compile_) in itertools.product(ways, COMPILERS.items()):
        if (who, name) == ("torchao", "desugar.compile"):
            continue
        quantized = copy.deepcopy(layer)
        quantize(quantized, kind)
        calls[who, name] = bind(compile_(quantized), x)
    with torch.no_grad():
        for call in calls.values():
            call()
    return calls


def bind(layer: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], Tensor]:
    return lambda: layer(x)


@pytest.mark.parametrize("kind", ["dynamic", "weight-only"])
@pytest.mark.parametrize(
    "subject", [("ours", name) for name in COMPILERS] + [("torchao", "torch.compile")], ids=str
)
def test_linear(benchmark, kind, subject):
    if subject[0] == "torchao":
        pytest.importorskip("torchao")
    benchmark.group = f"int8 linear, {kind}"
    call = make_calls(kind)[subject]
    with torch.no_grad():
        benchmark(call)


# ---------------------------------------------------------------------------------------------------------
# side by side
# ---------------------------------------------------------------------------------------------------------


def compare_int8(kind: str, rounds: int = 100, batch: int = BATCH) -> dict[Any, Timing]:
    """Times all layers in turns, in one process."""
    torch.compiler.reset()
    with torch.no_grad():
        return time_side_by_side(make_calls(kind, batch), rounds=rounds)


def main() -> None:
    torch.set_num_threads(1)
    print(describe_machine())
    for kind, batch in (("dynamic", BATCH), ("weight-only", BATCH), ("weight-only", 1), ("dynamic", 1)):
        timings = compare_int8(kind, batch=batch)
        reference = timings.get(("torchao", "torch.compile"))
        print(f"{kind}, {FEATURES} by {FEATURES}, batch {batch}: µs a call")
        for (who, name), timing in timings.items():
            ratio = f"{timing.median / reference.median:6.2f} of torchao's" if reference else ""
            print(f"  {who:8}{name:16}{timing!s:>18}  {ratio}")


if __name__ == "__main__":
    main()
