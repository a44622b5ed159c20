"""Builds and calls the kernels of `cpu_kernels.cpp`: products with int8 matrices on x86 processors.

PyTorch has no kernel that reads int8 numbers once and multiplies each by several rows of floats in registers. The first
product that needs the library builds it, in about two seconds. The library is kept in the folder in which Inductor
keeps kernels. It is for processors with AVX2 or AVX-512. Where it cannot be built, products run on PyTorch's kernels.
"""

from __future__ import annotations

import ctypes
import functools
import getpass
import hashlib
import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from subclasses import _torch_tracing
from subclasses.slow_paths import say_once

SOURCE = Path(__file__).with_suffix(".cpp")
MULTIPLE = 32  # of both extents of a matrix that is multiplied by floats: the loops have no remainder
INTEGERS_MULTIPLE = 64  # of the width of a matrix that is multiplied by integers
WORK = 2**19  # products for each thread; waking a thread takes as long as this many
WORK_OF_PASSES = 2**15  # the same for numbers that are read, converted and written
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
# The instruction set that PyTorch uses on this processor -> compiler flags besides the flag for this processor.
FLAGS = {"AVX512": ["-w", "-mavx512f"], "AVX2": ["-w", "-mno-avx512f", "-mavx2", "-mfma"]}

# ---- the library -------------------------------------------------------------------------------------------


@functools.cache
def library() -> ctypes.CDLL | None:
    """Returns the library, and builds it if necessary; None where it cannot be built."""
    flags = FLAGS.get(torch.backends.cpu.get_cpu_capability())
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()  # older releases lack the function
    if flags is None or capabilities.get("architecture") != "x86_64":
        return None
    has = sorted(name for name, value in capabilities.items() if value is True)
    digest = hashlib.blake2b(repr((torch.__version__, flags, has)).encode(), digest_size=12)
    digest.update(SOURCE.read_bytes())
    path = _folder() / f"subclasses_int8_{digest.hexdigest()}.so"
    try:
        if not path.exists():
            _build(path, flags)
        return _with_types(ctypes.CDLL(str(path)))
    except (RuntimeError, OSError) as error:
        say_once(
            "int8 products run on PyTorch's kernels, for ours were not built",
            f"install a C++ compiler: {str(error)[-500:]}",
        )
        return None


def _folder() -> Path:
    """Returns Inductor's cache folder, without importing Inductor, which takes seconds in eager mode."""
    if folder := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        return Path(folder)
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in containers
        user = f"uid_{os.getuid()}"
    return Path(tempfile.gettempdir()) / f"torchinductor_{user}"


def _build(path: Path, flags: list[str]) -> None:
    """Builds the library under a temporary name, then renames it: other processes find the whole library or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        _torch_tracing.build_library(str(SOURCE), folder, "kernels", flags)
        (Path(folder) / "kernels.so").replace(path)


def _with_types(loaded: ctypes.CDLL) -> ctypes.CDLL:
    pointer, extent, threads = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    for name in ("rows_float32", "columns_float32", "rows_bfloat16", "columns_bfloat16", "rows_int8"):
        if hasattr(loaded, name):  # kernels for bfloat16 exist where the processor has instructions for it
            getattr(loaded, name).argtypes = [pointer] * 3 + [extent] * 3 + [threads]
            getattr(loaded, name).restype = None
    for dtype in NAMES.values():
        getattr(loaded, f"dynamic_{dtype}").argtypes = [pointer] * 4 + [extent] * 4 + [threads]
        getattr(loaded, f"quantize_{dtype}").argtypes = [pointer] * 3 + [extent] * 2 + [threads]
        getattr(loaded, f"scale_{dtype}").argtypes = [pointer] * 3 + [
            extent,
            pointer,
            extent,
            extent,
            threads,
        ]
        for name in ("dynamic", "quantize", "scale"):
            getattr(loaded, f"{name}_{dtype}").restype = None
    loaded.convert_bfloat16.argtypes = [pointer, extent, pointer, extent, extent, threads]
    loaded.convert_bfloat16.restype = None
    return loaded


def has_avx512() -> bool:
    """Whether the library uses AVX-512; it is built for AVX2 otherwise."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def has_avx2_alone() -> bool:
    """Whether PyTorch uses AVX2 here, and nothing newer."""
    return torch.backends.cpu.get_cpu_capability() == "AVX2"


@functools.cache
def has_tiles() -> bool:
    """Whether the processor multiplies tiles of bfloat16 numbers (AMX), which oneDNN uses."""
    return getattr(torch.cpu, "get_capabilities", dict)().get("amx_bf16") is True


@functools.cache
def has_bfloat16() -> bool:
    """Whether the library multiplies bfloat16 by integers, in sums of float32."""
    return hasattr(library(), "rows_bfloat16")


def _threads(work: int, of_each: int) -> int:
    """Returns the number of threads that share ``work``, with at least ``of_each`` of it for each thread."""
    return max(1, min(torch.get_num_threads(), work // of_each))


def _call(name: str, x: Tensor, qdata: Tensor, y: Tensor) -> Tensor:
    """Calls a product of a contiguous matrix ``x`` with a contiguous int8 matrix."""
    rows, (height, width) = y.shape[0], qdata.shape
    threads = _threads(rows * height * width, WORK)
    kernel = getattr(library(), name)
    kernel(x.data_ptr(), qdata.data_ptr(), y.data_ptr(), rows, height, width, threads)
    return y


# ---- products ----------------------------------------------------------------------------------------------


def is_whole(qdata: Tensor) -> bool:
    """Whether the loops over a matrix have no remainder, and it is contiguous."""
    return qdata.is_contiguous() and all(extent % MULTIPLE == 0 for extent in qdata.shape)


def times_rows(x: Tensor, qdata: Tensor) -> Tensor:
    """Returns ``x @ qdata.T`` in float32, for ``x`` in float32, or in bfloat16 where :func:`has_bfloat16`."""
    name = "rows_bfloat16" if x.dtype is torch.bfloat16 else "rows_float32"
    return _call(name, x.contiguous(), qdata, x.new_empty(x.shape[0], qdata.shape[0], dtype=torch.float32))


def times_columns(x: Tensor, qdata: Tensor) -> Tensor:
    """Returns ``x @ qdata`` in float32, for ``x`` in the dtypes of :func:`times_rows`."""
    y = x.new_empty(x.shape[0], qdata.shape[1], dtype=torch.float32)
    if x.dtype is torch.bfloat16:  # pairs of entries that are neighbours in a row
        pairs = x.reshape(-1).view(torch.int32).view(x.shape[0], -1)
        return _call("columns_bfloat16", pairs.t().contiguous(), qdata, y)
    return _call("columns_float32", x.t().contiguous(), qdata, y)


def integers_times_rows(x: Tensor, qdata: Tensor) -> Tensor:
    """Returns the exact ``x @ qdata.T`` of contiguous int8 matrices as int32; `INTEGERS_MULTIPLE` divides the width."""
    return _call("rows_int8", x, qdata, x.new_empty(x.shape[0], qdata.shape[0], dtype=torch.int32))


def takes_integers(qdata: Tensor) -> bool:
    """Whether the library multiplies integers by a matrix: contiguous, with a width of whole vectors."""
    return qdata.is_contiguous() and qdata.shape[1] % INTEGERS_MULTIPLE == 0 and library() is not None


def can_convert(qdata: Tensor) -> bool:
    """Whether :func:`to_bfloat16` accepts a matrix."""
    return qdata.stride(1) == 1 and qdata.shape[1] % MULTIPLE == 0 and library() is not None


def to_bfloat16(qdata: Tensor, out: Tensor) -> Tensor:
    """Writes an int8 matrix to a contiguous bfloat16 matrix, in a third of the time of ``copy_``."""
    height, width = qdata.shape
    threads = _threads(height * width, WORK)
    convert = library().convert_bfloat16  # type: ignore[union-attr]
    convert(qdata.data_ptr(), qdata.stride(0), out.data_ptr(), height, width, threads)
    return out


# ---- products with rows that are quantized -----------------------------------------------------------------


def dynamic_rows(x: Tensor, qdata: Tensor, scale: Tensor) -> Tensor:
    """Quantizes each row of ``x``, multiplies by an int8 matrix and scales.

    Args:
        x: float32 or bfloat16, ``[M, K]``, contiguous.
        qdata: int8, ``[N, K]``, contiguous; `INTEGERS_MULTIPLE` divides ``K``.
        scale: float32, ``[N, 1]`` or ``[1, 1]``, contiguous.
    """
    (rows, width), height = x.shape, qdata.shape[0]
    y = x.new_empty(rows, height)
    threads = _threads(rows * height * width, WORK)
    multiply = getattr(library(), f"dynamic_{NAMES[x.dtype]}")
    pointers = x.data_ptr(), qdata.data_ptr(), y.data_ptr(), scale.data_ptr()
    multiply(*pointers, int(scale.shape[0] != 1), rows, height, width, threads)
    return y


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes each row of a contiguous matrix in float32 or bfloat16; returns the integers and the scales."""
    rows, width = x.shape
    q, scales = x.new_empty(x.shape, dtype=torch.int8), x.new_empty(rows, dtype=torch.float32)
    threads = _threads(rows * width, WORK_OF_PASSES)
    quantize = getattr(library(), f"quantize_{NAMES[x.dtype]}")
    quantize(x.data_ptr(), q.data_ptr(), scales.data_ptr(), rows, width, threads)
    return q, scales


def scale_sums(sums: Tensor, row_scales: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiplies int32 sums ``[N, M]`` by the scale of their row and of their column.

    Returns:
        The products in ``dtype``, ``[M, N]``.
    """
    height, rows = sums.shape
    y = sums.new_empty(rows, height, dtype=dtype)
    threads = _threads(rows * height, WORK_OF_PASSES)
    multiply, step = getattr(library(), f"scale_{NAMES[dtype]}"), int(scale.shape[0] != 1)
    pointers = sums.data_ptr(), row_scales.data_ptr(), scale.data_ptr()
    multiply(*pointers, step, y.data_ptr(), rows, height, threads)
    return y
