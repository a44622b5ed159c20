"""C++ checks of plain tensors: the tensors in a call, and the weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from desugar import _torch as torch_private
from desugar.ir.values import Flat, Plain, Wrapper, is_wrapper, paths_of, unwrap_value
from desugar.packages.manifest.records import Leaf, ProgramRecord


class Guards:
    """A C++ check of plain tensors: their types, dtypes, devices, sizes, strides, and whether they require grad.

    Attributes:
        check: Returns whether tensors match the examples.
        others: Checks of tensors that fit but fail `check`, such as inference tensors.
    """

    _MOST = 8  # the largest number of checks in `others`

    def __init__(self, examples: Sequence[Tensor], sizes: list[Any], strides: list[Any]) -> None:
        """Builds the check from `examples`; dynamic sizes and strides are None."""
        self._fixed = {"dynamic_dims_sizes": sizes, "dynamic_dims_strides": strides}
        self._require_grad = [tensor.requires_grad for tensor in examples]
        self.check = torch_private.TensorGuards(*examples, **self._fixed).check
        self.others: list[Any] = []

    def check_others(self, *tensors: Tensor) -> bool:
        """Whether tensors match tensors that `accept` has received before."""
        return any(check(*tensors) for check in self.others)

    def accept(self, tensors: Sequence[Tensor]) -> None:
        """Adds a check of tensors that fit in the current mode, unless their strides differ from the fixed strides."""
        if [tensor.requires_grad for tensor in tensors] != self._require_grad:
            return  # they fit only while gradients are off
        made = torch_private.TensorGuards(*tensors, **self._fixed).check
        is_new = not (self.check(*tensors) or self.check_others(*tensors))
        if is_new and len(self.others) < self._MOST and made(*tensors):
            self.others.append(made)


def guards_of(program: ProgramRecord) -> Guards:
    """Returns the check of the plain tensors in the arguments of a program."""
    plain = list(plain_in(program.leaves))
    plain_facts: list[Any] = [program.leaf_facts[one.index] for one in plain]
    with torch.inference_mode(False), torch.no_grad():
        examples = [
            torch.empty(
                (0,) * len(facts.size),
                dtype=facts.dtype,
                device=facts.device,
                requires_grad=one.requires_grad,
            )
            for facts, one in zip(plain_facts, plain, strict=True)
        ]
        return Guards(
            examples, [_fixed(one.size) for one in plain_facts], [_fixed(one.stride) for one in plain_facts]
        )


def plain_in(leaves: Sequence[Leaf]) -> Iterator[Plain]:
    """Yields the plain tensors of leaves, with inner tensors, in order."""
    for leaf in leaves:
        if isinstance(leaf, Plain):
            yield leaf
        elif isinstance(leaf, Wrapper):
            yield from plain_in([part for _, part in leaf.inner])  # type: ignore[misc]


def _fixed(extents: Sequence[Any]) -> list[int | None]:
    return [extent if isinstance(extent, int) else None for extent in extents]


class WeightGuards(Guards):
    """A C++ check that the weights still match the weights that a package was compiled for.

    Machine code reads the memory of the weights without a check, even after `module.half()` or an assignment to
    `.data`. The check compares the type, dtype, device, sizes, strides and `requires_grad` of each weight and of the
    tensors inside it. Calls skip the check until the package hands the weights out, since nothing else can change them
    before.

    Attributes:
        weights: The weights.
        handed_out: Empty until the package hands the weights out.
        inner: (weight number, attribute path) of each plain tensor inside a weight that is a wrapper.
    """

    def __init__(self, weights: Sequence[Tensor], *, handed_out: bool) -> None:
        self.weights = tuple(weights)
        self.handed_out: list[bool] = [True] * handed_out
        self.inner = [
            (number, ".".join(path))
            for number, weight in enumerate(weights)
            for _, path in paths_of(unwrap_value(weight, Flat()))
            if path
        ]
        tensors = self.tensors()
        sizes = [[None] * t.dim() if is_wrapper(t) else list(t.size()) for t in tensors]
        strides = [[None] * t.dim() if is_wrapper(t) else list(t.stride()) for t in tensors]
        super().__init__(tensors, sizes, strides)

    def tensors(self) -> list[Tensor]:
        """Returns the weights, and the plain tensors inside them."""
        return [*self.weights, *(attrgetter(path)(self.weights[number]) for number, path in self.inner)]
