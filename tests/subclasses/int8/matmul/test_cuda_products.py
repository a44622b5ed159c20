"""The kernel for 2 to 64 rows on CUDA: its values by Triton's interpreter, its loads and registers by the compiler."""

from __future__ import annotations

import pytest

from tests.triton_kernels import compile_for_hopper, interpret, needs_triton, triton_cache  # noqa: F401

# What the kernel gets is what `int8_rows` hands it: the op is called as the interpreter runs it, without a device.
VALUES = """
import torch
from subclasses.int8 import Int8Tensor
from subclasses.int8.matmul import cuda_products
torch.library.wrap_triton = lambda kernel: kernel
product = cuda_products.int8_rows._init_fn
torch.manual_seed(0)
for rows, columns, width in ((1, 5, 7), (16, 40, 300), (20, 16, 256), (33, 17, 513), (64, 24, 1024)):
    x = torch.randn(rows, width).to(torch.float16)
    blocks = [(1, width), (columns, width)]
    blocks += [(height, group) for height in (1, columns) for group in (16, 32, 128, 256, 512) if width % group == 0]
    for block_size in blocks:
        for symmetric in (True, False):
            weight = Int8Tensor.from_float(
                torch.randn(columns, width).to(torch.float16), block_size=block_size, symmetric=symmetric
            )
            y = product(x, weight.qdata, weight.scale, weight.zero_point)
            expected = (x.double() @ weight.dequantize().double().t()).to(torch.float16)
            torch.testing.assert_close(y, expected, atol=2e-2, rtol=1e-2)
print("all agree")
"""


@pytest.mark.slow
@needs_triton
def test_the_kernel_for_a_few_rows_computes_what_eager_does():
    """Runs it by Triton's interpreter, on the CPU; it has no products of bfloat16, so in float16."""
    assert interpret(VALUES) == "all agree"


@pytest.mark.sweep(3)
@needs_triton
@pytest.mark.usefixtures("triton_cache")
@pytest.mark.parametrize("rows", [16, 32, 64])
def test_the_kernel_reads_16_bytes_a_thread_and_spills_nothing(rows):
    from subclasses.int8.matmul import cuda_products as products

    width = products.BLOCK_K if rows <= 32 else products.BLOCK_K_OF_MANY
    arguments = dict.fromkeys(("rows", "columns", "width", "group_width", "row_step"), "i32")
    arguments |= {"x_ptr": "*bf16", "w_ptr": "*i8", "scale_ptr": "*bf16", "zero_ptr": "*i8", "y_ptr": "*bf16"}
    constants = {"BLOCK_M": rows, "BLOCK_N": products.BLOCK_N, "BLOCK_K": width, "PART": width}
    constants |= {"IS_GROUPED": False, "HAS_ZERO": False}
    found = compile_for_hopper(products.int8_rows_kernel, arguments, constants, num_warps=4, num_stages=4)
    assert found.count(r"cp\.async\.cg\.shared\.global [^;]*, 0x10") > 0, "no asynchronous copy of 16 bytes"
    assert found.count(r"cp\.async\.ca") == 0, "a copy of fewer bytes"
    assert (
        found.spills == 0 and found.registers <= 168
    )  # three programs of 128 threads for each multiprocessor
    assert found.shared <= 99 * 1024
