"""Lookups in embedding tables equal a loop over the rows, in every way to compile; errors of batches and lookups."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from subclasses import DispatchError
from subclasses.keyed import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor
from subclasses.ragged import JaggedTensor
from tests.doors import by_desugar, by_stock
from tests.subclasses.keyed.batches import COMPILED, IDS, LENGTHS, WAYS, batch, rows_of
from tests.subclasses.ragged.judge import working
from tests.tables import giving, raising

WIDTHS, SAME = {"a": 3, "b": 4}, {"a": 3, "b": 3}
POOL = {
    "sum": lambda v: v.sum(0),
    "mean": lambda v: v.mean(0) if len(v) else v.sum(0),
    "max": lambda v: v.amax(0) if len(v) else v.sum(0),
}

# ---- results of a loop -----------------------------------------------------------------------------------------


def pooled_by_loop(x, tables, mode):
    ids, found = rows_of(x, x.values), {}
    factors = None if x.weights is None else rows_of(x, x.unwrap("weights"))
    for key, rows in ids.items():
        table = tables[key]
        kept = [row != (-1 if table.padding_idx is None else table.padding_idx) for row in rows]
        entries = [table.weight[row[keep]] for row, keep in zip(rows, kept, strict=True)]
        if factors is not None:
            entries = [
                v * f[keep].unsqueeze(1) for v, f, keep in zip(entries, factors[key], kept, strict=True)
            ]
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


def _by_bag(module):
    def run(x):
        weights = {k: None if x.weights is None else x.feature_weights(k) for k in x.keys}
        return {k: module.tables[k](x[k], per_sample_weights=weights[k]) for k in x.keys}

    return run


def by_plain_bags(module):
    """Plain bags take ids and offsets: a loop would scale gradients by the frequency in a row, not in the batch."""

    def run(x):
        starts = {k: [0, *(len(row) for row in rows[:-1])] for k, rows in rows_of(x, x.values).items()}
        ids = {k: torch.cat(rows) for k, rows in rows_of(x, x.values).items()}
        return {k: module.tables[k](ids[k], torch.tensor(starts[k]).cumsum(0)) for k in x.keys}

    return run


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
    for how, form in {"collection": lambda module: lambda x: module(x), "each feature": _by_bag}.items()
}
ENTRIES = {
    f"{widths}, {options}": (
        lambda widths=widths, options=options: tables(widths, **options),
        False,
        lambda module: lambda x: {k: v.sum(1) for k, v in module(x).items()},
        lambda m: lambda x: looked_up_by_loop(x, m.tables),
    )
    for widths in (SAME, WIDTHS)
    for options in ({}, {"padding_idx": 2}, {"sparse": True})
}


@pytest.mark.sweep(352)
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
    check_gradients(module, run, by_loop(module), batch(LENGTHS[0], weighted=weighted), sparse, torch.int32)


@pytest.mark.slow
def test_sparse_gradients_by_inductor():
    module = bags(SAME, mode="mean", sparse=True)
    head = nn.Linear(6, 1)
    run = torch.compile(lambda x: {"a": head(torch.cat(list(module(x).values()), 1))}, fullgraph=True)

    def by_loop(x):
        return {"a": head(torch.cat(list(pooled_by_loop(x, module.tables, "mean").values()), 1))}

    check_gradients(module, run, by_loop, batch([1, 2, 0, 3]), sparse=True)


@pytest.mark.sweep(24)
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


@pytest.mark.sweep(32)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("kind", [EmbeddingBagCollection, EmbeddingCollection])
def test_one_table_for_two_keys(kind, sparse, way):
    options = {"mode": "sum"} if kind is EmbeddingBagCollection else {}
    shared, x = kind.kind(IDS, 3, sparse=sparse, **options), batch([1, 2, 0, 3])
    module = kind({"a": shared, "b": shared})
    WAYS[way](lambda x: sum(f.sum() for f in module(x).values()))(x).backward()
    assert shared.weight.grad.is_sparse is sparse
    assert shared.weight.grad.to_dense().equal(
        torch.bincount(x.values, minlength=IDS).float()[:, None].expand(-1, 3)
    )


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
    module.load_state_dict(copy.deepcopy(module).eval().state_dict())
    assert list(module.state_dict()) == [f"tables.{n}.weight" for n in names]


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


# ==== refused batches and lookups =================================================================================

# ---- batches ----------------------------------------------------------------------------------------------------

V, L = torch.arange(6), torch.tensor([1, 2, 0, 3])

WRONG_BATCHES = {
    "one string": (lambda: KeyedJaggedTensor("ab", V, L), "expected a sequence of strings, got 'ab'"),
    "no sequence": (lambda: KeyedJaggedTensor(3, V, L), r"keys: expected a sequence of strings, got 3"),
    "no keys": (lambda: KeyedJaggedTensor([], V, L), "expected at least one key"),
    "a key twice": (lambda: KeyedJaggedTensor(["a", "a"], V, L), "distinct keys, got 'a' more than once"),
    "a list": (lambda: KeyedJaggedTensor(["a"], [1], L), "values: expected a Tensor, got"),
    "a scalar": (lambda: KeyedJaggedTensor(["a"], torch.tensor(1), L), "got a scalar"),
    "lengths of a fraction": (lambda: KeyedJaggedTensor(["a", "b", "c"], V, L), r"shape \[K \* B\]"),
    "float lengths": (lambda: KeyedJaggedTensor(["a"], V, L.float()), "expected integers of shape"),
    "truth values as lengths": (lambda: KeyedJaggedTensor(["a"], V[:2], L[:2] > 0), "got torch.bool"),
    "a sum": (lambda: KeyedJaggedTensor(["a"], V[:5], L), "expected a sum of 5, .* got 6"),
    "negative": (lambda: KeyedJaggedTensor(["a"], V, torch.tensor([7, -1])), "none below 0, got -1"),
    "weights' shape": (
        lambda: KeyedJaggedTensor(["a"], V, L, weights=torch.ones(5)),
        "each of the 6 entries",
    ),
    "weights' dtype": (lambda: KeyedJaggedTensor(["a"], V, L, weights=V), "expected floating point weights"),
    "a device": (lambda: KeyedJaggedTensor(["a"], V, L.to("meta")), "lengths: expected device cpu"),
    "a key that is not there": (lambda: batch([1, 2])["c"], "no key 'c'; its keys are a, b"),
    "no weights": (lambda: batch([1, 2]).feature_weights("a"), "has no weights"),
    "an index": (lambda: batch([1, 2])[0], "expected a key, got 0"),
    "an op": (lambda: batch([1, 2]) * 2, r"work on a feature, which kjt\[key\] returns"),
    "split": (lambda: batch([1, 2]).split([1, 2]), r"add up to 2, got \[1, 2\]"),
    "split by size": (lambda: batch([1, 2]).split(1), "the number of keys of each part"),
    "split by torch": (lambda: torch.split(batch([1, 2]), 1), "the number of keys of each part"),
    "split of rows": (lambda: torch.split(batch([1, 2]), [1, 1], 1), "only dim 0, of the keys"),
    "split by fractions": (lambda: batch([1, 2]).split([1.0, 1.0]), r"such as \[2, 1\], got \[1.0, 1.0\]"),
    "permute by a string": (lambda: batch([1, 2]).permute("ab"), "keys or of indices of keys, got 'ab'"),
    "permute by a fraction": (lambda: batch([1, 2]).permute([1.5]), r"indices of keys, got \[1.5\]"),
    "a place that is not there": (lambda: batch([1, 2]).permute([2]), "indices below 2, .* got 2"),
    "permute twice": (lambda: batch([1, 2]).permute([0, 0]), "distinct keys, got 'a'"),
    "cat of others": (lambda: KeyedJaggedTensor.cat([V]), "expected KeyedJaggedTensors, got a Tensor"),
    "cat of none": (lambda: KeyedJaggedTensor.cat([]), "got none"),
    "cat of batch sizes": (
        lambda: KeyedJaggedTensor.cat([batch([1, 2]), batch([1, 2], "c")]),
        "got batch sizes 1, 2",
    ),
    "cat of one weighted": (
        lambda: KeyedJaggedTensor.cat([batch([1, 2]), batch([1], "c", weighted=True)]),
        "with weights or none",
    ),
    "cat of the same keys": (lambda: torch.cat([batch([1, 2])] * 2), "distinct keys, got a, b, a, b"),
    "cat along rows": (lambda: torch.cat([batch([1, 2]), batch([1], "c")], 1), "along dim 0, got dim=1"),
    "from no dict": (lambda: KeyedJaggedTensor.from_jagged([V]), "expected a dict from keys"),
    "from tensors": (lambda: KeyedJaggedTensor.from_jagged({"a": V}), "expected a JaggedTensor for 'a'"),
    "from other entries": (
        lambda: KeyedJaggedTensor.from_jagged(
            {"a": JaggedTensor.from_tensors([V]), "b": JaggedTensor.from_tensors([V.float()])}
        ),
        "got 1 rows of torch.float32.* for 'b' and 1 rows of torch.int64",
    ),
    "other values": (lambda: batch([1, 2]).with_values(torch.ones(2)), "expected 3 entries, got 2"),
}


SOME = batch([1, 2, 0, 3])
ONES = {key: SOME[key].with_values(torch.ones(6)) for key in SOME.keys}
GAPS = JaggedTensor(V, torch.tensor([0, 3, 6]), lengths=torch.tensor([2, 3]))


def from_jagged(features=None, **weights):
    """A batch of other features, or of the same with these weights."""
    given = {"weights": weights} if weights else {}
    return lambda: KeyedJaggedTensor.from_jagged(features or SOME.to_dict(), **given)


WRONG_BATCHES |= {
    "gaps": (from_jagged({"a": GAPS}), "rows back to back, got some with gaps"),
    "weights of one key": (from_jagged(b=ONES["b"]), r"expected weights for \['a', 'b'\], got \['b'\]"),
    "weights of other rows": (
        from_jagged(a=ONES["b"], b=ONES["a"]),
        "rows of other lengths, or that lie elsewhere",
    ),
    "weights of two columns": (
        from_jagged(**{key: SOME.with_values(torch.ones(6, 2))[key] for key in "ab"}),
        "Make it by feature",
    ),
}
ERRORS = TypeError, ValueError, LookupError, DispatchError
test_batches_that_are_refused = raising(
    {name: (call, ERRORS, text) for name, (call, text) in WRONG_BATCHES.items()}
)


def read_in_a_graph(function, *args):
    """Calls a compiled function, with Dynamo's own error around ours."""
    return lambda: by_desugar(function)(*args)


test_what_cannot_be_read_in_a_graph = raising(
    {
        "the longest row": (
            read_in_a_graph(lambda v, n: KeyedJaggedTensor(["a"], v, n)["a"].sum(1), V, L),
            Exception,
            "give max_length=, or build it outside",
        ),
        "the lengths": (
            read_in_a_graph(lambda x: x.compact().values, SOME),
            "compact reads the lengths",
        ),
    }
)


test_permute_takes_keys_and_places_of_any_iterable = giving(
    {
        "keys": (lambda: batch([1, 2]).permute({"b": 1}.keys()).keys, ("b",)),
        "places": (lambda: batch([1, 2]).permute((-1, 0)).keys, ("b", "a")),
    }
)

# ---- features and lookups ----------------------------------------------------------------------------------------

TABLE = torch.ones(IDS, 3)


DENSE_IDS = torch.tensor([[1, 2]])


def ragged_entries():
    return JaggedTensor.from_tensors([torch.randn(2, 3), torch.randn(1, 3)])


def ragged_ids():
    return JaggedTensor.from_tensors([torch.tensor([1, 2]), torch.tensor([3])])


def one(key, values):
    return KeyedJaggedTensor([key], values, torch.tensor([1]))


WRONG_FEATURES = {
    "a feature that is turned": (
        lambda: KeyedJaggedTensor.from_jagged({"a": ragged_entries().transpose(1, 2)}),
        ValueError,
        r"KeyedJaggedTensor.from_jagged: expected rows ragged along 1, got 'a', which is ragged along 2; transpose it "
        r"to 1 by x.transpose\(1, 2\)",
    ),
    "a feature of merged rows": (
        lambda: KeyedJaggedTensor.from_jagged({"a": ragged_entries().flatten(0, 1)}),
        ValueError,
        r"from_jagged: .* got 'a', which is ragged along 0; unmerge it by x.unflatten\(0, \(B, T\)\)",
    ),
    "cat of other dtypes": (
        lambda: KeyedJaggedTensor.cat([one("a", torch.tensor([1])), one("b", torch.tensor([1.0]))]),
        ValueError,
        r"KeyedJaggedTensor.cat: expected entries of one dtype and shape, got a Tensor of torch.int64 .* for 'a' and a "
        r"Tensor of torch.float32 .* for 'b'",
    ),
    "cat of other entries": (
        lambda: KeyedJaggedTensor.cat([one("a", torch.ones(1, 2)), one("b", torch.ones(1, 3))]),
        ValueError,
        r"of one dtype and shape, got .* shape \(1, 2\) for 'a' and .* shape \(1, 3\) for 'b'",
    ),
    "a ragged table": (
        lambda: F.embedding_bag(ragged_ids(), ragged_entries()),
        DispatchError,
        r"embedding_bag: weight: expected a dense table \[V, D\], got a JaggedTensor of size \(2, 2, 3\)",
    ),
    "dense ids in a ragged table": (
        lambda: F.embedding_bag(DENSE_IDS, ragged_entries()),
        DispatchError,
        r"embedding_bag: weight: expected a dense table \[V, D\], got a JaggedTensor of size \(2, 2, 3\)",
    ),
    "offsets of ragged ids": (
        lambda: F.embedding_bag(ragged_ids(), TABLE, torch.tensor([0])),
        DispatchError,
        r"and no offsets, got a JaggedTensor of size \(2, 2\), ragged along 1 and offsets a Tensor of size \(1,\)",
    ),
    "ragged weights of dense ids": (
        lambda: F.embedding_bag(
            DENSE_IDS,
            TABLE,
            mode="sum",
            per_sample_weights=JaggedTensor.from_tensors([torch.ones(2)]),
        ),
        DispatchError,
        r"embedding_bag: input: expected a JaggedTensor of ids beside a JaggedTensor of size \(1, 2\), ragged along 1 "
        r"as per_sample_weights, got a Tensor of size \(1, 2\); give both as JaggedTensors with the same rows, or both",
    ),
}


test_features_that_are_refused = raising(WRONG_FEATURES)

RAGGED_WEIGHTS = JaggedTensor.from_tensors([torch.ones(2), torch.ones(1)])
test_what_is_advised_works = working(
    {
        "transpose": lambda: KeyedJaggedTensor.from_jagged(
            {"a": ragged_entries().transpose(1, 2).transpose(1, 2)}
        ),
        "unflatten": lambda: KeyedJaggedTensor.from_jagged(
            {"a": ragged_entries().flatten(0, 1).unflatten(0, (2, 2))}
        ),
        "both ragged": lambda: F.embedding_bag(
            ragged_ids(), TABLE, mode="sum", per_sample_weights=RAGGED_WEIGHTS
        ),
        "both dense": lambda: F.embedding_bag(
            DENSE_IDS, TABLE, mode="sum", per_sample_weights=torch.ones(1, 2)
        ),
        "no offsets": lambda: F.embedding_bag(ragged_ids(), TABLE, mode="sum"),
    }
)


# ---- in a graph ------------------------------------------------------------------------------------------------

WRITING = {
    "a bag": (lambda: nn.EmbeddingBag(IDS, 3, max_norm=1.0), ragged_ids),
    "bags by key": (
        lambda: EmbeddingBagCollection({key: nn.EmbeddingBag(IDS, 3, max_norm=1.0) for key in "ab"}),
        lambda: batch([1, 2]),
    ),
    "entries by key": (
        lambda: EmbeddingCollection({key: nn.Embedding(IDS, 3, max_norm=1.0) for key in "ab"}),
        lambda: batch([1, 2]),
    ),
}


IN_A_GRAPH = (
    r"max_norm.*: each lookup writes to it, which a graph of jagged ids does not contain. Make it without max_norm "
    r"and renormalise its rows after the optimizer's step, or call it outside of the compiled function"
)
GRAPHS = {  # the first with Dynamo's own error around ours
    "compiled": (lambda f, x: torch.compile(f, backend="eager", fullgraph=True)(x), Exception, IN_A_GRAPH),
    "exported": (
        lambda f, x: torch.export.export(f, (x,), strict=False),
        DispatchError,
        r"a table of shape \(10, 3\) with max_norm=1.0: each lookup writes to it",
    ),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("name", WRITING)
def test_tables_that_a_lookup_writes_to(name, graph):
    (make, ids), (run, error, text) = WRITING[name], GRAPHS[graph]
    module = make()
    module(ids())
    with pytest.raises(error, match=text):
        run(module, ids())


def found_in(result):
    """The dense numbers of a lookup's results."""
    values = result.values() if isinstance(result, dict) else [result]
    return [v.unwrap("values") if isinstance(v, JaggedTensor) else v for v in values]


@pytest.mark.sweep(12)
@pytest.mark.parametrize("door", [by_stock, by_desugar])
@pytest.mark.parametrize("name", WRITING)
def test_a_graph_breaks_where_a_lookup_writes(name, door):
    make, ids = WRITING[name]
    module, x = make(), ids()
    other = copy.deepcopy(module)
    compiled = door(other)
    for _ in range(2):
        expected, got = found_in(module(x)), found_in(compiled(x))
        assert all(map(torch.equal, expected, got))
        for parts in (expected, got):
            sum(t.sum() for t in parts).backward()
    for p, q in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q) and torch.equal(p.grad, q.grad)
