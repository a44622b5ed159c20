"""Where a program finds its inputs."""

from __future__ import annotations

import pytest
import torch

from desugar.flatten.origins import Origin
from tests.desugar.classes import Labeled

TENSOR = Origin(1, ("pair", "a"))


@pytest.mark.parametrize(
    ("origin", "text"),
    [
        (TENSOR, "x.pair.a"),
        (TENSOR.integer("size", 0), "x.pair.a.size(0)"),
        (TENSOR.integer("stride", 2), "x.pair.a.stride(2)"),
        (TENSOR.integer("storage_offset"), "x.pair.a.storage_offset()"),
        (Origin(1, ("pair",)).field("n").integer(), "x.pair.n"),
        (Origin(1).integer(), "x"),
    ],
)
def test_the_expression_that_reads_it(origin, text):
    assert origin.expression("x", *origin.path) == text
    assert origin.is_symbol == (origin is not TENSOR)
    assert origin.name == "a1" + "".join(f".{name}" for name in origin.path)


def test_what_is_there():
    x = Labeled(torch.ones(4), count=6)
    (name, *_), _ = x.__tensor_flatten__()
    assert Origin(1).field(name).find([None, x]) is getattr(x, name)
    assert Origin(1).field("count").integer().find([None, x]) == 6
