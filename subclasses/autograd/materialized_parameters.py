"""Functions that materialize a Parameter: their backward needs the inner tensors that it had then.

The plain gradient of such a function reaches the Parameter, which passes it through ``materialize`` with the inner
tensors that it has then. PyTorch's formulas save the materialized tensor, and do not detect a write to an inner tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import is_recording
from subclasses.autograd.above import call
from subclasses.autograd.construct import Primal
from subclasses.errors import DispatchError, one_of
from subclasses.spec.values import HOOKS


def call_materializing(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Calls a function without a rule; its backward raises if a Parameter that it materialized has changed."""
    out = call(func, types, args, kwargs)
    if not torch.compiler.is_dynamo_compiling():
        nodes = {node for x in (out if isinstance(out, list | tuple) else (out,)) if (node := _node_of(x))}
        for x in _parameters_in((*args, *kwargs.values())) if nodes else ():
            check = _check_of(x)
            for node in nodes:
                node.register_prehook(check)
    return out


def _node_of(x: Any) -> Any:
    return x.grad_fn if type(x) is Tensor else None


def _parameters_in(values: Sequence[Any]) -> list[Any]:
    """Returns the Parameters that require grad and convert their gradients, also in lists."""
    found: list[Any] = []
    for x in values:
        if isinstance(x, list | tuple):
            found += _parameters_in(x)
        elif isinstance(x, Tensor) and HOOKS in x.__dict__ and is_recording(x):
            found.append(x)
    return found


def _check_of(x: Any) -> Callable[[Any], None]:
    """Returns the hook of a node: it raises DispatchError if the Parameter has changed since the forward."""
    primal = Primal(x)

    def check(_gradients: Any) -> None:
        if not primal.is_of(x):
            cls = primal.layout.cls
            raise DispatchError(
                f"the gradient of a Parameter goes through {cls.__name__}.materialize(), and an inner tensor "
                "was modified in place or assigned since, as by an optimizer's step",
                code="inner-modified",
                hint=f"run the backward before that, or give {one_of(cls)} a rule for the function that reads "
                "x.unwrap()",
            )

    return check
