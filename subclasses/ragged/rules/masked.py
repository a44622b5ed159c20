"""Refuses ``torch.masked.mean``, ``var`` and ``std`` where they would count the padding.

The other functions of ``torch.masked`` are composed of ops that have rules. These three are Python functions that
divide by the outer size unless there is a mask. They do not dispatch to ``__torch_function__`` as functions of their
own. They read ``Tensor.layout`` first, so its rule checks its callers.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from subclasses.errors import DispatchError, one_of
from subclasses.ragged.base import is_ragged
from subclasses.ragged.registry import Rules

RULES = Rules()

_COUNTING = {getattr(torch.masked, name).__code__: name for name in ("mean", "var", "std")}
_DEPTH = 8  # frames from the rule to one of the three functions, including frames of the generated method


@RULES.of(torch.Tensor.layout.__get__)  # type: ignore[attr-defined]
def _layout(func: Any, x: Any) -> torch.layout:
    if not torch.compiler.is_dynamo_compiling():  # Dynamo runs all three on fake tensors, in the same frames
        _check_counted(x)
    return torch.strided


def _check_counted(x: Any) -> None:
    """Raises if one of the three functions is a caller, and has no ragged mask."""
    frame = sys._getframe(2)
    for _ in range(_DEPTH):
        if frame is None:
            return
        name = _COUNTING.get(frame.f_code)
        if name is not None and not is_ragged(frame.f_locals.get("mask")):
            raise DispatchError(
                f"torch.masked.{name} of {one_of(type(x))} would count the padding",
                code="padding-counted",
                hint=f"write x.{name}(dim), or give a ragged mask, such as mask=torch.ones_like(x, dtype=torch.bool) "
                "or that & a dense mask",
            )
        frame = frame.f_back
