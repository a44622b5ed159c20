"""A matrix of which only some blocks are stored, as a weight.

`F.linear` multiplies the stored blocks alone: with one block in eight, an eighth of the multiplications. Any other op
runs on the whole matrix. The blocks get gradients; which blocks there are is data, so that one compiled program
serves every pattern of as many blocks. The script keeps the largest blocks of a matrix, and compares products.

    python examples/classes/block_sparse.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from subclasses import Outer, TensorSubclass, inner, static


class BlockSparse(TensorSubclass, fallback="materialize"):
    """Blocks in a grid of `grid[0]` by `grid[1]` places; blocks in one place add up."""

    blocks: Tensor = inner()  # [n, height, width]
    row: Tensor = inner(dtype=torch.int64)  # [n], each less than grid[0]
    column: Tensor = inner(dtype=torch.int64)  # [n], each less than grid[1]
    grid: tuple[int, int] = static()

    @staticmethod
    def outer(blocks, row, column, grid) -> Outer:
        if blocks.ndim != 3 or not (row.shape == column.shape == blocks.shape[:1]):
            sizes = [list(t.shape) for t in (blocks, row, column)]
            raise ValueError(f"blocks, rows and columns of sizes {sizes}: need [n, height, width], [n], [n]")
        return Outer((grid[0] * blocks.shape[1], grid[1] * blocks.shape[2]), dtype=blocks.dtype)

    def materialize(self) -> Tensor:
        rows, columns = self.grid
        all_blocks = self.blocks.new_zeros(rows * columns, *self.blocks.shape[1:])
        all_blocks = all_blocks.index_add(0, self.row * columns + self.column, self.blocks)
        return all_blocks.unflatten(0, (rows, columns)).transpose(1, 2).reshape(self.shape)

    @classmethod
    def largest(cls, w: Tensor, height: int, width: int, count: int) -> "BlockSparse":
        """The blocks with the largest norms."""
        rows, columns = w.shape[0] // height, w.shape[1] // width
        blocks = w.reshape(rows, height, columns, width).transpose(1, 2).flatten(0, 1)
        index = blocks.flatten(1).norm(dim=1).topk(count).indices
        return cls(blocks[index], index // columns, index % columns, grid=(rows, columns))


@BlockSparse.implements(F.linear)
def linear(func, input, weight, bias=None):
    if not isinstance(weight, BlockSparse) or isinstance(input, BlockSparse):
        return BlockSparse.unruled(func, input, weight, bias)
    blocks, row, column = weight.unwrap()
    parts = input.unflatten(-1, (weight.grid[1], blocks.shape[2])).index_select(-2, column)
    products = torch.einsum("...nw,nhw->...nh", parts, blocks)
    shape = (*input.shape[:-1], weight.grid[0], blocks.shape[1])
    y = products.new_zeros(shape).index_add(-2, row, products).flatten(-2)
    return y if bias is None else y + bias


def main() -> None:
    torch.manual_seed(0)
    w = torch.randn(8, 8).exp().repeat_interleave(32, 0).repeat_interleave(32, 1) * torch.randn(256, 256)
    x = torch.randn(16, 256)
    for count in (64, 16, 8):
        sparse = BlockSparse.largest(w, 32, 32, count)
        error = (F.linear(x, sparse) - F.linear(x, w)).norm() / F.linear(x, w).norm()
        print(f"{count:2} of 64 blocks: {sparse.blocks.nbytes:6} bytes, error of a product {error:.1%}")


if __name__ == "__main__":
    main()
