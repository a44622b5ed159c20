"""Ragged tensors: rows of uneven length, back to back or in a dense table."""

from subclasses.ragged.hugging_face.patches import patch_libraries
from subclasses.ragged.jagged import JaggedTensor
from subclasses.ragged.padded import PaddedTensor, kernel_multiple, propose_buckets
from subclasses.ragged.register import register_rules
from subclasses.ragged.sampling import TokenBatchSampler
from subclasses.ragged.token_losses import mean_over_ranks, weighted_loss

register_rules()
patch_libraries()

__all__ = [
    "JaggedTensor",
    "PaddedTensor",
    "TokenBatchSampler",
    "kernel_multiple",
    "mean_over_ranks",
    "propose_buckets",
    "weighted_loss",
]
