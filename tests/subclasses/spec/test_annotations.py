"""Annotations as newer releases of Python write and evaluate them."""

import importlib
import sys

import pytest
import torch
from torch import Tensor

from subclasses import SpecError, TensorSubclass, inner, static
from subclasses.spec.annotations import annotations_of

# A class with type parameters, and `type` statements.
PYTHON_312 = """
{future}
from typing import Literal
from torch import Tensor
from subclasses import TensorSubclass, inner, static

type Data = Tensor
type Missing = Undefined


def make():
    Mode = Literal["fast", "exact"]

    class Inside(TensorSubclass, fallback="materialize"):
        data_: Data = inner()

        def materialize(self) -> Tensor:
            return self.data_

    class Boxed[T: int](TensorSubclass, fallback="materialize"):
        inside: Inside = inner()
        scale: Data | None = inner(optional=True)
        mode: Mode = static(default="fast")
        count: T = static(default=3)

        def materialize(self) -> Tensor:
            return self.inside.data_ * self.count

    return Inside, Boxed


def make_wrong():
    class Wrong[T](TensorSubclass):
        data_: Missing = inner()
"""


@pytest.mark.skipif(sys.version_info < (3, 12), reason="its syntax")
@pytest.mark.parametrize("future", ["", "from __future__ import annotations"])
def test_type_parameters_and_aliases(future, tmp_path, monkeypatch):
    (tmp_path / "written_for_312.py").write_text(PYTHON_312.format(future=future))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "written_for_312", raising=False)
    module = importlib.import_module("written_for_312")
    inside, boxed = module.make()
    spec = boxed.__spec__
    assert [(f.name, f.subclass, f.optional) for f in spec.inners] == [
        ("inside", inside, False),
        ("scale", Tensor, True),
    ]
    assert spec.statics[0].choices == ("fast", "exact")
    x = boxed[int](inside(torch.ones(2)), None)
    assert type(x) is boxed and torch.equal(x + 1, torch.full((2,), 4.0))
    with pytest.raises(
        SpecError, match=r"Wrong.data_: cannot resolve the annotation .*'Undefined' is not defined"
    ):
        module.make_wrong()


def test_annotations_without_strings():
    later = "Later"

    class Pair(TensorSubclass, fallback="map"):
        left: Tensor = inner()
        right: "Tensor | None" = inner(optional=True)
        label: str = static(default=later)

    assert annotations_of(Pair) == {"left": Tensor, "right": "Tensor | None", "label": str}
    assert [f.optional for f in Pair.__spec__.inners] == [False, True]


@pytest.mark.skipif(sys.version_info < (3, 14), reason="annotations are evaluated at the class statement")
def test_an_annotation_that_names_the_class_itself():
    class Node(TensorSubclass, fallback="error"):
        data_: Tensor = inner()
        rest: Node | None = inner(optional=True)  # noqa: F821

    assert [(f.name, f.subclass) for f in Node.__spec__.inners] == [("data_", Tensor), ("rest", Node)]
