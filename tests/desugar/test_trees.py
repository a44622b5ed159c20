"""Results as optree sees them."""

from __future__ import annotations

import dataclasses
import types
from collections import namedtuple

import optree
import pytest
import torch

from desugar.trees import flatten, result_leaves
from tests.desugar.judge import by_pass

Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "result",
    [
        3,
        None,
        (1, [2, {"a": 3}]),
        Point(1, 2),
        torch.Size([2, 3]),
        {"s": (torch.Size([]), 4)},
        torch.ones(2).max(0),
    ],
    ids=str,
)
def test_round_trip(result):
    leaves, spec = flatten(result)
    again = spec.unflatten(leaves)
    assert type(again) is type(result) and str(again) == str(result)
    assert all(a is b for a, b in zip(result_leaves(result), leaves, strict=True))


@dataclasses.dataclass(frozen=True)
class Batch:
    tokens: torch.Tensor
    name: str
    mask: torch.Tensor | None = None


def test_dataclasses_that_hold_tensors_are_taken_apart():
    batch = Batch(torch.ones(2), "a")
    object.__setattr__(batch, "extra", 5)
    leaves, spec = flatten([batch])
    assert leaves == [batch.tokens, "a", None]
    (again,) = spec.unflatten([1, 2, 3])
    assert again == Batch(1, 2, 3) and again.extra == 5 and hash(spec) == hash(flatten([batch])[1])


def test_dataclasses_without_tensors_are_leaves():
    @dataclasses.dataclass
    class Config:
        width: int = 3

    config = Config()
    assert flatten(config)[0] == [config]


class Ours:
    def __init__(self, parts):
        self.parts = parts


torch.utils._pytree.register_pytree_node(
    Ours, lambda x: (x.parts, {"n": 1}), lambda parts, context: Ours(parts)
)


def test_classes_that_torchs_pytree_knows():
    leaves, spec = flatten(Ours([1, 2]))
    assert leaves == [1, 2] and spec.unflatten([3, 4]).parts == [3, 4]
    assert spec == flatten(Ours([5, 6]))[1] and hash(spec) == hash(flatten(Ours([5, 6]))[1])


def test_arguments_and_results_of_such_classes():
    compiled = by_pass(lambda batch: (Batch(batch.tokens * 2, batch.name), Ours([batch.tokens + 1])))
    for number in range(1, 4):
        batch, ours = compiled(Batch(torch.full((2,), float(number)), "a"))
        assert batch.tokens.tolist() == [2 * number] * 2 and batch.name == "a"
        assert ours.parts[0].tolist() == [number + 1] * 2
    assert len(compiled.programs) == 1
    assert compiled(Batch(torch.ones(2), "b"))[0].name == "b" and len(compiled.programs) == 2


def test_a_size_is_taken_apart_here_and_nowhere_else():
    assert result_leaves((torch.Size([2, 3]), None)) == [2, 3, None]
    assert optree.tree_leaves(torch.Size([2, 3])) == [torch.Size([2, 3])]


def test_a_namespace_is_taken_apart():
    compiled = by_pass(lambda d: types.SimpleNamespace(out=d.x * d.k))
    d = types.SimpleNamespace(x=torch.ones(2), k=2)
    assert compiled(d).out.tolist() == [2, 2]
    d.x = torch.full((2,), 3.0)
    assert compiled(d).out.tolist() == [6, 6] and len(compiled.programs) == 1
    d.k = 5
    assert compiled(d).out.tolist() == [15, 15]
