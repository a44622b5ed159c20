"""The two collections as modules: tables, keys, state."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import desugar
from subclasses.keyed import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor
from tests.subclasses.keyed.batches import IDS, WAYS, batch


def test_tables_stay_modules():
    tables = {"a": nn.EmbeddingBag(IDS, 3), "b": nn.EmbeddingBag(IDS, 4)}
    module = EmbeddingBagCollection(tables)
    assert list(module.state_dict()) == ["tables.a.weight", "tables.b.weight"]
    assert module.tables["a"] is tables["a"]


@pytest.mark.slow
def test_one_table_for_two_keys():
    shared = nn.EmbeddingBag(IDS, 3, mode="sum")
    module = EmbeddingBagCollection({"a": shared, "b": shared})
    x = batch([1, 2, 0, 3])
    for run in (module, desugar.compile(module, backend="eager")):
        module.zero_grad()
        sum(run(x).values()).sum().backward()
        assert shared.weight.grad[:, 0].equal(torch.bincount(x.values, minlength=IDS).float())


@pytest.mark.sweep(6)
@pytest.mark.parametrize("way", [way for way in WAYS if way != "eager"])
@pytest.mark.parametrize("kind", [EmbeddingBagCollection, EmbeddingCollection])
def test_one_sparse_table_for_two_keys(kind, way):
    options = {"mode": "sum"} if kind is EmbeddingBagCollection else {}
    shared = kind.kind(IDS, 3, sparse=True, **options)
    module = kind({"a": shared, "b": shared})
    x = batch([1, 2, 0, 3])

    def loss(found):
        return sum(f.square().sum() for f in found.values())

    loss(module(x)).backward()
    expected, shared.weight.grad = shared.weight.grad.to_dense(), None
    WAYS[way](lambda x: loss(module(x)))(x).backward()
    assert shared.weight.grad.is_sparse
    torch.testing.assert_close(shared.weight.grad.to_dense(), expected)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("way", [way for way in WAYS if way != "eager"])
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


def test_a_batch_may_have_fewer_keys_in_another_order():
    module = EmbeddingBagCollection({k: nn.EmbeddingBag(IDS, 3) for k in "abc"})
    x = batch([1, 2, 0, 3], "cb")
    assert list(module(x)) == ["c", "b"]


@pytest.mark.slow
def test_training_in_a_compiled_step_is_that_of_eager_mode():
    def train(compile):
        torch.manual_seed(0)
        module = EmbeddingBagCollection({k: nn.EmbeddingBag(IDS, 3, mode="sum") for k in "ab"})
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        step = compile(lambda x: sum(((o - 1) ** 2).sum() for o in module(x).values()))
        losses = []
        for lengths in ([1, 2, 0, 3], [2, 2, 1, 1], [4, 4, 0, 0, 1, 2]):
            optimizer.zero_grad()
            loss = step(batch(lengths))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    assert train(lambda f: f) == pytest.approx(train(lambda f: desugar.compile(f, backend="eager")))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: EmbeddingBagCollection({"a": nn.Embedding(2, 2)}), "expected an nn.EmbeddingBag for 'a'"),
        (lambda: EmbeddingCollection({"a": nn.EmbeddingBag(2, 2)}), "expected an nn.Embedding for 'a'"),
        (lambda: EmbeddingCollection({"a.b": nn.Embedding(2, 2)}), "can name a module"),
        (lambda: EmbeddingCollection({"": nn.Embedding(2, 2)}), "can name a module"),
        (lambda: EmbeddingCollection({"training": nn.Embedding(2, 2)}), "can name a module"),
        (lambda: EmbeddingCollection({}), "at least one key"),
        (
            lambda: EmbeddingBagCollection({"a": nn.EmbeddingBag(2, 2)})(batch([1, 2])),
            "no table for b; it has a",
        ),
        (
            lambda: EmbeddingBagCollection({"a": nn.EmbeddingBag(2, 2)})(torch.ones(2)),
            "expected a KeyedJagged",
        ),
        (
            lambda: EmbeddingBagCollection({k: nn.EmbeddingBag(2, 2) for k in "ab"})(
                batch([1, 2], weighted=True)
            ),
            "weights go with mode='sum', and a, b pool otherwise",
        ),
        (
            lambda: EmbeddingCollection({"a": nn.Embedding(2, 2)})(
                KeyedJaggedTensor(["a"], torch.ones(2), torch.tensor([2]))
            ),
            r"expected ids, integers \[total\], got torch.float32\[2\]",
        ),
    ],
)
def test_refused(make, text):
    with pytest.raises((TypeError, ValueError, KeyError), match=text):
        make()
