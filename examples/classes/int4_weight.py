"""A weight of four bits: two numbers in each byte, and a scale for each group of numbers in a row.

A matrix of 4096 by 4096 takes 10 MB in groups of 32 with float32 scales, instead of 67 MB. `F.linear` unpacks it in
the dtype of its input; every other op runs on the matrix in the dtype of the scales. The scales may be trained. The
script compares memory and error for several group sizes.

    python examples/classes/int4_weight.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from subclasses import Outer, TensorSubclass, inner, static


class Int4Weight(TensorSubclass, dtype_from="scale", fallback="materialize"):
    """Numbers from -8 to 7 times the scale of their group."""

    packed: Tensor = inner(dtype=torch.uint8)  # [out, in / 2], the first of two numbers in the lower bits
    scale: Tensor = inner()  # [out, in / group]
    group: int = static(default=32)

    @staticmethod
    def outer(packed, scale, group) -> Outer:
        rows, columns = packed.shape[0], packed.shape[1] * 2
        if scale.shape[0] != rows or scale.shape[1] * group != columns:
            raise ValueError(
                f"scales of size {list(scale.shape)} for groups of {group} in {rows} x {columns}"
            )
        return Outer((rows, columns))

    def materialize(self) -> Tensor:
        return unpack(self.packed, self.scale, self.group)

    @classmethod
    def from_float(cls, w: Tensor, group: int = 32) -> "Int4Weight":
        """The nearest four-bit numbers; the largest of a group becomes 7 or -7."""
        if group % 2 or w.shape[1] % group:
            raise ValueError(
                f"rows of {w.shape[1]} in groups of {group}: need an even group that divides the row"
            )
        groups = w.detach().unflatten(1, (w.shape[1] // group, group))
        scale = groups.abs().amax(-1) / 7
        q = (groups / scale.clamp(min=torch.finfo(w.dtype).tiny).unsqueeze(-1)).round().clamp(-8, 7) + 8
        low, high = q.to(torch.uint8).view(len(w), w.shape[1] // 2, 2).unbind(-1)
        return cls(low | high << 4, scale, group=group)


def unpack(packed: Tensor, scale: Tensor, group: int) -> Tensor:
    numbers = torch.stack([packed & 15, packed >> 4], -1).flatten(1).to(scale.dtype) - 8
    return numbers * scale.repeat_interleave(group, 1)


@Int4Weight.implements(F.linear)
def linear(func, input, weight, bias=None):
    if not isinstance(weight, Int4Weight):  # it is input, or the bias
        return Int4Weight.unruled(func, input, weight, bias)
    packed, scale = weight.unwrap()
    return func(input, unpack(packed, scale.to(input.dtype), weight.group), bias)


def main() -> None:
    torch.manual_seed(0)
    w, x = torch.randn(256, 256), torch.randn(8, 256)
    for group in (16, 64, 256):
        q = Int4Weight.from_float(w, group)
        error = (F.linear(x, q) - F.linear(x, w)).norm() / F.linear(x, w).norm()
        size = q.packed.nbytes + q.scale.nbytes
        print(f"groups of {group:3}: {size:6} bytes instead of {w.nbytes}, error of a product {error:.1%}")


if __name__ == "__main__":
    main()
