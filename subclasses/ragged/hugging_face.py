"""Caches of transformers with ragged keys: what they would get wrong is refused."""

from __future__ import annotations

import functools
from typing import Any

from subclasses.after_import import after_import
from subclasses.errors import DispatchError
from subclasses.ragged.base import RaggedTensor, shown


def refuse_next_steps() -> None:
    """Patches ``Cache.get_seq_length``, once transformers is imported, to raise where the keys are ragged.

    A model asks for it to number the positions of further tokens. The width of ragged keys is the length of the longest
    row, so tokens behind shorter rows would silently get wrong positions.
    """
    after_import("transformers.cache_utils", _patch)


def _patch(cache_utils: Any) -> None:
    original = cache_utils.Cache.get_seq_length

    @functools.wraps(original)
    def get_seq_length(self: Any, layer_idx: int = 0) -> Any:
        if layer_idx < len(self.layers):
            _check_keys(getattr(self.layers[layer_idx], "keys", None))
        return original(self, layer_idx)

    cache_utils.Cache.get_seq_length = get_seq_length


def _check_keys(keys: Any) -> None:
    if isinstance(keys, RaggedTensor):
        raise DispatchError(
            f"get_seq_length: a cache with {shown(keys)} as its keys has no single length, and further tokens would "
            f"get wrong positions; pass whole rows without past_key_values, or a dense batch with an attention_mask"
        )
