"""Ragged batches for transformers and accelerate: a collator, and patches of calls that would return wrong results.

`RaggedCollator` replaces a padding collator in ``Trainer``, in accelerate and in a plain ``DataLoader``. The model is
unchanged. This module imports neither transformers nor accelerate; each patch runs once its library is imported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from subclasses.after_import import after_import
from subclasses.errors import DispatchError
from subclasses.ragged.attention.rule import attend_by_hand
from subclasses.ragged.base import RaggedTensor, shown
from subclasses.ragged.generation import patch_generate
from subclasses.ragged.jagged import JaggedTensor
from subclasses.ragged.padded import PaddedTensor

__all__ = ["RaggedCollator"]

# ---- the collator ----------------------------------------------------------------------------------------------

_BATCHED = ("input_ids", "labels", "token_type_ids")
_DROPPED = ("attention_mask", "position_ids")


@dataclass(frozen=True)
class RaggedCollator:
    """Collates tokenized examples into ragged tensors; a ``data_collator`` or ``collate_fn`` without padding.

    An example is a mapping with ``input_ids``, and optionally ``labels``, ``token_type_ids``, ``attention_mask`` and
    ``position_ids``. Each value is a list, an array or a tensor of integers, one for each token. The collator removes
    the tokens whose ``attention_mask`` is 0, with their labels, from the left or from the right of an example.

    The batch is a dict of ``input_ids``, and of ``labels`` and ``token_type_ids`` where the examples have them. It has
    no ``attention_mask`` and no ``position_ids``: a model numbers the tokens of each row from 0, which the collator
    compares with the given positions.

    Args:
        layout: ``"jagged"`` for ``JaggedTensor``; ``"padded"`` for ``PaddedTensor``, whose table has few shapes.
        labels: ``"input_ids"``: an example without labels has its ``input_ids`` as labels, for causal language models,
            which shift labels themselves. ``"given"``: the batch has the labels of the examples.
        multiple: the table of a ``PaddedTensor`` is as wide as the next multiple of this.
        buckets: the table is as wide as the least of these widths that fits the longest row; ``"powers"``: powers of
            two.
        decoder_start: for models with an encoder and a decoder, the ``decoder_start_token_id`` of the configuration.
            ``labels`` have lengths of their own then. The batch has ``decoder_input_ids``, too: this token and all
            labels of a row but the last.

    Raises:
        ValueError: an option is not one of the above, or the batch has no token. An example lacks a column that others
            have, or has an unknown column. A column has another length than the ``input_ids``. A mask has a 0 between
            ones, or positions do not count from 0.
        TypeError: an example is not a mapping, or a column has other values than integers.
    """

    layout: str = "jagged"
    labels: str = "given"
    multiple: int | None = None
    buckets: Sequence[int] | str | None = None
    decoder_start: int | None = None

    def __post_init__(self) -> None:
        """Checks the options."""
        _check_option("layout", self.layout, ("jagged", "padded"))
        _check_option("labels", self.labels, ("given", "input_ids"))
        if self.layout == "jagged" and (self.multiple is not None or self.buckets is not None):
            raise ValueError(
                "RaggedCollator: a jagged batch has no padding, so expected neither multiple nor buckets; pass "
                'layout="padded", or leave them out'
            )

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns the batch of the examples, one row each."""
        if not len(examples):
            raise ValueError("RaggedCollator: expected at least one example, got an empty batch")
        rows = [self._row(f"RaggedCollator: example {i}", example) for i, example in enumerate(examples)]
        names = dict.fromkeys(name for name in _BATCHED if any(name in row for row in rows))
        for i, row in enumerate(rows):
            if missing := [name for name in names if name not in row]:
                hint = ', or labels="input_ids"' if missing == ["labels"] else ""
                raise ValueError(
                    f"RaggedCollator: example {i} has no {missing[0]!r}, which other examples of the batch have; give "
                    f"all examples the column or none{hint}"
                )
        if not any(len(row["input_ids"]) for row in rows):
            raise ValueError(
                f"RaggedCollator: expected a token in at least one of the {len(rows)} examples, got none; remove empty "
                f"examples from the data set"
            )
        columns = {name: self._batch([row[name] for row in rows]) for name in names}
        tokens = columns["input_ids"]
        # All values share the offsets or lengths of the first value, so their rows match without a comparison.
        if self.decoder_start is None or "labels" not in columns:
            return {name: tokens.with_stored(x.stored) for name, x in columns.items()}
        labels = columns.pop("labels")
        before = self._batch([_shifted(row["labels"], self.decoder_start) for row in rows])
        targets = {"labels": labels, "decoder_input_ids": labels.with_stored(before.stored)}
        return {name: tokens.with_stored(x.stored) for name, x in columns.items()} | targets

    def _row(self, where: str, example: Any) -> dict[str, Tensor]:
        """Returns the columns of an example, without the tokens that its mask removes."""
        if not isinstance(example, Mapping):
            raise TypeError(
                f"{where}: expected a mapping with 'input_ids', got {type(example).__name__}; tokenize the data set "
                f"first"
            )
        if "input_ids" not in example:
            raise ValueError(
                f"{where}: expected 'input_ids', got the columns {sorted(example)}; tokenize it first"
            )
        if unknown := sorted({*example} - {*_BATCHED, *_DROPPED}):
            raise ValueError(
                f"{where}: expected columns of {[*_BATCHED, *_DROPPED]}, got {unknown[0]!r}; remove the column, or "
                f"collate it in a function that calls the collator for the others"
            )
        row = {name: _as_row(where, name, values) for name, values in example.items()}
        length = len(row["input_ids"])
        target = None if self.decoder_start is None else row.pop("labels", None)
        for name, values in row.items():
            if len(values) != length:
                raise ValueError(
                    f"{where}: expected {name!r} to have a value for each of the {length} input_ids, got "
                    f"{len(values)}; pad or cut both alike, or neither"
                )
        if (mask := row.pop("attention_mask", None)) is not None:
            kept = _kept(where, mask)
            row = {name: values[kept] for name, values in row.items()}
        if (positions := row.pop("position_ids", None)) is not None:
            _check_positions(where, positions)
        if target is not None:
            row["labels"] = _as_target(where, target)
        elif self.labels == "input_ids":
            row.setdefault("labels", row["input_ids"])
        return row

    def _batch(self, rows: list[Tensor]) -> Any:
        if self.layout == "jagged":
            return JaggedTensor.from_tensors(rows)
        return PaddedTensor.from_tensors(rows, multiple=self.multiple, buckets=self.buckets)  # type: ignore[arg-type]


def _check_option(name: str, got: object, expected: tuple[str, ...]) -> None:
    if got not in expected:
        raise ValueError(f"RaggedCollator: expected {name} as one of {list(expected)}, got {got!r}")


def _as_row(where: str, name: str, values: Any) -> Tensor:
    """Returns a column of an example as ``[length]`` int64."""
    try:
        row = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{where}: expected {name!r} as a list or tensor of integers: {error}") from error
    if row.dim() != 1:
        raise ValueError(
            f"{where}: expected {name!r} as one row of integers, got the shape {tuple(row.shape)}; pass one row "
            f"in each example, as tokenizers return it without return_tensors"
        )
    if len(row) and (row.is_floating_point() or row.is_complex()):
        raise TypeError(f"{where}: expected {name!r} as integers, got {row.dtype}; convert the column")
    return row.to(torch.int64)


def _kept(where: str, mask: Tensor) -> slice:
    """Returns the slice of tokens that a mask keeps; raises unless they are contiguous."""
    places = mask.nonzero().flatten().tolist()
    first, end = (places[0], places[-1] + 1) if places else (0, 0)
    if len(places) < end - first or not ((mask == 0) | (mask == 1)).all():
        raise ValueError(
            f"{where}: expected an attention_mask of ones with zeros to the left or to the right, got {mask.tolist()}; "
            f"remove tokens that no other token may see"
        )
    return slice(first, end)


def _as_target(where: str, labels: Tensor) -> Tensor:
    """Returns the labels, which a decoder also reads as tokens; raises if there are none, or for a negative label."""
    if not len(labels) or (labels < 0).any():
        raise ValueError(
            f"{where}: expected labels that are tokens, since a decoder reads them, got {labels.tolist()}; leave out "
            f"padding, and examples without a target"
        )
    return labels


def _shifted(labels: Tensor, start: int) -> Tensor:
    """Returns the token before each label."""
    return torch.cat([labels.new_tensor([start]), labels[:-1]])


def _check_positions(where: str, positions: Tensor) -> None:
    if not torch.equal(positions, torch.arange(len(positions), device=positions.device)):
        raise ValueError(
            f"{where}: expected position_ids that count from 0, got {positions.tolist()}; "
            f"pass each document of a packed example as an example of its own"
        )


# ---- patches ---------------------------------------------------------------------------------------------------


def patch_libraries() -> None:
    """Patches seven functions of transformers and accelerate, each once its module is imported."""
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
            hint="call model.generate(input_ids=rows); or pass whole rows with use_cache=False; or pass a dense batch "
            "with an attention_mask",
        )


_PACKED = (
    "position_ids of a ragged batch: expected positions that grow by 1 in each row; pass each document as a row of its "
    "own, or do not compile the model"
)


def _leave_out_masks(masking_utils: Any) -> None:
    """Patches transformers to create no mask for ragged rows in a compiled model, as in an eager model.

    transformers detects several documents in a row by its ``position_ids``. It cannot read them in a trace, and always
    creates a mask for documents there. With the patch, the program asserts the positions when it runs.
    """
    original = getattr(masking_utils, "_preprocess_mask_arguments", None)
    if original is None:
        return

    @functools.wraps(original)
    def preprocess(
        config: Any, embeds: Any, mask: Any, cache: Any, position_ids: Any, *args: Any, **kwargs: Any
    ) -> Any:
        is_traced = torch.compiler.is_dynamo_compiling()
        if is_traced and isinstance(embeds, RaggedTensor) and mask is None and position_ids is not None:
            torch.ops.aten._assert_async.msg((position_ids[:, 1:] - position_ids[:, :-1] == 1).all(), _PACKED)
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
