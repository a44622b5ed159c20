"""``model.generate(input_ids=rows)`` of transformers: prompts of different lengths, and results without padding."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from subclasses.errors import DispatchError
from subclasses.ragged.base import RaggedTensor
from subclasses.ragged.jagged import JaggedTensor

# The rows determine the mask and the positions. Earlier keys, and embeddings instead of tokens, are dense.
_REFUSED = ("attention_mask", "position_ids", "past_key_values", "inputs_embeds")
# They pass several tokens at once, or take tokens of the cache back.
_REFUSED_WITH_CACHE = ("assistant_model", "prompt_lookup_num_tokens", "prefill_chunk_size")


def patch_generate(utils: Any) -> None:
    """Patches ``GenerationMixin.generate`` to accept ragged prompts, and to return ragged sequences.

    transformers generates from a table whose rows end in the same column, with a mask. The patch converts the prompts
    to such a table. Each row of the result is a prompt with its new tokens. With a `RaggedCache`, a second patch gives
    the model rows instead of the table.
    """
    from subclasses.ragged.hugging_face.cache import RaggedCache  # imports transformers

    original, original_inputs = (
        utils.GenerationMixin.generate,
        utils.GenerationMixin.prepare_inputs_for_generation,
    )
    names = [*inspect.signature(original).parameters][2:]  # after `self` and `inputs`

    @functools.wraps(original)
    def generate(self: Any, inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        prompts = kwargs.get("input_ids") if inputs is None else inputs
        if not isinstance(prompts, RaggedTensor):
            return original(self, inputs, *args, **kwargs)
        kwargs.pop("input_ids", None)
        return _generate(original, self, prompts, kwargs | dict(zip(names, args, strict=False)))

    @functools.wraps(original_inputs)
    def prepare_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = original_inputs(self, *args, **kwargs)
        is_ragged = isinstance(given.get("past_key_values"), RaggedCache)
        return _inputs_of_rows(given) if is_ragged else given

    utils.GenerationMixin.generate = generate
    utils.GenerationMixin.prepare_inputs_for_generation = prepare_inputs


def _inputs_of_rows(given: dict[str, Any]) -> dict[str, Any]:
    """Replaces a table of prompts and its mask by rows, and sets the positions of prompts and further tokens."""
    cache, mask = given["past_key_values"], given.pop("attention_mask", None)
    table = given["input_ids"]
    if cache.is_empty:
        mask = torch.ones_like(table) if mask is None else mask
        lengths, exists = mask.sum(1), mask.bool()
        for name, x in given.items():
            if isinstance(x, Tensor) and x.shape == table.shape:
                given[name] = JaggedTensor.from_lengths(x[exists], lengths)
    elif table.shape[1] > 1:
        raise DispatchError(
            f"generate: expected one token for each row of a RaggedCache, got {table.shape[1]}; use_cache is off, or "
            "this way of generation passes several",
            code="argument-refused",
            hint="pass use_cache=True; or leave out past_key_values",
        )
    given["position_ids"] = cache.positions(given["input_ids"])
    return given


def _generate(original: Callable[..., Any], model: Any, prompts: Any, kwargs: dict[str, Any]) -> Any:
    rows = prompts.to_tensors()
    _check(model, rows, kwargs)
    side = "right" if model.config.is_encoder_decoder else "left"
    pad = functools.partial(pad_sequence, batch_first=True, padding_side=side)
    tables = {
        name: pad(given.to_tensors())  # type: ignore[attr-defined]
        for name, given in kwargs.items()
        if isinstance(given, RaggedTensor)
    }
    stops, padding = _special_tokens(model, kwargs)
    table, mask = pad(rows, padding_value=padding or 0), pad([torch.ones_like(row) for row in rows])
    generated = original(model, table, **(kwargs | tables), attention_mask=mask)
    sequences: Tensor = generated if isinstance(generated, Tensor) else generated.sequences
    if model.config.is_encoder_decoder:
        starts, width = None, 1  # results begin with the start of a target
    else:
        starts, width = rows, table.shape[1]
    ends = _ends(sequences, width, stops, padding if _may_stop_otherwise(model, kwargs) else None)
    count = len(sequences) // len(rows)
    results = [
        row[:end] if starts is None else torch.cat([starts[number // count], row[width:end]])
        for number, (row, end) in enumerate(zip(sequences, ends, strict=True))
    ]
    ragged = type(prompts).from_tensors(results)
    if isinstance(generated, Tensor):
        return ragged
    generated.sequences = ragged
    return generated


def _check(model: Any, rows: list[Tensor], kwargs: Mapping[str, Any]) -> None:
    """Raises for arguments that do not go with ragged prompts."""
    name = type(model).__name__
    for refused in _REFUSED:
        given = kwargs.get(refused)
        if given is not None and not getattr(given, "is_empty", False):  # an empty RaggedCache
            own = (
                "an empty RaggedCache, made for each call"
                if refused == "past_key_values"
                else f"no {refused}"
            )
            raise DispatchError(
                f"{name}.generate: expected {own} beside ragged prompts",
                code="argument-refused",
                hint=f"leave out {refused}, or pass a dense batch: input_ids.to_dense(fill), with an attention_mask",
            )
    for refused in _REFUSED_WITH_CACHE if kwargs.get("past_key_values") is not None else ():
        if _option(model, kwargs, refused) is not None:
            raise DispatchError(
                f"{name}.generate: expected no {refused} beside a RaggedCache",
                code="argument-refused",
                hint=f"leave out {refused}, or past_key_values",
            )
    if isinstance(kwargs.get("labels"), RaggedTensor):
        raise DispatchError(
            f"{name}.generate: expected no labels, which Seq2SeqTrainer passes with predict_with_generate=True, and "
            "whose rows it then pads",
            code="argument-refused",
            hint="generate without labels; or evaluate with a collator that pads",
        )
    for column, given in kwargs.items():
        if isinstance(given, RaggedTensor) and [*map(len, given.to_tensors())] != [*map(len, rows)]:  # type: ignore[attr-defined]
            raise DispatchError(
                f"{name}.generate: expected rows of {column} as long as the prompts, since the padding of other rows "
                "would be read",
                code="argument-refused",
                hint=f"generate without {column}, or each prompt alone",
            )
    _check_prompts(name, rows)


def _check_prompts(name: str, rows: list[Tensor]) -> None:
    if rows[0].dim() != 1 or rows[0].is_floating_point():
        raise DispatchError(
            f"{name}.generate: expected ragged prompts of tokens, integers of size [rows, length], got rows of size "
            f"{tuple(rows[0].shape)} and {rows[0].dtype}",
            code="argument-refused",
            hint="pass input_ids as the collator makes them",
        )
    for number, row in enumerate(rows):
        if not len(row):
            raise DispatchError(
                f"{name}.generate: expected a token in each prompt, got none in row {number}",
                code="argument-refused",
                hint="leave out empty rows, or begin each with the token that begins a text",
            )


def _option(model: Any, kwargs: Mapping[str, Any], name: str) -> Any:
    if name in kwargs:  # None turns the option off
        return kwargs[name]
    configs = (kwargs.get("generation_config"), model.generation_config)
    return next((value for c in configs if (value := getattr(c, name, None)) is not None), None)


def _special_tokens(model: Any, kwargs: Mapping[str, Any]) -> tuple[list[int], int | None]:
    """Returns the tokens that end a text, and the token that pads a table."""
    end_of_text, padding = (_option(model, kwargs, name) for name in ("eos_token_id", "pad_token_id"))
    stops = [] if end_of_text is None else torch.as_tensor(end_of_text).flatten().tolist()
    return stops, int(padding) if padding is not None else stops[0] if stops else None


def _may_stop_otherwise(model: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether other criteria than a token may end a row: transformers pads such a row if a token may end others."""
    return bool(_option(model, kwargs, "stop_strings") or kwargs.get("stopping_criteria"))


def _ends(sequences: Tensor, width: int, stops: list[int], padding: int | None) -> list[int]:
    """Returns the end of each sequence: after its end-of-text token, or before padding if other criteria may end it."""
    ends = []
    for row in sequences.tolist():
        first = next((i + 1 for i in range(width, len(row)) if row[i] in stops), None)
        end = len(row) if first is None else first
        while first is None and stops and end > width and row[end - 1] == padding:
            end -= 1
        ends.append(end)
    return ends
