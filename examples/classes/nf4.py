"""QLoRA's four-bit weight: sixteen levels that suit normal numbers, and scales that are quantized themselves.

`QuantizedScales` is a declared class of its own, and an inner tensor of `NF4`: int8 numbers, their mean, and a factor
for each 256 of them. `from_float` gives the numbers and scales of torchao's `to_nf4`. A frozen weight is kept in four
bits for the backward, too. The script trains an adapter beside a frozen weight.

    python examples/classes/nf4.py
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from subclasses import Outer, TensorSubclass, constant, inner, static

LEVELS = [-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0]
LEVELS += [0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0]


class QuantizedScales(TensorSubclass, size_from="qdata", dtype_from="factor", fallback="materialize"):
    """Scales `qdata / factor + mean`. Each factor is of `piece` entries of one row, so that rows can be cut."""

    qdata: Tensor = inner(dtype=torch.int8, shape="out blocks")
    factor: Tensor = inner(shape="out pieces")
    mean: Tensor = inner(shape="")
    piece: int = static()

    def materialize(self) -> Tensor:
        factor = self.factor.repeat_interleave(self.piece, 1)
        return (self.qdata / factor).to(self.mean.dtype) + self.mean

    @classmethod
    def from_float(cls, scales: Tensor, group: int) -> "QuantizedScales":
        """Entries of `group` consecutive scales have one factor, where the group ends in another row, too."""
        mean = scales.mean() if scales.numel() else scales.new_zeros(())
        groups = (scales - mean).view(scales.numel() // group, group)
        largest = groups.abs().amax(1, keepdim=True)
        factor = 256 / (2 * largest.where(largest > 0, 1))
        qdata = (groups * factor).round().clamp(-128, 127).to(torch.int8)
        piece = math.gcd(group, scales.shape[1])
        factor = factor.repeat_interleave(group // piece).view(scales.shape[0], scales.shape[1] // piece)
        return cls(qdata.view(scales.shape), factor, mean, piece=piece)


class NF4(TensorSubclass, dtype_from="scale", fallback="materialize"):
    """Levels times the scale of their block."""

    packed: Tensor = inner(dtype=torch.uint8)  # [out, in / 2], the first of two levels in the upper bits
    scale: Tensor = inner()  # [out, in / block], QuantizedScales
    block: int = static(default=64)
    levels = constant(LEVELS)

    @staticmethod
    def outer(packed, scale, block) -> Outer:
        rows, columns = packed.shape[0], packed.shape[1] * 2
        if scale.shape[0] != rows or scale.shape[1] * block != columns:
            raise ValueError(
                f"scales of size {list(scale.shape)} for blocks of {block} in {rows} x {columns}"
            )
        return Outer((rows, columns))

    def materialize(self) -> Tensor:
        codes = torch.stack([self.packed >> 4, self.packed & 15], -1).flatten(1)
        scale = self.scale.materialize() if isinstance(self.scale, QuantizedScales) else self.scale
        return self.levels.to(scale.dtype)[codes.long()] * scale.repeat_interleave(self.block, 1)

    @classmethod
    def from_float(cls, w: Tensor, block: int = 64, group: int = 256) -> "NF4":
        """The nearest levels; the largest number of a block becomes 1 or -1."""
        if w.ndim != 2 or block % 2 or w.shape[1] % block or w.numel() % (block * group):
            raise ValueError(
                f"{group} blocks of {block} in a matrix of size {list(w.shape)}: need whole groups"
            )
        blocks = w.detach().contiguous().unflatten(1, (w.shape[1] // block, block))
        largest = blocks.abs().amax(2)
        numbers = blocks / largest.where(largest > 0, 1).unsqueeze(2)
        codes = (numbers.unsqueeze(-1) - numbers.new_tensor(LEVELS)).abs().min(-1).indices
        high, low = codes.to(torch.uint8).flatten(1).unflatten(1, (w.shape[1] // 2, 2)).unbind(-1)
        return cls(high << 4 | low, QuantizedScales.from_float(largest, group), block=block)


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


@NF4.implements(F.linear)
def linear(func, input, weight, bias=None):
    if not isinstance(weight, NF4) or isinstance(input, NF4):
        return NF4.unruled(func, input, weight, bias)
    if weight.requires_grad:
        return func(input, weight.materialize().to(input.dtype), bias)
    y = Product.apply(input, weight)
    return y if bias is None else y + bias


def main() -> None:
    torch.manual_seed(0)
    w, x = torch.randn(128, 256), torch.randn(512, 256)
    q = NF4.from_float(w)
    size = q.packed.nbytes + sum(t.nbytes for t in q.scale.unwrap())
    print(f"{size} bytes instead of {w.nbytes}")
    a = (torch.randn(16, 256) / 16).requires_grad_()
    b = torch.zeros(128, 16, requires_grad=True)
    optimizer = torch.optim.Adam([a, b], lr=0.01)
    for step in range(201):
        error = F.mse_loss(F.linear(x, q) + x @ a.T @ b.T, x @ w.T)
        if step % 200 == 0:
            print(f"step {step:3}: mean squared error {error:.3f}")
        optimizer.zero_grad()
        error.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
