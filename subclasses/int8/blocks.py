"""Blocks: which entries of a quantized tensor share a scale.

Along each dimension of size ``s`` there are ``n`` blocks of ``s / n`` entries, and a scale has the size
``[n, ...]``: that is all there is to say, so it is read off the sizes and stored nowhere. One scale for the whole
tensor has the size ``[1, 1]``, one for each row of a matrix ``[rows, 1]``, one for each group ``[rows, groups]``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from subclasses.errors import DispatchError

Size = Sequence[int]

# ---- sizes -------------------------------------------------------------------------------------------------


def block_size_of(size: Size, counts: Size) -> tuple[int, ...]:
    """How many entries a block has along each dimension, from the sizes of a tensor and of its scale."""
    return tuple(s if n == 1 else s // n if n else 1 for s, n in zip(size, counts, strict=True))


def counts_of(size: Size, block_size: Size) -> tuple[int, ...]:
    """The size of the scale for blocks of a given size; 0 entries along a dimension are one block.

    Raises:
        ValueError: there is not one extent per dimension, or it does not divide the dimension.
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


def per_row(size: Size) -> tuple[int, ...]:
    """The blocks of one scale per row: the last dimension, whole."""
    return (*(1 for _ in size[:-1]), size[-1])


def fits(size: Size, counts: Size) -> bool:
    """Whether a scale of this size says something about each entry: as many dimensions, blocks of equal size."""
    return len(size) == len(counts) and all(
        n == 1 or s == n or (n > 0 and s > 0 and s % n == 0) for s, n in zip(size, counts, strict=True)
    )


# ---- scales among entries ----------------------------------------------------------------------------------


def spread(scale: Tensor, size: Size) -> Tensor:
    """A scale that broadcasts against a tensor of this size."""
    for dim, (s, n) in enumerate(zip(size, scale.shape, strict=True)):
        if n not in (1, s):
            scale = scale.repeat_interleave(s // n, dim)
    return scale


def refine(scale: Tensor, counts: Size) -> Tensor:
    """The same scales for more blocks, each count a multiple of what it was."""
    for dim, (new, old) in enumerate(zip(counts, scale.shape, strict=True)):
        if new != old:
            scale = scale.repeat_interleave(new // old, dim) if old else scale
    return scale


def split_blocks(x: Tensor, counts: Size) -> tuple[Tensor, tuple[int, ...]]:
    """``[n1, b1, n2, b2, ...]`` with the dimensions of entries within a block, to reduce over."""
    shape = [extent for s, n in zip(x.shape, counts, strict=True) for extent in (n, s // n)]
    return x.reshape(shape), tuple(range(1, len(shape), 2))


def common_counts(all_counts: Sequence[Size]) -> tuple[int, ...]:
    """The coarsest blocks that divide those of every size given."""
    return tuple(math.lcm(*column) for column in zip(*all_counts, strict=True))


# ---- views -------------------------------------------------------------------------------------------------


def view_counts(size: Size, counts: Size, new: Size) -> tuple[int, ...]:
    """The size of the scale of a view: the same entries in the same order under other sizes.

    Sizes fall into groups of dimensions that hold the same entries before and after. Within a group, blocks stay
    blocks where each is a run of neighbours, and where the new sizes cut between runs.

    Raises:
        DispatchError: a block of the tensor is none of the view.
    """
    out: list[int] = []
    for old_dims, new_dims in _groups(size, new):
        part, n = [size[d] for d in old_dims], [counts[d] for d in old_dims]
        target = [new[d] for d in new_dims]
        moved = n if part == target else _regroup(part, n, target)
        if moved is None:
            raise DispatchError(
                f"view: blocks of {block_size_of(size, counts)} in {tuple(size)} are no blocks of {tuple(new)}; "
                f"call dequantize() first"
            )
        out += moved
    return tuple(out)


def _groups(size: Size, new: Size) -> list[tuple[list[int], list[int]]]:
    """The shortest stretches of dimensions, before and after, with equal products."""
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
    """Blocks of runs of neighbours, cut anew; None where there is no way."""
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
