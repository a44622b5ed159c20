"""Patches of calls of transformers and accelerate that would return wrong results for ragged tensors.

This module imports neither library; each patch runs once its library is imported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from subclasses.after_import import after_import
from subclasses.errors import DispatchError
from subclasses.ragged.attention.rule import attend_by_hand
from subclasses.ragged.base import RaggedTensor, shown
from subclasses.ragged.hugging_face.generation import patch_generate
from subclasses.ragged.hugging_face.positions import scaled_positions


def patch_libraries() -> None:
    """Patches eight functions of transformers and accelerate, each once its module is imported."""
    after_import("transformers.cache_utils", _refuse_next_steps)
    after_import("transformers.generation.utils", patch_generate)
    after_import("transformers.integrations.moe", _run_experts_on_entries)
    after_import("transformers.masking_utils", _leave_out_masks)
    after_import("transformers.modeling_utils", _attend_by_tables)
    after_import("transformers.trainer_pt_utils", _count_labels)
    after_import("accelerate.accelerator", _pad_ragged_results)


def _refuse_next_steps(cache_utils: Any) -> None:
    """Patches ``Cache.get_seq_length`` to raise for ragged keys.

    A model calls it to number the positions of further tokens. The width of ragged keys is the length of the longest
    row. So tokens after shorter rows would silently get wrong positions.
    """
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
            "get wrong positions",
            code="padding-counted",
            hint="pass past_key_values=RaggedCache(model.config), of subclasses.ragged.hugging_face, with the prompts; "
            "or call model.generate(input_ids=rows); or pass whole rows with use_cache=False",
        )


_PACKED = (
    "position_ids of a ragged batch: expected positions that grow by 1 in each row",
    "pass each document as a row of its own, or do not compile the model",
)
_MASKED = (
    "attention_mask beside ragged rows: expected ones at the tokens of the rows, got a zero, as of padding on the left",
    "leave out attention_mask",
)
_POOLED = (
    "classifier_pooling='mean' of {}: without a mask, the model divides the sum of each row by the longest row",
    "pass attention_mask=rows.mask(), or a configuration with classifier_pooling='cls'",
)
_POOLS_BY_MASK = ("modernbert", "modernvbert", "ultrabert", "ultravbert")
_SCALED = (
    "positions that depend on the longest row: of the type {!r}, a row longer than {} tokens changes the results of "
    "shorter rows",
    "make batches of rows up to that length, or of one length",
)


def _require(condition: Tensor, message: str, hint: str) -> None:
    """Raises unless a tensor is true; a compiled program checks it when it runs."""
    if torch.compiler.is_dynamo_compiling():
        torch.ops.aten._assert_async.msg(condition, f"{message}; {hint}")
    elif not condition:
        raise DispatchError(message, code="argument-refused", hint=hint)


def _check_mask(rows: Any, mask: Any) -> None:
    """Raises for a mask of a padded table that hides existing tokens."""
    if isinstance(mask, RaggedTensor):
        raise DispatchError(
            "attention_mask beside ragged rows: expected none, got rows",
            code="argument-refused",
            hint="leave out attention_mask",
        )
    if isinstance(mask, Tensor) and mask.dim() == 2:
        exists = torch.arange(mask.shape[1], device=mask.device) < rows.row_lengths()[:, None]
        _require((mask.bool() | ~exists).all(), *_MASKED)


def _check_lengths(config: Any, rows: Any, mask: Any) -> None:
    """Raises where transformers computes positions or means of all rows by the length of the longest one."""
    if mask is None and config.model_type in _POOLS_BY_MASK and config.classifier_pooling == "mean":
        message, hint = _POOLED
        lengths = rows.row_lengths()
        _require((lengths == lengths.max()).all(), message.format(config.model_type), hint)
    for kind, limit in scaled_positions(config):
        lengths = rows.row_lengths()
        longest = lengths.max()
        others = (lengths > 0) & (lengths <= limit if kind == "longrope" else lengths < longest)
        message, hint = _SCALED
        _require((longest <= limit) | ~others.any(), message.format(kind, limit), hint)


def _leave_out_masks(masking_utils: Any) -> None:
    """Patches transformers to create no mask for ragged rows in a compiled model, as in an eager model.

    transformers detects several documents in a row by its ``position_ids``. It cannot read them in a trace, and always
    creates a mask for documents there. With the patch, the program asserts the positions when it runs. A `RaggedCache`
    with prompts makes the mask itself. A mask that hides tokens of the rows raises. So do rows whose positions
    transformers would scale by the longest one.
    """
    original = getattr(masking_utils, "_preprocess_mask_arguments", None)
    if original is None:
        return
    made = torch.empty(1, 1, 1, 1, device="cpu")  # transformers uses a mask of four dimensions as it is

    @functools.wraps(original)
    def preprocess(
        config: Any, embeds: Any, mask: Any, cache: Any, position_ids: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not getattr(cache, "is_empty", True):  # a RaggedCache
            if mask is not None:
                raise DispatchError(
                    "RaggedCache: expected no attention_mask, since the rows say which tokens exist",
                    code="argument-refused",
                    hint="leave out attention_mask",
                )
            is_final, _, *others = original(config, embeds, made, cache, position_ids, *args, **kwargs)
            return is_final, cache.mask_of(embeds, config._attn_implementation), *others
        is_traced = torch.compiler.is_dynamo_compiling()
        if isinstance(embeds, RaggedTensor):
            _check_mask(embeds, mask)
            _check_lengths(config, embeds, mask)
        if is_traced and isinstance(embeds, RaggedTensor) and mask is None and position_ids is not None:
            _require((position_ids[:, 1:] - position_ids[:, :-1] == 1).all(), *_PACKED)
            position_ids = None
        return original(config, embeds, mask, cache, position_ids, *args, **kwargs)

    masking_utils._preprocess_mask_arguments = preprocess


def _patch_interface(interface: Any, wrap: Callable[[Any, bool], Any]) -> None:
    """Patches an interface of transformers to return wrapped functions; falls through where it is missing.

    Args:
        interface: a class with ``get_interface``, or None.
        wrap: gets the function that a model calls, and whether the model defines it.
    """
    if interface is None:
        return
    original = interface.get_interface

    @functools.wraps(original)
    def get_interface(self: Any, implementation: Any, default: Any) -> Any:
        forward = original(self, implementation, default)
        return wrap(forward, forward is default)

    interface.get_interface = get_interface


def _attend_by_tables(modeling_utils: Any) -> None:
    """Patches models to run their own attention functions on padded tables, with a mask of the padding.

    Such a function multiplies queries by all keys, so its scores have two ragged dimensions. Models define one for
    features that `scaled_dot_product_attention` lacks, such as soft-capped scores or attention sinks.
    """
    _patch_interface(getattr(modeling_utils, "AttentionInterface", None), _on_tables)


def _on_tables(forward: Any, is_own: bool) -> Any:
    if not is_own:
        return forward

    def attention_forward(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any
    ) -> Any:
        if not any(isinstance(x, RaggedTensor) for x in (query, key, value)):
            return forward(module, query, key, value, attention_mask, **kwargs)
        weights = []

        def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
            out, scores = forward(module, query, key, value, bias, **kwargs)
            weights.append(scores)
            return out.transpose(1, 2)

        out = attend_by_hand(attend, query, key, value, attention_mask)
        return out.transpose(1, 2), weights[0]

    return attention_forward


def _run_experts_on_entries(moe: Any) -> None:
    """Patches the experts of a model to compute the entries of merged rows as plain tensors.

    Experts compute each token alone. But they sort the tokens of a whole batch by expert, or loop over the experts, and
    ragged rows cannot have such an order. The result has the rows again.
    """
    _patch_interface(getattr(moe, "ExpertsInterface", None), _on_entries)


def _on_entries(forward: Any, is_own: bool) -> Any:
    def experts_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        tensors: list[Any] = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        if not tensors or not all(isinstance(t, RaggedTensor) and t.merged for t in tensors):
            return forward(module, *args, **kwargs)
        rows = tensors[0]
        # A missing entry is a token of zeros, which is routed to the first expert with a weight of zero.
        of_args = [_entries(rows, a) for a in args]
        of_kwargs = {name: _entries(rows, a) for name, a in kwargs.items()}
        return rows.with_kept(forward(module, *of_args, **of_kwargs))

    return experts_forward


def _entries(rows: Any, x: Any) -> Any:
    """Returns the entries of a ragged tensor at the stored positions of ``rows``; 0 in gaps."""
    return rows.alongside("experts", x).clean() if isinstance(x, Tensor) else x


def _count_labels(trainer_pt_utils: Any) -> None:
    """Patches ``LabelSmoother`` to divide by the number of existing labels.

    Without ``num_items_in_batch`` it derives that number from ``numel()``, which counts padding.
    """
    original = trainer_pt_utils.LabelSmoother.__call__

    @functools.wraps(original)
    def smoothed_loss(
        self: Any, model_output: Any, labels: Any, shift_labels: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if isinstance(labels, RaggedTensor) and num_items_in_batch is None:
            predicted: Any = labels[..., 1:] if shift_labels else labels  # type: ignore[index]
            num_items_in_batch = predicted.ne(self.ignore_index).sum()
        given = {} if num_items_in_batch is None else {"num_items_in_batch": num_items_in_batch}
        return original(self, model_output, labels, shift_labels, **given)

    trainer_pt_utils.LabelSmoother.__call__ = smoothed_loss


def _pad_ragged_results(accelerator: Any) -> None:
    """Patches ``Accelerator.pad_across_processes`` to pad ragged rows; Trainer calls it before it gathers."""
    original = accelerator.Accelerator.pad_across_processes

    @functools.wraps(original)
    def pad_across_processes(
        self: Any, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Any:
        return original(self, _as_dense(tensor, pad_index, pad_first), dim, pad_index, pad_first)

    accelerator.Accelerator.pad_across_processes = pad_across_processes


def _as_dense(x: Any, fill: int, pad_first: bool) -> Any:
    """Replaces ragged tensors in tuples, lists and mappings by plain tensors."""
    if isinstance(x, RaggedTensor):
        if pad_first:
            raise DispatchError(
                "pad_across_processes: expected pad_first=False for a ragged tensor, whose rows are padded at their "
                "end, got True",
                code="argument-refused",
                hint="call x.to_dense(fill) and move the entries",
            )
        return x.to_dense(fill)  # type: ignore[attr-defined]
    if isinstance(x, Mapping):
        return type(x)({key: _as_dense(value, fill, pad_first) for key, value in x.items()})  # type: ignore[call-arg]
    if type(x) in (tuple, list):
        return type(x)(_as_dense(value, fill, pad_first) for value in x)
    return x
