"""Lookups in embedding tables: outside of a graph, and in one by every way to compile, as a loop over the rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from subclasses.keyed import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor
from subclasses.ragged import JaggedTensor
from tests.subclasses.keyed.batches import IDS, LENGTHS, WAYS, batch, rows_of
from tests.tables import raising

WIDTHS = {"a": 3, "b": 4}
POOL = {
    "sum": lambda v: v.sum(0),
    "mean": lambda v: v.mean(0) if len(v) else v.sum(0),
    "max": lambda v: v.amax(0) if len(v) else v.sum(0),
}

# ---- what a loop gives -----------------------------------------------------------------------------------------


def pooled_by_loop(x, tables, mode):
    ids, found = rows_of(x, x.values), {}
    factors = None if x.weights is None else rows_of(x, x.unwrap("weights"))
    for key, rows in ids.items():
        table = tables[key]
        kept = [row != (-1 if table.padding_idx is None else table.padding_idx) for row in rows]
        entries = [table.weight[row[keep]] for row, keep in zip(rows, kept, strict=True)]
        if factors is not None:
            pairs = zip(entries, factors[key], kept, strict=True)
            entries = [v * f[keep].unsqueeze(1) for v, f, keep in pairs]
        found[key] = torch.stack([POOL[mode](v) for v in entries])
    return found


def looked_up_by_loop(x, tables):
    return {
        key: torch.stack([tables[key](row).sum(0) for row in rows])
        for key, rows in rows_of(x, x.values).items()
    }


def check_gradients(module, run, by_loop, x, sparse=False, dtype=torch.int64):
    """Equal values, and equal gradients of the tables and of the weights; ``run`` gets ids of another dtype."""
    found = []
    for f, ids in ((run, dtype), (by_loop, torch.int64)):
        module.zero_grad()
        leaf = None if x.weights is None else x.weights.detach().clone().requires_grad_()
        out = f(KeyedJaggedTensor(x.keys, x.values.to(ids), x.lengths.to(ids), weights=leaf))
        sum(((o + 1) ** 2).sum() for o in out.values()).backward()
        grads = [t.weight.grad for t in module.tables.values()]
        assert f is by_loop or all(g is None or g.is_sparse is sparse for g in grads)
        dense = [
            torch.zeros_like(t.weight) if g is None else g.to_dense()
            for t, g in zip(module.tables.values(), grads, strict=True)
        ]
        found.append([*out.values(), *dense, *([] if leaf is None else [leaf.grad])])
    torch.testing.assert_close(*found)


def bags(widths=WIDTHS, **options):
    torch.manual_seed(0)
    return EmbeddingBagCollection({k: nn.EmbeddingBag(IDS, d, **options) for k, d in widths.items()})


def tables(widths, **options):
    torch.manual_seed(0)
    return EmbeddingCollection({k: nn.Embedding(IDS, d, **options) for k, d in widths.items()})


# ---- pooled ----------------------------------------------------------------------------------------------------

KINDS = {
    "sum": ("sum", False, {}),
    "mean": ("mean", False, {}),
    "max": ("max", False, {}),
    "weighted": ("sum", True, {}),
    "padded": ("mean", False, {"padding_idx": 2}),
    "by frequency": ("sum", False, {"scale_grad_by_freq": True}),
    "sparse": ("sum", False, {"sparse": True}),
    "sparse mean": ("mean", False, {"sparse": True, "padding_idx": -1}),
    "sparse weighted": ("sum", True, {"sparse": True}),
    "bfloat16": ("sum", False, {"dtype": torch.bfloat16}),
    "float64": ("mean", False, {"dtype": torch.float64}),
}


def _by_collection(module):
    return lambda x: module(x)


def _by_bag(module):
    def run(x):
        weights = {k: None if x.weights is None else x.feature_weights(k) for k in x.keys}
        return {k: module.tables[k](x[k], per_sample_weights=weights[k]) for k in x.keys}

    return run


def by_plain_bags(module):
    """What a loop would count is not the batch's frequency: plain bags take ids and offsets."""

    def run(x):
        starts = {k: [0, *(len(row) for row in rows[:-1])] for k, rows in rows_of(x, x.values).items()}
        ids = {k: torch.cat(rows) for k, rows in rows_of(x, x.values).items()}
        return {k: module.tables[k](ids[k], torch.tensor(starts[k]).cumsum(0)) for k in x.keys}

    return run


@pytest.mark.sweep(88)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", [_by_collection, _by_bag], ids=["collection", "each feature"])
@pytest.mark.parametrize("kind", KINDS)
def test_pooled(kind, form, way):
    mode, weighted, options = KINDS[kind]
    module, sparse = bags(mode=mode, **options), options.get("sparse", False)
    run, by_loop = WAYS[way](form(module)), lambda x: pooled_by_loop(x, module.tables, mode)
    if kind == "by frequency":
        by_loop = by_plain_bags(module)
    for lengths in LENGTHS if way != "behind Dynamo" else LENGTHS[:3]:
        check_gradients(module, run, by_loop, batch(lengths, weighted=weighted), sparse)
    if way == "desugar.compile":
        assert len(run.programs) <= 2  # one row in the batch has a program of its own
    check_gradients(module, run, by_loop, batch([1, 2, 0, 3], weighted=weighted), sparse, torch.int32)


def test_sparse_gradients_by_inductor():
    module = bags({"a": 3, "b": 3}, mode="mean", sparse=True)
    head = nn.Linear(6, 1)
    run = torch.compile(lambda x: {"a": head(torch.cat(list(module(x).values()), 1))}, fullgraph=True)

    def by_loop(x):
        return {"a": head(torch.cat(list(pooled_by_loop(x, module.tables, "mean").values()), 1))}

    check_gradients(module, run, by_loop, batch([1, 2, 0, 3]), sparse=True)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_rows_with_gaps_between_them(way):
    x = JaggedTensor(torch.arange(8), torch.tensor([1, 4, 7]), lengths=torch.tensor([2, 3]), max_length=3)
    bag, weights = nn.EmbeddingBag(IDS, 3, mode="sum"), x.with_values(torch.rand(8))
    rows = [bag.weight[a:b] * weights.values[a:b, None] for a, b in ((1, 3), (4, 7))]
    found = WAYS[way](lambda x, w: bag(x, per_sample_weights=w))(x, weights)
    torch.testing.assert_close(list(found), [row.sum(0) for row in rows])


@pytest.mark.sweep(12)
@pytest.mark.parametrize("lengths", [[], [0, 0], [0, 0, 0, 0]], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_nothing_to_look_up(lengths, way):
    pooled, looked_up = bags(mode="max"), tables({"a": 3, "b": 3})
    x, nothing = batch(lengths), torch.zeros(len(lengths) // 2, 3)
    found = WAYS[way](lambda x: pooled(x)["a"])(x)
    assert found.equal(nothing)
    found.sum().backward()
    assert WAYS[way](lambda x: looked_up(x)["b"].sum(1))(x).equal(nothing)


# ---- entry by entry --------------------------------------------------------------------------------------------


@pytest.mark.sweep(24)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", [{}, {"padding_idx": 2}, {"sparse": True}], ids=str)
@pytest.mark.parametrize("widths", [(3, 3), (3, 4)], ids=str)
def test_entry_by_entry(widths, options, way):
    module = tables(dict(zip("ab", widths, strict=True)), **options)
    run = WAYS[way](lambda x: {k: v.sum(1) for k, v in module(x).items()})
    arguments = module, run, lambda x: looked_up_by_loop(x, module.tables)
    for lengths in LENGTHS if way != "behind Dynamo" else LENGTHS[:3]:
        check_gradients(*arguments, batch(lengths), "sparse" in options)
    check_gradients(*arguments, batch(LENGTHS[0]), "sparse" in options, torch.int32)


@pytest.mark.parametrize("way", ["eager", pytest.param("desugar.compile", marks=pytest.mark.slow)])
@pytest.mark.parametrize("keys", ["ca", "b", "cba"])
def test_other_orders_of_keys_share_the_values(keys, way):
    module, x = tables(dict.fromkeys("abc", 3)), batch([1, 2, 0, 3, 4, 1], "abc")
    expected = looked_up_by_loop(x, module.tables)
    found = WAYS[way](lambda x: {k: v.sum(1) for k, v in module(x).items()})(x.permute(list(keys)))
    assert list(found) == list(keys)
    torch.testing.assert_close(found, {key: expected[key] for key in keys})


# ---- what is refused -------------------------------------------------------------------------------------------


MEAN, SUM = (nn.EmbeddingBag(IDS, 3, mode=mode) for mode in ("mean", "sum"))
X = batch([1, 2, 0, 3], weighted=True)
test_refused_arguments = raising(
    [
        (
            lambda: MEAN(X["a"], per_sample_weights=X.feature_weights("a")),
            "go with mode='sum', got mode='mean'",
        ),
        (lambda: MEAN(X["a"], torch.tensor([0])), "no offsets"),
        (
            lambda: SUM(X["a"], per_sample_weights=X.feature_weights("b")),
            ValueError,
            "rows of other lengths, or that lie elsewhere",
        ),
        (lambda: SUM(X["a"], per_sample_weights=torch.ones(6)), ValueError, "got a Tensor of size"),
    ]
)
