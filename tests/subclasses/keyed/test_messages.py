"""What is refused of features by key, of their lookups, and of lookups in a graph: what the errors say."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from subclasses import DispatchError
from subclasses.keyed import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor
from subclasses.ragged import JaggedTensor
from tests.subclasses.keyed.batches import IDS, batch

TABLE = torch.ones(IDS, 3)


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
        "KeyedJaggedTensor.from_jagged: 'a' is ragged along 2; transpose it to 1",
    ),
    "a feature of merged rows": (
        lambda: KeyedJaggedTensor.from_jagged({"a": entries().flatten(0, 1)}),
        ValueError,
        "KeyedJaggedTensor.from_jagged: 'a' is ragged along 0",
    ),
    "cat of other dtypes": (
        lambda: KeyedJaggedTensor.cat([one("a", torch.tensor([1])), one("b", torch.tensor([1.0]))]),
        ValueError,
        r"KeyedJaggedTensor.cat: expected entries of one dtype and shape, got a Tensor of torch.int64 .* torch.float32",
    ),
    "cat of other entries": (
        lambda: KeyedJaggedTensor.cat([one("a", torch.ones(1, 2)), one("b", torch.ones(1, 3))]),
        ValueError,
        r"of one dtype and shape, got .* shape \(1, 2\) and .* shape \(1, 3\)",
    ),
    "a ragged table": (
        lambda: F.embedding_bag(bag(), entries()),
        DispatchError,
        "embedding_bag: expected ragged ids and a dense table",
    ),
    "dense ids in a ragged table": (
        lambda: F.embedding_bag(torch.tensor([[1, 2]]), entries()),
        DispatchError,
        "embedding_bag: expected ragged ids and a dense table",
    ),
    "ragged weights of dense ids": (
        lambda: F.embedding_bag(
            torch.tensor([[1, 2]]),
            TABLE,
            mode="sum",
            per_sample_weights=JaggedTensor.from_tensors([torch.ones(2)]),
        ),
        DispatchError,
        "embedding_bag: expected ragged ids",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_refused(name):
    call, error, text = WRONG[name]
    with pytest.raises(error, match=text):
        call()


def test_what_is_advised_works():
    kjt = KeyedJaggedTensor.from_jagged({"a": entries().transpose(1, 2).transpose(1, 2)})
    assert kjt.keys == ("a",)
    assert F.embedding_bag(bag(), TABLE, mode="sum").shape == (2, 3)


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


@pytest.mark.parametrize("name", WRITING)
def test_tables_that_a_lookup_writes_to(name):
    make, ids = WRITING[name]
    module = make()
    module(ids())
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    text = (
        r"embeddings with max_norm write to their table .* renormalise the table after the optimizer's step"
    )
    with pytest.raises(Exception, match=text):  # by way of Dynamo's own
        compiled(ids())
