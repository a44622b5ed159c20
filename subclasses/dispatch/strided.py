"""``as_strided`` of a wrapper, with which ``torch.compile`` remakes views of its arguments.

Size, stride and offset are those of the outer tensor. They mean the same place in an inner tensor that has the outer
size and stride, once the offset is counted from where that inner tensor starts in its own storage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from subclasses._torch import OpOverload
from subclasses.dispatch.aliasing import with_semantics
from subclasses.dispatch.rules import all_rules
from subclasses.dispatch.schema import op_facts
from subclasses.errors import DispatchError

aten = torch.ops.aten

STRIDED = frozenset({aten.as_strided.default, aten.as_strided_copy.default})


def map_strided(cls: Any, op: OpOverload) -> Callable[..., Any]:
    """The plan of a mapped ``as_strided``."""
    spec = cls.__spec__

    def plan(x: Any, size: Any, stride: Any, storage_offset: Any = None) -> Any:
        done = []
        for name in spec.inner_names:
            t = x.__dict__[name]
            if t is not None:
                _check_alike(op, x, name, t)
                skipped = None if storage_offset is None else storage_offset - x.storage_offset()
                t = op(t, size, stride, None if skipped is None else t.storage_offset() + skipped)
            done.append(t)
        return cls._wrap(x._layout, *done, *(x.__dict__[f.name] for f in spec.dynamics))

    return with_semantics(op, plan)


def _check_alike(op: OpOverload, x: Any, name: str, t: Any) -> None:
    if t.shape != x.shape or t.stride() != x.stride():
        cls = type(x).__name__
        raise DispatchError(
            f"{op} on a {cls} of size {tuple(x.shape)} and stride {x.stride()}, whose inner tensor {name!r} has size "
            f"{tuple(t.shape)} and stride {t.stride()}: the same strides mean other elements there; add a rule with "
            f"@{cls}.implements(torch.ops.{op})"
        )


def check_strided_copy(cls: Any, op: OpOverload) -> None:
    """Raises where a view that the class makes itself would be remade as a copy of what it materializes to."""
    viewing = [key for key, _ in all_rules(cls) if isinstance(key, OpOverload) and op_facts(key).viewed]
    if op in STRIDED and viewing:
        raise DispatchError(
            f"{cls.__name__} has a rule for {viewing[0]}, and none for {op}, with which torch.compile remakes views of "
            f"its arguments; add one with @{cls.__name__}.implements(torch.ops.{op})"
        )
