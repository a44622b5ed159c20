"""The C++ check of the plain tensors of a call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
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

    Machine code reads their memory, whatever `module.half()` or an assignment to `.data` did to them since. The check
    compares the type, dtype, device, sizes, strides and `requires_grad` of each weight and of the tensors inside of it.
    Nothing can have changed weights that only the package has: calls check them from when it hands them out.

    Attributes:
        weights: The weights.
        handed_out: Empty as long as only the package has the weights.
        inner: The plain tensors inside of weights that are wrappers: the weight's number, and the attributes to it.
        check: The check, of all weights and then of all inner tensors.
    """

    _MOST = 4  # checks kept: one for each mode in which tensors have other dispatch keys

    def __init__(self, weights: Sequence[Tensor], *, handed_out: bool) -> None:
        self.weights = tuple(weights)
        self.handed_out: list[bool] = [True] * handed_out
        self.inner = [
            (number, path) for number, weight in enumerate(weights) for path in _paths_inside(weight)
        ]
        self._flags = self._requires_grad()
        self.check = self._make()
        self._others: list[Any] = []

    def hand_out(self) -> None:
        """Makes all further calls check the weights."""
        if not self.handed_out:
            self.handed_out.append(True)

    def check_others(self) -> bool:
        """Whether the weights are such as were found to fit before, in another mode."""
        return bool(self._others) and any(check(*self._tensors()) for check in self._others)

    def accept(self) -> None:
        """Notes that the weights fit in the present mode."""
        if self._requires_grad() != self._flags or len(self._others) >= self._MOST:
            return  # weights that require grad only now fit while gradients are off
        if not (self.check(*self._tensors()) or self.check_others()):
            self._others.append(self._make())

    def _requires_grad(self) -> list[bool]:
        return [weight.requires_grad for weight in self.weights]

    def _tensors(self) -> list[Tensor]:
        return [*self.weights, *(attrgetter(path)(self.weights[number]) for number, path in self.inner)]

    def _make(self) -> Any:
        tensors = self._tensors()
        fixed = [[None] * t.dim() if is_wrapper(t) else list(t.size()) for t in tensors]
        strides = [[None] * t.dim() if is_wrapper(t) else list(t.stride()) for t in tensors]
        return private.TensorGuards(*tensors, dynamic_dims_sizes=fixed, dynamic_dims_strides=strides).check


def _paths_inside(tensor: Tensor) -> Iterator[str]:
    """Yields the attributes that lead to the plain tensors inside of a wrapper, in flatten order."""
    for name in inner_names(tensor) if is_wrapper(tensor) else ():
        yield from [f"{name}.{path}" for path in _paths_inside(getattr(tensor, name))] or [name]


def are_distinct(*tensors: object) -> bool:
    """Whether no object is passed twice."""
    return len({id(tensor) for tensor in tensors}) == len(tensors)
