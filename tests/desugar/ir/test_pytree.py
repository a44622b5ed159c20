"""What graphs return as optree sees it, and containers of every class around compiled functions."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict, namedtuple

import pytest
import torch

from tests.desugar.classes import Pair, TwoTensor, make
from tests.desugar.judge import assert_same_values, by_pass
from tests.desugar.refusing import BOTH_DOORS

Point = namedtuple("Point", "x y")


# ---- arguments and results -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Batch:
    tokens: torch.Tensor
    name: str
    mask: torch.Tensor | None = None


class Ours:
    """Known to PyTorch's own pytree."""

    def __init__(self, parts):
        self.parts = parts


torch.utils._pytree.register_pytree_node(
    Ours, lambda x: (x.parts, {"n": 1}), lambda parts, context: Ours(parts)
)


@pytest.mark.parametrize("cls", [torch.Tensor, TwoTensor, Pair])
def test_dataclasses_and_classes_of_pytorchs_pytree(cls):
    compiled = by_pass(lambda batch: (Batch(batch.tokens * 2, batch.name), Ours([batch.tokens + 1])))
    for name in "aab":
        tokens = make(cls, 2, 3)
        batch, ours = compiled(Batch(tokens, name))
        assert type(batch) is Batch and type(ours) is Ours and (batch.name, batch.mask) == (name, None)
        assert_same_values([batch.tokens, *ours.parts], [tokens * 2, tokens + 1])
    assert len(compiled.programs) == 1


def test_attributes_beside_the_fields_of_a_dataclass():
    compiled, batch = by_pass(lambda batch: batch.tokens * batch.extra), Batch(torch.ones(2), "a")
    for extra in (5, 6):
        object.__setattr__(batch, "extra", extra)
        assert compiled(batch).tolist() == [extra] * 2


CALLS = {
    "nothing": ((), {}),
    "by position": ((1, None, "s"), {}),
    "by name": ((2,), {"b": 2, "a": 3}),
    "nested": (([1, (2, 3)], {"k": [4], 5: ()}), {"z": {"y": {"x": 6}}}),
    "empty": (((), [], {}), {}),
    "named tuple": ((Point(1, 2),), {}),
    "ordered": ((OrderedDict(b=1, a=2),), {}),
    "with a default": ((defaultdict(list, b=1, a=2),), {}),
    "key that is a tuple": (({(1, 2): 3},), {}),
    "size": ((torch.Size([2, 3]), (torch.Size([]), 4)), {}),
}


@BOTH_DOORS
def test_structures_come_and_go_as_they_are(door):
    fn = lambda x, *args, **kwargs: (args, kwargs, x * 2, {"y": [x + 1, None]})  # noqa: E731
    compiled, x = door(fn), make(TwoTensor, 2)
    for args, kwargs in [*CALLS.values()] * 2:
        got, want = compiled(x, *args, **kwargs), fn(x, *args, **kwargs)
        assert repr(got[:2]) == repr(want[:2])
        assert list(map(type, got[0])) == list(map(type, want[0]))
        assert_same_values([got[2], got[3]["y"][0]], [want[2], want[3]["y"][0]])
