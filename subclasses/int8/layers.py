"""Linear layers, matrix products and embeddings with int8 weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subclasses.int8 import affine, blocks
from subclasses.int8.matmul import kernels
from subclasses.int8.tensor import Activation, Int8Tensor
from subclasses.slow_paths import say_once

# ---- linear ------------------------------------------------------------------------------------------------


@Int8Tensor.implements(F.linear)
def _(func: Any, input: Any, weight: Any, bias: Any = None) -> Any:
    if isinstance(input, Int8Tensor):
        input = input.dequantize()
    if isinstance(bias, Int8Tensor):
        bias = bias.dequantize()
    if not isinstance(weight, Int8Tensor):
        return func(input, weight, bias)
    if weight.dim() != 2 or not input.is_floating_point() or input.shape[-1:] != weight.shape[-1:]:
        return Int8Tensor.unruled(func, input, weight, bias)
    y = _linear(input, weight, weight.activation)
    return y if bias is None else y + bias.to(y.dtype)


def _linear(x: Tensor, w: Int8Tensor, activation: Activation) -> Tensor:
    qdata, scale, zero_point = w.unwrap()
    x = _autocast(x)
    rows = kernels.Rows(qdata, _expand_to_rows(scale, qdata), _expand_to_rows(zero_point, qdata))  # type: ignore[arg-type]
    if activation is None:
        return kernels.float_times_int8(x, rows)
    longest = kernels.longest_sum(w.activation_symmetric, zero_point is None)
    if rows.scale.shape[1] != 1 or x.shape[-1] > longest:
        say_once(
            "a dynamic int8 layer multiplies floats, for its weight has several scales or too many numbers in a row",
            "quantize its weight with PerRow() or PerTensor()",
        )
        return kernels.float_times_int8(_fake_quantize(x, w), rows)
    x_rows = x.reshape(kernels.num_rows(x), x.shape[-1])
    y = kernels.dynamic_linear(x_rows, rows, activation, w.activation_symmetric)
    return y.reshape(*x.shape[:-1], qdata.shape[0])  # type: ignore[union-attr]


def _autocast(x: Tensor) -> Tensor:
    """Converts the input to the dtype in which autocast runs a linear layer."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype is not torch.float64:
        return x.to(torch.get_autocast_dtype(kind))
    return x


def _expand_to_rows(t: Tensor | None, qdata: Any) -> Tensor | None:
    """Expands a scale or zero point of blocks of rows to one number for each row, or keeps one for all rows."""
    if t is None or t.shape[0] in (1, qdata.shape[0]):
        return t
    return blocks.refine_scale(t, (qdata.shape[0], t.shape[1]))


def _fake_quantize(x: Tensor, w: Int8Tensor) -> Tensor:
    """Quantizes and dequantizes the input, with the gradient of the identity (straight-through)."""
    rows = x.detach().reshape(kernels.num_rows(x), x.shape[-1])
    seen = kernels.quantize_rows(rows, w.activation or "row", w.activation_symmetric).to_float(x.dtype)
    return x + (seen.reshape(x.shape) - x).detach()


# ---- matrix products ---------------------------------------------------------------------------------------
# These are as exact as the weight. Only linear layers quantize their inputs.


@Int8Tensor.implements(torch.matmul, torch.mm)
def _(func: Any, input: Any, other: Any, **kwargs: Any) -> Any:
    plain_first = isinstance(other, Int8Tensor) and not isinstance(input, Int8Tensor) and not kwargs
    least = 2 if func is torch.mm else 1
    if plain_first and other.dim() == 2 and input.dim() >= least and input.shape[-1] == other.shape[0]:
        return _linear(input, other.t(), None)  # type: ignore[arg-type]
    return Int8Tensor.unruled(func, input, other, **kwargs)


@Int8Tensor.implements(torch.addmm)
def _(func: Any, input: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1, **kwargs: Any) -> Any:
    """Runs ``Conv1D`` of transformers like ``F.linear``: the weight's metadata determines how inputs are quantized."""
    is_layer = isinstance(mat2, Int8Tensor) and not isinstance(mat1, Int8Tensor) and not kwargs
    if not is_layer or (mat1.dim(), mat2.dim()) != (2, 2) or mat1.shape[1] != mat2.shape[0]:
        return Int8Tensor.unruled(func, input, mat1, mat2, beta=beta, alpha=alpha, **kwargs)
    y = _linear(mat1, mat2.t(), mat2.activation)  # type: ignore[arg-type]
    y = y if alpha == 1 else y * alpha
    if beta == 0:
        return y
    bias = input.dequantize() if isinstance(input, Int8Tensor) else input
    return y + (bias if beta == 1 else bias * beta).to(y.dtype).expand(y.shape)


# ---- embeddings --------------------------------------------------------------------------------------------


@Int8Tensor.implements(F.embedding)
def _(func: Any, input: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
    options = dict(zip(_EMBEDDING_OPTIONS, args, strict=False)) | kwargs
    needs_all_rows = options.get("max_norm") is not None or weight.requires_grad
    if needs_all_rows or not isinstance(weight, Int8Tensor) or weight.dim() != 2:
        return Int8Tensor.unruled(func, input, weight, *args, **kwargs)
    rows = input.reshape(-1)
    scale, zero_point = (_take_rows(t, rows, weight) for t in (weight.scale, weight.zero_point))
    # torch's own lookup of the numbers checks that each index is in range.
    embedded = affine.from_int8(weight.qdata.index_select(0, rows), scale, zero_point, weight.dtype)  # type: ignore[arg-type]
    return embedded.reshape(*input.shape, weight.shape[1])


_EMBEDDING_OPTIONS = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")


def _take_rows(t: Tensor | None, rows: Tensor, weight: Int8Tensor) -> Tensor | None:
    """Returns the scales or zero points of some rows."""
    if t is None or t.shape[0] == 1:
        return t
    height = weight.block_size[0]
    return t.index_select(0, rows if height == 1 else rows // height)
