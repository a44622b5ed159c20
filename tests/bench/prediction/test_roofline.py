import pytest
import torch

from bench.prediction.devices import DEVICES
from bench.prediction.records import Kernel, Stage
from bench.prediction.roofline import IN_GRAPH, LAUNCH, predict_kernel, predict_program

H100 = DEVICES["h100"]


@pytest.mark.parametrize(
    ("traffic", "flops", "dtype", "on_matrix_units", "expected"),
    [
        (3_350_000, 0, torch.float32, False, (1e-6, "memory")),
        (0, int(989.4e6), torch.bfloat16, True, (1e-6, "compute")),
        (0, int(66.9e6), torch.bfloat16, False, (1e-6, "compute")),  # as without a library
    ],
)
def test_a_kernel_takes_the_longer_of_moving_and_computing(traffic, flops, dtype, on_matrix_units, expected):
    seconds, limit = predict_kernel(H100, traffic, flops, dtype, on_matrix_units=on_matrix_units)
    assert (seconds, limit) == (pytest.approx(expected[0]), expected[1])


def stage(seconds, launches, **reasons):
    return Stage("inference", (Kernel("k", "triton", (), launches, 0, 0, seconds=seconds),), **reasons)


CANNOT = {"no_cuda_graph": ("why",)}


@pytest.mark.parametrize(
    ("stages", "seconds", "graphed"),
    [
        ([stage(1e-7, 10)], 10 * LAUNCH, 10 * (1e-7 + IN_GRAPH)),
        ([stage(1e-3, 10)], 1e-2, 1e-2 + 10 * IN_GRAPH),  # the time to launch is hidden
        ([stage(1e-3, 1), stage(1e-3, 1, **CANNOT)], 2e-3, None),
    ],
)
def test_kernels_are_launched_while_others_run(stages, seconds, graphed):
    found = predict_program(stages)
    assert found[0] == pytest.approx(seconds)
    assert found[1] is None if graphed is None else found[1] == pytest.approx(graphed)


def test_work_on_the_host_is_no_launch():
    host = Stage("inference", (Kernel("host kernel", "host", (), 3, 100, 100),))
    assert (host.launches, host.bytes, host.roofline) == (0, 0, 0)
