"""The kernels of our own: values, their library, what is done where it cannot be built, and which kernel is chosen."""

from __future__ import annotations

import itertools
import logging
import os
import subprocess
import sys

import pytest
import torch

from subclasses.int8.matmul import cpu_kernels, products
from subclasses.int8.matmul.integers import integer_product
from tests.subclasses.int8.models import integers

pytestmark = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in cpu_kernels.FLAGS,
    reason="the kernels are for x86 with AVX2",
)

SIZES = [(32, 32), (64, 96), (160, 64), (96, 416)]


# ---- values ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("height", "width"), SIZES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 16, 33, 70])
def test_products_of_floats(rows, height, width, dtype):
    if dtype is torch.bfloat16 and not cpu_kernels.has_bfloat16():
        pytest.skip("this processor has no products of bfloat16")
    q, x, g = integers(height, width), torch.randn(rows, width).to(dtype), torch.randn(rows, height).to(dtype)
    for got, expected in (
        (cpu_kernels.times_rows(x, q), x.double() @ q.double().t()),
        (cpu_kernels.times_columns(g, q), g.double() @ q.double()),
    ):
        assert got.dtype is torch.float32 and (got - expected).norm() < 1e-6 * expected.norm()


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 33])
@pytest.mark.parametrize(("height", "width"), [(1, 64), (7, 192), (100, 512)])
def test_products_of_integers_are_exact(rows, height, width):
    for x, q in (
        (integers(rows, width), integers(height, width)),
        (integers(rows, width).fill_(-128), integers(height, width).fill_(-128)),
        (integers(rows, width).fill_(127), integers(height, width).fill_(-128)),
    ):
        assert torch.equal(cpu_kernels.integers_times_rows(x, q), x.int() @ q.int().t())


def test_all_int8_numbers_become_bfloat16():
    q = torch.arange(-128, 128, dtype=torch.int8).repeat(3, 1)
    for part in (q, q[:, 32:96], q[1:2]):
        got = cpu_kernels.to_bfloat16(part, torch.empty(part.shape, dtype=torch.bfloat16))
        assert torch.equal(got, part.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_that_are_not_finite_stay_so(dtype):
    x = torch.ones(2, 64, dtype=dtype)
    x[0, 5], x[1, 6] = float("inf"), float("nan")
    y = products.int8_product(x, torch.ones(32, 64, dtype=torch.int8), None, None)
    assert y[0].isposinf().all() and y[1].isnan().all()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_share_the_work(threads, monkeypatch):
    monkeypatch.setattr(cpu_kernels, "WORK", 1)
    before, x, q, g = torch.get_num_threads(), torch.randn(5, 96), integers(160, 96), torch.randn(5, 160)
    torch.set_num_threads(threads)
    try:
        found = [cpu_kernels.times_rows(x, q), cpu_kernels.times_columns(g, q)]
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(found, [x @ q.float().t(), g @ q.float()], rtol=1e-4, atol=1e-3)


# ---- the library -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_it_is_built_once_and_only_its_file_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "made"))
    cpu_kernels.library.__wrapped__()
    (file,) = (tmp_path / "made").iterdir()
    written = file.stat().st_mtime_ns
    monkeypatch.setattr(cpu_kernels, "_build", None)  # is not asked
    assert cpu_kernels.library.__wrapped__() is not None and file.stat().st_mtime_ns == written


@pytest.fixture
def without_library(monkeypatch):
    monkeypatch.setattr(cpu_kernels, "library", lambda: None)
    monkeypatch.setattr(cpu_kernels, "has_bfloat16", lambda: False)


def test_without_a_compiler_pytorchs_kernels_multiply(tmp_path, monkeypatch, caplog):
    def fail(*args):
        raise RuntimeError("no compiler was found")

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cpu_kernels._torch_tracing, "build_library", fail)
    with caplog.at_level(logging.WARNING, "subclasses"):
        assert cpu_kernels.library.__wrapped__() is None
    assert "no compiler was found" in caplog.text and list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of PyTorch's _int_mm
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_without_the_library(dtype, without_library):
    for rows, scale in itertools.product((1, 16, 40), (None, torch.rand(96, 1))):
        x, q = torch.randn(rows, 64).to(dtype) / 64, integers(96, 64)
        got = products.int8_product(x, q, scale, None).double()
        expected = x.double() @ (q.double() * (1 if scale is None else scale)).t()
        assert (got - expected).norm() < 6 * torch.finfo(dtype).eps * expected.norm()
    a, b = integers(3, 64), integers(32, 64)
    assert torch.equal(integer_product(a, b), a.int() @ b.int().t())


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


Q, SCALE, GROUPS = integers(64, 128), torch.rand(64, 1), torch.rand(64, 4)
SMALL, LARGE = integers(256, 256), integers(1024, 1056)
FLOATS = torch.float32, torch.float16, torch.bfloat16
TILES, NO_TILES = {"has_tiles": True}, {"has_tiles": False}
BFLOAT16, NO_BFLOAT16 = NO_TILES | {"has_bfloat16": True}, NO_TILES | {"has_bfloat16": False}
NO_LIBRARY = NO_BFLOAT16 | {"library": None}

# What the processor has, rows and dtype of the input, the matrix with its scales and zero points; and the kernel.
CHOSEN = [
    *(
        (has, 4, dtype, matrix, kernel)
        for has in (TILES, NO_TILES)
        for dtype in FLOATS
        for matrix, kernel in [
            ((Q,), "_by_rows"),
            ((Q, SCALE), "_by_rows"),
            ((Q, SCALE, integers(64, 1)), "_by_rows"),
            ((Q.t(),), "_by_columns"),
            ((Q.t(), SCALE.t(), integers(1, 64)), "_by_columns"),
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
        for matrix in [(Q, GROUPS), (Q, GROUPS, integers(64, 4)), (Q[:, :100],)]
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


@pytest.mark.parametrize(("has", "rows", "dtype", "matrix", "kernel"), CHOSEN)
def test_which_kernel_is_chosen(has, rows, dtype, matrix, kernel, monkeypatch):
    for name, value in has.items():
        monkeypatch.setattr(cpu_kernels, name, lambda value=value: value)
    assert chosen(torch.randn(rows, matrix[0].shape[1], dtype=dtype), *matrix) == kernel


def test_other_dtypes_are_refused():
    with pytest.raises(TypeError, match=r"expected floats of 16, 32 or 64 bits, got torch\.int32"):
        products.int8_product(torch.ones(2, 32, dtype=torch.int32), integers(32, 32), None, None)
