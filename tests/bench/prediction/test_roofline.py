import pytest
import torch

from bench.prediction.devices import DEVICES
from bench.prediction.records import Kernel, Stage
from bench.prediction.roofline import IN_GRAPH, LAUNCH, predict_kernel, predict_program

H100 = DEVICES["h100"]


def test_a_kernel_takes_the_longer_of_moving_and_computing():
    copy = predict_kernel(H100, 3_350_000, 0, torch.float32, on_matrix_units=False)
    assert copy == (pytest.approx(1e-6), "memory")
    product = predict_kernel(H100, 0, int(989.4e6), torch.bfloat16, on_matrix_units=True)
    assert product == (pytest.approx(1e-6), "compute")


def test_only_a_library_computes_on_matrix_units():
    on, off = (
        predict_kernel(H100, 0, 10**12, torch.bfloat16, on_matrix_units=units)[0] for units in (True, False)
    )
    assert off / on == pytest.approx(989.4 / 66.9)


def stage(seconds, launches, **reasons):
    return Stage("inference", (Kernel("k", "triton", (), launches, 0, 0, seconds=seconds),), **reasons)


def test_small_kernels_take_the_time_to_launch_them():
    seconds, graphed = predict_program([stage(1e-7, 10)])
    assert seconds == pytest.approx(10 * LAUNCH)
    assert graphed == pytest.approx(10 * (1e-7 + IN_GRAPH))


def test_large_kernels_hide_the_time_to_launch_them():
    assert predict_program([stage(1e-3, 10)])[0] == pytest.approx(1e-2)


def test_one_stage_that_cannot_be_recorded_rules_the_program_out():
    assert predict_program([stage(1e-3, 1), stage(1e-3, 1, no_cuda_graph=("why",))])[1] is None


def test_work_on_the_host_is_no_launch():
    host = Stage("inference", (Kernel("host kernel", "host", (), 3, 100, 100),))
    assert (host.launches, host.bytes, host.roofline) == (0, 0, 0)
