"""`python -m desugar package show` and `call`."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import desugar
from desugar.cli.commands import app
from desugar.packages.loading import recompile
from tests.desugar.packages.test_inference import Block, rows


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr(recompile, "BACKEND", "eager")

    def run(*arguments):
        made = CliRunner().invoke(app, ["package", *map(str, arguments)])
        return made.exit_code, made.output

    return run


def test_show_and_call(run, tmp_path):
    model, place = Block(), tmp_path / "rows.pt2"
    digest = desugar.save(place, model, desugar.call(rows(3, 5, 2)), native=False)
    code, said = run("show", place)
    assert code == 0, said
    for words in (
        "a package for inference",
        f"sha256    {digest}",
        f"torch {torch.__version__}",
        "plain graphs alone",
        "JaggedTensor(values: float32[n0, 8], offsets: int64[(1 + n1)], max_length: n2)",
        "first.weight: float32[16, 8], requires grad, parameter",
        "(x, scale=1.0, *, offset=None)",
        "weights   6 tensors",
    ):
        assert words in said

    x = rows(1, 4)
    inputs, outputs = tmp_path / "inputs.safetensors", tmp_path / "outputs.safetensors"
    save_file({"x.values": x.values, "x.offsets": x.offsets}, inputs, metadata={"x.max_length": "4"})
    code, said = run("call", place, inputs, "--no-native", "-o", outputs)
    assert code == 0, said
    with torch.no_grad():
        torch.testing.assert_close(load_file(outputs)["result.values"], model(x).values)
    code, said = run("call", place, inputs, "--no-native")
    assert code == 0 and "result.values float32[5, 8]" in said


def test_mistakes(run, tmp_path):
    place, inputs = tmp_path / "sum.pt2", tmp_path / "inputs.safetensors"
    desugar.save(place, lambda x, n: x * n, desugar.call(torch.ones(3), 2), native=False)
    save_file({"y": torch.ones(3)}, inputs)
    for arguments, words in [
        (("show", tmp_path / "none.pt2"), "there is no file"),
        (("call", place, inputs), "holds no machine code"),
        (("call", place, inputs, "--no-native"), "expected the tensors x, got y"),
        (("call", place, place, "--no-native"), "cannot be read as safetensors"),
        (("call", place, inputs, "--no-native", "--class", "no.module:Name"), "expected MODULE:CLASS"),
    ]:
        code, said = run(*arguments)
        assert code == 2 and words in " ".join(said.replace("│", " ").split()), said
    save_file({"x": torch.ones(4)}, inputs)
    code, said = run("call", place, inputs, "--no-native")
    assert code == 2 and "expected 3, got 4" in said
