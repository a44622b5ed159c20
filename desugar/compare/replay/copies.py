"""Copies of the arguments of a call, and of the tensors that it may change, so that the call can be made again."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from desugar.compare.import_names import Call
from desugar.compare.outcome import copy_parts, leaves_of, parts_of, shared_memory
from desugar.ir.values import is_wrapper


class NoCopy(ValueError):
    """The arguments of a call cannot be copied; the message says why."""


def copy_call(call: Call) -> Call:
    """Copies the arguments of a call; modules among them are state, and stay what they are.

    Raises:
        NoCopy: Arguments share memory, or one has no copy.
    """
    leaves = {id(leaf): leaf for _, leaf in leaves_of(call, "")}
    tensors = {str(number): leaf for number, leaf in leaves.items() if isinstance(leaf, Tensor)}
    if any(True for _ in shared_memory(tensors)):
        raise NoCopy("its arguments share memory, and copies of them would not")
    memo = {number: leaf for number, leaf in leaves.items() if isinstance(leaf, nn.Module)}
    try:
        memo |= {id(tensor): _copy_tensor(tensor) for tensor in tensors.values()}
        return copy.deepcopy(call, memo)
    except Exception as error:  # a class of the user's may raise anything
        raise NoCopy(
            f"its arguments cannot be copied: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        ) from error


def _copy_tensor(tensor: Tensor) -> Tensor:
    """Copies a tensor with its strides; one that is no autograd leaf has a copy that is none."""
    with torch.no_grad():
        copied = _copy_values(tensor.detach())
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(copied, tensor.requires_grad)
    if type(tensor) is Tensor:
        vars(copied).update(vars(tensor))  # which sizes are to be symbolic
    if not tensor.requires_grad:
        return copied
    copied.requires_grad_()
    with torch.enable_grad():
        return copied if tensor.is_leaf else copied.clone()


def _copy_values(tensor: Tensor) -> Tensor:
    copied = tensor.clone()
    if is_wrapper(tensor) or tensor.layout is not torch.strided or copied.stride() == tensor.stride():
        return copied
    extent = 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size
    )
    flat = tensor.as_strided((extent,), (1,), tensor.storage_offset()).clone()
    return flat.as_strided(tensor.shape, tensor.stride(), 0)


def bytes_of(call: Call) -> int:
    """Returns the bytes of the tensors in the arguments of a call."""
    tensors = {id(leaf): leaf for _, leaf in leaves_of(call, "") if isinstance(leaf, Tensor)}
    parts = [part for tensor in tensors.values() for _, part in parts_of(tensor)]
    return sum(part.numel() * part.element_size() for part in parts)


# ------------------------------------------------------------------------------------------------------ state


@contextlib.contextmanager
def restored(state: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, tensors have no gradients and may be written; afterwards their values and gradients are as before."""
    before = copy_parts(state)
    gradients = {name: tensor.grad for name, tensor in state.items() if tensor.is_leaf}
    try:
        for name in gradients:  # a backward adds to a gradient that is there
            state[name].grad = None
        yield
    finally:
        for name, tensor in state.items():
            _restore(tensor, before[name])
            if name in gradients:
                tensor.grad = gradients[name]


def _restore(tensor: Tensor, before: list[Tensor]) -> None:
    with torch.no_grad():
        for (_, part), value in zip(parts_of(tensor), before, strict=True):
            if part.shape == value.shape and not torch.equal(part.detach(), value):
                part.detach().copy_(value)
