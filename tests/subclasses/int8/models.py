"""Quantized layers, matrices of integers, and the ways to compile, for the tests of this folder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import desugar
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
COMPILERS = {
    "torch.compile": lambda f: torch.compile(f, backend="aot_eager", fullgraph=True),
    "desugar.compile": lambda f: desugar.compile(f, backend="eager"),
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


def sqnr(expected: Tensor, got: Tensor) -> float:
    """The signal-to-noise ratio in decibel."""
    return float(20 * torch.log10(expected.norm() / (expected - got).norm()).detach())
