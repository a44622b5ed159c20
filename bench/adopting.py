"""Times classes of others that `subclasses.adopt` adopts: a call with 1, 5 and 20 wrapped arguments.

    python -m bench.adopting        # a few minutes; writes bench/results/adopting.md

torchao's `Int8Tensor` as it is, adopted, and this project's `Int8Tensor` multiply the same input; `TwoTensor` as it is,
adopted, and a declared pair are doubled. Tensors are small, so that most of a call is the handling of arguments. All
calls of one number of arguments are timed in turns, in one process. A ratio compares a call with the same class as it
is, under `torch.compile`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal import two_tensor
from torch.testing._internal.two_tensor import TwoTensor

import desugar
import subclasses
from bench.kinds import SIZE, multiply_all
from bench.layouts import HAS_TORCHAO, torchao_weights
from bench.subjects import Pair, copy_function, double
from bench.timing import Timing, describe_machine, time_side_by_side
from subclasses.int8 import Int8Tensor

RESULTS = Path(__file__).parent / "results"
COUNTS = (1, 5, 20)
WAYS = {"torch.compile": partial(torch.compile, fullgraph=True), "desugar.compile": desugar.compile}

Make = Callable[[], Tensor]
Call = Callable[[], Any]


def int8_kinds() -> dict[str, Make]:
    """Returns makers of int8 weights by kind; empty if torchao is not installed."""
    if not HAS_TORCHAO:
        return {}

    def as_it_is() -> Tensor:
        return torchao_weights(torch.randn(SIZE, SIZE))["torchao"]

    cls: Any = type(as_it_is())
    adopted = subclasses.adopt(type("Adopted", (cls,), {}))  # a copy of the class, so that both can be timed

    def adopted_weight() -> Tensor:
        w: Any = as_it_is()
        copy = adopted(w.qdata, w.scale, w.block_size, w.dtype, zero_point=w.zero_point)
        return torch.nn.Parameter(copy, requires_grad=False)

    def declared() -> Tensor:
        return torch.nn.Parameter(Int8Tensor.from_float(torch.randn(SIZE, SIZE)), requires_grad=False)

    return {"as it is": as_it_is, "adopted": adopted_weight, "declared": declared}


def measure(
    fn: Any, kinds: dict[str, Make], first: tuple[Tensor, ...], count: int
) -> dict[tuple[str, str], Timing]:
    """Times a function of `count` arguments of each kind, compiled in each way."""
    calls: dict[tuple[str, str], Call] = {}
    for kind, make in kinds.items():
        for way, compile_ in WAYS.items():
            args = [*first, *(make() for _ in range(count))]
            calls[kind, way] = partial(compile_(copy_function(fn)), *args)
            for _ in range(3):
                calls[kind, way]()
    return time_side_by_side(calls)


def adopted_two_tensor() -> Any:
    """Returns a copy of `TwoTensor`, adopted; its methods make values of the class that they name."""
    names = dict(vars(two_tensor))
    exec(inspect.getsource(TwoTensor), names)  # noqa: S102 - the source of torch's own class
    return subclasses.adopt(names["TwoTensor"])


def pair_of(cls: Any) -> Tensor:
    """Returns a pair of small tensors."""
    return cls(torch.rand(8, 8), torch.rand(8, 8))


def main() -> None:
    """Prints and writes the tables."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    two = {
        "as it is": partial(pair_of, TwoTensor),
        "adopted": partial(pair_of, adopted_two_tensor()),
        "declared": partial(pair_of, Pair),
    }
    tables = {
        "torchao's `Int8Tensor`": (multiply_all, int8_kinds(), (torch.randn(4, SIZE),)),
        "`TwoTensor`": (double, two, ()),
    }
    machine = ", ".join(f"{name} {value}" for name, value in describe_machine().items())
    lines = ["# Classes of others, adopted", "", machine, ""]
    lines += ["Microseconds a call, and the ratio to the class as it is under `torch.compile`.", ""]
    with torch.no_grad():
        for name, (fn, kinds, first) in tables.items():
            head = [
                "arguments",
                *(f"{kind}, {way}" for kind in kinds for way in WAYS),
            ]
            lines += [f"## {name}", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
            for count in COUNTS if kinds else ():
                timings = measure(fn, kinds, first, count)
                base = timings["as it is", "torch.compile"].median
                cells = [f"{t.median:.1f} ({t.median / base:.2f})" for t in timings.values()]
                lines.append(f"| {count} | {' | '.join(cells)} |")
                print(lines[-1], flush=True)
            lines.append("")
    text = "\n".join(lines)
    (RESULTS / "adopting.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
