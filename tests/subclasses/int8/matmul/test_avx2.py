"""Products as they are computed on processors with AVX2 alone: values, layouts, and compiled layers."""

from __future__ import annotations

import copy
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import desugar
from subclasses.int8 import Int8Tensor
from subclasses.int8.matmul import cpu_kernels, integers, kernels
from tests.subclasses.int8.models import PRODUCTS as CONFIGS, frozen, integers as random_integers

COMPILERS = {"torch.compile": torch.compile, "desugar.compile": desugar.compile}


@pytest.fixture(params=["AVX2", "AVX2 and VNNI", "AVX-512 without VNNI"])
def processor(request, monkeypatch):
    monkeypatch.setattr(cpu_kernels, "has_avx2_alone", lambda: "AVX2" in request.param)
    monkeypatch.setattr(integers, "is_without_vnni", lambda: request.param != "AVX2 and VNNI")


@pytest.mark.sweep(2)
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


@pytest.mark.sweep(198)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("compiler", COMPILERS)
def test_layers(compiler, config, dtype, error, rows, processor):
    layer, x = frozen(64, 32, CONFIGS[config], dtype=dtype), torch.randn(rows, 64, dtype=dtype)
    compiled = COMPILERS[compiler](copy.deepcopy(layer), backend="inductor")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), layer(x), rtol=error, atol=error)


@pytest.mark.parametrize("activation", [None, "row"])
def test_a_weight_at_another_place_in_memory(activation, processor):
    compiled = desugar.compile(F.linear, backend="eager")
    x, memory, scale = torch.randn(1, 16), random_integers(200), torch.rand(8, 1)
    with torch.no_grad():
        for start in (0, 4, 1, 8, 3):
            w = Int8Tensor(memory[start : start + 128].view(8, 16), scale, activation=activation)
            torch.testing.assert_close(compiled(x, w), F.linear(x, w), rtol=1e-4, atol=1e-4)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", ["weights", "asymmetric"])
def test_one_row_is_no_sum_that_a_compiler_fuses(dtype, config, alone, monkeypatch):
    """A compiler would convert the numbers one at a time; the op runs the kernel of eager mode."""
    layer = frozen(256, 256, CONFIGS[config], dtype=dtype)
    monkeypatch.setattr(cpu_kernels, "has_avx2_alone", lambda: alone)
    with torch.no_grad():
        graph = desugar.trace(layer, torch.randn(1, 256, dtype=dtype)).forward
    assert any("int8_product" in str(node.target) for node in graph.graph.nodes) is alone


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of PyTorch's _int_mm
@pytest.mark.parametrize("config", ["dynamic", "dynamic asymmetric"])
def test_a_batch_of_inputs_under_vmap(config, processor):
    layer, x = frozen(16, 8, CONFIGS[config]), torch.randn(5, 3, 16)
    torch.testing.assert_close(torch.vmap(layer)(x), torch.stack([layer(one) for one in x]))


@pytest.mark.slow
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


@pytest.mark.parametrize(
    ("other", "is_without"),
    [
        ({}, True),
        ({"avx512_vnni": True}, False),
        ({"avx_vnni": True}, False),
        ({"architecture": "aarch64"}, False),
    ],
)
def test_what_the_processor_says(other, is_without, monkeypatch):
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    says = {"architecture": "x86_64", "avx2": True, "avx512_vnni": False, "avx_vnni": False}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: says | other)
    assert integers.is_without_vnni.__wrapped__() is is_without
