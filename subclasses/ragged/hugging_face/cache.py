"""A key-value cache of transformers whose rows have different lengths; this module imports transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer  # type: ignore[reportMissingImports]

from subclasses.errors import DispatchError
from subclasses.ragged.base import RaggedTensor, shown
from subclasses.ragged.hugging_face.positions import scaled_positions
from subclasses.ragged.jagged import JaggedTensor

__all__ = ["RaggedCache"]


class RaggedCache(DynamicCache):
    """A cache that holds the keys and values of each row without padding, for models with full causal attention.

    Pass it to ``model.generate(prompts, past_key_values=cache)`` with a `JaggedTensor` of prompts. In a loop, call the
    model with the prompts, then with further tokens and their positions::

        cache = RaggedCache(model.config)
        logits = model(prompts, past_key_values=cache).logits[:, -1]
        tokens = logits.argmax(-1, keepdim=True)
        logits = model(tokens, past_key_values=cache, position_ids=cache.positions(tokens)).logits

    Further tokens are a dense tensor ``[B, T]``, or a `JaggedTensor` of B rows of different lengths. Each row then has
    the result of all of its tokens in one call. Several tokens of each row in one call attend more slowly, on a padded
    table with a mask.

    Args:
        config: the configuration of the model.

    Raises:
        DispatchError: a layer of the model has no cache of all tokens, such as a layer with a sliding window. Or the
            model has an encoder, or rotary positions that depend on the longest row.
    """

    layers: Any  # each is a DynamicLayer

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self._makes_masks = False  # whether the model takes its masks from this cache
        other = next((type(layer).__name__ for layer in self.layers if type(layer) is not DynamicLayer), None)
        if scaled_positions(config):
            other = "positions that depend on the longest row"
        if config.is_encoder_decoder or other is not None:
            raise DispatchError(
                f"RaggedCache: expected a decoder whose layers attend to all earlier tokens, got {config.model_type} "
                f"with {other or 'an encoder'}",
                code="argument-refused",
                hint="leave out past_key_values; model.generate(prompts) has a padded cache",
            )

    @property
    def is_empty(self) -> bool:
        """Whether the cache has no keys yet."""
        return not self.layers[0].is_initialized

    @property
    def row_lengths(self) -> Tensor:
        """The number of tokens of each row, ``[B]`` int64; raises `DispatchError` for an empty cache."""
        if self.is_empty:
            raise DispatchError(
                "RaggedCache.row_lengths: the cache has no rows yet",
                code="argument-refused",
                hint="call the model with the prompts first",
            )
        return self.layers[0].keys.row_lengths()

    def positions(self, tokens: Tensor) -> Tensor:
        """Returns the ``position_ids`` of prompts or further tokens: each row counts on from its length.

        Args:
            tokens: ``[B, T]``, dense or a `JaggedTensor`.

        Returns:
            int64 of the same rows.
        """
        steps = torch.arange(tokens.shape[1], device=tokens.device)
        positions = torch.zeros_like(tokens, dtype=torch.int64) + steps
        return positions if self.is_empty else positions + self.row_lengths.unsqueeze(1)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns 0 before the prompts; raises afterwards, since rows have no common length."""
        if self.is_empty:
            return 0
        raise DispatchError(
            f"get_seq_length: the rows of {shown(self.layers[layer_idx].keys)} have no common length",
            code="padding-counted",
            hint="pass position_ids=cache.positions(tokens) with further tokens; if the model has no position_ids, "
            "leave out past_key_values and call model.generate(prompts)",
        )

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Appends the keys and values ``[B, H, T, D]`` of a layer to its rows, and returns all of them."""
        is_first = not self.layers[layer_idx].is_initialized
        if not isinstance(key_states, JaggedTensor) and (is_first or isinstance(key_states, RaggedTensor)):
            raise DispatchError(
                f"RaggedCache: expected a JaggedTensor of {'prompts' if is_first else 'tokens'}, got keys as "
                f"{shown(key_states)}",
                code="argument-refused",
                hint="pass JaggedTensor.from_tensors(rows) as input_ids",
            )
        if not (is_first or self._makes_masks or key_states.shape[-2] == 1):
            raise DispatchError(
                f"RaggedCache: expected one token for each row, got {key_states.shape[-2]}: the model creates its own "
                "mask, which does not see the lengths of the rows",
                code="argument-refused",
                hint="pass the tokens one by one",
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def mask_of(self, embeds: Tensor, implementation: str) -> Tensor | None:
        """Returns the mask of a step after the prompts: None if each row has one token at most, which sees all keys.

        Args:
            embeds: ``[B, T, D]``, the embeddings of the further tokens.
            implementation: the implementation of attention that the model has.

        Returns:
            ``[B, 1, T, S]`` bool: True where a token sees a key, which is the token itself or an earlier one.
        """
        if implementation not in ("sdpa", "eager"):
            raise DispatchError(
                f'RaggedCache: expected attn_implementation="sdpa" or "eager", got {implementation!r}',
                code="argument-refused",
                hint='call model.set_attn_implementation("sdpa")',
            )
        self._makes_masks = True
        if embeds.shape[1] == 1:
            return None
        last: Any = self.positions(embeds[..., 0])
        last = last.to_dense() if isinstance(last, JaggedTensor) else last
        keys = torch.arange(self.layers[0].keys.shape[-2] + embeds.shape[1], device=last.device)
        return (keys <= last.unsqueeze(-1)).unsqueeze(1)
