"""Rows of uneven length in a dense table."""

from subclasses.ragged.padded.buckets import kernel_multiple, propose_buckets
from subclasses.ragged.padded.tensor import PaddedTensor

# Each of these files adds its rules to the class; pointwise comes last, since it has one for hundreds of functions.
from subclasses.ragged.padded import (  # noqa: F401  # isort: skip
    indexing,
    writing,
    joining,
    layers,
    losses,
    products,
    reductions,
    views,
    pointwise,
)

__all__ = ["PaddedTensor", "kernel_multiple", "propose_buckets"]
