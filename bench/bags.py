"""Benchmarks bags of embeddings as recommenders have them: 26 features, a table of a million rows for each.

    python -m bench.bags                 # about four minutes and 5 GiB; writes bench/results/bags.*

Each row of a batch has from none to twenty ids for each feature, and their embeddings are summed. A training step
computes the gradients of all tables, which are sparse (`sparse=True`): dense ones would be as large as the tables.

*one by one*: an `nn.EmbeddingBag` for each feature, called with ids and offsets of its own.
*torchrec*: its `EmbeddingBagCollection` on a `KeyedJaggedTensor`, not sharded, if it is installed.
*EmbeddingBagCollection*: the class of `subclasses.keyed`.

All ways look up the same tables, on two threads. Before anything is timed, all results are compared. A figure is the
median of the fastest tenth of the turns, as in `bench.int8_sizes`.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import desugar
from bench.int8_sizes import time_fastest
from bench.report import Row, print_rows, save_rows
from bench.timing import Timing, describe_machine
from subclasses.keyed import EmbeddingBagCollection, KeyedJaggedTensor

RESULTS = Path(__file__).parent / "results"
NAME = "bags"
HAS_TORCHREC = importlib.util.find_spec("torchrec") is not None
FEATURES, MOST_IDS = 26, 20
MODES = ("inference", "training")
ONE_BY_ONE = "one by one, eager"
Pooled = Mapping[str, Tensor]
Call = Callable[[], Pooled]

# ---------------------------------------------------------------------------------------------------------
# the ways
# ---------------------------------------------------------------------------------------------------------


class OneByOne(nn.Module):
    """A table for each feature, called with ids and offsets of its own."""

    def __init__(self, tables: dict[str, nn.EmbeddingBag]) -> None:
        super().__init__()
        self.tables = nn.ModuleDict(tables)

    def forward(self, ids: dict[str, Tensor], offsets: dict[str, Tensor]) -> dict[str, Tensor]:
        return {key: table(ids[key], offsets[key]) for key, table in self.tables.items()}


def make_tables(rows: int, width: int) -> dict[str, nn.EmbeddingBag]:
    return {
        f"feature{k}": nn.EmbeddingBag(rows, width, mode="sum", sparse=True, include_last_offset=True)
        for k in range(FEATURES)
    }


def of_torchrec(tables: dict[str, nn.EmbeddingBag], values: Tensor, lengths: Tensor) -> Call:
    """Returns a call of torchrec's collection, with the same tables."""
    from torchrec import EmbeddingBagCollection as Theirs, EmbeddingBagConfig, KeyedJaggedTensor as TheirBatch

    configs = [
        EmbeddingBagConfig(name=key, embedding_dim=t.weight.shape[1], num_embeddings=1, feature_names=[key])
        for key, t in tables.items()
    ]
    module = Theirs(tables=configs)
    for key, table in tables.items():
        their = module.embedding_bags[key]
        their.weight, their.num_embeddings, their.sparse = table.weight, table.num_embeddings, True
    batch = TheirBatch(keys=[*tables], values=values, lengths=lengths.flatten())

    def call() -> Pooled:
        # Its batch remembers offsets that it computed; a new batch has none.
        return module(TheirBatch(batch.keys(), batch.values(), lengths=batch.lengths())).to_dict()

    return call


def make_calls(tables: dict[str, nn.EmbeddingBag], batch: int) -> dict[str, Call]:
    """Returns the calls by name. Compiled ones get a batch of the same sizes each time."""
    lengths = torch.randint(0, MOST_IDS + 1, (FEATURES, batch))
    rows = next(iter(tables.values())).num_embeddings
    values = torch.randint(0, rows, (int(lengths.sum()),))
    parts = dict(zip(tables, values.split(lengths.sum(1).tolist()), strict=True))
    offsets = {key: torch.cat([n.new_zeros(1), n.cumsum(0)]) for key, n in zip(tables, lengths, strict=True)}
    ids = KeyedJaggedTensor(tuple(tables), values, lengths.flatten())
    ways = {"eager": lambda fn: fn, "torch.compile": torch.compile, "desugar.compile": desugar.compile}
    calls: dict[str, Call] = {}
    for way, compile_ in ways.items():
        ours = compile_(EmbeddingBagCollection(tables))
        calls[f"EmbeddingBagCollection, {way}"] = lambda ours=ours: ours(ids)
        if way != "desugar.compile":
            theirs = compile_(OneByOne(tables))
            calls[f"one by one, {way}"] = lambda theirs=theirs: theirs(parts, offsets)
    if HAS_TORCHREC:
        calls["torchrec, eager"] = of_torchrec(tables, values, lengths)
    return dict(sorted(calls.items(), key=lambda item: item[0] != ONE_BY_ONE))


# ---------------------------------------------------------------------------------------------------------
# measuring
# ---------------------------------------------------------------------------------------------------------


def in_inference(call: Call) -> Callable[[], Any]:
    return torch.no_grad()(call)


def in_training(call: Call, tables: dict[str, nn.EmbeddingBag]) -> Callable[[], Any]:
    """Returns a training step without its optimizer: a forward, and the gradients of all tables."""
    weights = [t.weight for t in tables.values()]

    def step() -> Any:
        pooled = call()
        results = [pooled[key] for key in tables]
        return torch.autograd.grad(results, weights, [torch.ones_like(r) for r in results])

    return step


def check_equal(calls: dict[str, Callable[[], Any]]) -> None:
    """Raises AssertionError if results, or gradients, differ."""
    expected = _dense(calls[ONE_BY_ONE]())
    for call in calls.values():
        torch.testing.assert_close(_dense(call()), expected)


def _dense(results: Any) -> list[Tensor]:
    """Returns the numbers of results; of sparse gradients, the rows that they name and their values."""
    parts = results.values() if isinstance(results, Mapping) else results
    tensors: list[Tensor] = []
    for t in parts:
        tensors += [c.indices(), c.values()] if t.is_sparse and (c := t.coalesce()) is not None else [t]
    return tensors


def measure(options: argparse.Namespace) -> list[Row]:
    torch.manual_seed(0)
    tables = make_tables(options.rows, options.width)
    rows: list[Row] = []
    for mode in MODES:
        torch.compiler.reset()
        calls: dict[str, Callable[[], Any]] = {
            name: in_inference(call) if mode == "inference" else in_training(call, tables)
            for name, call in make_calls(tables, options.batch).items()
        }
        check_equal(calls)
        timings = time_fastest(calls, options.seconds)
        reference = timings[ONE_BY_ONE].median
        group = f"{FEATURES} tables of {options.rows:,} by {options.width}, batch {options.batch}, {mode}"
        rows += [
            Row(
                group,
                name,
                Timing(*(t / 1e3 for t in (timing.median, timing.low, timing.high))),
                {"/ one by one": timing.median / reference},
                unit="ms a call",
                ours=name.startswith("EmbeddingBagCollection"),
            )
            for name, timing in timings.items()
        ]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000, help="of each table")
    parser.add_argument("--width", type=int, default=32, help="of each table")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=5.0, help="for all turns of one call")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(2)
    rows = measure(options)
    print_rows(rows)
    save_rows(rows, describe_machine(), options.out / f"{NAME}.json", command="bench.bags")


if __name__ == "__main__":
    main()
