"""Gradients of Parameters of declared classes that FSDP2 cut into rows.

FSDP2 sums the gradients of a group of Parameters in one flat buffer, of which each rank keeps its shard. It expects one
plain gradient of the size of each Parameter. A gradient of a declared class has a tensor for each inner tensor. This
module packs them into one plain matrix with a row for each rank, and unpacks this rank's row to its shard's gradient.

An inner tensor that stays whole on each rank is in every row. Its gradient is then the same on all ranks, which make
the same update; the norm of all gradients counts it once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from subclasses.dispatch.sharding import is_cut, rows_of
from subclasses.errors import DispatchError, one_of
from subclasses.methods.parameters import mark_gradient
from subclasses.spec.values import RANKS, is_differentiable, map_inners


def pack(shard: Any, gradient: Any, ranks: int) -> Tensor | None:
    """Returns a gradient as a matrix with a row for each rank; None if FSDP2 itself handles it, as a plain one.

    Args:
        shard: this rank's shard of the Parameter.
        gradient: the gradient of the whole Parameter.
        ranks: the number of ranks that the Parameter is cut for.

    Raises:
        DispatchError: the gradient is not of the class of the Parameter.
    """
    cls = type(shard)
    if not hasattr(cls, "__spec__"):
        return None
    if not isinstance(gradient, cls):
        raise DispatchError(
            f"FSDP2: the gradient of a Parameter of {one_of(cls)} is {one_of(type(gradient))}, and its inner tensors "
            f"get their gradients from one of {one_of(cls)}",
            code="gradient-misfit",
            hint=f"let the rules of {cls.__name__} give such gradients",
        )
    size = gradient.size(0) // ranks
    rows = [list(_tensors(rows_of(gradient, k * size, (k + 1) * size))) for k in range(ranks)]
    return torch.stack([torch.cat([t.reshape(-1) for t in row]) for row in rows])


def unpack(shard: Any, row: Tensor, ranks: int) -> Any:
    """Returns the gradient of this rank's shard from its row of the matrix, as views of it."""
    gradient = _with_gradients(shard, iter(row.reshape(-1).split([t.numel() for t in _tensors(shard)])))
    marked = mark_gradient(gradient, shard.__dict__)
    _mark_whole(marked, ranks)
    return marked


def _tensors(x: Any) -> Iterator[Tensor]:
    """Yields the differentiable plain tensors in a value, also inside of wrappers that it holds."""
    for name in x._layout.present:
        t = x.__dict__[name]
        if hasattr(type(t), "__spec__"):
            yield from _tensors(t)
        elif is_differentiable(t):
            yield t


def _with_gradients(x: Any, gradients: Iterator[Tensor]) -> Any:
    """Returns a value with the next shards in place of its differentiable tensors."""

    def replace(_: Any, t: Any) -> Any:
        if hasattr(type(t), "__spec__"):
            return _with_gradients(t, gradients)
        return next(gradients).view(t.shape).to(t.dtype) if is_differentiable(t) else t

    return map_inners(x, replace)


def _mark_whole(gradient: Any, ranks: int) -> None:
    """Stores in a gradient the names of the inner tensors that every rank has whole."""
    inners = {name: gradient.__dict__[name] for name in gradient._layout.present}
    whole = frozenset(name for name, t in inners.items() if not is_cut(gradient, t))
    gradient.__dict__[RANKS] = (ranks, whole)
    for name, _ in gradient._layout.nested:
        if name not in whole and hasattr(type(inners[name]), "__spec__"):
            _mark_whole(inners[name], ranks)
