"""The GPU benchmarks, run once on a device that is not there: everything up to the launch of each kernel.

What cannot run without a device is replaced, and nothing else: clocks, CUDA graphs, the engine behind `backward`, and
the conversion of a module's parameters, which PyTorch refuses for fake tensors.
"""

import inspect
import re

import pytest
import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from bench import gpu, gpu_calls, gpu_decode, gpu_int8, gpu_predicted, gpu_rows, gpu_timing
from bench.report import Row
from bench.timing import Timing
from desugar import _torch
from desugar.prediction import fake_device
from tests.desugar.prediction.needs import cuda_build

SERVING = gpu_decode.Serving(dim=64, heads=2, layers=1, longest=64, bucket=32, stride=16)
SCALE = gpu_rows.Scale(dim=64, heads=2, layers=1, width=32, batch=4)
PREDICTED = gpu_predicted.predicted_for("H100", gpu.RESULTS / "gpu-predicted.json")
GROUPS = {
    "int8": "int8, ",
    "decode": "decode, ",
    "model": "model, ",
    "events": "training, N = ",
    "rows": "training, #",
    "overhead": "inference",
}
SMALL = {
    "int8": lambda: gpu_int8.measure_int8(1, sizes=(64,), batches=(1, 16)),
    "decode": lambda: gpu_decode.measure_decode(1, SERVING, batches=(2,)),
    "rows": lambda: gpu_rows.measure_rows(1, width=32, dim=64, batch=4),
    "model": lambda: gpu_rows.measure_model(1, SCALE),
    "overhead": lambda: gpu_calls.measure_overhead(1, counts=(1,)),
    "events": lambda: gpu_calls.measure_events(1, count=2),
}


def call_each_once(calls, **options):
    for call in calls.values():
        call()
    return dict.fromkeys(calls, Timing(1.0, 1.0, 1.0))


def convert(module, device, dtype):
    for part in module.modules():
        for name, parameter in part._parameters.items():
            part._parameters[name] = nn.Parameter(torch.empty_like(parameter, device=device, dtype=dtype))
    return module


def backward(loss):
    """Runs the engine in Python, to all leaves."""
    leaves, stack, seen = [], [loss.grad_fn], set()
    while stack:
        node = stack.pop()
        if node in seen or node is None:
            continue
        seen.add(node)
        leaves += [node.variable] if hasattr(node, "variable") else []
        stack += [following for following, _ in node.next_functions]
    for leaf, gradient in zip(leaves, torch.autograd.grad(loss, leaves), strict=True):
        leaf.grad = gradient


@pytest.fixture
def recorded():
    """Counts the CUDA graphs that would be recorded."""
    return []


@pytest.fixture
def without_a_device(monkeypatch, recorded):
    def record(graph, inputs, *args, **kwargs):
        recorded.append(graph)
        return graph, graph(inputs)

    monkeypatch.setattr("torch._inductor.cudagraph_trees.cudagraphify", record)
    for module in (gpu_timing, gpu_int8, gpu_decode, gpu_rows, gpu_calls):
        if hasattr(module, "time_side_by_side"):
            monkeypatch.setattr(module, "time_side_by_side", call_each_once)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(gpu_int8, "CACHE", 64 * 64)
    monkeypatch.setattr(gpu_int8, "_as_graph", lambda name, steps: lambda: [step() for step in steps])
    monkeypatch.setattr(gpu_decode, "count_graphs", lambda: len(recorded))
    monkeypatch.setattr(gpu_rows, "FILLS", (0.5,))
    lengths = gpu_rows.uneven_lengths(0.5, 32, 4)
    monkeypatch.setattr(gpu_rows, "uneven_lengths", lambda *args: lengths)  # fake tensors have no data
    monkeypatch.setattr(nn.Module, "to", convert)
    monkeypatch.setattr(nn.Module, "load_state_dict", lambda module, values: None)
    monkeypatch.setattr(torch.Tensor, "backward", backward)


@pytest.mark.sweep(4)
@cuda_build
@pytest.mark.parametrize("name", gpu.MEASURES)
@pytest.mark.filterwarnings("ignore")
def test_a_benchmark_runs_up_to_its_launches(name, without_a_device, capsys):
    _torch.shared_nested_tensor()  # PyTorch makes it once, of real tensors
    with fake_device("h100") as fake, fake.mode:
        fake.mode.shape_env = ShapeEnv()  # for sizes of torch.nested
        rows = SMALL[name]()
        launched = [call for call in fake.recorder.calls if call.kind in ("triton", "library")]
    assert rows and len({(row.group, row.name) for row in rows}) == len(rows)
    assert launched, "no kernel was launched"
    missing = [line for line in capsys.readouterr().err.splitlines() if line.startswith("no figure for")]
    assert all(gpu_rows.NESTED in line for line in missing), missing  # which takes no fake tensors
    if name == "decode":
        found = {row.name: row.timing.median for row in rows if row.unit == gpu_decode.GRAPHS_RECORDED}
        assert found.pop(gpu_decode.BUCKETS) == found.pop(gpu_decode.LIMIT) == SERVING.num_buckets
        assert not any(found.values())
    measured = {(without_numbers(row.group), row.name) for row in rows}
    predicted = {(without_numbers(group), row) for group, row in PREDICTED if group.startswith(GROUPS[name])}
    assert predicted <= measured, "a prediction that nothing measures"
    assert bool(predicted) == (name in ("int8", "decode", "model", "events"))


def without_numbers(group):
    return re.sub(r"\d+", "#", group)


def test_what_is_predicted_is_among_what_is_measured():
    """The groups of a prediction are found by their names, in which sizes are."""
    for predict, measure, parameters in (
        (gpu_predicted.predict_int8, gpu_int8.measure_int8, ("sizes", "batches")),
        (gpu_predicted.predict_decode, gpu_decode.measure_decode, ("batch",)),
        (gpu_predicted.predict_wrappers, gpu_calls.measure_events, ("count",)),
    ):
        wanted, given = inspect.signature(predict).parameters, inspect.signature(measure).parameters
        for name in parameters:
            value, values = wanted[name].default, given[name if name in given else "batches"].default
            assert value == values or set(value if isinstance(value, tuple) else [value]) <= set(values)


def test_a_measured_row_gets_the_column_of_its_prediction():
    found = gpu_predicted.predicted_for("NVIDIA H100 80GB HBM3", gpu.RESULTS / "gpu-predicted.json")
    (group, name), figure = next(iter(found.items()))
    rows = [Row(group, name, Timing(*[2 * figure] * 3), {"a": 1.0}), Row(group, "another", Timing(1, 1, 1))]
    first, second = gpu.with_predictions(rows, found)
    assert first.ratios == {"a": 1.0, "predicted µs": figure, "predicted / measured": 0.5}
    assert second == rows[1]
    assert found != gpu_predicted.predicted_for("NVIDIA A100-SXM4-80GB", gpu.RESULTS / "gpu-predicted.json")


def test_a_device_without_predictions_gets_no_column(tmp_path):
    assert not gpu_predicted.predicted_for("NVIDIA T4", gpu.RESULTS / "gpu-predicted.json")
    assert not gpu_predicted.predicted_for("NVIDIA H100", tmp_path / "none.json")
