"""Quantized layers and matrices of integers, for the tests of this folder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from subclasses.int8 import (
    Int8DynamicActivationInt8WeightConfig,
    Int8Tensor,
    Int8WeightOnlyConfig,
    PerGroup,
    PerTensor,
    quantize_,
)

WEIGHTS, DYNAMIC = Int8WeightOnlyConfig(), Int8DynamicActivationInt8WeightConfig()
CONFIGS = {
    "rows": WEIGHTS,
    "tensor": Int8WeightOnlyConfig(PerTensor()),
    "groups": Int8WeightOnlyConfig(PerGroup(4), symmetric=False),
    "dynamic": Int8DynamicActivationInt8WeightConfig(act_mapping_type="asymmetric"),
}
# As they run on a processor, in float32 and with the layers of every kind.
PRODUCTS = {
    "weights": WEIGHTS,
    "asymmetric": Int8WeightOnlyConfig(symmetric=False),
    "groups": Int8WeightOnlyConfig(PerGroup(16)),
    "asymmetric groups": Int8WeightOnlyConfig(PerGroup(16), symmetric=False),
    "dynamic": DYNAMIC,
    "dynamic asymmetric": Int8DynamicActivationInt8WeightConfig(
        act_mapping_type="asymmetric", symmetric=False
    ),
}


def quantized(model: nn.Module, config: Any = WEIGHTS, choose: Any = None) -> Any:
    """The model, after ``quantize_``."""
    quantize_(model, config, choose)
    return model


def int8_names(model: nn.Module) -> set[str]:
    """The names of the int8 parameters."""
    return {name for name, p in model.named_parameters() if isinstance(p.data, Int8Tensor)}


def integers(*size: int) -> Tensor:
    """Random int8 numbers."""
    return torch.randint(-128, 128, size, dtype=torch.int8)


# Matrices of one size, in memory laid out otherwise.
LAYOUTS = {
    "rows": integers,
    "transposed": lambda m, k: integers(k, m).t(),
    "sliced": lambda m, k: integers(m, k + 5)[:, 3 : 3 + k],
    "strided": lambda m, k: integers(2 * m, 2 * k)[::2, ::2],
    "expanded": lambda m, k: integers(1, k).expand(m, k),
}


def frozen(columns: int, rows: int, config: Any = WEIGHTS, **options: Any) -> Any:
    """A quantized linear layer that is not trained."""
    return quantized(nn.Linear(columns, rows, **options).requires_grad_(False), config)


def sqnr(expected: Tensor, got: Tensor) -> float:
    """The signal-to-noise ratio in decibel."""
    return float(20 * torch.log10(expected.norm() / (expected - got).norm()).detach())
