"""The kernels of our own: values, their library, the choice of one, and products on processors with AVX2 alone."""

import copy
import itertools
import logging
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import desugar
from subclasses.int8 import Int8Tensor
from subclasses.int8.matmul import cpu_kernels, integers, kernels, products
from subclasses.int8.matmul.integers import integer_product
from tests.subclasses.int8.models import PRODUCTS as CONFIGS, frozen, integers as random_integers

OWN = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in cpu_kernels.FLAGS,
    reason="the kernels are for x86 with AVX2",
)

SIZES = [(32, 32), (64, 96), (160, 64), (96, 416)]


# ---- values ------------------------------------------------------------------------------------------------


@OWN
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("height", "width"), SIZES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 16, 33, 70])
def test_products_of_floats(rows, height, width, dtype):
    if dtype is torch.bfloat16 and not cpu_kernels.has_bfloat16():
        pytest.skip("this processor has no products of bfloat16")
    q, x, g = (
        random_integers(height, width),
        torch.randn(rows, width).to(dtype),
        torch.randn(rows, height).to(dtype),
    )
    for got, expected in (
        (cpu_kernels.times_rows(x, q), x.double() @ q.double().t()),
        (cpu_kernels.times_columns(g, q), g.double() @ q.double()),
    ):
        assert got.dtype is torch.float32 and (got - expected).norm() < 1e-6 * expected.norm()


@OWN
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 33])
@pytest.mark.parametrize(("height", "width"), [(1, 64), (7, 192), (100, 512)])
def test_products_of_integers_are_exact(rows, height, width):
    for x, q in (
        (random_integers(rows, width), random_integers(height, width)),
        (random_integers(rows, width).fill_(-128), random_integers(height, width).fill_(-128)),
        (random_integers(rows, width).fill_(127), random_integers(height, width).fill_(-128)),
    ):
        assert torch.equal(cpu_kernels.integers_times_rows(x, q), x.int() @ q.int().t())


@OWN
def test_all_int8_numbers_become_bfloat16():
    q = torch.arange(-128, 128, dtype=torch.int8).repeat(3, 1)
    for part in (q, q[:, 32:96], q[1:2]):
        got = cpu_kernels.to_bfloat16(part, torch.empty(part.shape, dtype=torch.bfloat16))
        assert torch.equal(got, part.bfloat16())


@OWN
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_that_are_not_finite_stay_so(dtype):
    x = torch.ones(2, 64, dtype=dtype)
    x[0, 5], x[1, 6] = float("inf"), float("nan")
    y = products.int8_product(x, torch.ones(32, 64, dtype=torch.int8), None, None)
    assert y[0].isposinf().all() and y[1].isnan().all()


@OWN
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_share_the_work(threads, monkeypatch):
    monkeypatch.setattr(cpu_kernels, "WORK", 1)
    before, x, q, g = (
        torch.get_num_threads(),
        torch.randn(5, 96),
        random_integers(160, 96),
        torch.randn(5, 160),
    )
    torch.set_num_threads(threads)
    try:
        found = [cpu_kernels.times_rows(x, q), cpu_kernels.times_columns(g, q)]
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(found, [x @ q.float().t(), g @ q.float()], rtol=1e-4, atol=1e-3)


# ---- the library -------------------------------------------------------------------------------------------


@OWN
@pytest.mark.slow
def test_it_is_built_once_and_only_its_file_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "made"))
    cpu_kernels.library.__wrapped__()
    (file,) = (tmp_path / "made").iterdir()
    written = file.stat().st_mtime_ns
    monkeypatch.setattr(cpu_kernels, "_build", None)  # is not called
    assert cpu_kernels.library.__wrapped__() is not None and file.stat().st_mtime_ns == written


@pytest.fixture
def without_library(monkeypatch):
    monkeypatch.setattr(cpu_kernels, "library", lambda: None)
    monkeypatch.setattr(cpu_kernels, "has_bfloat16", lambda: False)


@OWN
def test_without_a_compiler_pytorchs_kernels_multiply(tmp_path, monkeypatch, caplog):
    def fail(*args):
        raise RuntimeError("no compiler was found")

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cpu_kernels._torch_tracing, "build_library", fail)
    with caplog.at_level(logging.WARNING, "subclasses"):
        assert cpu_kernels.library.__wrapped__() is None
    assert "no compiler was found" in caplog.text and list(tmp_path.iterdir()) == []


@OWN
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of PyTorch's _int_mm
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_without_the_library(dtype, without_library):
    for rows, scale in itertools.product((1, 16, 40), (None, torch.rand(96, 1))):
        x, q = torch.randn(rows, 64).to(dtype) / 64, random_integers(96, 64)
        got = products.int8_product(x, q, scale, None).double()
        expected = x.double() @ (q.double() * (1 if scale is None else scale)).t()
        assert (got - expected).norm() < 6 * torch.finfo(dtype).eps * expected.norm()
    a, b = random_integers(3, 64), random_integers(32, 64)
    assert torch.equal(integer_product(a, b), a.int() @ b.int().t())


@OWN
@pytest.mark.slow
def test_the_library_for_avx2():
    """A processor with AVX-512 runs the kernels for AVX2, too."""
    script = """
import torch
from subclasses.int8.matmul import cpu_kernels
assert cpu_kernels.library() is not None and not cpu_kernels.has_bfloat16() and not cpu_kernels.has_avx512()
q = torch.randint(-128, 128, (96, 64), dtype=torch.int8)
for rows in (1, 2, 3, 9):
    x, g, a = torch.randn(rows, 64), torch.randn(rows, 96), torch.randint(-128, 128, (rows, 64), dtype=torch.int8)
    torch.testing.assert_close(cpu_kernels.times_rows(x, q), x @ q.float().t(), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(cpu_kernels.times_columns(g, q), g @ q.float(), rtol=1e-4, atol=1e-3)
    assert torch.equal(cpu_kernels.integers_times_rows(a, q), a.int() @ q.int().t())
    assert torch.equal(cpu_kernels.to_bfloat16(q, torch.empty(96, 64, dtype=torch.bfloat16)), q.bfloat16())
"""
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "avx2"}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=300)


# ---- the choice --------------------------------------------------------------------------------------------


def chosen(x, q, scale=None, zero_point=None):
    """The name of the kernel that multiplies, by the table."""
    for kernel in products.KERNELS:
        fits = x.dtype in kernel.dtypes and x.shape[0] <= kernel.rows and q.numel() <= kernel.entries
        if fits and kernel.is_for() and kernel.takes(q, scale, zero_point):
            return kernel.multiply.__name__
    return None


Q, SCALE, GROUPS = random_integers(64, 128), torch.rand(64, 1), torch.rand(64, 4)
SMALL, LARGE = random_integers(256, 256), random_integers(1024, 1056)
FLOATS = torch.float32, torch.float16, torch.bfloat16
TILES, NO_TILES = {"has_tiles": True}, {"has_tiles": False}
BFLOAT16, NO_BFLOAT16 = NO_TILES | {"has_bfloat16": True}, NO_TILES | {"has_bfloat16": False}
NO_LIBRARY = NO_BFLOAT16 | {"library": None}

# The features of the processor, rows and dtype of the input, the matrix with its scales and zero points; and the
# kernel.
CHOSEN = [
    *(
        (has, 4, dtype, matrix, kernel)
        for has in (TILES, NO_TILES)
        for dtype in FLOATS
        for matrix, kernel in [
            ((Q,), "_by_rows"),
            ((Q, SCALE), "_by_rows"),
            ((Q, SCALE, random_integers(64, 1)), "_by_rows"),
            ((Q.t(),), "_by_columns"),
            ((Q.t(), SCALE.t(), random_integers(1, 64)), "_by_columns"),
        ]
    ),
    *(
        (has, 4, dtype, matrix, kernel)
        for has, dtype, kernel in [
            (TILES, torch.float32, "_at_once"),
            (NO_TILES, torch.float32, "_in_parts"),
            (TILES, torch.float16, "_in_parts"),
            (NO_TILES, torch.float16, "_in_parts"),
            (TILES, torch.bfloat16, "_at_once"),
            (NO_TILES, torch.bfloat16, "_at_once"),
        ]
        for matrix in [(Q, GROUPS), (Q, GROUPS, random_integers(64, 4)), (Q[:, :100],)]
    ),
    *((has, 4, torch.float64, (Q,), "_in_parts") for has in (TILES, NO_TILES, NO_LIBRARY)),
    # rows of which the converted matrix pays
    (NO_TILES, 24, torch.float32, (SMALL,), "_by_rows"),
    (TILES, 24, torch.float32, (SMALL,), "_by_rows"),
    (NO_TILES, 49, torch.float32, (SMALL,), "_by_rows"),
    (TILES, 49, torch.float32, (SMALL,), "_at_once"),
    (NO_TILES, 300, torch.float32, (LARGE,), "_by_rows"),
    (TILES, 300, torch.float32, (LARGE,), "_by_rows"),
    (NO_TILES, 300, torch.float32, (LARGE.t(),), "_by_columns"),
    (TILES, 300, torch.float32, (LARGE.t(),), "_in_parts"),
    (NO_TILES, 16, torch.bfloat16, (SMALL,), "_by_rows"),
    (TILES, 16, torch.bfloat16, (SMALL,), "_at_once"),
    (NO_TILES, 16, torch.bfloat16, (LARGE,), "_by_rows"),
    (TILES, 16, torch.bfloat16, (LARGE,), "_at_once"),
    # many and few rows of bfloat16
    (BFLOAT16, 32, torch.bfloat16, (Q,), "_by_rows"),
    (BFLOAT16, 300, torch.bfloat16, (Q,), "_at_once"),
    (NO_BFLOAT16, 300, torch.bfloat16, (Q,), "_by_rows"),
    (NO_LIBRARY, 16, torch.bfloat16, (Q,), "_packed"),
    (NO_LIBRARY, 17, torch.bfloat16, (Q,), "_at_once"),
]


@OWN
@pytest.mark.parametrize(("has", "rows", "dtype", "matrix", "kernel"), CHOSEN)
def test_which_kernel_is_chosen(has, rows, dtype, matrix, kernel, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    for name, value in ({"has_bfloat16": True} | has).items():
        monkeypatch.setattr(cpu_kernels, name, lambda value=value: value)
    assert chosen(torch.randn(rows, matrix[0].shape[1], dtype=dtype), *matrix) == kernel


@OWN
def test_other_dtypes_are_refused():
    with pytest.raises(TypeError, match=r"expected floats of 16, 32 or 64 bits, got torch\.int32"):
        products.int8_product(torch.ones(2, 32, dtype=torch.int32), random_integers(32, 32), None, None)


# ==== processors with AVX2 alone ==================================================================================

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


@pytest.mark.slow
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
