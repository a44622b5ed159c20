"""Errors of a mapped in-place op before it has written anything.

A mapped op runs on one inner tensor after the other. Where all have one dtype and shape, what is wrong for one is wrong
for the first, which then is not written. Where they differ, as a number and a count do under ``x.mul_(2.5)``, the op
is tried for the others first. Only pointwise ops and copies are tried: dtypes and sizes decide whether they raise.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from subclasses._torch import OpOverload
from subclasses.dispatch.schema import functional_counterpart, op_facts

PLAIN = frozenset({Tensor, nn.Parameter})


def is_tried_first(op: OpOverload) -> bool:
    """Whether an op writes to tensors, and dtypes and sizes decide whether it raises."""
    if not op_facts(op).written or torch.Tag.nondeterministic_seeded in op.tags:
        return False
    functional = functional_counterpart(op) or op
    return torch.Tag.pointwise in (*op.tags, *functional.tags) or op is torch.ops.aten.copy_.default


def differ(first: Any, other: Any) -> bool:
    """Whether two inner tensors have different dtypes or shapes; not asked of traced ones, which would be guarded."""
    return (
        other.__class__ in PLAIN
        and first.__class__ in PLAIN
        and (other.dtype is not first.dtype or other.shape != first.shape)
    )


def try_first(cls: Any, op: OpOverload, names: tuple[str, ...], args: Any, kwargs: Any) -> None:
    """Tries an op for the inner tensors of these names, and raises what the op would raise for them.

    It runs on tensors of one element, with their dtypes; what it reads must expand to the sizes of what it writes.
    """
    facts = op_facts(op)
    for name in names:
        inners = [v.__dict__[name] if isinstance(v, cls) else v for v in (*args, *kwargs.values())]
        tensors = [t for t in inners if isinstance(t, Tensor)]
        if not tensors or any(t.__class__ not in PLAIN or t.layout is not torch.strided for t in tensors):
            continue
        small = [one_element(t) if isinstance(t, Tensor) else t for t in inners]
        op(*small[: len(args)], **dict(zip(kwargs, small[len(args) :], strict=True)))
        # The result of out= is resized instead.
        check_sizes(tensors, [inners[i] for i in facts.written if not facts.arguments[i].keyword])


def one_element(tensor: Tensor) -> Tensor:
    """Returns a tensor with the dtype, the device and the number of dimensions of another one."""
    return tensor.new_ones((1,) * tensor.dim())


def check_sizes(tensors: Iterable[Tensor], written: Iterable[Tensor]) -> None:
    """Raises PyTorch's error if a tensor does not expand to the size of one that an op writes to."""
    for target in written:
        for t in tensors:
            if t.shape != target.shape:
                t.expand_as(target)
