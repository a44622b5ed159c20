"""A matrix of four-bit floats: two in each byte, a float8 scale for each 16 of a row, one float32 scale for all.

This is NVIDIA's NVFP4. A number is 0, 0.5, 1, 1.5, 2, 3, 4 or 6, with a sign. `from_float` gives the numbers and scales
of torchao's `NVFP4Tensor.to_nvfp4` with a scale for the tensor. `F.linear` multiplies by the matrix in the dtype of
its input. The script compares sizes and errors.

    python examples/classes/nvfp4.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from subclasses import Outer, TensorSubclass, constant, inner, static

aten = torch.ops.aten
SCALES, BLOCK = torch.float8_e4m3fn, 16
LEAST, MOST = torch.finfo(SCALES).tiny, torch.finfo(SCALES).max
LEVELS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
# A number is rounded up above these. Halfway between two levels, rounding takes the even code, as by IEEE 754.
HALFWAY = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
BOUNDS = [h if code % 2 == 0 else h * (1 - 2**-24) for code, h in enumerate(HALFWAY)]


class NVFP4(TensorSubclass, fallback="materialize"):
    """Levels times the scales of their block and of the tensor, as a tensor of the dtype `float_dtype`."""

    qdata: Tensor = inner(dtype=torch.uint8)  # [..., n / 2], the first of two numbers in the lower bits
    scale: Tensor = inner(dtype=SCALES)  # [..., n / 16]
    tensor_scale: Tensor = inner(dtype=torch.float32)  # []
    float_dtype: torch.dtype = static(default=torch.float32)
    levels = constant([*LEVELS, *(-level for level in LEVELS)])
    bounds = constant(BOUNDS)

    @staticmethod
    def outer(qdata, scale, tensor_scale, float_dtype) -> Outer:
        size = (*qdata.shape[:-1], qdata.shape[-1] * 2)
        if size != (*scale.shape[:-1], scale.shape[-1] * BLOCK) or tensor_scale.ndim:
            sizes = [list(t.shape) for t in (qdata, scale, tensor_scale)]
            raise ValueError(f"numbers and scales of sizes {sizes}: need [..., n / 2], [..., n / 16], []")
        return Outer(size, dtype=float_dtype)

    def materialize(self) -> Tensor:
        codes = torch.stack([self.qdata & 15, self.qdata >> 4], -1).flatten(-2)
        scale = (self.tensor_scale * self.scale.float()).repeat_interleave(BLOCK, -1)
        return (self.levels[codes.long()] * scale).to(self.float_dtype)

    @classmethod
    def from_float(cls, x: Tensor) -> "NVFP4":
        """The largest number of the tensor becomes 6 times 448 times the scale of the tensor."""
        if x.dtype not in (torch.float32, torch.bfloat16) or x.ndim == 0 or x.shape[-1] % BLOCK:
            raise ValueError(
                f"{x.dtype} of size {list(x.shape)}: need float32 or bfloat16 in blocks of {BLOCK}"
            )
        blocks = x.detach().float().contiguous().unflatten(-1, (x.shape[-1] // BLOCK, BLOCK))
        largest = blocks.abs().amax(-1)
        whole = largest.amax() / (MOST * LEVELS[-1]) if x.numel() else largest.new_ones(())
        whole = whole.where(whole > 0, 1)
        scale = (largest / LEVELS[-1] / whole).clamp(LEAST, MOST).to(SCALES)
        numbers = (blocks * (1 / whole / scale.float()).unsqueeze(-1)).view(x.shape)
        codes = torch.bucketize(numbers.abs(), numbers.new_tensor(BOUNDS)) | numbers.signbit() << 3
        low, high = codes.to(torch.uint8).unflatten(-1, (x.shape[-1] // 2, 2)).unbind(-1)
        return cls(low | high << 4, scale, whole, float_dtype=x.dtype)


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


@NVFP4.implements(F.linear)
def linear(func, input, weight, bias=None):
    if not isinstance(weight, NVFP4) or isinstance(input, NVFP4):
        return NVFP4.unruled(func, input, weight, bias)
    if weight.requires_grad:
        return func(input, weight.materialize().to(input.dtype), bias)
    y = Product.apply(input, weight)
    return y if bias is None else y + bias


@NVFP4.implements(aten._to_copy)
def to_copy(func, x, *, dtype=None, **options):
    if dtype is not None and not dtype.is_floating_point:
        return func(x.materialize(), dtype=dtype, **options)
    inners = [func(t, **options) for t in (x.qdata, x.scale, x.tensor_scale)]
    return NVFP4(*inners, float_dtype=dtype or x.float_dtype)


def main() -> None:
    torch.manual_seed(0)
    w, x = torch.randn(256, 256), torch.randn(8, 256)
    q = NVFP4.from_float(w)
    size = sum(t.nbytes for t in q.unwrap())
    error = (F.linear(x, q) - F.linear(x, w)).norm() / F.linear(x, w).norm()
    print(f"{size} bytes instead of {w.nbytes}, error of a product {error:.1%}")


if __name__ == "__main__":
    main()
