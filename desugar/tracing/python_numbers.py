"""Python numbers from tensors without dimensions: floats that change from call to call, and indices.

Dynamo passes a float that changes to its graph as a tensor without dimensions and reads it there with `item()`.
Compiled kernels take tensors, not numbers from tensors, so arithmetic with the number becomes arithmetic with the
tensor, by PyTorch's own pass. For an op that accepts only numbers, the pass makes the float a constant of the program,
and Dynamo captures the function again. Indexing by an integer tensor reads its value in eager mode; a trace makes the
value a symbol of the graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from desugar import _torch as private
from desugar.flatten.inputs import Inputs
from subclasses import TensorSubclass
from subclasses._torch import disabled_torch_function_impl


def replace_floats(graph: fx.GraphModule, mode: Any) -> None:
    """Replaces arithmetic with symbolic floats in a traced graph by arithmetic with the tensors that hold them.

    Args:
        graph: The graph; changed in place.
        mode: The fake mode of its trace.

    Raises:
        TensorifyScalarRestartAnalysis: An op takes such a float as a number. Dynamo captures the function again.
    """
    items = graph.graph.find_nodes(op="call_function", target=torch.ops.aten._local_scalar_dense.default)
    if any(isinstance(node.meta.get("val"), torch.SymFloat) for node in items):
        private.tensorify_python_scalars(graph, mode.shape_env, mode)
        graph.recompile()


# ---- indexing by integer tensors ---------------------------------------------------------------------------

_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)


def index_by_scalars(func: Any, args: Any, kwargs: Any, inputs: Inputs) -> tuple[Any, Any]:
    """Replaces the tensor `i` in `x[i]`, `x[1:i]` and `x[i] = y` by its value; returns other calls unchanged.

    `x[...]` accepts no symbol that depends on data as an index, so each such index becomes a `select`. A mask of dtype
    uint8 becomes a bool mask when `x` is read: fake tensors do not accept a uint8 mask.

    Returns:
        The function to call and its arguments.
    """
    x, index, *value = args
    parts = index if type(index) is tuple else (index,)
    if not value and any(map(_is_byte_mask, parts)):
        parts = tuple(part != 0 if _is_byte_mask(part) else part for part in parts)
        args = (x, parts, *value)
    if not any(map(_has_scalar, parts)) or not all(map(_is_basic, parts)) or not _has_default_indexing(x):
        return func, args
    return (_write if value else _read), (x, parts, *value)


def _read(x: Tensor, parts: tuple[Any, ...]) -> Tensor:
    for dim, part in reversed([*enumerate(parts)]):
        x = x.select(dim, part.item()) if _is_scalar(part) else x  # type: ignore[arg-type]
    return x[tuple(_to_number(part) for part in parts if not _is_scalar(part))]


def _write(x: Tensor, parts: tuple[Any, ...], value: Any) -> None:
    _read(x, parts)[...] = value


def _has_default_indexing(x: Any) -> bool:
    """Whether indexing has PyTorch's meaning: the class of `x` has no rules for torch functions."""
    cls = type(x)
    if isinstance(x, private.FunctionalTensor) or cls.__torch_function__ is disabled_torch_function_impl:
        return True
    return issubclass(cls, TensorSubclass) and not cls._has_function_rules


def _is_byte_mask(part: Any) -> bool:
    return isinstance(part, Tensor) and part.dtype is torch.uint8


def _is_scalar(part: Any) -> bool:
    return isinstance(part, private.FunctionalTensor) and part.dim() == 0 and part.dtype in _INTEGERS


def _has_scalar(part: Any) -> bool:
    if isinstance(part, slice):
        return any(map(_is_scalar, (part.start, part.stop, part.step)))
    return _is_scalar(part)


def _is_basic(part: Any) -> bool:
    return isinstance(part, int | slice) or _is_scalar(part)


def _to_number(part: Any) -> Any:
    if isinstance(part, slice):
        return slice(*map(_to_number, (part.start, part.stop, part.step)))
    return part.item() if _is_scalar(part) else part
