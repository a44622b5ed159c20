"""What is refused of features by key, of their lookups, and of lookups in a graph: what the errors say."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from subclasses import DispatchError
from subclasses.keyed import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor
from subclasses.ragged import JaggedTensor
from tests.doors import by_desugar, by_stock
from tests.subclasses.keyed.batches import IDS, batch
from tests.subclasses.ragged.judge import working
from tests.tables import giving, raising

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
    "split of rows": (lambda: torch.split(batch([1, 2]), [1, 1], 1), "only dim 0, that of the keys"),
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


ENTRIES = batch([1, 2, 0, 3])
ONES = {key: ENTRIES[key].with_values(torch.ones(6)) for key in ENTRIES.keys}
GAPS = JaggedTensor(V, torch.tensor([0, 3, 6]), lengths=torch.tensor([2, 3]))


def from_jagged(features=None, **weights):
    """A batch of other features, or of the same with these weights."""
    given = {"weights": weights} if weights else {}
    return lambda: KeyedJaggedTensor.from_jagged(features or ENTRIES.to_dict(), **given)


WRONG_BATCHES |= {
    "gaps": (from_jagged({"a": GAPS}), "rows back to back, got some with gaps"),
    "weights of one key": (from_jagged(b=ONES["b"]), r"expected weights for \['a', 'b'\], got \['b'\]"),
    "weights of other rows": (
        from_jagged(a=ONES["b"], b=ONES["a"]),
        "rows of other lengths, or that lie elsewhere",
    ),
    "weights of two columns": (
        from_jagged(**{key: ENTRIES.with_values(torch.ones(6, 2))[key] for key in "ab"}),
        "make it by feature",
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
            read_in_a_graph(lambda x: x.compact().values, ENTRIES),
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


IDS_OF_BAG = torch.tensor([[1, 2]])


def entries():
    return JaggedTensor.from_tensors([torch.randn(2, 3), torch.randn(1, 3)])


def bag():
    return JaggedTensor.from_tensors([torch.tensor([1, 2]), torch.tensor([3])])


def one(key, values):
    return KeyedJaggedTensor([key], values, torch.tensor([1]))


WRONG = {
    "a feature that is turned": (
        lambda: KeyedJaggedTensor.from_jagged({"a": entries().transpose(1, 2)}),
        ValueError,
        r"KeyedJaggedTensor.from_jagged: expected rows ragged along 1, got 'a', which is ragged along 2; transpose it "
        r"to 1 by x.transpose\(1, 2\)",
    ),
    "a feature of merged rows": (
        lambda: KeyedJaggedTensor.from_jagged({"a": entries().flatten(0, 1)}),
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
        lambda: F.embedding_bag(bag(), entries()),
        DispatchError,
        r"embedding_bag: weight: expected a dense table \[V, D\], got a JaggedTensor of size \(2, 2, 3\)",
    ),
    "dense ids in a ragged table": (
        lambda: F.embedding_bag(IDS_OF_BAG, entries()),
        DispatchError,
        r"embedding_bag: weight: expected a dense table \[V, D\], got a JaggedTensor of size \(2, 2, 3\)",
    ),
    "offsets of ragged ids": (
        lambda: F.embedding_bag(bag(), TABLE, torch.tensor([0])),
        DispatchError,
        r"and no offsets, got a JaggedTensor of size \(2, 2\), ragged along 1 and offsets a Tensor of size \(1,\)",
    ),
    "ragged weights of dense ids": (
        lambda: F.embedding_bag(
            IDS_OF_BAG,
            TABLE,
            mode="sum",
            per_sample_weights=JaggedTensor.from_tensors([torch.ones(2)]),
        ),
        DispatchError,
        r"embedding_bag: input: expected a JaggedTensor of ids beside a JaggedTensor of size \(1, 2\), ragged along 1 "
        r"as per_sample_weights, got a Tensor of size \(1, 2\); give both as JaggedTensors with the same rows, or both",
    ),
}


test_features_that_are_refused = raising(WRONG)

WEIGHTS = JaggedTensor.from_tensors([torch.ones(2), torch.ones(1)])
test_what_is_advised_works = working(
    {
        "transpose": lambda: KeyedJaggedTensor.from_jagged({"a": entries().transpose(1, 2).transpose(1, 2)}),
        "unflatten": lambda: KeyedJaggedTensor.from_jagged(
            {"a": entries().flatten(0, 1).unflatten(0, (2, 2))}
        ),
        "both ragged": lambda: F.embedding_bag(bag(), TABLE, mode="sum", per_sample_weights=WEIGHTS),
        "both dense": lambda: F.embedding_bag(
            IDS_OF_BAG, TABLE, mode="sum", per_sample_weights=torch.ones(1, 2)
        ),
        "no offsets": lambda: F.embedding_bag(bag(), TABLE, mode="sum"),
    }
)


# ---- in a graph ------------------------------------------------------------------------------------------------

WRITING = {
    "a bag": (lambda: nn.EmbeddingBag(IDS, 3, max_norm=1.0), bag),
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
    r"max_norm.*: each lookup writes to it, which is no part of a graph of jagged ids; make it without max_norm "
    r"and renormalise its rows after the optimizer's step, or call it outside of the compiled function"
)
EXPORTED = r"a table of shape \(10, 3\) with max_norm=1.0: each lookup writes to it"
GRAPHS = {  # the first with Dynamo's own error around ours
    "compiled": (lambda f, x: torch.compile(f, backend="eager", fullgraph=True)(x), Exception, IN_A_GRAPH),
    "exported": (lambda f, x: torch.export.export(f, (x,), strict=False), DispatchError, EXPORTED),
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
    """The dense numbers of what a lookup gives."""
    values = result.values() if isinstance(result, dict) else [result]
    return [v.unwrap("values") if isinstance(v, JaggedTensor) else v for v in values]


@pytest.mark.sweep(6)
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
