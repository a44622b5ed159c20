"""Ragged batches for transformers and accelerate: a collator, a key-value cache, and patches of both libraries.

`RaggedCollator` replaces a padding collator in ``Trainer``, in accelerate and in a plain ``DataLoader``. The model is
unchanged. ``RaggedCache`` is a cache for `JaggedTensor` prompts; to import it imports transformers.
"""

from __future__ import annotations

from typing import Any

from subclasses.ragged.hugging_face.collator import RaggedCollator

__all__ = ["RaggedCollator"]


def __getattr__(name: str) -> Any:
    if name == "RaggedCache":
        from subclasses.ragged.hugging_face.cache import RaggedCache  # imports transformers

        return RaggedCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
