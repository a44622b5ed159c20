"""The C++ check of the plain tensors of a call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from desugar import _torch as private
from desugar.ir.values import inner_names, is_wrapper
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
        if [t.requires_grad for t in tensors] != [leaf.requires_grad for leaf in self._leaves]:
            return  # it fits while gradients are off
        made = self._guards(tensors)
        if len(self.others) < self._MOST and made.check(*tensors):
            self.others.append(made.check)


def _example(leaf: TensorLeaf) -> Tensor:
    facts = leaf.facts
    made = torch.empty((0,) * len(facts.size), dtype=facts.dtype, device=facts.device)
    return made.requires_grad_() if leaf.requires_grad else made


class WeightGuards:
    """A C++ check that the weights of a package are still what it was compiled for.

    Machine code reads their memory, whatever `module.half()` or an assignment to `.data` did to them since.
    """

    _MOST = 4  # checks kept: one for each mode in which tensors have other dispatch keys

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._weights = weights
        self._flags = self._requires_grad()
        self._checks = [self._make()]

    def hold(self) -> bool:
        """Whether no weight has changed its dtype, size, stride, device or `requires_grad`."""
        plain = self._plain()
        return any(check(*plain) for check in self._checks) and self._requires_grad() == self._flags

    def accept(self) -> None:
        """Notes that the weights fit in the present mode."""
        if self._requires_grad() == self._flags and len(self._checks) < self._MOST:
            self._checks.append(self._make())

    def _requires_grad(self) -> list[bool]:
        return [weight.requires_grad for weight in self._weights]

    def _plain(self) -> list[Tensor]:
        return [plain for weight in self._weights for plain in plain_tensors(weight)]

    def _make(self) -> Any:
        plain = self._plain()
        if not plain:
            return lambda: True
        sizes, strides = [list(t.size()) for t in plain], [list(t.stride()) for t in plain]
        return private.TensorGuards(*plain, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yields the plain tensors in a tensor, in flatten order."""
    if is_wrapper(tensor):
        for name in inner_names(tensor):
            yield from plain_tensors(getattr(tensor, name))
    else:
        yield tensor


def are_distinct(*tensors: object) -> bool:
    """Whether no object is passed twice."""
    return len({id(tensor) for tensor in tensors}) == len(tensors)
