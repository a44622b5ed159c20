"""Which modules ``quantize_`` takes for linear layers."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear


def is_linear(layer: nn.Module) -> bool:
    """Whether a module is a linear layer, but not the output layer of ``nn.MultiheadAttention``."""
    if is_conv1d(layer):
        return True
    return isinstance(layer, nn.Linear) and not isinstance(layer, NonDynamicallyQuantizableLinear)


def is_conv1d(layer: nn.Module) -> bool:
    """Whether a module is a ``Conv1D`` of transformers: a linear layer with a weight of size ``[inputs, outputs]``."""
    transformers: Any = sys.modules.get("transformers.pytorch_utils")
    return transformers is not None and isinstance(layer, transformers.Conv1D)


def adapters_in(module: nn.Module) -> set[nn.Module]:
    """Returns the modules that peft adds beside frozen layers: they are to train, so they stay floats.

    A layer of peft names its adapters in ``adapter_layer_names``.
    """
    return {
        part
        for layer in module.modules()
        for name in getattr(layer, "adapter_layer_names", ())
        if isinstance(adapter := getattr(layer, name, None), nn.Module)
        for part in adapter.modules()
    }
