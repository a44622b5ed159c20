"""Tables of a ``PaddedTensor``: the mask of existing entries, and the width.

A compiler makes a program, and a CUDA graph, for each width. So few widths should serve many lengths, and kernels run
faster for some widths. `propose_buckets` returns widths for given lengths with the least total padding. The user passes
the number of programs, and a multiple that suits the kernels.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Buckets = Sequence[int] | Literal["powers"]

# Bytes that an extent should fill: of a tensor core's operand (NVIDIA's "Matrix Multiplication Background User's
# Guide": 16 bytes, so 8 elements of half precision), and of an AVX-512 register.
_BYTES = {"cuda": 16, "cpu": 64}

# ---- one width -------------------------------------------------------------------------------------------------


def bucket_of(length: int, multiple: int | None = None, buckets: Buckets | None = None) -> int:
    """Returns the width for rows of up to ``length`` entries.

    Args:
        length: the longest row.
        multiple: the width is the next multiple of this, at least one, so that an empty batch needs no own program.
        buckets: the width is the least of these that is wide enough; ``"powers"``: the next power of two.

    Raises:
        ValueError: both are given, one is not positive, or no bucket is wide enough.
    """
    if multiple is not None and buckets is not None:
        raise ValueError(f"expected multiple or buckets, got both: {multiple} and {buckets!r}")
    if multiple is not None:
        check_positive("multiple", multiple)
        return max(-(-length // multiple), 1) * multiple
    if buckets is None:
        return length
    if buckets == "powers":
        return 1 << max(length - 1, 0).bit_length()
    if isinstance(buckets, str):
        raise ValueError(f"buckets: expected a list of widths or 'powers', got {buckets!r}")
    wide_enough = [b for b in buckets if b >= length]
    if not wide_enough:
        raise ValueError(
            f"buckets: a row of {length} entries fits into none of {sorted(buckets)}; add a wider one"
        )
    return min(wide_enough)


def check_positive(name: str, n: int) -> None:
    """Raises unless ``n`` is one or more."""
    if n < 1:
        raise ValueError(f"{name}: expected an int of at least 1, got {n}")


# ---- tables --------------------------------------------------------------------------------------------------


def exists_in(padded: Tensor, lengths: Tensor, ragged_dim: int, batch_dim: int) -> Tensor:
    """Returns a mask of existing entries of a table, with extent 1 for dimensions of the entries."""
    if ragged_dim == batch_dim:
        rows = lengths.shape[0]
        positions = torch.arange(padded.size(ragged_dim) // max(rows, 1), device=lengths.device)
        size = [padded.size(d) if d == ragged_dim else 1 for d in range(padded.dim())]
        return (positions < lengths.unsqueeze(1)).view(size)

    def along(t: Tensor, dim: int) -> Tensor:
        return t.view([t.shape[0] if d == dim else 1 for d in range(padded.dim())])

    columns = torch.arange(padded.size(ragged_dim), device=lengths.device)
    return along(columns, ragged_dim) < along(lengths, batch_dim)


def widen(padded: Tensor, dim: int, width: int) -> Tensor:
    """Returns a table with ``width`` positions along ``dim``: adds zeros, or cuts positions past all rows off."""
    return F.pad(padded, [0, 0] * (padded.dim() - 1 - dim) + [0, width - padded.shape[dim]])


# ---- proposing widths ------------------------------------------------------------------------------------------


def kernel_multiple(dtype: torch.dtype, device: torch.device | str = "cpu") -> int:
    """Returns the number that should divide extents of matrices, for a device's matrix kernels: 8 or more elements."""
    return max(_BYTES.get(torch.device(device).type, 64) // dtype.itemsize, 8)


def propose_buckets(lengths: Sequence[int], *, programs: int = 4, multiple: int = 8) -> list[int]:
    """Returns at most ``programs`` widths for rows of given lengths, with the least padding.

    Args:
        lengths: the length of the longest row of each batch, with repetitions.
        programs: the greatest number of widths.
        multiple: each is a multiple of this; see `kernel_multiple`.

    Returns:
        The widths in ascending order, for ``buckets=``.

    Raises:
        ValueError: there is no length, or an argument is not positive.
    """
    check_positive("programs", programs)
    check_positive("multiple", multiple)
    if not lengths or min(lengths) < 0:
        raise ValueError(
            f"propose_buckets: expected one length or more, each at least 0, got {list(lengths)}"
        )
    counts = Counter(bucket_of(n, multiple) for n in lengths)
    widths = sorted(counts)
    total = [0]
    for width in widths:
        total.append(total[-1] + counts[width])

    @cache
    def best(stop: int, left: int) -> tuple[float, tuple[int, ...]]:
        """Returns the fewest positions for the first ``stop`` widths in ``left`` buckets, and these buckets."""
        if stop == 0:
            return 0, ()
        if left == 0:
            return math.inf, ()
        options = []
        for start in range(stop):
            count, chosen = best(start, left - 1)
            options.append(
                (count + (total[stop] - total[start]) * widths[stop - 1], (*chosen, widths[stop - 1]))
            )
        return min(options)

    return list(best(len(widths), programs)[1])
