"""The two towers: the example reads a file, training learns, and compiled training equals eager training."""

import math
import sys

import pytest
import torch

import recommend_imports as example
from tests.doors import by_desugar


@pytest.fixture(scope="module")
def data():
    return example.read_library(60)


def test_what_is_read_of_a_file(tmp_path):
    path = tmp_path / "a.py"
    path.write_text(
        "import os.path\nfrom json import dumps as write\nfrom . import near\nprint(os.sep, os.sep, write(x))"
    )
    found = example.read_file(path)
    assert found["names"] == {"print": 1, "x": 1}  # neither os nor write: the imports bind them
    assert found["attributes"] == {"sep": 2}
    assert found["module"] == {"os": 1, "json": 1}


def test_a_row_weighs_by_how_often():
    ids, weights = example.to_row({7: 1, 3: 8})
    assert ids == [7, 3] and weights[1] > weights[0]
    assert math.isclose(sum(w * w for w in weights), 1.0, rel_tol=1e-6)
    assert example.to_row({}) == ([], [])


def test_a_batch_has_a_row_for_each_pair(data):
    batch = example.make_batch(data, [2, 0], [5, 4])
    assert batch.keys == example.KEYS and batch.batch_size == 2
    assert batch["names"].to_tensors()[0].tolist() == data.files[2]["names"][0]
    assert [row.tolist() for row in batch["module"].to_tensors()] == [[5], [4]]


def test_compiled_it_is_the_same_training_by_one_program(data):
    compiled = by_desugar(example.loss_of)
    files = len(data.files) * 4 // 5
    model, losses, _ = example.train(data, files, 25, example.loss_of)
    again, others, _ = example.train(data, files, 25, compiled)
    assert losses[-1] < losses[0] - 0.3
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(others), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model.state_dict(), again.state_dict(), rtol=1e-2, atol=1e-3)
    assert len(compiled.programs) == 1


@pytest.mark.slow
def test_the_report(monkeypatch, capsys):
    monkeypatch.setattr(
        sys, "argv", ["recommend_imports.py", "--files", "50", "--steps", "5", "--backend", "eager"]
    )
    example.main()
    out = capsys.readouterr().out
    assert "eager: loss" in out and "compiled: loss" in out
    assert "programs: 1 for 5 batches of other lengths" in out
