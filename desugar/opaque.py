"""Results that hold traced tensors where no pytree shows them: refused, for the user would get fakes."""

from __future__ import annotations

import gc
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from desugar.errors import DesugarError
from desugar.inputs import is_traced
from desugar.trees import result_leaves

_MAX_DEPTH, _MAX_OBJECTS = 4, 10_000
_PASSED_BY = (type, types.ModuleType, types.CodeType, types.FrameType, torch.nn.Module)


def check_result(result: Any, inputs: list[Any]) -> None:
    """Raises for a leaf that hides traced tensors, and for a result that requires grad where gradients are off.

    Args:
        result: What the traced function returned.
        inputs: The traced argument leaves.
    """
    known = {id(leaf) for leaf in inputs}
    for leaf in result_leaves(result):
        if id(leaf) in known:
            continue
        if isinstance(leaf, Tensor):
            _check_tensor(leaf)
        elif isinstance(leaf, Iterator) or _holds_traced(leaf):
            raise DesugarError(
                f"the result holds a {type(leaf).__name__}, which is no container that can be taken apart",
                instead="return tensors in tuples, lists, dicts or named tuples, or register the class with optree",
            )


def _check_tensor(leaf: Tensor) -> None:
    if leaf.is_nested:
        raise DesugarError(
            "a result is one of PyTorch's nested tensors, whose sizes are no ints",
            instead="return its values and offsets, or a JaggedTensor",
        )
    # A view of an argument says that it requires grad as soon as it is asked, in eager mode as well.
    if leaf.requires_grad and not torch.is_grad_enabled() and not leaf._is_view():
        raise DesugarError(
            f"a result of size {tuple(leaf.shape)} requires grad although gradients are off around the call",
            instead="call the compiled function with gradients on, and turn them off inside where they are not wanted",
        )


def _holds_traced(leaf: Any) -> bool:
    """Whether an object leads to a traced tensor within a few references."""
    layer, seen = [leaf], {id(leaf)}
    for _ in range(_MAX_DEPTH):
        found = []
        for obj in gc.get_referents(*layer):
            if isinstance(obj, Tensor):
                if is_traced(obj):
                    return True
            elif id(obj) not in seen and not isinstance(obj, _PASSED_BY) and not _is_namespace(obj):
                seen.add(id(obj))
                found.append(obj)
        if len(seen) > _MAX_OBJECTS:
            return False
        layer = found
    return False


def _is_namespace(obj: Any) -> bool:
    """Whether an object is the globals of a module."""
    return isinstance(obj, dict) and "__builtins__" in obj
