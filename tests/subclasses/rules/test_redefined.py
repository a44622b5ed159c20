"""A class statement that runs twice, as a cell of a notebook does: values of the first class are told of."""

from __future__ import annotations

import sys
import types

import pytest

CELL = """
import torch
from torch import Tensor
from subclasses import TensorSubclass, inner

class Scaled(TensorSubclass, fallback="materialize"):
    raw: Tensor = inner()

    def materialize(self):
        return self.raw * 2

@Scaled.implements(torch.ops.aten.mul)
def _(func, x, y):
    return func(*(t.materialize() if isinstance(t, Scaled) else t for t in (x, y)))
"""


def run_cell(module, text=CELL):
    exec(text, module.__dict__)  # noqa: S102 - the text above


@pytest.fixture
def notebook(monkeypatch):
    module = types.ModuleType("notebook")
    monkeypatch.setitem(sys.modules, "notebook", module)
    run_cell(module)
    return module


@pytest.mark.usefixtures("without_garbage_collection")
def test_a_value_of_an_earlier_definition(notebook):
    x = notebook.Scaled(notebook.torch.ones(2))
    assert (x * 3).tolist() == [6, 6]
    run_cell(notebook)
    with pytest.raises(RecursionError, match=r"`class Scaled` has run again .* make the value again"):
        _ = x * 3
    assert (notebook.Scaled(x.raw) * 3).tolist() == [6, 6]


@pytest.mark.usefixtures("without_garbage_collection")
def test_a_rule_that_calls_itself_is_told_so(notebook):
    run_cell(notebook, CELL.replace("t.materialize() if isinstance(t, Scaled) else t", "t"))
    with pytest.raises(RecursionError, match="calls itself without end"):
        _ = notebook.Scaled(notebook.torch.ones(2)) * 3
