"""A scaled float8 tensor: numbers of eight bits and one scale, for weights and for activations.

Products of matrices run on the float8 numbers themselves where the hardware can (`torch._scaled_mm`, from compute
capability 8.9 on). Elsewhere, and for every other op, they run on the wide numbers, and so does the backward of a
product. `from_float` gives the numbers and the scale of torchao's `Float8Tensor.from_hp` with a scale for the tensor.

    python examples/classes/float8.py
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import desugar
from subclasses import Outer, TensorSubclass, inner, static

aten = torch.ops.aten
NARROW = torch.float8_e4m3fn


class Float8(TensorSubclass, fallback="materialize"):
    """`qdata * scale`, as a tensor of the dtype `float_dtype`."""

    qdata: Tensor = inner(dtype=NARROW)
    scale: Tensor = inner(dtype=torch.float32, shape="")
    float_dtype: torch.dtype = static(default=torch.float32)

    @staticmethod
    def outer(qdata, scale, float_dtype) -> Outer:
        return Outer(qdata.shape, qdata.stride(), dtype=float_dtype, storage_offset=qdata.storage_offset())

    def materialize(self) -> Tensor:
        return (self.qdata.float() * self.scale).to(self.float_dtype)

    @classmethod
    def from_float(cls, x: Tensor) -> "Float8":
        """The largest entry becomes the largest number that float8 has."""
        largest = x.abs().amax() if x.numel() else x.new_zeros(())
        scale = (largest.where(largest > 0, 1) / torch.finfo(NARROW).max).float()
        return cls((x.float() / scale).to(NARROW), scale, float_dtype=x.dtype)


# ---------------------------------------------------------------------------------------------------------
# Views: the scale is of all entries, so it stays
# ---------------------------------------------------------------------------------------------------------


@Float8.implements(
    *(aten.t.default, aten.transpose.int, aten.permute.default, aten.view.default, aten.slice.Tensor),
    aten.as_strided.default,  # with which torch.compile remakes a view of an argument
)
def view(func, x, *args, **kwargs):
    return Float8(func(x.qdata, *args, **kwargs), aten.alias(x.scale), float_dtype=x.float_dtype)


@Float8.implements(aten._to_copy)
def to_copy(func, x, *, dtype=None, **options):
    if dtype is not None and not dtype.is_floating_point:
        return func(x.materialize(), dtype=dtype, **options)
    return Float8(func(x.qdata, **options), func(x.scale, **options), float_dtype=dtype or x.float_dtype)


# ---------------------------------------------------------------------------------------------------------
# Products of matrices
# ---------------------------------------------------------------------------------------------------------


@cache
def has_scaled_mm(device_type: str) -> bool:
    return device_type == "cuda" and torch.cuda.get_device_capability() >= (8, 9)


def fits_scaled_mm(x: Any, y: Any) -> bool:
    """Whether two factors can go to the hardware: both narrow, the first by rows, the second by columns."""
    both = isinstance(x, Float8) and isinstance(y, Float8)
    if not (both and has_scaled_mm(x.device.type) and x.dtype == y.dtype):
        return False
    aligned = all(extent % 16 == 0 for extent in (*x.shape, *y.shape))
    return aligned and x.qdata.is_contiguous() and y.qdata.t().is_contiguous()


def wide(value: Any) -> Any:
    return value.materialize() if isinstance(value, Float8) else value


@Float8.implements(aten.mm.default)
def mm(func, x, y):
    if not fits_scaled_mm(x, y):
        return func(wide(x), wide(y))
    return torch._scaled_mm(x.qdata, y.qdata, scale_a=x.scale, scale_b=y.scale, out_dtype=x.dtype)


@Float8.implements(aten.addmm.default)
def addmm(func, bias, x, y, *, beta=1, alpha=1):
    if not fits_scaled_mm(x, y):
        return func(wide(bias), wide(x), wide(y), beta=beta, alpha=alpha)
    return beta * wide(bias) + alpha * mm(aten.mm.default, x, y)


# ---------------------------------------------------------------------------------------------------------
# A layer whose weight is stored in float8, and whose input is made narrow on the way
# ---------------------------------------------------------------------------------------------------------


class Float8Linear(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(Float8.from_float(linear.weight.detach()), requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(Float8.from_float(x), self.weight, self.bias)


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    linear = nn.Linear(64, 32, device=device)
    layer, x = Float8Linear(linear), torch.randn(16, 64, device=device)
    how = "on the float8 numbers (torch._scaled_mm)" if has_scaled_mm(device) else "on the wide numbers"
    nbytes = layer.weight.qdata.nbytes + layer.weight.scale.nbytes
    print(f"weight: {linear.weight.nbytes} bytes, in float8 {nbytes}; products run {how}")
    with torch.no_grad():
        expected = linear(x)
        stock = torch.compile(layer, backend="aot_eager", fullgraph=True)
        ways = {
            "eager": layer,
            "torch.compile": stock,
            "desugar.compile": desugar.compile(layer, backend="eager"),
        }
        for name, way in ways.items():
            print(f"{name:16} error beside float32 {relative_error(way(x), expected):.2%}")


if __name__ == "__main__":
    main()
