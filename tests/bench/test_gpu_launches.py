"""The GPU benchmarks run once without a device, up to the launch of each kernel.

The tests replace only code that needs a device: clocks, CUDA graphs, the engine behind `backward`, and the conversion
of a module's parameters, which PyTorch refuses for fake tensors.
"""

import inspect
import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from bench import gpu_predicted
from bench.gpu.device import Cuda
from bench.gpu.report import RESULTS, make_rows
from bench.gpu.run import Run
from bench.gpu.stages import calls, int8, model, padded, training
from bench.prediction import fake_device
from bench.report import Row, load_rows, save_rows
from bench.timing import Timing
from desugar import _torch
from tests.bench.prediction.needs import cuda_build
from tests.tables import giving

SERVING = padded.Serving(dim=64, heads=2, layers=1, longest=64, bucket=32, stride=16)
SCALE = model.Scale(dim=64, heads=2, layers=1, width=32, batch=4)
DEVICE = "H100: "
PREDICTED = {
    (row.group.removeprefix(DEVICE), row.name)
    for row in load_rows(RESULTS / "gpu-predicted.json")[0]
    if row.group.startswith(DEVICE)
}
GROUPS = {"int8": "int8, ", "padded": "encoding ", "model": "model, ", "events": "training, N = "}
SMALL = {
    "int8": int8.measure_int8,
    "dynamic": int8.measure_dynamic,
    "padded": partial(padded.measure_padded, serving=SERVING, batches=(2,)),
    "model": partial(model.measure_model, fills=(0.5,)),
    "training": partial(training.measure_training, cases=(training.Case(64, 2, (20, 3, 32)),)),
    "calls": partial(calls.measure_calls, counts=(1,)),
    "events": partial(calls.measure_events, count=2),
}
# Rows that are left out: they reject fake tensors, read data to check themselves, or need kernels that this
# installation lacks.
WITHOUT = (
    "fp8",  # its shapes ask the driver
    "torch.nested",
    "torchao",
    "gemlite",
    "FlexAttention",
    "record",
    "floor",
    "without a mask",
)


class Absent(Cuda):
    """A CUDA device that is not there: a call is made once, and nothing is timed."""

    def describe(self):
        return "a fake H100"

    def pick(self, real, small):
        return small

    def synchronize(self):
        """There is nothing to wait for."""

    def time(self, call, times):
        call()
        return 1.0

    def time_host(self, call, times):
        return 1.0

    def record(self, steps):
        return lambda: [step() for step in steps]

    def peak(self, call):
        """There is no memory."""

    def kernels(self, call):
        return []

    def free(self):
        """There is no memory."""


def convert(module, device, dtype=None):
    for part in module.modules():
        for name, parameter in part._parameters.items():
            part._parameters[name] = nn.Parameter(
                torch.empty_like(parameter, device=device, dtype=dtype or parameter.dtype)
            )
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

    lengths = model.uneven_lengths(0.5, 32, 4)
    monkeypatch.setattr("torch._inductor.cudagraph_trees.cudagraphify", record)
    for owner, name, stand_in in (
        (int8, "_check", lambda found, expected: None),  # fake tensors have no data
        (torch.testing, "assert_close", lambda *args, **options: None),
        (training, "copy", SimpleNamespace(deepcopy=lambda layer: layer)),
        (padded, "count_graphs", lambda: len(recorded)),
        (model, "SMALL", SCALE),
        (model, "look_inside", lambda *args: None),
        (calls, "_count_events", lambda *args: None),  # the profiler calls the driver
        (model, "uneven_lengths", lambda *args: lengths),
        (nn.Module, "to", convert),
        (torch.Tensor, "backward", backward),
    ):
        monkeypatch.setattr(owner, name, stand_in)


@pytest.mark.sweep(4)
@cuda_build
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.filterwarnings("ignore")
def test_a_benchmark_runs_up_to_its_launches(name, without_a_device):
    _torch.shared_nested_tensor()  # PyTorch makes it once, of real tensors
    lines = []
    with fake_device("h100") as fake, fake.mode:
        fake.mode.shape_env = ShapeEnv()  # for sizes of torch.nested
        SMALL[name](Run(name, Absent(), lines.append))
        launched = [call for call in fake.recorder.calls if call.kind in ("triton", "library")]
    missing = {line.subject: line.error for line in lines if line.error}
    assert not {name: why for name, why in missing.items() if not any(word in name for word in WITHOUT)}
    rows = [row for row in make_rows(lines) if row.unit == "µs a call"]
    assert rows and len({(row.group, row.name) for row in rows}) == len(rows)
    assert launched, "no kernel was launched"
    if name == "padded":
        found = {line.subject: line.value for line in lines if line.figure == padded.GRAPHS_RECORDED}
        assert found.pop(padded.BUCKETS) == found.pop(padded.LIMIT) == SERVING.num_buckets
        assert not any(found.values())
    if name in GROUPS:
        measured = {(without_numbers(row.group), row.name) for row in rows}
        groups = {(group, row) for group, row in PREDICTED if group.startswith(GROUPS[name])}
        predicted = {(without_numbers(group), row) for group, row in groups}
        assert predicted and predicted <= measured | {(group, int8.DYNAMIC) for group, _ in measured}


def without_numbers(group):
    """Replaces numbers, and the sizes of a matrix that is square."""
    return re.sub(r"\d+", "#", group).replace("N = K = #", "N = #, K = #")


def defaults(function, *names):
    return [inspect.signature(function).parameters[name].default for name in names]


PAGES = [path for path in RESULTS.glob("gpu-*") if path.stem != "gpu-predicted"]


# The groups of a prediction are found by their names, in which sizes are.
test_what_is_predicted_and_measured = giving(
    {
        "sizes": (
            lambda: bool(
                {(size, size) for size in defaults(gpu_predicted.predict_int8, "sizes")[0]} & set(int8.SHAPES)
            ),
            True,
        ),
        "batches": (
            lambda: set(defaults(gpu_predicted.predict_int8, "batches")[0]) - set(int8.BATCHES),
            set(),
        ),
        "wrappers": (lambda: defaults(gpu_predicted.predict_wrappers, "count"), [20]),
        "there are pages of measurements": (lambda: bool(PAGES), True),
        "they have no predicted figure": (
            lambda: [path.name for path in PAGES if "predicted" in path.read_text()],
            [],
        ),
    }
)


def test_a_predicted_row_gets_the_columns_of_its_measurement(tmp_path):
    unit = gpu_predicted.UNIT
    rows = [Row(f"{DEVICE}g", name, Timing(5, 5, 5), {"launches": 2.0}, unit) for name in ("a", "b")]
    measured = [Row("g", "a", Timing(10, 9, 11)), Row("g: graphs", "b", Timing(1, 1, 1), unit="graphs")]
    for key in ("device", "gpu"):
        save_rows(measured, {key: "NVIDIA H100 80GB HBM3"}, tmp_path / "gpu-int8.json")
        found = gpu_predicted.measured_on("h100", tmp_path)
        assert found == {("g", "a"): 10}
        assert not any(gpu_predicted.measured_on(other, tmp_path) for other in ("a100", "h10"))
        first, second = gpu_predicted.with_measured(rows, found)
        assert first.ratios == {"launches": 2.0, "measured µs": 10, "predicted / measured": 0.5}
        assert first.unit == unit and second == rows[1]
