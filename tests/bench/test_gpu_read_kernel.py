"""The floor of the int8 benchmarks reads every byte, 16 at a time."""

import pytest

from tests.triton_kernels import compile_for_hopper, interpret, needs_triton, triton_cache  # noqa: F401

VALUES = """
import torch
from bench.gpu import read_kernel
read_kernel.PROGRAMS, read_kernel.BLOCK = 3, 16
for count in (1, 15, 16, 47, 48, 49, 200):
    x = torch.randint(-1000, 1000, (count,), dtype=torch.int32)
    out = torch.full((3,), 7, dtype=torch.int32)
    read_kernel.read_all(x, out)
    assert out.sum() == x.sum(), count
print("all read")
"""


@pytest.mark.slow
@needs_triton
def test_every_number_is_read_once():
    assert interpret(VALUES) == "all read"


@needs_triton
@pytest.mark.usefixtures("triton_cache")
def test_a_load_is_16_bytes_and_nothing_is_written_but_the_sums():
    from bench.gpu import read_kernel

    arguments = {"x_ptr": "*i32", "out_ptr": "*i32", "count": "i32"}
    kernel, constants = read_kernel.read_kernel, {"BLOCK": read_kernel.BLOCK}
    found = compile_for_hopper(kernel, arguments, constants, num_warps=read_kernel.WARPS)
    wide = read_kernel.BLOCK // (32 * read_kernel.WARPS * 4)
    assert found.count(r"ld\.global\.[\w:.]*v4\.b32") == found.count(r"ld\.global") == wide
    assert found.count(r"st\.global") == 1 and found.spills == 0
    assert found.count("evict_first") >= 1
