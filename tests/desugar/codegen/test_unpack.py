"""The text that takes arguments apart reads attributes, and checks nothing."""

from __future__ import annotations

import pytest
import torch

from desugar.codegen.unpack import emit_unpacking
from desugar.flatten.fakes import Fakes
from desugar.flatten.inputs import Inputs
from subclasses.codegen.emitter import Emitter
from tests.desugar.classes import EVERY, Nested, Pair, make


def unpacked(*leaves, is_dynamic=False):
    inputs, out = Inputs(Fakes(), is_dynamic), Emitter()
    inputs.add_arguments(list(leaves))
    parameters = [out.fresh_name(f"a{n}") for n in range(len(leaves))]
    return emit_unpacking(out, inputs, parameters), out.source, inputs


@pytest.mark.sweep(2)
@pytest.mark.parametrize("cls", EVERY)
@pytest.mark.parametrize("is_dynamic", [False, True])
def test_every_input_has_a_name(cls, is_dynamic):
    names, text, inputs = unpacked(make(cls, 3, 6), torch.ones(2), is_dynamic=is_dynamic)
    assert sorted(names.slots) == list(range(len(inputs.flat.items)))
    assert "if " not in text and "isinstance" not in text


def test_the_text():
    names, text, _ = unpacked(make(Nested, 2), 3)
    assert text.splitlines() == [
        "a0_pair = a0.pair",
        "a0_pair_a = a0_pair.a",
        "a0_pair_b = a0_pair.b",
        "a0_flat = a0.flat",
    ]
    assert names.leaves == ["a0", "a1"]


def test_sizes_are_read_from_where_they_are():
    _, text, _ = unpacked(make(Pair, 4, 3), is_dynamic=True)
    assert "= a0.a.size(0)" in text and "= a0.b.size(1)" in text
