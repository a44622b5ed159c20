"""Matrix products, embeddings and other layers that treat each entry alike."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subclasses.errors import DispatchError
from subclasses.ragged.jagged import JaggedTensor
from subclasses.ragged.rows import check_rows_match, shown

# ---- one layer, entry by entry ---------------------------------------------------------------------------------


@JaggedTensor.implements(F.linear)
def _(func: Any, input: Any, weight: Tensor, bias: Tensor | None = None) -> Any:
    _check_dense(func, weight, bias)
    _check_features(func, input, 1)
    return entrywise(input, func(input.clean_values(), weight, bias))


@JaggedTensor.implements(F.embedding)
def _(func: Any, input: Any, weight: Tensor, *args: Any, **kwargs: Any) -> Any:
    _check_dense(func, weight)
    return entrywise(input, func(input.kept(input.values), weight, *args, **kwargs))


@JaggedTensor.implements(F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm)
def _(func: Any, input: Any, normalized_shape: Any, *args: Any, **kwargs: Any) -> Any:
    _check_features(func, input, len(normalized_shape))
    return entrywise(input, func(input.clean_values(), normalized_shape, *args, **kwargs))


@JaggedTensor.implements(F.dropout, F.alpha_dropout, F.rrelu, torch.dropout, torch.alpha_dropout, torch.rrelu)
def _(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    return entrywise(input, func(input.clean_values(), *args, **kwargs))


# ---- matrix products -------------------------------------------------------------------------------------------


@JaggedTensor.implements(torch.bmm, torch.mm)
def _(func: Any, input: Any, mat2: Any) -> Any:
    return torch.matmul(input, mat2)


@JaggedTensor.implements(torch.matmul)
def _(func: Any, input: Any, other: Any) -> Any:
    if isinstance(input, JaggedTensor) and _is_matrix(other) and 0 <= input.ragged_dim < input.dim() - 1:
        return entrywise(input, torch.matmul(input.clean_values(), other))
    if isinstance(other, JaggedTensor) and _is_matrix(input) and 0 < other.ragged_dim == other.dim() - 1:
        return entrywise(other, torch.matmul(input, other.clean_values()))
    return _multiply_padded(func, input, other)


def _is_matrix(t: Tensor) -> bool:
    return not isinstance(t, JaggedTensor) and t.dim() == 2


def _multiply_padded(func: Any, a: Any, b: Any) -> Any:
    """A product for each row, by padded tables: the ragged dimension is contracted, or stays where it is."""
    n = max(a.dim(), b.dim())
    ragged_a = a.ragged_dim if isinstance(a, JaggedTensor) else None
    ragged_b = b.ragged_dim if isinstance(b, JaggedTensor) else None
    if a.dim() != b.dim() or 0 in (ragged_a, ragged_b):
        raise DispatchError(
            f"{func.__name__}: {shown(a)} and {shown(b)}; expected as many dimensions, and rows"
        )
    stay = [
        t for t, r, contracted in ((a, ragged_a, n - 1), (b, ragged_b, n - 2)) if r not in (None, contracted)
    ]
    if ragged_a is not None and ragged_b is not None:
        if (ragged_a, ragged_b) not in ((n - 1, n - 2), *((d, d) for d in range(1, n - 2))):
            raise DispatchError(
                f"{func.__name__}: the product of {shown(a)} and {shown(b)} would have two ragged dimensions; use "
                f"F.scaled_dot_product_attention, or x.to_dense() with x.mask()"
            )
        check_rows_match(func, a, b)
    elif not stay:
        raise DispatchError(
            f"{func.__name__}: {shown(a)} and {shown(b)} are contracted along rows of other lengths; select the "
            f"entries first"
        )
    width = max(t.max_length for t in (a, b) if isinstance(t, JaggedTensor))
    product = torch.matmul(_padded(a, width), _padded(b, width))
    if not stay:
        return product
    x = stay[0]
    return x.with_values(x.trailing(x.segments.unpad(product.movedim(x.ragged_dim, 1))))


def _padded(t: Tensor, width: Any) -> Tensor:
    """A ragged operand as a padded table of this width."""
    if not isinstance(t, JaggedTensor):
        return t
    missing = width - t.max_length
    return F.pad(t.to_dense(), [0, 0] * (t.dim() - 1 - t.ragged_dim) + [0, missing])


# ---- what they share -------------------------------------------------------------------------------------------


def entrywise(x: JaggedTensor, values: Tensor) -> JaggedTensor:
    """What a layer made of clean values; no cotangent of a hole comes back to the layer's parameters."""
    return x.with_values(x.kept(values))


def _check_dense(func: Any, *parameters: Any) -> None:
    for p in parameters:
        if isinstance(p, JaggedTensor):
            raise DispatchError(f"{func.__name__}: expected dense parameters, got {shown(p)}")


def _check_features(func: Any, x: JaggedTensor, count: int) -> None:
    """Raises unless the last dimensions are those of an entry."""
    if x.ragged_dim >= x.dim() - count:
        raise DispatchError(
            f"{func.__name__}: works along the last {count} dimensions, and {shown(x)} is ragged along one of them; "
            f"swap them by transpose"
        )
