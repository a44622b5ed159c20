"""Traffic of a call, seconds of kernels and programs, and the table of devices."""

import pytest
import torch

from bench.prediction.devices import DEVICES, find_device
from bench.prediction.records import Kernel, Stage
from bench.prediction.roofline import IN_GRAPH, LAUNCH, predict_kernel, predict_program
from bench.prediction.traffic import count_call, nbytes
from tests.tables import giving


@pytest.mark.parametrize(
    ("traffic", "flops", "dtype", "on_matrix_units", "expected"),
    [
        (3_350_000, 0, torch.float32, False, (1e-6, "memory")),
        (0, int(989.4e6), torch.bfloat16, True, (1e-6, "compute")),
        (0, int(66.9e6), torch.bfloat16, False, (1e-6, "compute")),  # as without a library
    ],
)
def test_a_kernel_takes_the_longer_of_moving_and_computing(traffic, flops, dtype, on_matrix_units, expected):
    seconds, limit = predict_kernel(DEVICES["h100"], traffic, flops, dtype, on_matrix_units=on_matrix_units)
    assert (seconds, limit) == (pytest.approx(expected[0]), expected[1])


def stage(seconds, launches, **reasons):
    return Stage("inference", (Kernel("k", "triton", (), launches, 0, 0, seconds=seconds),), **reasons)


@pytest.mark.parametrize(
    ("stages", "seconds", "graphed"),
    [
        ([stage(1e-7, 10)], 10 * LAUNCH, 10 * (1e-7 + IN_GRAPH)),
        ([stage(1e-3, 10)], 1e-2, 1e-2 + 10 * IN_GRAPH),  # the time to launch is hidden
        ([stage(1e-3, 1), stage(1e-3, 1, no_cuda_graph=("why",))], 2e-3, None),
    ],
)
def test_kernels_are_launched_while_others_run(stages, seconds, graphed):
    found = predict_program(stages)
    assert found[0] == pytest.approx(seconds)
    assert found[1] is None if graphed is None else found[1] == pytest.approx(graphed)


# ---- traffic --------------------------------------------------------------------------------------------------------

aten = torch.ops.aten
X, A, B = torch.randn(10), torch.randn(4, 8), torch.randn(8, 16)
EXPANDED = torch.randn(1, 8).expand(100, 8)
INTS = torch.ones(32, 8, dtype=torch.int8)
F32 = torch.float32
OF_PRODUCT = {"reads": {F32: 4 * (4 * 8 + 8 * 16)}, "writes": {F32: 4 * 4 * 16}, "flops": 2 * 4 * 8 * 16}


# The op, its arguments, and the expected counts.
CALLS = {
    "a product reads both operands and writes its result": (aten.mm.default, (A, B), {}, OF_PRODUCT),
    "an out argument is written and not read": (aten.mm.out, (A, B), {"out": torch.empty(4, 16)}, OF_PRODUCT),
    "an in-place op reads what it writes": (
        aten.add_.Tensor,
        (torch.randn(10), X),
        {},
        {"reads": {F32: 80}, "writes": {F32: 40}},
    ),
    "an expanded operand is read once": (
        aten.mul.Tensor,
        (EXPANDED, torch.randn(100, 8)),
        {},
        {"reads": {F32: 32 + 3200}},
    ),
    "an embedding reads the rows that it takes": (
        aten.embedding.default,
        (torch.randn(1000, 16), torch.arange(3)),
        {},
        {"reads": {F32: 3 * 16 * 4, torch.int64: 24}},
    ),
    "an operand twice is read once": (aten.mul.Tensor, (X, X), {}, {"reads": {F32: 40}}),
    "integers are multiplied as often as floats": (
        aten._int_mm.default,
        (INTS, INTS.t()),
        {},
        {"flops": 2 * 32 * 8 * 32},
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_what_a_call_reads_writes_and_computes(case):
    func, args, kwargs, expected = CALLS[case]
    found = count_call(func, args, kwargs, func(*args, **kwargs))
    assert {name: getattr(found, name) for name in expected} == expected


# ---- devices --------------------------------------------------------------------------------------------------------

HOST = Stage("inference", (Kernel("host kernel", "host", (), 3, 100, 100),))
test_other_figures = giving(
    {
        "work on the host is no launch": (lambda: (HOST.launches, HOST.bytes, HOST.roofline), (0, 0, 0)),
        "bytes of an expanded tensor": (lambda: nbytes(EXPANDED), 32),
        "the devices of the table": (lambda: set(DEVICES), {"h100", "h200", "a100", "l4", "b200"}),
        "a device by its name or itself": (
            lambda: [find_device(one).name for one in ("H100", DEVICES["h100"])],
            ["h100", "h100"],
        ),
        "newer devices are faster": (
            lambda: sorted(set(DEVICES) - {"l4"}, key=lambda name: DEVICES[name].bandwidth),
            ["a100", "h100", "h200", "b200"],
        ),
    }
)


@pytest.mark.parametrize("device", DEVICES.values(), ids=lambda device: device.name)
def test_figures_of_a_device_agree_with_each_other(device):
    assert device.source and device.title.startswith("NVIDIA")
    flops = device.flops
    assert flops[torch.float32] == device.vector < flops[torch.bfloat16] == flops[torch.float16]
    assert flops[torch.int8] == pytest.approx(2 * flops[torch.bfloat16], rel=0.01)
    assert (torch.float8_e4m3fn in flops) == (device.capability >= (8, 9))
    # Operations for each byte of memory: a unit that is wrong by 1000 lies far outside.
    assert 100 < flops[torch.bfloat16] / device.bandwidth < 600
    properties = device.properties
    assert (properties.major, properties.minor) == device.capability
    assert properties.multi_processor_count == device.multiprocessors
    assert properties.shared_memory_per_block_optin < properties.shared_memory_per_multiprocessor


def test_an_unknown_device_is_named_with_those_there_are():
    with pytest.raises(ValueError, match=r"expected a device of the table \(h100, h200.*got 'v100'"):
        find_device("v100")
