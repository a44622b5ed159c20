"""``torch.masked.mean``, ``var`` and ``std`` of the entries that exist.

The other functions of ``torch.masked`` are made of ops that have rules. These three are Python functions that count by
the outer shape and do not call ``__torch_function__``: eager mode and Dynamo alike would silently count the padding. So
the three names get functions that look for a ragged argument first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from subclasses.ragged.base import is_ragged


def _asking(plain: Callable[..., Any], ragged: Callable[..., Any]) -> Callable[..., Any]:
    """``plain``, but ``ragged`` for a ragged first argument without a mask; a mask picks existing entries."""

    @functools.wraps(plain)
    def masked(input: Any, *args: Any, mask: Any = None, **kwargs: Any) -> Any:
        if is_ragged(input):
            if mask is None:
                return ragged(plain, input, *args, **kwargs)
            mask = mask if is_ragged(mask) else input.like_dense(mask.expand(input.shape))
        return plain(input, *args, mask=mask, **kwargs)

    return masked


def _mean(plain: Any, input: Any, dim: Any = None, *, keepdim: Any = False, dtype: Any = None) -> Any:
    return input.mean(dim, bool(keepdim), dtype=dtype)


def _spread(  # noqa: PLR0913
    plain: Any,
    input: Any,
    dim: Any = None,
    unbiased: Any = None,
    *,
    correction: Any = None,
    keepdim: Any = False,
    dtype: Any = None,
) -> Any:
    if unbiased is not None and correction is not None:
        raise ValueError(f"torch.masked.{plain.__name__}: expected unbiased or correction, got both")
    if correction is None:
        correction = 1 if unbiased is None else int(unbiased)
    if dtype is None and not (input.is_floating_point() or input.is_complex()):
        dtype = torch.float32
    wide = input if dtype is None else input.to(dtype)
    return getattr(wide, plain.__name__)(dim, correction=correction, keepdim=bool(keepdim))


def replace_functions() -> None:
    """Replaces the three functions in ``torch.masked``."""
    for name, ragged in (("mean", _mean), ("var", _spread), ("std", _spread)):
        setattr(torch.masked, name, _asking(getattr(torch.masked, name), ragged))
