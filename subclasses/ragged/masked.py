"""``torch.masked.mean``, ``var`` and ``std``: means and variances of what exists, and of what a mask picks of that.

The other functions of ``torch.masked`` are made of ops that have rules. These three are Python functions that count by
the outer shape, and never ask ``__torch_function__`` whether someone knows better: eager mode and Dynamo alike would
count the padding without a word. So the three names are given functions that do ask, for ragged arguments alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from subclasses.ragged.jagged import JaggedTensor
from subclasses.ragged.padded.tensor import PaddedTensor

RAGGED = (JaggedTensor, PaddedTensor)


def _asking(plain: Callable[..., Any], ragged: Callable[..., Any]) -> Callable[..., Any]:
    """``plain``, but ``ragged(plain, ...)`` for a ragged first argument."""

    @functools.wraps(plain)
    def masked(input: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(input, RAGGED):
            return ragged(plain, input, *args, **kwargs)
        return plain(input, *args, **kwargs)

    return masked


# ---- what they are ---------------------------------------------------------------------------------------------


def _mean(
    plain: Any, input: Any, dim: Any = None, *, keepdim: Any = False, dtype: Any = None, mask: Any = None
) -> Any:
    if mask is None:
        return input.mean(dim, bool(keepdim), dtype=dtype)
    return plain(input, dim, keepdim=keepdim, dtype=dtype, mask=_existing(input, mask))


def _spread(  # noqa: PLR0913
    plain: Any,
    input: Any,
    dim: Any = None,
    unbiased: Any = None,
    *,
    correction: Any = None,
    keepdim: Any = False,
    dtype: Any = None,
    mask: Any = None,
) -> Any:
    if mask is not None:
        mask = _existing(input, mask)
        return plain(input, dim, unbiased, correction=correction, keepdim=keepdim, dtype=dtype, mask=mask)
    if unbiased is not None and correction is not None:
        raise ValueError(f"torch.masked.{plain.__name__}: expected unbiased or correction, got both")
    if correction is None:
        correction = 1 if unbiased is None else int(unbiased)
    if dtype is None and not (input.is_floating_point() or input.is_complex()):
        dtype = torch.float32
    wide = input if dtype is None else input.to(dtype)
    return getattr(wide, plain.__name__)(dim, correction=correction, keepdim=bool(keepdim))


def _existing(x: Any, mask: Tensor) -> Tensor:
    """A mask of the existing entries; a dense one says nothing of the others."""
    return mask if isinstance(mask, RAGGED) else x.like_dense(mask.expand(x.shape))


for _name, _ragged in (("mean", _mean), ("var", _spread), ("std", _spread)):
    setattr(torch.masked, _name, _asking(getattr(torch.masked, _name), _ragged))
