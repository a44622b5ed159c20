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
from tests.tables import raising

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


test_refused = raising(WRONG)

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
