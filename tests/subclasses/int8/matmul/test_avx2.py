"""Products as they are computed on processors with AVX2 alone: values, layouts, and compiled layers."""

from __future__ import annotations

import copy
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import desugar
from subclasses.int8 import Int8DynamicActivationInt8WeightConfig, Int8Tensor, Int8WeightOnlyConfig, quantize_
from subclasses.int8.matmul import avx2, integers, kernels

CONFIGS = {
    "weights": Int8WeightOnlyConfig(),
    "asymmetric": Int8WeightOnlyConfig(symmetric=False),
    "dynamic": Int8DynamicActivationInt8WeightConfig(),
    "dynamic asymmetric": Int8DynamicActivationInt8WeightConfig(
        act_mapping_type="asymmetric", symmetric=False
    ),
}


@pytest.fixture(params=["AVX2", "AVX2 and VNNI", "AVX-512 without VNNI"])
def processor(request, monkeypatch):
    monkeypatch.setattr(kernels, "is_avx2", lambda: "AVX2" in request.param)
    monkeypatch.setattr(integers, "is_without_vnni", lambda: request.param != "AVX2 and VNNI")


def random_integers(*size):
    return torch.randint(-128, 128, size, dtype=torch.int8)


@pytest.mark.parametrize("counts", [None, (1, 1), (6, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_row(dtype, counts):
    matrix = random_integers(6, 12)
    matrix[0], matrix[1] = -128, 127
    row = torch.randint(-128, 128, (12,)).to(dtype)
    zero_point = None if counts is None else random_integers(*counts)
    expected = matrix.to(torch.int64) - (0 if zero_point is None else zero_point)
    got = avx2.row_times_int8(row, matrix, zero_point)
    assert got.dtype is dtype and got.tolist() == (expected @ row.to(torch.int64)).tolist()


def test_which_matrices_have_words():
    memory = random_integers(65)
    assert avx2.has_words(random_integers(3, 8))
    assert avx2.has_words(memory[4:60].view(7, 8))
    assert not avx2.has_words(memory[1:57].view(7, 8))
    assert not avx2.has_words(random_integers(3, 6))
    assert not avx2.has_words(random_integers(8, 8).t())


@pytest.mark.parametrize("without_vnni", [True, False])
@pytest.mark.parametrize("k", [1, 3, 1023, 1024, 1025, 5000, 5120])
@pytest.mark.parametrize(("m", "n"), [(1, 2), (2, 1), (5, 64), (17, 1100)])
def test_integers_of_any_size_are_multiplied_exactly(m, n, k, without_vnni, monkeypatch):
    monkeypatch.setattr(integers, "is_without_vnni", lambda: without_vnni)
    monkeypatch.setattr(integers, "SMALL", 0)
    for a, b in (
        (random_integers(m, k), random_integers(n, k)),
        (random_integers(k, m).t(), random_integers(1, k).expand(n, k)),
        (random_integers(m, k).fill_(-128), random_integers(n, k).fill_(-128)),
    ):
        got = kernels.multiply_integers(a, b)
        assert got.is_contiguous() and torch.equal(got, a.int() @ b.int().t())


def test_the_op_is_one_for_pytorch():
    torch.library.opcheck(integers.integer_product, (random_integers(2, 5), random_integers(3, 5)))


@pytest.mark.sweep(4)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("compiler", ["torch.compile", "desugar.compile"])
def test_layers(compiler, config, dtype, rows, processor):
    layer = nn.Linear(64, 32, dtype=dtype).requires_grad_(False)
    quantize_(layer, CONFIGS[config])
    compiled = {"torch.compile": torch.compile, "desugar.compile": desugar.compile}[compiler](
        copy.deepcopy(layer), backend="inductor"
    )
    x = torch.randn(rows, 64, dtype=dtype)
    with torch.no_grad():
        got, expected = compiled(x), layer(x)
    assert got.dtype is dtype
    torch.testing.assert_close(
        got,
        expected,
        rtol=2e-2 if dtype is torch.bfloat16 else 1e-4,
        atol=2e-2 if dtype is torch.bfloat16 else 1e-4,
    )


@pytest.mark.parametrize("activation", [None, "row"])
def test_a_weight_at_another_place_in_memory(activation, processor):
    """A program that reads words is not run for a matrix that has none."""
    compiled = desugar.compile(F.linear, backend="eager")
    x, memory, scale = torch.randn(1, 16), random_integers(200), torch.rand(8, 1)
    with torch.no_grad():
        for start in (0, 4, 1, 8, 3):
            w = Int8Tensor(memory[start : start + 128].view(8, 16), scale, activation=activation)
            torch.testing.assert_close(compiled(x, w), F.linear(x, w), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of PyTorch's _int_mm
@pytest.mark.parametrize("config", ["dynamic", "dynamic asymmetric"])
def test_a_batch_of_inputs_under_vmap(config, processor):
    layer = nn.Linear(16, 8).requires_grad_(False)
    quantize_(layer, CONFIGS[config])
    x = torch.randn(5, 3, 16)
    torch.testing.assert_close(torch.vmap(layer)(x), torch.stack([layer(one) for one in x]))


@pytest.mark.skipif(sys.platform != "linux", reason="oneDNN reads the variable on x86 Linux")
def test_sums_are_exact_where_onednn_is_told_to_use_less():
    script = """
import torch
from subclasses.int8.matmul import kernels
a, b = torch.randint(-128, 128, (3, 64), dtype=torch.int8), torch.randint(-128, 128, (8, 64), dtype=torch.int8)
assert kernels.multiply_integers(a, b).equal(a.int() @ b.int().t())
assert kernels.multiply_integers(a[:1], b).equal(a[:1].int() @ b.int().t())
"""
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "avx2"}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=120)


def test_what_the_processor_says(monkeypatch):
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    integers.is_without_vnni.cache_clear()
    says = {"architecture": "x86_64", "avx2": True, "avx512_vnni": False, "avx_vnni": False}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: says)
    assert integers.is_without_vnni()
    for other in ({"avx512_vnni": True}, {"avx_vnni": True}, {"architecture": "aarch64"}):
        integers.is_without_vnni.cache_clear()
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda other=other: says | other)
        assert not integers.is_without_vnni()
    integers.is_without_vnni.cache_clear()
