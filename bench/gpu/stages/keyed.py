"""Lookups of many tables: an `EmbeddingBagCollection`, beside an `nn.EmbeddingBag` for each table."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor, nn

from bench.gpu.device import Call
from bench.gpu.run import Run, Turns

ONE_BY_ONE, COMPILED = "nn.EmbeddingBag one by one, eager", "nn.EmbeddingBag one by one, torch.compile"
OURS, OURS_EAGER = "EmbeddingBagCollection, desugar.compile", "EmbeddingBagCollection, eager"
MODES = ("inference", "training")
Lengths = list[list[int]]  # of each bag of each table
Tables = dict[str, nn.EmbeddingBag]


def measure_keyed(run: Run) -> None:
    """Times lookups that add up the rows of each bag; a training step computes the gradients of all tables, dense."""
    import desugar

    tables, rows, width, batch, most = run.device.pick((26, 20000, 128, 2048, 20), (2, 7, 4, 3, 3))
    for mode in MODES:
        torch.compiler.reset()
        torch.manual_seed(0)
        rng = random.Random(0)
        lengths = [[rng.randint(0, most) for _ in range(batch)] for _ in range(tables)]
        values = torch.randint(0, rows, (sum(map(sum, lengths)),), device=run.device.name)
        group = f"lookups, {tables} tables of {rows:,} by {width}, batch {batch}, {mode}"
        named = {
            f"feature{k}": nn.EmbeddingBag(rows, width, mode="sum", include_last_offset=True).to(
                run.device.name
            )
            for k in range(tables)
        }
        ways = {
            ONE_BY_ONE: partial(_one_by_one, _as_it_is),
            COMPILED: partial(_one_by_one, partial(run.device.compile, torch.compile)),
            OURS_EAGER: partial(_ours, _as_it_is),
            OURS: partial(_ours, partial(run.device.compile, desugar.compile)),
        }
        makers = {name: partial(_make, way, mode, named, values, lengths) for name, way in ways.items()}
        run.compare(group, makers, Turns(ONE_BY_ONE, host=True, seconds=3.0))


Wrap = Callable[[Callable], Callable]


def _as_it_is(fn: Callable) -> Callable:
    return fn


def _one_by_one(wrap: Wrap, tables: Tables, values: Tensor, lengths: Lengths) -> Call:
    parts = values.split([*map(sum, lengths)])
    offsets = [torch.tensor([*accumulate(n, initial=0)], device=values.device) for n in lengths]

    def look_up(parts: Any, offsets: Any) -> list[Tensor]:
        return [table(*arguments) for table, *arguments in zip(tables.values(), parts, offsets, strict=True)]

    fn = wrap(look_up)
    return lambda: fn(parts, offsets)


def _ours(wrap: Wrap, tables: Tables, values: Tensor, lengths: Lengths) -> Call:
    from subclasses.keyed import EmbeddingBagCollection, KeyedJaggedTensor

    ids = KeyedJaggedTensor(tuple(tables), values, torch.tensor([*chain(*lengths)], device=values.device))
    fn = wrap(EmbeddingBagCollection(tables))
    return lambda: [*fn(ids).values()]


def _make(way: Callable[..., Call], mode: str, tables: Tables, values: Tensor, lengths: Lengths) -> Call:
    """Returns a lookup, or a training step; first compares the results with lookups in one module after another."""
    call = way(tables, values, lengths)
    with torch.no_grad():
        torch.testing.assert_close(call(), _one_by_one(_as_it_is, tables, values, lengths)())
    if mode == "inference":
        return torch.no_grad()(call)
    weights = [table.weight for table in tables.values()]

    def step() -> Any:
        results = call()
        return torch.autograd.grad(sum(x.sum() for x in results), weights)

    return step
