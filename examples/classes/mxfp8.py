"""A float8 matrix with a scale for each 32 numbers of a row, as the MX formats of the Open Compute Project define it.

A scale is a power of two, stored in eight bits. `from_float` rounds the scale down (the rule of the standard), and
gives the numbers and scales of torchao's `MXTensor.to_mx`. `F.linear` multiplies by the matrix in the dtype of its
input; a frozen matrix is kept in float8 for the backward. The script compares errors with one scale for a tensor.

    python examples/classes/mxfp8.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from subclasses import Outer, TensorSubclass, inner, static

aten = torch.ops.aten
NARROW, BLOCK = torch.float8_e4m3fn, 32
LARGEST = torch.finfo(NARROW).max  # 448; its exponent is 8


class MXFP8(TensorSubclass, fallback="materialize"):
    """`qdata` times the scale of its block, as a tensor of the dtype `float_dtype`."""

    qdata: Tensor = inner(dtype=NARROW)  # [..., n]
    scale: Tensor = inner(dtype=torch.float8_e8m0fnu)  # [..., n / 32]
    float_dtype: torch.dtype = static(default=torch.float32)

    @staticmethod
    def outer(qdata, scale, float_dtype) -> Outer:
        if qdata.shape != (*scale.shape[:-1], scale.shape[-1] * BLOCK):
            raise ValueError(f"scales of size {list(scale.shape)} for numbers of size {list(qdata.shape)}")
        return Outer(qdata.shape, dtype=float_dtype)

    def materialize(self) -> Tensor:
        scale = self.scale.to(self.float_dtype).repeat_interleave(BLOCK, -1)
        return self.qdata.to(self.float_dtype) * scale

    @classmethod
    def from_float(cls, x: Tensor) -> "MXFP8":
        """The largest exponent of a block becomes the largest exponent of a float8 number; larger numbers saturate."""
        if x.dtype not in (torch.float32, torch.bfloat16) or x.ndim == 0 or x.shape[-1] % BLOCK:
            raise ValueError(
                f"{x.dtype} of size {list(x.shape)}: need float32 or bfloat16 in blocks of {BLOCK}"
            )
        blocks = x.detach().float().contiguous().unflatten(-1, (x.shape[-1] // BLOCK, BLOCK))
        largest = blocks.abs().amax(-1)
        exponent = ((largest.view(torch.int32) >> 23) - 8).clamp(min=0)
        exponent = exponent.where(~largest.isnan(), 255)
        power = (exponent << 23).view(torch.float32).clamp(min=torch.finfo(torch.float32).tiny)
        qdata = (blocks / power.unsqueeze(-1)).clamp(-LARGEST, LARGEST).to(NARROW)
        return cls(
            qdata.view(x.shape), exponent.to(torch.uint8).view(torch.float8_e8m0fnu), float_dtype=x.dtype
        )


class Product(torch.autograd.Function):
    """A product with a frozen weight: the backward makes the matrix again, and nothing keeps it in between."""

    generate_vmap_rule = True

    @staticmethod
    def forward(input, weight):
        return F.linear(input, weight.materialize().to(input.dtype))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx, grad):
        return grad @ ctx.saved_tensors[0].materialize().to(grad.dtype), None


@MXFP8.implements(F.linear)
def linear(func, input, weight, bias=None):
    if not isinstance(weight, MXFP8) or isinstance(input, MXFP8):
        return MXFP8.unruled(func, input, weight, bias)
    if weight.requires_grad:
        return func(input, weight.materialize().to(input.dtype), bias)
    y = Product.apply(input, weight)
    return y if bias is None else y + bias


@MXFP8.implements(aten._to_copy)
def to_copy(func, x, *, dtype=None, **options):
    if dtype is not None and not dtype.is_floating_point:
        return func(x.materialize(), dtype=dtype, **options)
    return MXFP8(func(x.qdata, **options), func(x.scale, **options), float_dtype=dtype or x.float_dtype)


def main() -> None:
    torch.manual_seed(0)
    w = torch.randn(64, 256) * torch.logspace(-6, 0, 256)  # the first columns are small
    whole = (w / w.abs().max() * LARGEST).to(NARROW).float() * w.abs().max() / LARGEST
    blocks = MXFP8.from_float(w)
    print(f"{blocks.qdata.nbytes + blocks.scale.nbytes} bytes instead of {w.nbytes}")
    for name, q in {"one scale": whole, "a scale for each 32": blocks.materialize()}.items():
        error = ((q - w).abs() / w.abs()).median()
        print(f"{name:19} median error of a number {error:.2%}")


if __name__ == "__main__":
    main()
