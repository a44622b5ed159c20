"""Lookups in embedding tables, by every way to compile, as a loop over the rows; the collections as modules."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from subclasses.keyed import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor
from subclasses.ragged import JaggedTensor
from tests.subclasses.keyed.batches import COMPILED, IDS, LENGTHS, WAYS, batch, rows_of
from tests.tables import raising

WIDTHS, SAME = {"a": 3, "b": 4}, {"a": 3, "b": 3}
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


def _by_entry(module):
    return lambda x: {k: v.sum(1) for k, v in module(x).items()}


# A module, whether batches have weights, how its tables are looked up, and the judge.
FORMS = {
    f"{name}, {how}": (
        lambda mode=mode, options=options: bags(mode=mode, **options),
        weighted,
        form,
        by_plain_bags
        if name == "by frequency"
        else lambda m, mode=mode: lambda x: pooled_by_loop(x, m.tables, mode),
    )
    for name, (mode, weighted, options) in KINDS.items()
    for how, form in {"collection": _by_collection, "each feature": _by_bag}.items()
}
ENTRIES = {
    f"{widths}, {options}": (
        lambda widths=widths, options=options: tables(widths, **options),
        False,
        _by_entry,
        lambda m: lambda x: looked_up_by_loop(x, m.tables),
    )
    for widths in (SAME, WIDTHS)
    for options in ({}, {"padding_idx": 2}, {"sparse": True})
}


@pytest.mark.sweep(88)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FORMS | ENTRIES)
def test_values_and_gradients(name, way):
    make, weighted, form, by_loop = (FORMS | ENTRIES)[name]
    module = make()
    run, sparse = WAYS[way](form(module)), next(iter(module.tables.values())).sparse
    for lengths in LENGTHS if way != "behind Dynamo" else LENGTHS[:3]:
        check_gradients(module, run, by_loop(module), batch(lengths, weighted=weighted), sparse)
    if way == "desugar.compile":
        assert len(run.programs) <= 2  # one row in the batch has a program of its own
    x = batch(LENGTHS[0], weighted=weighted)
    check_gradients(module, run, by_loop(module), x, sparse, torch.int32)


@pytest.mark.slow
def test_sparse_gradients_by_inductor():
    module = bags(SAME, mode="mean", sparse=True)
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
    pooled, looked_up = bags(mode="max"), tables(SAME)
    x, nothing = batch(lengths), torch.zeros(len(lengths) // 2, 3)
    found = WAYS[way](lambda x: pooled(x)["a"])(x)
    assert found.equal(nothing)
    found.sum().backward()
    assert WAYS[way](lambda x: looked_up(x)["b"].sum(1))(x).equal(nothing)


@pytest.mark.parametrize("way", ["eager", pytest.param("desugar.compile", marks=pytest.mark.slow)])
@pytest.mark.parametrize("keys", ["ca", "b", "cba"])
def test_other_orders_of_keys_share_the_values(keys, way):
    module, x = tables(dict.fromkeys("abc", 3)), batch([1, 2, 0, 3, 4, 1], "abc")
    expected = looked_up_by_loop(x, module.tables)
    found = WAYS[way](lambda x: {k: v.sum(1) for k, v in module(x).items()})(x.permute(list(keys)))
    assert list(found) == list(keys)
    torch.testing.assert_close(found, {key: expected[key] for key in keys})


# ---- as modules -------------------------------------------------------------------------------------------------


def test_tables_stay_modules():
    table = nn.EmbeddingBag(IDS, 3)
    module = EmbeddingBagCollection({"a": table, "b": nn.EmbeddingBag(IDS, 4)})
    assert list(module.state_dict()) == ["tables.a.weight", "tables.b.weight"]
    assert module.tables["a"] is table


@pytest.mark.sweep(16)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("kind", [EmbeddingBagCollection, EmbeddingCollection])
def test_one_table_for_two_keys(kind, sparse, way):
    options = {"mode": "sum"} if kind is EmbeddingBagCollection else {}
    shared, x = kind.kind(IDS, 3, sparse=sparse, **options), batch([1, 2, 0, 3])
    module = kind({"a": shared, "b": shared})
    WAYS[way](lambda x: sum(f.sum() for f in module(x).values()))(x).backward()
    assert shared.weight.grad.is_sparse is sparse
    counts = torch.bincount(x.values, minlength=IDS).float()
    assert shared.weight.grad.to_dense().equal(counts[:, None].expand(-1, 3))


@pytest.mark.sweep(3)
@pytest.mark.parametrize("way", COMPILED)
def test_a_sparse_table_may_be_looked_up_twice(way):
    module = bags(SAME, mode="sum", sparse=True)
    batches = batch([1, 2, 0, 3]), batch([2, 2, 1, 1])

    def loss(x, y):
        return sum(f.sum() for f in module(x).values()) + sum(f.square().sum() for f in module(y).values())

    loss(*batches).backward()
    expected = [t.weight.grad.to_dense() for t in module.tables.values()]
    module.zero_grad()
    WAYS[way](loss)(*batches).backward()
    torch.testing.assert_close([t.weight.grad.to_dense() for t in module.tables.values()], expected)


@pytest.mark.slow
def test_keys_that_are_names_of_a_module_s_own():
    names = ["items", "keys", "type", "values", "forward", "0"]
    module = bags(dict.fromkeys(names, 3), mode="sum")
    x = batch([1, 2] * len(names), names)
    expected = module(x)
    for way in WAYS.values():
        torch.compiler.reset()
        assert all(f.equal(expected[n]) for n, f in way(module)(x).items())
    other = copy.deepcopy(module).eval()
    other.load_state_dict(module.state_dict())
    assert list(other.state_dict()) == [f"tables.{n}.weight" for n in names]


@pytest.mark.slow
@pytest.mark.parametrize("way", COMPILED)
def test_training_in_a_compiled_step_is_that_of_eager_mode(way):
    losses = {"eager": [], way: []}
    for name, found in losses.items():
        module = bags(SAME, mode="sum")
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        step = WAYS[name](lambda x, module=module: sum(((o - 1) ** 2).sum() for o in module(x).values()))
        for lengths in ([1, 2, 0, 3], [2, 2, 1, 1], [4, 4, 0, 0, 1, 2]):
            optimizer.zero_grad()
            found.append(step(batch(lengths)))
            found[-1].backward()
            optimizer.step()
    torch.testing.assert_close(*losses.values())


BAG = EmbeddingBagCollection({"a": nn.EmbeddingBag(2, 2)})
FLOATS = KeyedJaggedTensor(["a"], torch.ones(2), torch.tensor([2]))
WRONG = [
    (lambda: EmbeddingBagCollection({"a": nn.Embedding(2, 2)}), "expected an nn.EmbeddingBag for 'a'"),
    (lambda: EmbeddingCollection({"a": nn.EmbeddingBag(2, 2)}), "expected an nn.Embedding for 'a'"),
    (lambda: EmbeddingCollection({"a.b": nn.Embedding(2, 2)}), "can name a module"),
    (lambda: EmbeddingCollection({"": nn.Embedding(2, 2)}), "can name a module"),
    (lambda: EmbeddingCollection({"training": nn.Embedding(2, 2)}), "can name a module"),
    (lambda: EmbeddingCollection({}), "at least one key"),
    (lambda: BAG(batch([1, 2])), "no table for b; it has a"),
    (lambda: BAG(torch.ones(2)), "expected a KeyedJagged"),
    (
        lambda: EmbeddingBagCollection({k: nn.EmbeddingBag(2, 2) for k in "ab"})(
            batch([1, 2], weighted=True)
        ),
        "weights go with mode='sum', and a, b pool otherwise",
    ),
    (
        lambda: EmbeddingCollection({"a": nn.Embedding(2, 2)})(FLOATS),
        r"expected ids, integers \[total\], got torch.float32\[2\]",
    ),
]
test_refused_tables_and_batches = raising(
    [(call, (TypeError, ValueError, KeyError), text) for call, text in WRONG]
)

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
