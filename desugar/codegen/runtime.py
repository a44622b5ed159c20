"""Functions that runtime wrappers call in less common cases."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from desugar import _torch as torch_private
from desugar.ir.abstract_values import fixed_extents
from desugar.ir.values import plain_parts
from subclasses._torch_distributed import dtensor_spec
from subclasses._torch_tracing import without_lazy_bits
from subclasses.handwritten import LOCAL, DTensorContext, is_dtensor


def restride(tensor: Tensor, order: Sequence[int]) -> Tensor:
    """Returns the tensor in dense memory, with its dimensions ordered as in `order`; copies only if necessary.

    Args:
        tensor: A plain tensor.
        order: The dimensions from the largest stride to the smallest.
    """
    permuted = tensor.permute(tuple(order))
    if permuted.is_contiguous():
        return tensor
    inverse = sorted(range(len(order)), key=lambda position: order[position])
    return permuted.contiguous().permute(inverse)


def are_batched(tensors: Iterable[Tensor | None]) -> bool:
    """Whether a tensor, or an inner tensor of one, is a batch of vmap.

    Recognizes functorch's batches, and batches of the legacy vmap behind `is_grads_batched=True`.
    """
    parts = (part for tensor in tensors if tensor is not None for part in (tensor, *plain_parts(tensor)))
    return any(
        torch_private.is_batchedtensor(part) or torch_private.is_legacy_batchedtensor(part) for part in parts
    )


def placed(gradient: Any, context: DTensorContext) -> Any:
    """Returns a gradient laid out over the mesh as in the trace, with its collectives ended.

    Gradients of one `DTensor` may arrive with any placements; a sum of partial sums, for example, is replicated. An
    object that is not a `DTensor` on the same mesh is returned as is. So is a gradient that is differentiated further.
    """
    if not is_dtensor(gradient) or torch.is_grad_enabled():
        return gradient
    mesh, placements = context.spec.mesh, context.spec.placements
    if gradient.device_mesh is not mesh and gradient.device_mesh != mesh:
        return gradient
    if gradient.placements != placements:
        gradient = gradient.redistribute(mesh, placements)
    local = getattr(gradient, LOCAL)
    if type(local) is not Tensor and isinstance(local, torch_private.AsyncCollectiveTensor):
        return type(gradient)(local.wait(), dtensor_spec(gradient), requires_grad=False)
    return gradient


def tensor_guards(fakes: Sequence[Tensor]) -> Any:
    """Returns a C++ check of the type, dispatch keys, dtype, device, sizes and strides of tensors.

    Args:
        fakes: The expected tensors; their symbolic sizes and strides are not checked.
    """
    with torch.no_grad():
        examples = [torch.empty((0,) * fake.dim(), dtype=fake.dtype, device=fake.device) for fake in fakes]
    return torch_private.TensorGuards(
        *examples,
        dynamic_dims_sizes=[fixed_extents(fake.size()) for fake in fakes],
        dynamic_dims_strides=[fixed_extents(fake.stride()) for fake in fakes],
    )


def settle(gradients: Sequence[Tensor | None], orders: Sequence[Sequence[int]]) -> list[Tensor] | None:
    """Returns gradients without lazy negation, with their zeros in memory, and in the traced memory order.

    Args:
        gradients: The gradients that arrived.
        orders: Per gradient, the dimensions from the largest stride to the smallest.

    Returns:
        The gradients; None if one is not a plain tensor or is a batch of vmap.
    """
    if any(type(gradient) is not Tensor for gradient in gradients) or are_batched(gradients):
        return None
    return [restride(without_lazy_bits(g), order) for g, order in zip(gradients, orders, strict=True)]  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------ inference tensors


def check_inference_mode(tensors: Sequence[Tensor]) -> None:
    """Raises, as eager mode does, if a call outside inference mode would write to inference tensors.

    Args:
        tensors: The inference tensors that the program writes to.

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
    """Returns the version counters of tensors before a write; None for an inference tensor, which has no counter."""
    return tuple(None if tensor.is_inference() else tensor._version for tensor in tensors)


def bump_versions(tensors: Sequence[Tensor], before: Sequence[int | None], rises: Sequence[int]) -> None:
    """Sets version counters to their values in eager mode, independently of how often the writes advanced them.

    Views and detached tensors share a counter. It rises by the sum over all tensors that share it.

    Args:
        tensors: The tensors that were written to.
        before: Their counters before the write; None for inference tensors.
        rises: By how much each counter rises in eager mode.
    """
    counted = [(t, old, rise) for t, old, rise in zip(tensors, before, rises, strict=True) if old is not None]
    torch_private.set_version_counters(tuple(t for t, _, _ in counted), tuple(old for _, old, _ in counted))
    for tensor, _, rise in counted:
        if rise:
            torch_private.set_version_counters((tensor,), (tensor._version + rise,))
