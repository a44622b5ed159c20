"""Benchmarks the library's classes and their rivals: int8 weights, and a block over ragged rows.

*int8*: `F.linear` with an `Int8Tensor`, which multiplies floats by its integers, and with a dynamic one, which
quantizes its input. Rivals: the hand-written weight of `examples/int8_weight.py`, which computes as the former does,
and torchao's layers of both kinds if it is installed.
*rows*: `x + gelu(linear(layer_norm(x)))` over rows of uneven length, as a dense batch that computes on its padding,
as `PaddedTensor`, as `JaggedTensor`, and as a tensor of `torch.nested`. Half of the padded batch is padding.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.exc import InductorError

from bench.subjects import WAYS, copy_function
from examples.int8_weight import Int8ByHand, quantizer
from subclasses.int8 import Int8Tensor
from subclasses.ragged import JaggedTensor, PaddedTensor

Call = Callable[[], Any]
HAS_TORCHAO = importlib.util.find_spec("torchao") is not None
LENGTHS = (64, 8, 40, 16, 24, 48, 32, 24)
DIM = 64

# ---------------------------------------------------------------------------------------------------------
# int8
# ---------------------------------------------------------------------------------------------------------


def multiply(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w)


def make_int8(mode: str, size: int) -> dict[tuple[str, str], Call]:
    """Returns calls by (kind, way)."""
    weight, x = torch.randn(size, size), torch.randn(4, size)
    kinds: dict[str, Any] = {
        "plain": weight,
        "by hand": quantizer(Int8ByHand)(weight),
        "Int8Tensor": Int8Tensor.from_float(weight),
        "dynamic Int8Tensor": Int8Tensor.from_float(weight, activation="row"),
    }
    calls = {
        (kind, way): _call(mode, make(copy_function(multiply)), x, w)
        for kind, w in kinds.items()
        for way, make in WAYS.items()
    }
    for kind, w in torchao_weights(weight).items():
        if mode == "training" and kind == "dynamic torchao":
            continue  # it computes no gradient of its input
        for way in ("eager", "torch.compile"):
            calls[kind, way] = _call(mode, WAYS[way](copy_function(multiply)), x, w)
    return calls


def torchao_weights(weight: Tensor) -> dict[str, nn.Parameter]:
    """Returns torchao's weights, weight-only and dynamic, by kind; an empty dict if torchao is not installed."""
    if not HAS_TORCHAO:
        return {}
    logging.getLogger("torchao").setLevel(logging.ERROR)  # it warns about missing CUDA extensions
    from torchao import quantization

    weights = {}
    for kind, config in (
        ("torchao", quantization.Int8WeightOnlyConfig),
        ("dynamic torchao", quantization.Int8DynamicActivationInt8WeightConfig),
    ):
        layer = nn.Sequential(nn.Linear(1, 1, bias=False, device="meta"))
        layer[0].weight = nn.Parameter(weight.clone(), requires_grad=False)
        # The default would change Inductor's settings for the whole process.
        quantization.quantize_(layer, config(set_inductor_config=False))
        weights[kind] = layer[0].weight
    return weights


# ---------------------------------------------------------------------------------------------------------
# rows
# ---------------------------------------------------------------------------------------------------------


def block(x: Any, w: Tensor) -> Any:
    return x + F.gelu(F.linear(F.layer_norm(x, (DIM,)), w))


def make_rows(mode: str, size: int) -> dict[tuple[str, str], Call]:
    """Returns calls by (kind, way), on `size` times eight rows."""
    rows = [torch.randn(n, DIM) for n in LENGTHS * size]
    w = torch.randn(DIM, DIM) / 8
    kinds: dict[str, Any] = {
        "dense table": nn.utils.rnn.pad_sequence(rows, batch_first=True),
        "PaddedTensor": PaddedTensor.from_tensors(rows),
        "JaggedTensor": JaggedTensor.from_tensors(rows),
        "torch.nested": torch.nested.nested_tensor(rows, layout=torch.jagged),
    }
    calls: dict[tuple[str, str], Call] = {}
    for kind, x in kinds.items():
        for way, make in WAYS.items():
            if kind == "torch.nested" and "desugar" in way:
                continue  # PyTorch's own class, with symbols that desugar does not support
            try:
                calls[kind, way] = _call(mode, make(copy_function(block)), x.detach(), w)
            except (NameError, InductorError) as error:  # a kernel that fails gets no figure
                print(f"no figure for {kind}, {way}: {error}", file=sys.stderr)
    return calls


# ---------------------------------------------------------------------------------------------------------
# all subjects
# ---------------------------------------------------------------------------------------------------------

SUBJECTS = {
    "int8, 256 by 256": lambda mode: make_int8(mode, 256),
    "int8, 1024 by 1024": lambda mode: make_int8(mode, 1024),
    "8 rows": lambda mode: make_rows(mode, 1),
    "64 rows": lambda mode: make_rows(mode, 8),
}


def _call(mode: str, fn: Callable, x: Any, *rest: Any) -> Call:
    if mode == "inference":

        def call() -> Any:
            with torch.no_grad():
                return fn(x, *rest)

    else:
        leaf = x.requires_grad_() if x.is_leaf and not x.requires_grad else x
        with torch.no_grad():
            like = fn(x, *rest).detach()

        def call() -> Any:
            return torch.autograd.grad(fn(leaf, *rest), leaf, like)

    for _ in range(3):
        call()
    return call
