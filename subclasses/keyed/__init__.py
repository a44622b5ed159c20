"""Jagged features by key, as recommender models use them, and lookups in embedding tables."""

from subclasses.keyed.modules import EmbeddingBagCollection, EmbeddingCollection
from subclasses.keyed.tensor import KeyedJaggedTensor

from subclasses.keyed import gradients  # noqa: F401  # isort: skip  (registers what PyTorch asks of the ops)

__all__ = ["EmbeddingBagCollection", "EmbeddingCollection", "KeyedJaggedTensor"]
