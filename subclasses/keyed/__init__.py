"""Jagged features by key, as in recommender models, and lookups in embedding tables."""

from subclasses.keyed.modules import EmbeddingBagCollection, EmbeddingCollection
from subclasses.keyed.tensor import KeyedJaggedTensor

from subclasses.keyed import gradients  # noqa: F401  # isort: skip  (registers fake kernels and derivatives)

__all__ = ["EmbeddingBagCollection", "EmbeddingCollection", "KeyedJaggedTensor"]
