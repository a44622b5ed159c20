"""Results that hold traced tensors where no pytree shows them: refused, for the user would get fakes."""

from __future__ import annotations

import gc
import re
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import SymInt, Tensor

from desugar import _torch as private
from desugar.errors import DesugarError
from desugar.fakes import Fakes
from desugar.inputs import StaticNeeded, is_traced
from desugar.trees import result_leaves, result_paths

_WORD, _TRACED_NAMES = re.compile(r"\w+"), {"FunctionalTensor", "FakeTensor"}
_MAX_DEPTH, _MAX_OBJECTS = 4, 10_000
_STORAGES = (torch.UntypedStorage, torch.TypedStorage, torch.autograd.graph.Node)
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
        elif isinstance(leaf, (Iterator, *_STORAGES)) or _holds_traced(leaf):
            raise DesugarError(
                f"the result holds a {type(leaf).__name__}, which is no container that can be taken apart",
                instead="return tensors in tuples, lists, dicts or named tuples, or register the class with optree",
                late="result",
            )


def check_texts(result: Any, fakes: Fakes) -> None:
    """Raises for a text that was made from a symbol or a traced tensor: it would be the same in each call.

    Raises:
        StaticNeeded: It shows a size.
        DesugarError: It shows data, or a traced tensor.
    """
    leaves, paths = result_leaves(result), result_paths(result)
    sizes, data = set(map(str, fakes.symbols)), set(map(str, fakes.env.var_to_range))
    for leaf in leaves:
        if isinstance(leaf, slice) and any(isinstance(n, SymInt) for n in (leaf.start, leaf.stop, leaf.step)):
            raise StaticNeeded
        if isinstance(leaf, type) and leaf in (private.FunctionalTensor, private.FakeTensor):
            raise _shows("the type of a traced tensor")
    for text in [key for key in (*leaves, *(key for path in paths for key in path)) if isinstance(key, str)]:
        words = set(_WORD.findall(text))
        if words & sizes:
            raise StaticNeeded
        if words & data:
            raise _shows("a number that depends on data")
        if words & _TRACED_NAMES:
            raise _shows("a traced tensor")


def _shows(what: str) -> DesugarError:
    return DesugarError(
        f"a text or type in the result shows {what}, as it was made when the function was traced",
        instead="return the tensor or number, and print it outside the compiled function",
        late="result",
    )


def _check_tensor(leaf: Tensor) -> None:
    if leaf.is_nested:
        raise DesugarError(
            "a result is one of PyTorch's nested tensors, whose sizes are no ints",
            instead="return its values and offsets, or a JaggedTensor",
            late="result",
        )
    # A view of an argument says that it requires grad as soon as it is asked, in eager mode as well.
    if leaf.requires_grad and not torch.is_grad_enabled() and not leaf._is_view():
        raise DesugarError(
            f"a result of size {tuple(leaf.shape)} requires grad although gradients are off around the call",
            instead="call the compiled function with gradients on, and turn them off inside where they are not wanted",
            late="result",
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
