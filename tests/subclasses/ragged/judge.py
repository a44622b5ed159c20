"""A loop over the rows as the judge of what a ragged tensor computes.

A `Batch` has one leaf, the values, of which both the ragged tensor and the plain rows are functions; what lies between
rows is NaN, so that anything which reads it shows. `check_parts` compares results row by row, and then the gradients of
the leaf and of all dense parameters under one random cotangent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import desugar
from subclasses.ragged import JaggedTensor

LAYOUTS = ["back to back", "holes", "ragged dim 2", "not contiguous"]
LENGTHS = [3, 0, 5, 1]

# ---- batches ---------------------------------------------------------------------------------------------------


@dataclass
class Batch:
    """Rows as a ragged tensor, and as plain slices of the same leaf."""

    leaf: Tensor
    offsets: Tensor
    lengths: Tensor | None
    ragged_dim: int
    max_length: int
    batch_dim: int = 0

    @property
    def x(self) -> JaggedTensor:
        """The rows as one ragged tensor."""
        return JaggedTensor(
            self.leaf,
            self.offsets,
            lengths=self.lengths,
            ragged_dim=self.ragged_dim,
            max_length=self.max_length,
        )

    @property
    def rows(self) -> list[Tensor]:
        """The rows by plain slicing."""
        lengths = self.offsets.diff() if self.lengths is None else self.lengths
        pairs = zip(self.offsets.tolist(), lengths.tolist(), strict=False)
        return [self.leaf.narrow(self.ragged_dim - 1, start, n) for start, n in pairs]


def make_batch(
    layout: str = "back to back",
    lengths: Sequence[int] = LENGTHS,
    entry: tuple[int, ...] = (4,),
    dtype=torch.float64,
) -> Batch:
    """Random rows ``[length, *entry]``; with ragged dim 2 they are ``[entry[0], length, *entry[1:]]``."""
    gaps = [i % 2 + 1 if layout == "holes" else 0 for i, _ in enumerate(lengths)]
    held = torch.tensor([0, *(n + gap for n, gap in zip(lengths, gaps, strict=True))])
    offsets, sizes = held.cumsum(0), torch.tensor(lengths, dtype=torch.int64)
    shape = (int(offsets[-1]), *entry)
    values = (
        torch.randn(shape, dtype=dtype)
        if dtype.is_floating_point
        else torch.randint(0, 9, shape, dtype=dtype)
    )
    if layout == "not contiguous":
        values = (
            torch.cat([values, values], -1)[..., : entry[-1]]
            if entry
            else torch.stack([values, values], 1)[:, 0]
        )
    if layout == "holes" and dtype.is_floating_point:
        exists = torch.zeros(shape[0], dtype=torch.bool)
        for start, n in zip(offsets.tolist(), lengths, strict=False):
            exists[start : start + n] = True
        values[~exists] = float("nan")
    ragged_dim = 1
    if layout == "ragged dim 2":
        values, ragged_dim = values.movedim(0, 1).contiguous(), 2
    leaf = values.requires_grad_() if dtype.is_floating_point else values
    holes = sizes if layout == "holes" else None
    return Batch(leaf, offsets, holes, ragged_dim, max(lengths, default=0))


# ---- judging ---------------------------------------------------------------------------------------------------


def eager(f: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself."""
    return f


def stock(f: Callable[..., Any]) -> Callable[..., Any]:
    """Under stock `torch.compile`."""
    return torch.compile(f, fullgraph=True, backend="aot_eager")


def desugared(f: Callable[..., Any]) -> Callable[..., Any]:
    """Under the pass."""
    return desugar.compile(f, backend="eager")


WAYS = [eager, stock, desugared]


def check_parts(
    batch: Batch,
    parts: Sequence[Tensor],
    expected: Sequence[Tensor],
    parameters: Sequence[Tensor] = (),
    **tolerance,
) -> None:
    """Compares tensors one by one, and the gradients that flow back from them."""
    assert len(parts) == len(expected)
    for got, want in zip(parts, expected, strict=True):
        torch.testing.assert_close(got, want, equal_nan=True, **tolerance)
    leaves = [t for t in (batch.leaf, *parameters) if t.requires_grad]
    if not leaves or not any(p.requires_grad for p in expected):
        return
    cotangents = [torch.randn_like(p) for p in expected]
    grads = [_grads(tensors, cotangents, leaves) for tensors in (parts, expected)]
    for leaf, got, want in zip(leaves, *grads, strict=True):
        assert type(got) is Tensor and got.shape == leaf.shape
        got = torch.where(leaf.isnan(), 0, got) if leaf is batch.leaf and batch.lengths is not None else got
        torch.testing.assert_close(got, want, equal_nan=True, **tolerance)


def _grads(tensors: Sequence[Tensor], cotangents: Sequence[Tensor], leaves: list[Tensor]) -> Any:
    pairs = [(t, c) for t, c in zip(tensors, cotangents, strict=True) if t.requires_grad]
    outputs, given = zip(*pairs, strict=True)
    return torch.autograd.grad(outputs, leaves, given, allow_unused=True, materialize_grads=True)
