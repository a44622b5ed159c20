"""Arguments of a program that is not called yet, for its wrapper's text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from desugar.flatten.inputs import Inputs
from desugar.ir.values import Constant, Plain, Wrapper, slots_of


def make_placeholders(inputs: Inputs, inference: set[int]) -> list[Any]:
    """Returns an object for each argument leaf, of which the wrapper's text needs the kind alone.

    The input slots of tensors made in inference mode get such tensors, too.
    """
    leaves: list[Any] = []
    for number, value in enumerate(inputs.values):
        is_inference = not inference.isdisjoint(slots_of(value))
        match value:
            case Constant(constant):
                leaves.append(constant)
            case Plain() | Wrapper() if number in inputs.parameters:
                leaves.append(nn.Parameter(torch.empty(0), requires_grad=False))
            case _:
                leaves.append(_empty(is_inference))
    items = enumerate(inputs.flat.items)
    inputs.flat.items = [
        _empty(slot in inference) if isinstance(item, Tensor) else item for slot, item in items
    ]
    return leaves


def _empty(is_inference: bool) -> Tensor:
    with torch.inference_mode(is_inference):
        return torch.empty(0)
