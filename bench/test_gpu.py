"""Tests the GPU benchmarks: they are rejected without a GPU, and run briefly with one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from bench import gpu_calls, gpu_decode, gpu_int8, gpu_rows
from bench.gpu import MEASURES, main
from bench.layouts import HAS_TORCHAO

on_the_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")


@on_the_cpu
def test_without_a_gpu_nothing_is_written(tmp_path, capsys):
    assert main(["--out", str(tmp_path)]) == 2
    assert "expected a CUDA device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.fixture
def no_waiting(monkeypatch):
    """Replaces the synchronization with the GPU by nothing."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


@pytest.mark.slow
@on_the_cpu
def test_the_table_of_int8_is_whole(monkeypatch, no_waiting):
    """Everything except the recording, on the CPU: every kind at every size has ratios to bfloat16 and the limit."""
    monkeypatch.setattr(gpu_int8, "CACHE", 2 * 64 * 64)
    monkeypatch.setattr(gpu_int8, "_as_graph", lambda name, steps: lambda: [step() for step in steps])
    rows = gpu_int8.measure_int8(3, sizes=(64, 128), batches=(1, 17), device="cpu")
    kinds = {row.name for row in rows}
    assert len(kinds) == 4 + 2 * HAS_TORCHAO and {gpu_int8.PLAIN, gpu_int8.LIMIT} < kinds
    assert len(rows) == 4 * len(kinds) == len({(row.group, row.name) for row in rows})
    assert all(row.ratios[f"/ {gpu_int8.PLAIN}"] == 1 for row in rows if row.name == gpu_int8.PLAIN)
    assert all(row.ratios["limit / this"] == 1 for row in rows if row.name == gpu_int8.LIMIT)


# ---------------------------------------------------------------------------------------------------------
# decode
# ---------------------------------------------------------------------------------------------------------

SERVING = gpu_decode.Serving(dim=16, heads=2, layers=1, longest=24, bucket=8, stride=3, dtype=torch.float64)


@on_the_cpu
@pytest.mark.parametrize("batch", [1, 3])
@torch.no_grad()
def test_every_way_to_decode_gives_the_same_bytes(batch):
    model, requests = SERVING.make_model("cpu"), SERVING.make_requests(batch, "cpu")
    assert [len(rows[0]) for rows in requests] == [24, 21, 18, 15, 12, 9, 6, 3]
    expected = [torch.stack([model.logits(row[None])[0, -1].argmax() for row in rows]) for rows in requests]
    subjects = gpu_decode.make_subjects(model, requests, SERVING.bucket)
    for name, subject in subjects.items():
        fn = gpu_decode.next_byte if "PaddedTensor" in name else gpu_decode.next_byte_by_hand
        found = [fn(model, *(x for x in request if x is not model)) for request in subject.requests]
        torch.testing.assert_close(found, expected, msg=name)
    widths = {request[0].shape[1] for request in subjects[gpu_decode.BUCKETS].requests}
    assert widths == {request[1].shape[1] for request in subjects[gpu_decode.LIMIT].requests} == {8, 16, 24}
    assert len(widths) == SERVING.num_buckets


@pytest.mark.slow
@on_the_cpu
def test_the_table_of_decoding_is_whole(no_waiting):
    """Everything except the graphs, on the CPU: a program per bucket, and one dynamic program for all lengths."""
    rows = gpu_decode.measure_decode(3, SERVING, batches=(2,), device="cpu")
    assert len(rows) == 12 == len({(row.group, row.name) for row in rows})
    times, programs, graphs = rows[:4], rows[4:8], rows[8:]
    assert times[0].name == gpu_decode.DYNAMIC and times[-1].name == gpu_decode.LIMIT
    assert times[0].ratios[f"{gpu_decode.DYNAMIC} / this"] == times[-1].ratios["limit / this"] == 1
    assert [row.timing.median for row in programs] == [1, 3, 3, 3]
    assert [row.timing.median for row in graphs] == [0, 0, 0, 0]


# ---------------------------------------------------------------------------------------------------------
# rows, and the model
# ---------------------------------------------------------------------------------------------------------

SCALE = gpu_rows.Scale(dim=16, heads=2, layers=1, width=12, batch=5, dtype=torch.float32)
attend = F.scaled_dot_product_attention


@pytest.mark.parametrize("fill", gpu_rows.FILLS)
def test_lengths_fill_as_much_as_they_are_to(fill):
    lengths = gpu_rows.uneven_lengths(fill, 512, 32)
    assert len(lengths) == 32 and max(lengths) == 512 and min(lengths) >= 1
    assert sum(lengths) / (32 * 512) == pytest.approx(fill, abs=0.03)


def attend_row_by_row(q, k, v, is_causal):
    """Causal attention of nested tensors, which `torch.nested` supports on a GPU only."""
    if not q.is_nested:
        return attend(q, k, v, is_causal=is_causal)
    parts = zip(*(x.transpose(1, 2).unbind() for x in (q, k, v)), strict=True)
    rows = [attend(*(p.transpose(0, 1) for p in row), is_causal=is_causal).transpose(0, 1) for row in parts]
    offsets = q.transpose(1, 2).offsets()
    return torch.nested.nested_tensor_from_jagged(torch.cat(rows), offsets).transpose(1, 2)


def test_every_layout_gives_the_same_loss(monkeypatch):
    calls, ways = [], {}
    for name, (kind, layout, _) in gpu_rows.WAYS.items():
        ways[name] = kind, layout, lambda model: model
    monkeypatch.setattr(gpu_rows, "WAYS", ways)
    for name, (model, loss_of) in gpu_rows.make_losses(SCALE, [5, 3, 12], "cpu").items():
        with monkeypatch.context() as patched:
            if name == gpu_rows.NESTED:
                patched.setattr(F, "scaled_dot_product_attention", attend_row_by_row)
            loss = loss_of()
        loss.backward()
        calls.append((model, loss))
    (first, expected), *others = calls
    assert len(others) == 2
    for model, loss in others:
        torch.testing.assert_close(loss, expected)
        for (name, p), q in zip(model.named_parameters(), first.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, msg=name)


@pytest.mark.slow
@on_the_cpu
def test_the_table_of_rows_is_whole(monkeypatch, no_waiting):
    monkeypatch.setattr(gpu_rows, "FILLS", (0.5,))
    rows = {row.name: row for row in gpu_rows.measure_rows(3, width=12, dim=16, batch=5, device="cpu")}
    assert rows.keys() - {gpu_rows.NESTED} == {gpu_rows.DENSE, gpu_rows.JAGGED, gpu_rows.LIMIT}
    assert rows[gpu_rows.LIMIT].ratios["/ (dense * fill)"] == pytest.approx(1.15)


def test_a_failure_of_our_own_is_no_missing_figure(capsys):
    def fail():
        raise RuntimeError("no kernel\nfor this")

    calls = {}
    gpu_rows._add_call(calls, gpu_rows.NESTED, fail)
    assert capsys.readouterr().err == f"no figure for {gpu_rows.NESTED}: no kernel\n"
    with pytest.raises(RuntimeError, match="no kernel"):
        gpu_rows._add_call(calls, gpu_rows.JAGGED, fail)
    assert not calls


@pytest.mark.slow
@on_the_cpu
def test_the_table_of_the_model_is_whole(monkeypatch, no_waiting, capsys):
    """On the CPU, where `torch.nested` has no causal attention."""
    monkeypatch.setattr(gpu_rows, "FILLS", (0.5,))
    rows = {row.name: row for row in gpu_rows.measure_model(3, SCALE, device="cpu")}
    assert list(rows) == [gpu_rows.DENSE, gpu_rows.JAGGED, gpu_rows.LIMIT]
    assert f"no figure for {gpu_rows.NESTED}" in capsys.readouterr().err
    fill = sum(gpu_rows.uneven_lengths(0.5, SCALE.width, SCALE.batch)) / (SCALE.width * SCALE.batch)
    assert rows[gpu_rows.LIMIT].ratios["/ (dense * fill)"] == pytest.approx(1.15)
    assert rows[gpu_rows.LIMIT].ratios[f"/ {gpu_rows.DENSE}"] == pytest.approx(1.15 * fill)
    assert rows[gpu_rows.DENSE].ratios["/ (dense * fill)"] == pytest.approx(1 / fill)


# ---------------------------------------------------------------------------------------------------------
# calls
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@on_the_cpu
def test_the_table_of_overhead_is_whole(no_waiting):
    rows = gpu_calls.measure_overhead(3, counts=(1, 2), device="cpu")
    assert len(rows) == 2 * 2 * 6 == len({(row.group, row.name) for row in rows})
    for row in rows:
        assert (row.ratios["/ same way, plain"] == 1) == row.name.startswith("plain")


@pytest.mark.slow
@on_the_cpu
@pytest.mark.filterwarnings("ignore:CUDA is not available, disabling CUDA profiling")
def test_what_is_called_in_a_step_is_counted(monkeypatch, no_waiting):
    """Counts functions that a step on the CPU calls, in place of CUDA's events."""
    monkeypatch.setattr(gpu_calls, "EVENTS", ("Backward", "BackwardBackward"))
    rows = gpu_calls.measure_events(3, count=4, device="cpu")
    counts = {(row.group, row.name): row.timing.median for row in rows if row.unit == gpu_calls.CALLS}
    assert set(counts.values()) == {1}
    assert len(rows) == 2 + 2 * 2 == 2 + len(counts)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", MEASURES)
def test_with_a_gpu(tmp_path, name):
    assert main(["--only", name, "--brief", "--rounds", "3", "--out", str(tmp_path)]) == 0
    assert (tmp_path / f"gpu-{name}.md").stat().st_size
