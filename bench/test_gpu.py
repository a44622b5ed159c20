"""The GPU's measurements: refused without one, and run briefly where there is one."""

from __future__ import annotations

import pytest
import torch

from bench import gpu
from bench.gpu import main
from bench.layouts import HAS_TORCHAO


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
def test_without_a_gpu_nothing_is_written(tmp_path, capsys):
    assert main(["--out", str(tmp_path)]) == 2
    assert "expected a CUDA device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
def test_the_table_of_int8_is_whole(monkeypatch):
    """All but the recording, on the CPU: every kind at every size, beside bfloat16 and the limit."""
    monkeypatch.setattr(gpu, "CACHE", 2 * 64 * 64)
    monkeypatch.setattr(gpu, "_as_graph", lambda name, steps: lambda: [step() for step in steps])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    rows = gpu.measure_int8(3, sizes=(64, 128), batches=(1, 17), device="cpu")
    kinds = {row.name for row in rows}
    assert len(kinds) == 4 + 2 * HAS_TORCHAO and {gpu.PLAIN, gpu.LIMIT} < kinds
    assert len(rows) == 4 * len(kinds) == len({(row.group, row.name) for row in rows})
    assert all(row.ratios[f"/ {gpu.PLAIN}"] == 1 for row in rows if row.name == gpu.PLAIN)
    assert all(row.ratios["limit / this"] == 1 for row in rows if row.name == gpu.LIMIT)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", ["int8", "rows", "events"])
def test_with_a_gpu(tmp_path, name):
    assert main(["--only", name, "--rounds", "3", "--out", str(tmp_path)]) == 0
    assert (tmp_path / f"gpu-{name}.md").stat().st_size
