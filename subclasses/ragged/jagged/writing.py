"""Writing into a ``JaggedTensor`` by an index.

A write numbers the stored elements, indexes the numbers, and replaces the elements with the resulting numbers. So an
index selects the same elements for reading and writing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from subclasses.errors import DispatchError
from subclasses.ragged.base import RaggedTensor, shown
from subclasses.ragged.jagged.operands import spread

if TYPE_CHECKING:
    from subclasses.ragged.jagged import JaggedTensor

# ---- the interface ---------------------------------------------------------------------------------------------


def with_written(x: JaggedTensor, func: Any, index: Any, value: Any) -> Any:
    """Returns ``x`` with a value at an index."""
    return _written(func, x, index, value, False)


def with_put(x: JaggedTensor, func: Any, indices: Sequence[Any], values: Any, accumulate: bool) -> Any:
    """Returns ``x`` with values at index tensors."""
    return _written(func, x, _as_index(indices), values, accumulate)


def _as_index(indices: Sequence[Any]) -> Any:
    index = tuple(slice(None) if i is None else i for i in indices)
    if len(index) > 2:  # among three or more index tensors a zero-dimensional one broadcasts with the others
        index = tuple(i.unsqueeze(0) if isinstance(i, Tensor) and i.dim() == 0 else i for i in index)
    return index[0] if len(index) == 1 and isinstance(index[0], RaggedTensor) else index


# ---- numbers of elements ---------------------------------------------------------------------------------------


def _written(func: Any, x: JaggedTensor, index: Any, value: Any, accumulate: bool) -> JaggedTensor:
    """Returns ``x`` with a value at an index."""
    values = x.unwrap("values")
    numbers = torch.arange(values.numel(), device=x.device).view(values.shape)
    with torch.no_grad():
        selected = x.with_values(numbers)[index]
    elements, new = (
        _ragged(func, x, selected, value) if isinstance(selected, x.ragged_class) else (selected, value)
    )
    if isinstance(new, x.ragged_class):
        raise DispatchError(
            f"{func.__name__}: expected a dense value for this index of {shown(x)}, got {shown(new)}",
            code="write-misfit",
        )
    new = torch.as_tensor(new, dtype=x.dtype, device=x.device).expand(elements.shape)
    # Values for holes are written past the last element, which is cut off.
    flat = torch.cat([values.flatten(), values.new_zeros(1)])
    flat = flat.index_put((elements.flatten(),), new.flatten(), accumulate)
    return x.with_values(flat[:-1].view(values.shape))


def _ragged(func: Any, x: JaggedTensor, selected: JaggedTensor, value: Any) -> tuple[Tensor, Tensor]:
    """Returns the numbers of the elements at a ragged index, and the new value of each."""
    if isinstance(value, selected.ragged_class):
        new = selected.relaid(func, value).unwrap("values")
    else:
        new = spread(func, selected, torch.as_tensor(value, dtype=x.dtype, device=x.device))
    return selected.kept(selected._raw_values, x._raw_values.numel()), new
