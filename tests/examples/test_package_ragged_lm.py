"""A model is saved, and goes on in a process that does not have it: the same text, the same losses."""

from __future__ import annotations

import pytest

import package_ragged_lm as example
from tests.examples.command import run_command


@pytest.mark.slow
def test_a_process_without_the_model_says_and_learns_the_same():
    made = run_command(example.main, "--quick", "--steps", "5")
    assert made.exit_code == 0, made.output
    assert "without the model's source" in made.output


@pytest.mark.slow
def test_a_difference_is_a_failure(monkeypatch):
    """The script fails if the second process computes something else."""
    wrong = {"rows": [], "losses": [0.0] * 4, "seconds": 0.0, "has": []}
    monkeypatch.setattr(example, "save_packages", lambda *_: None)
    monkeypatch.setattr(example, "run_client", lambda *_: wrong)
    made = run_command(example.main, "--quick", "--steps", "1")
    assert made.exit_code != 0
    assert "The packages went wrong" in made.output
