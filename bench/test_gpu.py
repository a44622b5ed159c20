"""The GPU's measurements: refused without one, and run briefly where there is one."""

from __future__ import annotations

import pytest
import torch

from bench.gpu import main


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
def test_without_a_gpu_nothing_is_written(tmp_path, capsys):
    assert main(["--out", str(tmp_path)]) == 2
    assert "expected a CUDA device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", ["int8", "rows", "events"])
def test_with_a_gpu(tmp_path, name):
    assert main(["--only", name, "--rounds", "3", "--out", str(tmp_path)]) == 0
    assert (tmp_path / f"gpu-{name}.md").stat().st_size
