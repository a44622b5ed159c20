"""The classes with a meaning: an int8 weight declared and by hand, and a block over ragged rows; rivals beside them.

*int8*: `F.linear` with the weight of `examples/int8_weight.py`, and torchao's weight-only layer where it is installed.
*rows*: `x + gelu(linear(layer_norm(x)))` over rows of uneven length: as a dense table that computes on its padding too,
as `PaddedTensor`, as `JaggedTensor`, and as a tensor of `torch.nested`. Half of the table is padding.
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
from examples.int8_weight import Int8ByHand, Int8Weight, quantizer
from subclasses.ragged import JaggedTensor, PaddedTensor

Call = Callable[[], Any]
LENGTHS = (64, 8, 40, 16, 24, 48, 32, 24)
DIM = 64

# ---------------------------------------------------------------------------------------------------------
# int8
# ---------------------------------------------------------------------------------------------------------


def multiply(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w)


def make_int8(mode: str, size: int) -> dict[tuple[str, str], Call]:
    """Calls by (kind, way)."""
    weight, x = torch.randn(size, size), torch.randn(4, size)
    kinds: dict[str, Any] = {
        "plain": weight,
        "by hand": quantizer(Int8ByHand)(weight),
        "declared": quantizer(Int8Weight)(weight),
    }
    calls = {
        (kind, way): _call(mode, make(copy_function(multiply)), x, w)
        for kind, w in kinds.items()
        for way, make in WAYS.items()
    }
    if importlib.util.find_spec("torchao") is not None:
        layer = _torchao_layer(weight)
        calls["torchao", "eager"] = _call(mode, layer, x)
        calls["torchao", "torch.compile"] = _call(mode, torch.compile(layer, fullgraph=True), x)
    return calls


def _torchao_layer(weight: Tensor) -> nn.Module:
    logging.getLogger("torchao").setLevel(logging.ERROR)  # it says that its CUDA extensions are missing
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = nn.Sequential(nn.Linear(weight.shape[1], weight.shape[0], bias=False))
    model[0].weight = nn.Parameter(weight.clone(), requires_grad=False)
    quantize_(model, Int8WeightOnlyConfig())
    return model


# ---------------------------------------------------------------------------------------------------------
# rows
# ---------------------------------------------------------------------------------------------------------


def block(x: Any, w: Tensor) -> Any:
    return x + F.gelu(F.linear(F.layer_norm(x, (DIM,)), w))


def make_rows(mode: str, size: int) -> dict[tuple[str, str], Call]:
    """Calls by (kind, way), on `size` times eight rows."""
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
                continue  # a class of PyTorch's own, with symbols that the pass does not know
            try:
                calls[kind, way] = _call(mode, make(copy_function(block)), x.detach(), w)
            except (NameError, InductorError) as error:  # a kernel that cannot be run has no time
                print(f"no figure for {kind}, {way}: {error}", file=sys.stderr)
    return calls


# ---------------------------------------------------------------------------------------------------------
# both
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
