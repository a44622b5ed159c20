"""The tables of predictions are whole; the bytes behind them are those that one counts by hand."""

import pytest
import torch

from bench import gpu_predicted, predictions
from tests.bench.prediction.needs import MISSING, cuda_build


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
@pytest.mark.parametrize(
    ("name", "entries"),
    [
        ("x + y", 2 + 2),  # of the size of x: two are read, one is written, which the CPU reads first
        ("out += x", 2 + 1),
        ("(x * w + b).relu()", 1 + 2),
        ("x.amax(-1)", 1),
        ("half of the rows of x, * 2", 0.5 + 1),
    ],
)
def test_bytes_on_the_cpu_are_those_counted_by_hand(name, entries):
    fn, args = predictions.make_subjects(64)[name]
    _, counted = predictions.compile_and_count(fn, args)
    assert counted == pytest.approx(entries * 4 * 64 * 1024, rel=0.02)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
def test_the_table_is_whole():
    rows = predictions.measure_predictions(3, rows=256, cached=8)
    assert [row.name for row in rows[-2:]] == ["median", "largest"]
    assert len(rows) == 1 + len(predictions.make_subjects(1)) + 2
    assert all(row.ratios["predicted / measured"] > 0 for row in rows[1:-2])


@pytest.mark.skipif(not MISSING, reason="for machines without PyTorch's CUDA build")
def test_without_the_cuda_build_nothing_is_written(tmp_path, capsys):
    assert gpu_predicted.main(["--out", str(tmp_path / "a.json")]) == 2
    assert "pip install torch==" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@cuda_build
def test_int8_is_predicted_to_reach_its_goals_at_decode():
    rows = [*gpu_predicted.predict_int8("h100", sizes=(4096,))]
    ours = [row for row in rows if row.name.startswith("int8 weight-only")]
    assert len(rows) == 6 and len(ours) == 2
    for row in ours:
        assert row.ratios["bf16 / this"] >= 1.7 and row.ratios["of the bandwidth"] >= 0.8
        assert row.unit == gpu_predicted.UNIT and "predicted" in row.unit


@pytest.mark.slow
@cuda_build
def test_a_jagged_step_is_predicted_to_cost_its_fill():
    from bench.gpu.stages.model import JAGGED, Scale

    scale = Scale(dim=256, heads=4, layers=1, width=256, batch=16, dtype=torch.bfloat16)
    rows = [row for row in gpu_predicted.predict_model("h100", scale) if row.name == JAGGED]
    assert len(rows) == 3
    # Small enough that launches count: the bytes are what the fill is about.
    moved = [row.ratios["MB"] for row in rows]
    assert moved == sorted(moved)


@cuda_build
def test_wrappers_are_predicted_to_add_nothing():
    plain, wrapped = gpu_predicted.predict_wrappers("h100", count=2)
    assert plain.timing == wrapped.timing and plain.ratios == wrapped.ratios
    assert wrapped.ratios["waits and copies"] == 0
