"""Writes to values that several jagged tensors share.

Slices of rows, and tensors with merged dimensions, share the values of the tensor that they come from, their *root*.
Autograd does not record this as a view, since their offsets or lengths are new. A write that autograd records would
change the gradient of one tensor and not of the other. Therefore it raises while both exist. Any other write changes
existing entries only, and bumps the version counters of all sharing tensors. So autograd detects a change of a tensor
that it saved.

A slice with a step copies its entries. A write to the copy would change the source of a dense slice, and not of this
one, so it raises while the source exists.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from subclasses._torch_tracing import leave_in_graph
from subclasses.errors import DispatchError
from subclasses.op_schemas.aliasing import bump_versions
from subclasses.ragged import checks

# The root of each tensor that shares its values, and the tensors that share the values of each root. They are not
# attributes, since a copy or a pickle would include them.
_roots: WeakIdKeyDictionary = WeakIdKeyDictionary()
_users: WeakIdKeyDictionary = WeakIdKeyDictionary()
# References to the sources of each copy that a slice with a step makes; a slice of a copy has several.
_sources: WeakIdKeyDictionary = WeakIdKeyDictionary()


@leave_in_graph
def sharing(x: Any, of: Any) -> Any:
    """Records that ``x`` shares the values of another tensor, and returns ``x``."""
    root = _roots[x] = _root(of)
    _users[root] = [weakref.ref(t) for t in (*_sharers(root), x)]
    return x


@leave_in_graph
def copied(x: Any, of: Any) -> Any:
    """Records that ``x`` is a copy of a slice of another tensor, and returns ``x``."""
    root = _root(of)
    _sources[x] = [*(_sources.get(root) or ()), weakref.ref(root)]
    return x


def _root(x: Any) -> Any:
    base = x._base if x._is_view() else x
    return _roots.get(base, base)


def _sharers(root: Any, but: Any = None) -> list[Any]:
    """Returns the live tensors that share the values of a root."""
    users = (ref() for ref in _users.get(root) or ())
    return [t for t in users if t is not None and t is not but]


def check_writable(x: Any, func: Any, *operands: Any) -> None:
    """Raises if a write would be lost, or if autograd would record a write to values that other tensors share."""
    root, base = _root(x), x._base if x._is_view() else x
    is_copy = any(source() is not None for source in (_sources.get(root) or ()))
    is_shared = (root is not base or _sharers(root, base)) and checks.is_recorded(x, *operands)
    if not (is_copy or is_shared) or hasattr(
        x._raw_values, "fake_mode"
    ):  # raising in Dynamo would break its graph; a compiler of the graph checks again
        return
    name = getattr(func, "__name__", func)
    if is_copy:
        raise DispatchError(
            f"{name}: this JaggedTensor is a slice with a step, and so a copy. The tensor that it was taken from would "
            "not change",
            code="write-lost",
            hint="write to that tensor, such as x[index] = value, or to y.clone()",
        )
    if root is base:
        raise DispatchError(
            f"{name}: a slice of this JaggedTensor, or the same with its dimensions merged, is in use and shares its "
            "values. The gradient of the slice would miss the write",
            code="write-shared",
            hint="take the slice after the write, or write to a copy by clone()",
        )
    raise DispatchError(
        f"{name}: this JaggedTensor is a slice of another one, or has its dimensions merged, and shares its values. "
        "The gradient of the other would miss the write",
        code="write-shared",
        hint="write to the other one, such as y[index] = value, or to a copy by clone()",
    )


def write_values(x: Any, op: Any, new: Tensor, non_blocking: bool) -> None:
    """Writes existing entries only, since elements between them may belong to another tensor."""
    check_writable(x, op)
    values, exists = x._raw_values, x.segments.exists
    if exists is not None:
        exists = exists.view(-1, *[1] * (values.dim() - max(x.ragged_dim, 1)))
        new = torch.where(exists, new.to(values.device), values)
    values.copy_(new, non_blocking)
    root, base = _root(x), x._base if x._is_view() else x
    bump_versions([values, *(t for t in (root, *_sharers(root, base)) if t is not base)])
