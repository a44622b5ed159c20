import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bench.prediction import predict
from bench.prediction.predicting import EAGER, OURS, STOCK
from tests.bench.prediction.needs import cuda_build
from tests.subclasses.subjects import Pair

pytestmark = cuda_build


def scale_rows(x, w):
    return F.gelu(x * w).sum(-1)


SIZE = 64 * 4096
ARGS = torch.randn(64, 4096), torch.randn(4096)


def test_a_fused_kernel_and_its_bytes():
    prediction = predict(scale_rows, ARGS, device="h100")
    for name in (OURS, STOCK):
        (stage,) = prediction.way(name).stages
        (kernel,) = stage.kernels
        assert (kernel.kind, kernel.launches, stage.name) == ("triton", 1, "inference")
        assert kernel.reads == 4 * (SIZE + 4096) and kernel.writes == 4 * 64
        assert "mul" in kernel.fuses and "erf" in kernel.fuses and any("sum" in op for op in kernel.fuses)
        assert kernel.registers and kernel.spills == 0 and kernel.configurations >= 1
        assert SIZE * 5 < kernel.flops < SIZE * 20
        assert not (stage.no_cuda_graph or stage.synchronizations or stage.copies)
    (eager,) = prediction.way(EAGER).stages
    assert [kernel.name for kernel in eager.kernels] == [
        "aten.mul.Tensor",
        "aten.gelu.default",
        "aten.sum.dim_IntList",
    ]
    assert eager.bytes == 4 * (SIZE + 4096 + SIZE + SIZE + SIZE + SIZE + 64)


@pytest.mark.slow
def test_training_has_two_stages_in_each_way():
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))
    prediction = predict(lambda x: model(x).square().mean(), (torch.randn(16, 32),))
    for way in prediction.ways:
        assert not way.error and [stage.name for stage in way.stages] == ["forward", "backward"], way
        products = sum(kernel.launches for kernel in way.kernels if "mm" in kernel.name)
        assert products == 5  # two forward, and three backward: the input needs no gradient
        # Each product of a layer is twice as many operations as its weight has entries, for each row.
        assert way.flops >= 16 * 2 * (2 * 32 * 64 + 3 * 64 * 8)


def test_faster_memory_makes_the_same_kernels_faster():
    h100, h200 = (predict(scale_rows, ARGS, device=name, ways=(OURS,)).way(OURS) for name in ("h100", "h200"))
    assert h100.bytes == h200.bytes and h100.roofline / h200.roofline == pytest.approx(4.8 / 3.35)


def test_a_value_that_the_host_needs_is_a_synchronization():
    def masked(x):
        return x[x > 0].sum()

    found = predict(masked, (torch.randn(64),), ways=(EAGER,)).way(EAGER)
    (stage,) = found.stages
    assert any("nonzero" in op for op in stage.synchronizations)
    assert any("aten.index.Tensor" in reason for reason in stage.no_cuda_graph)
    assert found.graphed_seconds is None


def test_a_tensor_of_the_host_rules_a_cuda_graph_out():
    def fn(x):
        return (x * 2).cpu() + 1

    (stage,) = predict(fn, (torch.randn(64),), ways=(OURS,)).way(OURS).stages
    assert stage.copies == stage.synchronizations == ("aten.copy_.default",)
    assert any("host" in reason for reason in stage.no_cuda_graph)
    assert [kernel.kind for kernel in stage.kernels] == ["triton", "copy", "host"]


def test_a_function_that_cannot_be_captured_has_an_error():
    def breaks(x):
        print("no graph")
        return x + 1

    for way in predict(breaks, (torch.randn(3),)).ways:
        assert way.error and not way.stages


def test_a_wrapper_is_desugared():
    x = Pair(torch.randn(1024), torch.randn(1024))
    (stage,) = predict(lambda x: x.relu() * 2, (x,), ways=(OURS,)).way(OURS).stages
    assert stage.bytes == 4 * 4 * 1024


def test_sizes_of_another_call_leave_no_symbols():
    for rows in (8, 16, 24):
        (stage,) = (
            predict(scale_rows, (torch.randn(rows, 64), torch.randn(64)), ways=(OURS,)).way(OURS).stages
        )
        assert stage.sizes == ()


def test_symbolic_sizes_are_named_with_their_values():
    (stage,) = (
        predict(scale_rows, (torch.randn(24, 64), torch.randn(64)), ways=(OURS,), dynamic=True)
        .way(OURS)
        .stages
    )
    assert sorted(value for _, value in stage.sizes) == [24, 64]
    (kernel,) = stage.kernels
    assert kernel.reads == 4 * (24 * 64 + 64)
