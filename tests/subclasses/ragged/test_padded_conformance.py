"""The conformance kit on padded tensors whose rows are full, so that each represents its table."""

from __future__ import annotations

import pytest
import torch

from subclasses.ragged import PaddedTensor
from subclasses.testing import Options, suite

# A copy shares its lengths with the value that it is a copy of: the same tensor proves that rows match, and it is never
# written to. The list of rules that the kit's calls do not reach is long: the op database reaches them.


def full(*size: int, **places: int) -> PaddedTensor:
    """Rows as long as the table is wide."""
    table = torch.randn(size)
    batch, ragged = places.get("batch_dim", 0), places.get("ragged_dim", 1)
    return PaddedTensor(table, torch.full((size[batch],), size[ragged]), **places)


def wrap(t: torch.Tensor) -> torch.Tensor:
    """An input of PyTorch's op database, as rows where it has two dimensions."""
    return PaddedTensor(t, torch.full(t.shape[:1], t.shape[1])) if t.dim() > 1 else t


OPTIONS: Options = {
    "reference": lambda x: x.to_dense(),
    "skip": ("clone_and_detach", "rules_tried"),
    "ops": {
        "softmax",
        "sum",
        "mean",
        "var",
        "matmul",
        "nn.functional.linear",
        "add",
        "mul",
        "where",
        "cat",
        "view",
    },
    "wrap": wrap,
}

TestRows = suite(
    lambda: full(3, 6),
    sizes=[lambda: full(4, 9), lambda: full(5, 7)],
    variants=[lambda: full(3, 6, ragged_dim=0, batch_dim=1)],
    **OPTIONS,
)
TestRowsOfVectors = pytest.mark.slow(suite(lambda: full(3, 6, 4), **OPTIONS))
