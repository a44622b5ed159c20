"""A float32 weight that computes in another dtype, and is cast where it is used.

The weight has the compute dtype, which is static; the master that it is made from keeps float32, and gets float32
gradients. `F.linear` casts its input too. `to(dtype)` changes the dtype of computing alone, so that converting a
module loses no bits. The script trains one layer in bfloat16 with a master weight, and without.

    python examples/classes/master_weight.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subclasses import Outer, TensorSubclass, inner, static

aten = torch.ops.aten


class MasterWeight(TensorSubclass, fallback="materialize"):
    """`master`, as if it were of the dtype `compute`."""

    master: Tensor = inner(dtype=torch.float32)
    compute: torch.dtype = static(default=torch.bfloat16)

    @staticmethod
    def outer(master, compute) -> Outer:
        return Outer(master.shape, master.stride(), dtype=compute, storage_offset=master.storage_offset())

    def materialize(self) -> Tensor:
        return self.master.to(self.compute)


@MasterWeight.implements(F.linear)
def linear(func, input, weight, bias=None):
    if not isinstance(weight, MasterWeight) or isinstance(input, MasterWeight):
        return MasterWeight.unruled(func, input, weight, bias)
    cast = weight.unwrap("master").to(weight.compute)
    return func(input.to(weight.compute), cast, None if bias is None else bias.to(weight.compute))


@MasterWeight.implements(aten._to_copy)
def to_copy(func, x, *, dtype=None, **options):
    if dtype is not None and not dtype.is_floating_point:
        return func(x.materialize(), dtype=dtype, **options)
    return MasterWeight(func(x.master, **options), compute=dtype or x.compute)


class Linear(nn.Module):
    """Holds the master as a parameter, and makes the weight in each step."""

    def __init__(self, master: Tensor, compute: torch.dtype) -> None:
        super().__init__()
        self.master, self.compute = nn.Parameter(master), compute

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, MasterWeight(self.master, compute=self.compute))


def main() -> None:
    torch.manual_seed(0)
    x, true = torch.randn(256, 16), torch.randn(8, 16)
    for name, layer in {
        "float32 master": Linear(torch.zeros(8, 16), torch.bfloat16),
        "bfloat16 weight": nn.Linear(16, 8, bias=False, dtype=torch.bfloat16),
    }.items():
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.02)
        for _ in range(500):
            optimizer.zero_grad()
            y = layer(x.bfloat16())
            F.mse_loss(y.float(), x @ true.T, reduction="sum").div(256).backward()
            optimizer.step()
        (weight,) = layer.parameters()
        print(f"{name:15} {weight.dtype}, largest error {(weight - true).abs().max():.4f}")


if __name__ == "__main__":
    main()
