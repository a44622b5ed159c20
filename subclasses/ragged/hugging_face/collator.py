"""A collator of ragged batches for models of transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from subclasses.ragged.jagged import JaggedTensor
from subclasses.ragged.padded import PaddedTensor

_BATCHED = ("input_ids", "labels", "token_type_ids")
_CHECKED = ("attention_mask", "position_ids")


@dataclass(frozen=True)
class RaggedCollator:
    """Collates tokenized examples into ragged tensors; a ``data_collator`` or ``collate_fn`` without padding.

    An example is a mapping with ``input_ids``, and optionally ``labels``, ``token_type_ids``, ``attention_mask`` and
    ``position_ids``. Each value is a list, an array or a tensor of integers, one for each token. The collator removes
    the tokens whose ``attention_mask`` is 0, with their labels, from the left or from the right of an example.

    The batch is a dict of ``input_ids``, and of ``labels`` and ``token_type_ids`` where the examples have them. It has
    no ``attention_mask`` and no ``position_ids``: a model numbers the tokens of each row from 0. Given positions must
    be the same.

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
        # All columns share the offsets or lengths tensor of `input_ids`: later ops see that their rows match.
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
                f"{where}: expected a mapping with 'input_ids', got {type(example).__name__}; tokenize the texts, and "
                f"pass a list of examples, not the tokenizer's result for all texts"
            )
        if "input_ids" not in example:
            raise ValueError(
                f"{where}: expected 'input_ids', got the columns {sorted(example)}; tokenize it first"
            )
        if unknown := sorted({*example} - {*_BATCHED, *_CHECKED}):
            raise ValueError(
                f"{where}: expected columns of {[*_BATCHED, *_CHECKED]}, got {unknown[0]!r}; remove the column, or "
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
            token_slice = _slice_of_mask(where, mask)
            row = {name: values[token_slice] for name, values in row.items()}
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
    if name == "labels" and row.dim() == 0:
        raise ValueError(
            f"{where}: expected a label for each token, got the label {values} for the whole row. A model may find the "
            f"last token of a row by its padding; use a collator that pads"
        )
    if row.dim() != 1:
        raise ValueError(
            f"{where}: expected {name!r} as one row of integers, got the shape {tuple(row.shape)}; pass one row "
            f"in each example, as tokenizers return it without return_tensors"
        )
    if len(row) and (
        row.is_floating_point() or row.is_complex() or (name == "labels" and row.dtype == torch.bool)
    ):
        raise TypeError(f"{where}: expected {name!r} as integers, got {row.dtype}; convert the column")
    return row.to(torch.int64)


def _slice_of_mask(where: str, mask: Tensor) -> slice:
    """Returns the slice of tokens that a mask keeps; raises unless they are contiguous."""
    positions = mask.nonzero().flatten().tolist()
    first, end = (positions[0], positions[-1] + 1) if positions else (0, 0)
    if len(positions) < end - first or not ((mask == 0) | (mask == 1)).all():
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
