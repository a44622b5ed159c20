"""What generated wrappers call when something is out of the ordinary."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from desugar import _torch as private
from desugar.frontend.fakes import fixed_extents
from desugar.ir.values import inner_names, is_wrapper


def restride(tensor: Tensor, order: Sequence[int]) -> Tensor:
    """The tensor with its memory dense and its dimensions ordered as in `order`, copied only where it is not."""
    permuted = tensor.permute(tuple(order))
    if permuted.is_contiguous():
        return tensor
    inverse = sorted(range(len(order)), key=lambda position: order[position])
    return permuted.contiguous().permute(inverse)


def are_batched(tensors: Iterable[Tensor | None]) -> bool:
    """Whether some are batches that vmap goes through, the old one (`is_grads_batched=True`) or functorch's."""
    for tensor in tensors:
        if tensor is None:
            continue
        if private.is_batchedtensor(tensor) or private.is_legacy_batchedtensor(tensor):
            return True
        if is_wrapper(tensor) and are_batched(getattr(tensor, name) for name in inner_names(tensor)[0]):
            return True
    return False


def tensor_guards(fakes: Sequence[Tensor]) -> Any:
    """A C++ check that tensors have the type, dispatch keys, dtype, device, sizes and strides of fake ones.

    Sizes and strides that are symbols are not looked at.
    """
    with torch.no_grad():
        alike = [torch.empty((0,) * fake.dim(), dtype=fake.dtype, device=fake.device) for fake in fakes]
    return private.TensorGuards(
        *alike,
        dynamic_dims_sizes=[fixed_extents(fake.size()) for fake in fakes],
        dynamic_dims_strides=[fixed_extents(fake.stride()) for fake in fakes],
    )


def settle(gradients: Sequence[Tensor | None], orders: Sequence[Sequence[int]]) -> list[Tensor] | None:
    """Gradients with their values in memory that is ordered as was traced; None where some are not plain or a batch."""
    if any(type(gradient) is not Tensor for gradient in gradients) or are_batched(gradients):
        return None
    return [restride(g.resolve_neg(), order) for g, order in zip(gradients, orders, strict=True)]  # type: ignore[union-attr]


# ------------------------------------------------------------------------------------------ inference tensors


def check_inference_mode(tensors: Sequence[Tensor]) -> None:
    """Raises, as eager mode does, if tensors made in inference mode are about to be written outside of it.

    Raises:
        RuntimeError: The call is not in inference mode.
    """
    if torch.is_inference_mode_enabled():
        return
    sizes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
    raise RuntimeError(
        f"the function writes to a tensor made in inference mode (of size {sizes}), and is called outside of that "
        "mode: call it in torch.inference_mode(), or pass clone()s made outside of it"
    )


# ------------------------------------------------------------------------------------------ version counters


def note_versions(tensors: Sequence[Tensor]) -> tuple[int | None, ...]:
    """The version counters of tensors that are about to be written; inference tensors have none."""
    return tuple(None if tensor.is_inference() else tensor._version for tensor in tensors)


def raise_versions(tensors: Sequence[Tensor], before: Sequence[int | None], rises: Sequence[int]) -> None:
    """Sets the version counters to what eager mode would have made them, however the writes were done.

    Views and detached tensors share a counter, which rises by what was done to any of them.
    """
    found = [(t, old, rise) for t, old, rise in zip(tensors, before, rises, strict=True) if old is not None]
    private.set_version_counters(tuple(t for t, _, _ in found), tuple(old for _, old, _ in found))
    for tensor, _, rise in found:
        if rise:
            private.set_version_counters((tensor,), (tensor._version + rise,))
