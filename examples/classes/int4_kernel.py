"""A four-bit weight with a kernel of its own.

`F.linear` runs a custom op of `torch.library`, which compilers keep as one node, and which never makes the whole
matrix: for each group of columns it multiplies by the numbers, and scales the product. The op has a CPU
implementation, a fake one for tracing, and a backward. The script shows the graph of a compiled layer.

    python examples/classes/int4_kernel.py
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import desugar
from subclasses import Outer, TensorSubclass, inner


def numbers(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers from -8 to 7; the first of two in the lower bits of a byte."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2).to(dtype) - 8


@torch.library.custom_op("gallery::int4_linear", mutates_args=(), device_types="cpu")
def int4_linear(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    """`x` [n, groups, group] by a weight `packed` [out, groups, group / 2] and `scale` [out, groups]: [n, out]."""
    y = x.new_zeros(x.shape[0], packed.shape[0])
    for g, part in enumerate(x.unbind(1)):
        y += (part @ numbers(packed[:, g], x.dtype).T) * scale[:, g]
    return y


@int4_linear.register_fake
def _(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], packed.shape[0])


def save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor]:
    x, packed, scale = ctx.saved_tensors
    q = numbers(packed, x.dtype)
    return torch.einsum("no,ogi,og->ngi", grad, q, scale), None, torch.einsum("no,ngi,ogi->og", grad, x, q)


int4_linear.register_autograd(backward, setup_context=save_inputs)


class KernelInt4Weight(TensorSubclass, dtype_from="scale", fallback="materialize"):
    """Numbers of four bits times the scale of their group; ops other than linear layers run on the whole matrix."""

    packed: Tensor = inner(dtype=torch.uint8)  # [out, groups, group / 2]
    scale: Tensor = inner()  # [out, groups]

    @staticmethod
    def outer(packed, scale) -> Outer:
        if packed.ndim != 3 or packed.shape[:2] != scale.shape:
            raise ValueError(f"numbers of size {list(packed.shape)} with scales of size {list(scale.shape)}")
        return Outer((packed.shape[0], packed.shape[1] * packed.shape[2] * 2))

    def materialize(self) -> Tensor:
        return (numbers(self.packed, self.scale.dtype) * self.scale.unsqueeze(-1)).flatten(1)

    @classmethod
    def from_float(cls, w: Tensor, group: int) -> "KernelInt4Weight":
        if group % 2 or w.shape[1] % group:
            raise ValueError(
                f"groups of {group} in rows of {w.shape[1]}: need an even group that divides the row"
            )
        groups = w.detach().unflatten(1, (w.shape[1] // group, group))
        scale = groups.abs().amax(-1) / 7
        q = (groups / scale.clamp(min=torch.finfo(w.dtype).tiny).unsqueeze(-1)).round().clamp(-8, 7) + 8
        low, high = q.to(torch.uint8).unflatten(2, (group // 2, 2)).unbind(-1)
        return cls(low | high << 4, scale)


@KernelInt4Weight.implements(F.linear)
def linear(func, input, weight, bias=None):
    if not isinstance(weight, KernelInt4Weight) or isinstance(input, KernelInt4Weight):
        return KernelInt4Weight.unruled(func, input, weight, bias)
    packed, scale = weight.unwrap()
    group = (packed.shape[1], packed.shape[2] * 2)
    rows = input.unflatten(-1, group).reshape(-1, *group)
    y = int4_linear(rows, packed, scale.to(input.dtype)).view(*input.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias


def main() -> None:
    torch.manual_seed(0)
    dense, x = torch.randn(64, 128), torch.randn(8, 128)
    layer = desugar.compile(lambda x, w: F.linear(x, w).relu(), backend="eager")
    y = layer(x, KernelInt4Weight.from_float(dense, 32))
    expected = F.linear(x, dense).relu()
    print(layer.programs[0].forward.code.strip())
    print(f"error beside float32 {(y - expected).norm() / expected.norm():.1%}")


if __name__ == "__main__":
    main()
