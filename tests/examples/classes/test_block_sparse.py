"""The block-sparse weight: products are those of the whole matrix, gradients reach the blocks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import desugar
from classes.block_sparse import BlockSparse
from subclasses import strict
from subclasses.testing import suite
from tests.examples.classes.checks import check_gradients, converted, refused

X = torch.linspace(-1, 1, 18).view(3, 6)
ROW, COLUMN = [0, 1, 1], [1, 0, 2]


def make(count=3, grid=(2, 3), dtype=None):
    row, column = (torch.tensor((places * 3)[:count], dtype=torch.int64) for places in (ROW, COLUMN))
    return BlockSparse(torch.randn(count, 2, 2, dtype=dtype), row, column, grid=grid)


TestBlockSparse = suite(
    make,
    ops={F.linear: lambda x: (torch.cat([X, X], 1)[:, : x.shape[1]], x)},
    sizes=[lambda n=n: make(n) for n in (5, 7)],
    variants=[lambda: make(grid=(3, 3))],
)
test_conversions_keep_the_places = converted(
    [make], [torch.bfloat16, torch.float64], lambda w: [F.linear(X.to(w.dtype), w)]
)
TWO, THREE = torch.zeros(2).long(), torch.zeros(3).long()
test_what_is_refused = refused(
    [make],
    {
        "other places": (
            ValueError,
            r"need \[n, height, width\], \[n\], \[n\]",
            [lambda w: BlockSparse(torch.ones(2, 2, 2), THREE, TWO, grid=(1, 1))],
        ),
        "writes": (
            NotImplementedError,
            None,
            [lambda w: w.mul_(2), lambda w: w.__isub__(w), lambda w: w.copy_(torch.zeros(4, 6))],
        ),
    },
)


def whole(blocks, row, column, grid):
    """The matrix, block by block."""
    rows = [[torch.zeros_like(blocks[0]) for _ in range(grid[1])] for _ in range(grid[0])]
    for block, i, j in zip(blocks, row.tolist(), column.tolist(), strict=True):
        rows[i][j] = rows[i][j] + block
    return torch.cat([torch.cat(row, 1) for row in rows])


@pytest.mark.sweep(4)
@pytest.mark.parametrize("size", [(6,), (4, 6), (2, 3, 6), (0, 6)], ids=str)
def test_values_and_gradients(way, size):
    w = make(4, dtype=torch.float64)  # two blocks in one place
    leaves = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in (size, (4, 2, 2), (4,))]

    def layer(x, blocks, bias):
        return F.linear(x, BlockSparse(blocks, w.row, w.column, grid=w.grid), bias).tanh()

    expected = F.linear(leaves[0], whole(leaves[1], w.row, w.column, w.grid), leaves[2]).tanh()
    check_gradients(way(layer)(*leaves), expected, leaves)


@pytest.mark.parametrize("count", [0, 4])
def test_the_matrix(count):
    w = make(count)
    expected = whole(w.blocks, w.row, w.column, w.grid) if count else torch.zeros(4, 6)
    torch.testing.assert_close(w.materialize(), expected)
    torch.testing.assert_close(F.linear(X, w), X @ expected.T)
    torch.testing.assert_close(2 / (w + 1), 2 / (expected + 1))


def test_a_product_never_makes_the_matrix(way):
    w = make()
    with strict():
        got = way(lambda x, w: F.linear(x, w))(X, w)
    torch.testing.assert_close(got, X @ w.materialize().T)


def test_one_program_serves_every_pattern():
    layer = desugar.compile(lambda x, w: F.linear(x, w), backend="eager")
    for pattern in ([0, 0, 1], [1, 1, 1], [0, 1, 0]):
        w = BlockSparse(torch.randn(3, 2, 2), torch.tensor(pattern), torch.tensor(COLUMN), grid=(2, 3))
        torch.testing.assert_close(layer(X, w), X @ w.materialize().T)
    assert len(layer.programs) == 1


def test_the_largest_blocks():
    w = torch.arange(24.0).view(4, 6)
    assert torch.equal(BlockSparse.largest(w, 2, 3, 4).materialize(), w)
    expected = torch.nn.functional.pad(w[2:, 3:], (3, 0, 2, 0))
    assert torch.equal(BlockSparse.largest(w, 2, 3, 1).materialize(), expected)
