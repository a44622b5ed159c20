"""Rows of uneven length in a dense table."""

from subclasses.ragged.padded.buckets import kernel_multiple, propose_buckets
from subclasses.ragged.padded.tensor import PaddedTensor

__all__ = ["PaddedTensor", "kernel_multiple", "propose_buckets"]
