"""Products of floats, quantized by row, with int8 matrices on the CPU: one op.

For a few rows, separate kernels would compute the scales, the integers, the product and the scaled sums. Starting the
kernels beside the product takes longer than running them. One call of our own library computes all of it. A program for
any batch size still runs the fastest kernel for each batch: PyTorch's kernel multiplies more rows (`integers.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from subclasses.int8 import affine
from subclasses.int8.matmul import cpu_kernels, integers
from subclasses.int8.matmul.ops import define_op, is_traced, register_product


def takes(x: Tensor, qdata: Tensor, scale: Tensor) -> bool:
    """Whether :func:`dynamic_product` computes a product on this machine: by a contiguous matrix of whole vectors.

    A compiler's own kernels take less time for a small matrix.
    """
    return (
        x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and scale.dtype is torch.float32
        and scale.shape[1] == 1
        and isinstance(qdata.shape[1], int)  # a comparison with a symbol becomes a guard
        and (qdata.numel() > integers.SMALL or not is_traced(x))
        and cpu_kernels.takes_integers(qdata)
    )


@define_op("subclasses::int8_dynamic_product(Tensor x, Tensor qdata, Tensor scale) -> Tensor")
def dynamic_product(x: Tensor, qdata: Tensor, scale: Tensor) -> Tensor:
    """Returns ``int8(x) @ (qdata * scale).T`` in the dtype of ``x``; each row of ``x`` has its own scale.

    Args:
        x: floats of 16 or 32 bits, ``[M, K]``.
        qdata: int8, ``[N, K]``; ``K`` is not 1.
        scale: float32, ``[N, 1]`` or ``[1, 1]``.
    """
    if x.shape[0] == 0:
        return x.new_empty(0, qdata.shape[0])
    if not cpu_kernels.takes_integers(qdata):  # a package on another machine
        return _by_torch(x, qdata, scale)
    values = (x if x.dtype in cpu_kernels.NAMES else x.float()).contiguous()
    scale = scale.contiguous()
    if x.shape[0] <= integers.FEW_ROWS or integers.is_without_vnni():
        return cpu_kernels.dynamic_rows(values, qdata, scale).to(x.dtype)
    rows, row_scales = cpu_kernels.quantize_rows(values)
    sums = integers.transposed_product(rows, qdata)
    return cpu_kernels.scale_sums(sums, row_scales, scale, values.dtype).to(x.dtype)


register_product(dynamic_product, lambda x: x.dtype)


def _by_torch(x: Tensor, qdata: Tensor, scale: Tensor) -> Tensor:
    row_scale, _ = affine.choose_scale(x, (x.shape[0], 1), symmetric=True)
    sums = integers.multiply_on_cpu(affine.to_int8(x, row_scale, None), qdata)
    return (sums.to(row_scale.dtype) * row_scale * scale.t()).to(x.dtype)
