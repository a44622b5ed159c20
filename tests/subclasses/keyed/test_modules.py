"""The two collections as modules: tables, keys, state."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from subclasses.keyed import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor
from tests.subclasses.keyed.batches import COMPILED, IDS, WAYS, batch
from tests.tables import raising


def test_tables_stay_modules():
    tables = {"a": nn.EmbeddingBag(IDS, 3), "b": nn.EmbeddingBag(IDS, 4)}
    module = EmbeddingBagCollection(tables)
    assert list(module.state_dict()) == ["tables.a.weight", "tables.b.weight"]
    assert module.tables["a"] is tables["a"]


@pytest.mark.sweep(12)
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
    module = EmbeddingBagCollection({k: nn.EmbeddingBag(IDS, 3, mode="sum", sparse=True) for k in "ab"})
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
    module = EmbeddingBagCollection({n: nn.EmbeddingBag(IDS, 3, mode="sum") for n in names})
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
        torch.manual_seed(0)
        module = EmbeddingBagCollection({k: nn.EmbeddingBag(IDS, 3, mode="sum") for k in "ab"})
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
REFUSED = [
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
test_refused = raising([(call, (TypeError, ValueError, KeyError), text) for call, text in REFUSED])
