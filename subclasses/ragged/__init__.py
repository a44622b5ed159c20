"""Ragged tensors: rows of uneven length, back to back."""

from subclasses.ragged.jagged import JaggedTensor

# Each of these files adds its rules to the class; pointwise comes last, since it has one for hundreds of functions.
from subclasses.ragged import (  # noqa: F401  # isort: skip
    along,
    indexing,
    joining,
    linear,
    losses,
    reductions,
    sdpa,
    structure,
    views,
    pointwise,
)

__all__ = ["JaggedTensor"]
