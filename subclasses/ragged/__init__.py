"""Ragged tensors: rows of uneven length, back to back or in a dense table."""

from subclasses.ragged.hugging_face import refuse_next_steps
from subclasses.ragged.jagged import JaggedTensor
from subclasses.ragged.padded import PaddedTensor, kernel_multiple, propose_buckets
from subclasses.ragged.register import register_rules

register_rules()
refuse_next_steps()

__all__ = ["JaggedTensor", "PaddedTensor", "kernel_multiple", "propose_buckets"]
