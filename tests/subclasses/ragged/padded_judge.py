"""Poisoned tables, and a loop over the rows as the judge of what a padded tensor computes.

The padding of every table is NaN (or an index out of range), and the cotangent of a ragged result is NaN there too.
`check_parts` compares values, then the gradients of the table's leaf (zero in the padding) and of dense parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from subclasses.ragged import PaddedTensor

PLACES = {"[B, T]": (0, 1), "[T, B]": (1, 0), "[B, D, T]": (0, 2), "[D, B, T]": (1, 2)}
LENGTHS = [3, 0, 5, 1]


@dataclass
class Table:
    """Rows as a padded tensor, and as plain slices of the same leaf."""

    leaf: Tensor
    lengths: Tensor
    batch_dim: int = 0
    ragged_dim: int = 1

    @property
    def x(self) -> PaddedTensor:
        """The rows as one padded tensor."""
        return PaddedTensor(self.leaf, self.lengths, ragged_dim=self.ragged_dim, batch_dim=self.batch_dim)

    def slices(self, table: Tensor) -> list[Tensor]:
        """The rows of a plain table by plain slicing, without the batch dimension."""
        return slices_of(table, self.lengths, self.batch_dim, self.ragged_dim)

    @property
    def rows(self) -> list[Tensor]:
        """The rows of the leaf."""
        return self.slices(self.leaf)


def slices_of(table: Tensor, lengths: Tensor, batch_dim: int, ragged_dim: int) -> list[Tensor]:
    """Rows of a plain table by plain slicing; those of merged dimensions follow each other in it."""
    if batch_dim == ragged_dim:
        table, ragged_dim = table.unflatten(batch_dim, (len(lengths), -1)), batch_dim + 1
    place = ragged_dim - (batch_dim < ragged_dim)
    pairs = zip(table.unbind(batch_dim), lengths.tolist(), strict=True)
    return [row.narrow(place, 0, n) for row, n in pairs]


def make_table(
    places: str = "[B, T]", lengths: Sequence[int] = LENGTHS, width: int = 7, entry: Sequence[int] = (4,)
) -> Table:
    """Random rows whose padding is NaN."""
    batch_dim, ragged_dim = PLACES[places]
    table = torch.randn(len(lengths), width, *entry, dtype=torch.float64)
    for row, n in zip(table, lengths, strict=True):
        row[n:] = float("nan")
    table = table.movedim((0, 1), (batch_dim, ragged_dim)).contiguous()
    return Table(table.requires_grad_(), torch.tensor(lengths), batch_dim, ragged_dim)


def check_parts(table: Table, got: Any, expected: list[Tensor], parameters: Sequence[Tensor] = ()) -> None:
    """Compares a padded or dense result with its parts, and the gradients that flow back from it."""
    parts = got.to_tensors() if isinstance(got, PaddedTensor) else list(got)
    torch.testing.assert_close(parts, expected, equal_nan=True)
    leaves = [t for t in (table.leaf, *parameters) if t.requires_grad]
    if not leaves or not any(p.requires_grad for p in expected):
        return
    if isinstance(got, PaddedTensor):
        cotangent = torch.full_like(got.padded, float("nan"))
        cotangents = slices_of(cotangent, got.lengths, got.batch_dim, got.ragged_dim)[: len(expected)]
        for part in cotangents:
            part.copy_(torch.randn_like(part))
        ours = torch.autograd.grad(
            got, leaves, got.detach().with_padded(cotangent), allow_unused=True, materialize_grads=True
        )
    else:
        cotangents = [torch.randn_like(p) for p in expected]
        ours = torch.autograd.grad(parts, leaves, cotangents, allow_unused=True, materialize_grads=True)
    theirs = torch.autograd.grad(expected, leaves, cotangents, allow_unused=True, materialize_grads=True)
    for leaf, mine, wanted in zip(leaves, ours, theirs, strict=True):
        assert type(mine) is Tensor and mine.shape == leaf.shape
        torch.testing.assert_close(mine, wanted, equal_nan=True)
