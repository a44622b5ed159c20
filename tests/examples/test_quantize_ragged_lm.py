"""The quantized language model: a quarter of the bytes, nearly the same loss, and a failure where it is not."""

from __future__ import annotations

import pytest
import torch

import quantize_ragged_lm as example
from _language_model import LanguageModel, draw_batches, read_lines
from subclasses.int8 import weight_bytes
from tests.examples.command import check_exits, run_command


@pytest.mark.slow
def test_by_itself():
    result = run_command(example.main, "--quick", "--steps", "2")
    assert result.exit_code == 0, result.output
    assert all(name in result.stdout for name in example.CONFIGS)


@pytest.fixture
def model():
    return LanguageModel(dim=64, heads=2, layers=2, longest=48)


@pytest.mark.slow
def test_a_model_that_got_worse_fails(model, monkeypatch, capsys):
    monkeypatch.setattr(example, "WORST_LOSS", -0.5)
    monkeypatch.setattr(example, "ROUNDS", 1)
    batch = next(draw_batches(read_lines(48), 16, 0))
    check_exits(capsys, "worse", example.compare_quantized, model, batch, "eager")


def test_the_model_itself_stays_as_it_is(model):
    before = {name: p.clone() for name, p in model.named_parameters()}
    bytes_before = weight_bytes(model)
    for config in list(example.CONFIGS.values())[1:]:
        assert weight_bytes(example.quantized(model, config)) < 0.4 * bytes_before
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
