"""The language model that generates with buckets, is quantized and goes into a package; a failure where it is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import generate_ragged_lm
import package_ragged_lm
import quantize_ragged_lm
from _language_model import LanguageModel, draw_batches, read_lines
from subclasses.int8 import weight_bytes
from subclasses.ragged import PaddedTensor
from tests.examples.command import check_exits, run_command

SCRIPTS: dict[str, tuple[Any, str, list[str]]] = {
    "generate": (generate_ragged_lm, "2", ["32 prompt lengths are served by 4 programs", "yes"]),
    "quantize": (quantize_ragged_lm, "2", [*quantize_ragged_lm.CONFIGS]),
    "package": (package_ragged_lm, "5", ["without the model's source"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_by_itself(name):
    example, steps, words = SCRIPTS[name]
    result = run_command(example.main, "--quick", "--steps", steps)
    assert result.exit_code == 0, result.output
    assert all(part in result.stdout for part in words)
    assert name != "generate" or (result.stdout.count("yes") == 4 and "NO" not in result.stdout)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return LanguageModel(dim=64, heads=2, layers=2, longest=48)


# ---- generating ------------------------------------------------------------------------------------------------


def shifted(x):
    return [row + 1 for row in x.padded]


def without_options(compile_one):
    return lambda fn, **options: compile_one(fn, backend="eager")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [
        (PaddedTensor, "to_tensors", shifted),
        (generate_ragged_lm.desugar, "compile", without_options(generate_ragged_lm.desugar.compile)),
    ],
    ids=["a row that is not its own", "too many programs"],
)
def test_what_fails(owner, name, wrong, model, monkeypatch, capsys):
    monkeypatch.setattr(owner, name, wrong)
    check_exits(capsys, "went wrong", generate_ragged_lm.generate_by_bucket, model, "eager")


def test_prompts_are_of_all_lengths(model):
    assert len(generate_ragged_lm.PROMPT) >= generate_ragged_lm.LONGEST
    prompts = [torch.tensor(list(generate_ragged_lm.PROMPT[:n])) for n in (3, 1)]
    with torch.no_grad():
        together = generate_ragged_lm.continue_batch(lambda t: model.logits(t)[:, -1].argmax(-1), prompts)
    assert [len(row) for row in together] == [33, 31]
    torch.testing.assert_close([row[: len(p)] for row, p in zip(together, prompts, strict=True)], prompts)


# ---- quantized -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_model_that_got_worse_fails(model, monkeypatch, capsys):
    monkeypatch.setattr(quantize_ragged_lm, "WORST_LOSS", -0.5)
    monkeypatch.setattr(quantize_ragged_lm, "ROUNDS", 1)
    batch = next(draw_batches(read_lines(48), 16, 0))
    check_exits(capsys, "worse", quantize_ragged_lm.compare_quantized, model, batch, "eager")


def test_the_model_itself_stays_as_it_is(model):
    before = {name: p.clone() for name, p in model.named_parameters()}
    for config in list(quantize_ragged_lm.CONFIGS.values())[1:]:
        assert weight_bytes(quantize_ragged_lm.quantized(model, config)) < 0.4 * weight_bytes(model)
    torch.testing.assert_close(dict(model.named_parameters()), before, rtol=0, atol=0)


# ---- packaged --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_package_that_computes_something_else_fails(monkeypatch):
    wrong = {"rows": [], "losses": [0.0] * 4, "seconds": 0.0, "has": []}
    monkeypatch.setattr(package_ragged_lm, "save_packages", lambda *_: None)
    monkeypatch.setattr(package_ragged_lm, "run_client", lambda *_: wrong)
    made = run_command(package_ragged_lm.main, "--quick", "--steps", "1")
    assert made.exit_code != 0 and "The packages went wrong" in made.output
