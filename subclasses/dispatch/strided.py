"""``as_strided`` on a wrapper, with which ``torch.compile`` recreates views of its arguments.

Size, stride and storage offset are those of the outer tensor. They select the same elements of an inner tensor with the
outer size and stride, once the offset is taken relative to the storage offset of that inner tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from subclasses._torch import OpOverload
from subclasses.errors import DispatchError
from subclasses.ops.aliasing import with_aliasing
from subclasses.ops.schema import op_facts
from subclasses.rules.registry import all_rules
from subclasses.spec.values import with_inners

aten = torch.ops.aten

STRIDED_OPS = frozenset({aten.as_strided.default, aten.as_strided_copy.default})


def map_strided(cls: Any, op: OpOverload) -> Callable[..., Any]:
    """Returns the plan of ``as_strided`` for the ``"map"`` fallback.

    Raises:
        DispatchError: from the plan, if an inner tensor has another size or stride than the outer tensor.
    """
    spec = cls.__spec__

    def plan(x: Any, size: Any, stride: Any, storage_offset: Any = None) -> Any:
        results = []
        for name in spec.attributes:
            t = x.__dict__[name]
            if t is not None:
                _check_same_strides(op, x, name, t)
                relative_offset = None if storage_offset is None else storage_offset - x.storage_offset()
                t = op(
                    t, size, stride, None if relative_offset is None else t.storage_offset() + relative_offset
                )
            results.append(t)
        return with_inners(x, results)

    return with_aliasing(op, plan)


def _check_same_strides(op: OpOverload, x: Any, name: str, t: Any) -> None:
    if t.shape != x.shape or t.stride() != x.stride():
        cls = type(x).__name__
        raise DispatchError(
            f"{op} on a {cls} of size {tuple(x.shape)} and stride {x.stride()}, whose inner tensor {name!r} has size "
            f"{tuple(t.shape)} and stride {t.stride()}: the same strides mean other elements there; add a rule with "
            f"@{cls}.implements(torch.ops.{op})"
        )


def check_strided_copy(cls: Any, op: OpOverload) -> None:
    """Raises DispatchError if materializing ``as_strided`` would turn a view by a rule of the class into a copy."""
    viewing = [key for key, _ in all_rules(cls) if isinstance(key, OpOverload) and op_facts(key).viewed]
    if op in STRIDED_OPS and viewing:
        raise DispatchError(
            f"{cls.__name__} has a rule for {viewing[0]}, and none for {op}, with which torch.compile remakes views of "
            f"its arguments; add one with @{cls.__name__}.implements(torch.ops.{op})"
        )
