"""Ragged tensors: rows of uneven length, back to back or in a dense table."""

from subclasses.ragged.jagged import JaggedTensor

# Each of these files adds its rules to the class; pointwise comes last, since it has one for hundreds of functions.
from subclasses.ragged import (  # noqa: F401  # isort: skip
    along,
    indexing,
    joining,
    linear,
    picking,
    products,
    losses,
    reductions,
    sdpa,
    writing,
    views,
    pointwise,
)
from subclasses.ragged.padded import PaddedTensor, kernel_multiple, propose_buckets  # isort: skip
from subclasses.ragged import gradients, masked  # noqa: F401  # isort: skip

__all__ = ["JaggedTensor", "PaddedTensor", "kernel_multiple", "propose_buckets"]
