"""Int8 weights: quantized tensors, and ``quantize_``, which quantizes the weights of a model."""

import importlib
from typing import Any

from subclasses.after_import import after_import
from subclasses.files import from_plain, to_plain
from subclasses.int8 import collectives, layers, structure, writing  # noqa: F401  # imported to register rules
from subclasses.int8.config import (
    FqnToConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    PerGroup,
    PerRow,
    PerTensor,
    quantize_,
    weight_bytes,
)
from subclasses.int8.tensor import Int8Tensor


def _register_quantizer(_: Any) -> None:
    importlib.import_module("subclasses.int8.hugging_face")


after_import("transformers.modeling_utils", _register_quantizer)
__all__ = [
    "FqnToConfig",
    "Int8DynamicActivationInt8WeightConfig",
    "Int8Tensor",
    "Int8WeightOnlyConfig",
    "PerGroup",
    "PerRow",
    "PerTensor",
    "from_plain",
    "quantize_",
    "to_plain",
    "weight_bytes",
]
