"""Blocks: the entries of a quantized tensor that share a scale.

Along each dimension of size ``s`` there are ``n`` blocks of ``s / n`` entries, and the scale has the size ``[n, ...]``.
The blocks therefore follow from the two sizes and are not stored. A single scale for a whole matrix has the size
``[1, 1]``, and a scale for each row ``[rows, 1]``. A scale for each group has the size ``[rows, groups]``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from subclasses.errors import DispatchError

Size = Sequence[int]

# ---- sizes -------------------------------------------------------------------------------------------------


def block_size_of(size: Size, counts: Size) -> tuple[int, ...]:
    """Returns the entries of a block along each dimension, from the size of a tensor and of its scale."""
    return tuple(s if n == 1 else s // n if n else 1 for s, n in zip(size, counts, strict=True))


def block_counts(size: Size, block_size: Size) -> tuple[int, ...]:
    """Returns the size of the scale for blocks of a given size; a dimension without entries counts as one block.

    Raises:
        ValueError: ``block_size`` does not have one extent for each dimension, or does not divide ``size``.
    """
    if not isinstance(block_size, Sequence) or len(block_size) != len(size):
        raise ValueError(
            f"block_size: expected an extent for each of the {len(size)} dimensions of {tuple(size)}, "
            f"got {block_size}"
        )
    for s, b in zip(size, block_size, strict=True):
        if s and (b < 1 or s % b):
            raise ValueError(
                f"block_size {tuple(block_size)} does not divide the size {tuple(size)}; choose divisors, or pad"
            )
    return tuple(s // b if s else 1 for s, b in zip(size, block_size, strict=True))


def row_block_size(size: Size) -> tuple[int, ...]:
    """Returns the block size for one scale per row: the whole last dimension."""
    return (*(1 for _ in size[:-1]), size[-1])


def is_valid_scale(size: Size, counts: Size) -> bool:
    """Whether a scale of size ``counts`` fits a tensor: as many dimensions, and blocks of equal size."""
    return len(size) == len(counts) and all(
        n == 1 or s == n or (n > 0 and s > 0 and s % n == 0) for s, n in zip(size, counts, strict=True)
    )


# ---- expanding scales --------------------------------------------------------------------------------------


def expand_scale(scale: Tensor, size: Size) -> Tensor:
    """Expands a scale so that it broadcasts against a tensor of this size."""
    for dim, (s, n) in enumerate(zip(size, scale.shape, strict=True)):
        if n not in (1, s):
            scale = scale.repeat_interleave(s // n, dim)
    return scale


def refine_scale(scale: Tensor, counts: Size) -> Tensor:
    """Repeats a scale for smaller blocks, where each count is a multiple of the old count."""
    for dim, (new, old) in enumerate(zip(counts, scale.shape, strict=True)):
        if new != old:
            scale = scale.repeat_interleave(new // old, dim) if old else scale
    return scale


def split_blocks(x: Tensor, counts: Size) -> tuple[Tensor, tuple[int, ...]]:
    """Reshapes to ``[n1, b1, n2, b2, ...]``; also returns the dimensions within a block, to reduce over."""
    sizes = block_size_of(x.shape, counts)
    shape = [extent for pair in zip(counts, sizes, strict=True) for extent in pair]
    return x.reshape(shape), tuple(range(1, len(shape), 2))


def common_counts(all_counts: Sequence[Size]) -> tuple[int, ...]:
    """Returns the counts of the coarsest blocks that divide all the given blocks."""
    return tuple(math.lcm(*column) for column in zip(*all_counts, strict=True))


# ---- views -------------------------------------------------------------------------------------------------


def view_counts(size: Size, counts: Size, new: Size) -> tuple[int, ...]:
    """Returns the size of the scale of a view, which has the same entries in the same order with other sizes.

    The dimensions fall into groups that hold the same entries before and after. Within a group, blocks are preserved if
    each is a contiguous run and the new sizes split between runs.

    Raises:
        DispatchError: the view does not preserve the blocks.
    """
    out: list[int] = []
    for old_dims, new_dims in _groups(size, new):
        part, n = [size[d] for d in old_dims], [counts[d] for d in old_dims]
        target = [new[d] for d in new_dims]
        moved = n if part == target else _regroup(part, n, target)
        if moved is None:
            raise DispatchError(
                f"view: blocks of {block_size_of(size, counts)} in {tuple(size)} do not correspond to blocks of "
                f"{tuple(new)}",
                code="blocks-refused",
                hint="call dequantize() first",
            )
        out += moved
    return tuple(out)


def _groups(size: Size, new: Size) -> list[tuple[list[int], list[int]]]:
    """Returns the shortest groups of consecutive dimensions with equal products, before and after."""
    groups, i, j = [], 0, 0
    while i < len(size) or j < len(new):
        olds, news, a, b = [], [], 1, 1
        while a != b or not (olds or news):
            if (a < b or not olds) and i < len(size):
                a, i = a * size[i], (olds.append(i), i + 1)[1]
            elif j < len(new):
                b, j = b * new[j], (news.append(j), j + 1)[1]
            else:
                break
        groups.append((olds, news))
    return groups


def _regroup(size: Size, counts: Size, new: Size) -> list[int] | None:
    """Returns the block counts for new sizes if each block is a contiguous run that fits them, else None."""
    run, whole = 1, True
    for s, n in zip(reversed(size), reversed(counts), strict=True):
        if whole:
            run, whole = run * (s // n if n else 1), n == 1
        elif n != s:
            return None
    out: list[int] = []
    for s in reversed(new):
        if run and s and run % s == 0:
            out, run = [1, *out], run // s
        elif run and s % run == 0:
            out, run = [s // run, *out], 1
        else:
            return None
    return out
