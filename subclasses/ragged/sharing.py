"""Writing into values that several jagged tensors share: into existing entries only, and with a gradient or not at all.

Slices of rows, and merged dimensions, share the values of the tensor that they come from. Autograd is not told so: what
says where the rows lie is new, and no formula of a view leads from one to the other. A write that it records would
give the one a gradient and leave the other without, so it is refused; the index of a write says the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subclasses.errors import DispatchError
from subclasses.ragged import checks
from subclasses.semantics import bump_versions

SHARES = "_shares_values"


def sharing(x: Any) -> Any:
    """The same value, of which is noted that another one has its values."""
    if not torch.compiler.is_dynamo_compiling():
        x.__dict__[SHARES] = True
    return x


def check_writable(func: Any, x: Any, *operands: Any) -> None:
    """Raises where autograd would record a write and not know who else sees it."""
    base = x._base if x._is_view() else x
    if SHARES not in getattr(base, "__dict__", ()) or not checks.is_recorded(x, *operands):
        return
    raise DispatchError(
        f"{getattr(func, '__name__', func)}: this JaggedTensor is a slice of another one, or has its dimensions "
        f"merged, and shares its values, so the gradient of the other would not know of the write; write to the other "
        f"one, such as y[index] = value, or to a copy by clone()"
    )


def write_values(op: Any, x: Any, new: Tensor, non_blocking: bool) -> None:
    """Writes the entries that exist: what lies between them may be another's."""
    check_writable(op, x)
    values, exists = x.values, x.segments.exists
    if exists is not None:
        exists = exists.view(-1, *[1] * (values.dim() - max(x.ragged_dim, 1)))
        new = torch.where(exists, new.to(values.device), values)
    values.copy_(new, non_blocking)
    bump_versions([values])
