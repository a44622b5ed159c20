"""Generating with buckets: four programs, what row by row gives, and a failure where it is not."""

from __future__ import annotations

import pytest
import torch

import generate_ragged_lm as example
from _language_model import LanguageModel
from subclasses.ragged import PaddedTensor
from tests.examples.command import check_exits, run_command


@pytest.fixture
def model():
    torch.manual_seed(0)
    return LanguageModel(dim=16, heads=2, layers=1, longest=48)


@pytest.mark.slow
def test_by_itself():
    result = run_command(example.main, "--quick", "--steps", "2")
    assert result.exit_code == 0, result.output
    assert "32 prompt lengths are served by 4 programs" in result.stdout
    assert result.stdout.count("yes") == 4 and "NO" not in result.stdout


@pytest.mark.slow
def test_a_row_that_is_not_its_own_fails(model, monkeypatch, capsys):
    monkeypatch.setattr(PaddedTensor, "to_tensors", lambda x: [row + 1 for row in x.padded])
    check_exits(capsys, "went wrong", example.generate_by_bucket, model, "eager")


@pytest.mark.slow
def test_too_many_programs_fail(model, monkeypatch, capsys):
    compile_one = example.desugar.compile
    monkeypatch.setattr(example.desugar, "compile", lambda fn, **options: compile_one(fn, backend="eager"))
    check_exits(capsys, "went wrong", example.generate_by_bucket, model, "eager")


def test_prompts_are_of_all_lengths(model):
    assert len(example.PROMPT) >= example.LONGEST
    prompts = [torch.tensor(list(example.PROMPT[:n])) for n in (3, 1)]
    with torch.no_grad():
        together = example.continue_batch(lambda t: model.logits(t)[:, -1].argmax(-1), prompts)
    assert [len(row) for row in together] == [33, 31]
    for row, prompt in zip(together, prompts, strict=True):
        torch.testing.assert_close(row[: len(prompt)], prompt)
