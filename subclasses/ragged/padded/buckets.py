"""How wide a table is: few widths for many lengths, so that few programs serve them."""

from __future__ import annotations

from collections.abc import Sequence


def bucket_of(length: int, multiple: int | None = None, buckets: Sequence[int] | None = None) -> int:
    """The width for rows of up to ``length`` entries.

    Args:
        length: the longest row.
        multiple: the next multiple of this (at least one of it, so that an empty batch needs no program of its own).
        buckets: the least of these that is wide enough.

    Raises:
        ValueError: both are given, one is not positive, or no bucket is wide enough.
    """
    if multiple is not None and buckets is not None:
        raise ValueError(f"expected multiple or buckets, got both: {multiple} and {list(buckets)}")
    if multiple is not None:
        if multiple < 1:
            raise ValueError(f"multiple: expected an int of at least 1, got {multiple}")
        return max(-(-length // multiple), 1) * multiple
    if buckets is None:
        return length
    wide_enough = [b for b in buckets if b >= length]
    if not wide_enough:
        raise ValueError(
            f"buckets: a row of {length} entries fits into none of {sorted(buckets)}; add a wider one"
        )
    return min(wide_enough)
