"""The C++ check of the plain tensors of a call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from desugar import _torch as private
from desugar.packages.manifest.records import Leaf, TensorLeaf, WrapperLeaf


def plain_leaves(leaves: Sequence[Leaf]) -> Iterator[TensorLeaf]:
    """Yields the plain tensors of leaves, inner ones included, in order."""
    for leaf in leaves:
        if isinstance(leaf, TensorLeaf):
            yield leaf
        elif isinstance(leaf, WrapperLeaf):
            yield from plain_leaves([part for _, part in leaf.inner])


class Guards:
    """A C++ check of the plain tensors of a call: their types, dtypes, devices, sizes and strides.

    Attributes:
        check: The check of tensors like those of the saved call.
        others: Checks of tensors that differ in what makes no difference, and were found to fit.
    """

    _MOST = 8  # checks kept

    def __init__(self, leaves: Sequence[TensorLeaf]) -> None:
        self._leaves = leaves
        with torch.inference_mode(False), torch.no_grad():
            self.check = self._guards([_example(leaf) for leaf in leaves])
        self.others: list[Any] = []

    def _guards(self, tensors: Sequence[Tensor]) -> Any:
        fixed = [
            [[extent if isinstance(extent, int) else None for extent in extents] for extents in kind]
            for kind in (
                [leaf.facts.size for leaf in self._leaves],
                [leaf.facts.stride for leaf in self._leaves],
            )
        ]
        return private.TensorGuards(*tensors, dynamic_dims_sizes=fixed[0], dynamic_dims_strides=fixed[1])

    def check_others(self, *tensors: Tensor) -> bool:
        """Whether tensors are such as were found to fit before."""
        return any(check(*tensors) for check in self.others)

    def accept(self, tensors: Sequence[Tensor]) -> None:
        """Notes that tensors fit, so that others like them are recognized; only where their strides are the usual."""
        made = self._guards(tensors)
        if len(self.others) < self._MOST and made.check(*tensors):
            self.others.append(made.check)


def _example(leaf: TensorLeaf) -> Tensor:
    facts = leaf.facts
    made = torch.empty((0,) * len(facts.size), dtype=facts.dtype, device=facts.device)
    return made.requires_grad_() if leaf.requires_grad else made
