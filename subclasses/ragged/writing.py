"""Writing into rows that lie back to back: ``x[index] = value`` and ``index_put``.

Whatever an index means when reading, it means when writing: it is asked of the numbers of the stored elements, and the
elements with the numbers that come back are replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from subclasses.errors import DispatchError
from subclasses.ragged.jagged import JaggedTensor
from subclasses.ragged.rows import relaid, shown, spread

# ---- the rules -------------------------------------------------------------------------------------------------


@JaggedTensor.implements(torch.Tensor.__setitem__)
def _(func: Any, x: Any, index: Any, value: Any) -> None:
    _check_written(func, x, value)
    if isinstance(index, JaggedTensor) and not isinstance(value, JaggedTensor) and _is_number(value):
        for _ in range(x.dim() - index.dim()):
            index = index.unsqueeze(-1)
        x.copy_(torch.where(index, value, x))  # type: ignore[arg-type]
    else:
        x.copy_(_written(func, x, index, value, False))


@JaggedTensor.implements(torch.index_put)
def _(func: Any, input: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    _check_written(func, input, values)
    return _written(func, input, _as_index(indices), values, accumulate)


@JaggedTensor.implements(torch.Tensor.index_put_)
def _(func: Any, input: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    _check_written(func, input, values)
    return input.copy_(_written(func, input, _as_index(indices), values, accumulate))


def _check_written(func: Any, x: Any, value: Any) -> None:
    if not isinstance(x, JaggedTensor):
        raise DispatchError(f"{func.__name__}: cannot write {_kind(value)} into {shown(x)}; use to_dense()")


def _kind(value: Any) -> str:
    return shown(value) if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _is_number(value: Any) -> bool:
    return not isinstance(value, Tensor) or value.numel() == 1


def _as_index(indices: Sequence[Any]) -> Any:
    index = tuple(slice(None) if i is None else i for i in indices)
    return index[0] if len(index) == 1 and isinstance(index[0], JaggedTensor) else index


# ---- numbers of elements ---------------------------------------------------------------------------------------


def _written(func: Any, x: JaggedTensor, index: Any, value: Any, accumulate: bool) -> JaggedTensor:
    """``x`` with a value at an index."""
    values = x.unwrap("values")
    numbers = torch.arange(values.numel(), device=x.device).view(values.shape)
    with torch.no_grad():
        places = x.with_values(numbers)[index]
    found, new = _ragged(func, x, places, value) if isinstance(places, JaggedTensor) else (places, value)
    if isinstance(new, JaggedTensor):
        raise DispatchError(
            f"{func.__name__}: expected a dense value for this index of {shown(x)}, got {shown(new)}"
        )
    new = torch.as_tensor(new, dtype=x.dtype, device=x.device).expand(found.shape)
    # What belongs to no row is written behind the others, and cut off.
    flat = torch.cat([values.flatten(), values.new_zeros(1)])
    flat = flat.index_put((found.flatten(),), new.flatten(), accumulate)
    return x.with_values(flat[:-1].view(values.shape))


def _ragged(func: Any, x: JaggedTensor, places: JaggedTensor, value: Any) -> tuple[Tensor, Tensor]:
    """The elements of places that are rows again, and what is written to each."""
    if isinstance(value, JaggedTensor):
        new = relaid(func, places, value).unwrap("values")
    else:
        new = spread(func, places, torch.as_tensor(value, dtype=x.dtype, device=x.device))
    return places.kept(places.values, x.values.numel()), new
