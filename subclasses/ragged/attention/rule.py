"""``scaled_dot_product_attention`` of ragged tensors: each row attends to the row of the same number."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subclasses.errors import DispatchError
from subclasses.op_schemas.custom import run
from subclasses.ragged.attention.fused import attend_fused, kernel_for
from subclasses.ragged.attention.row_attention import ragged_attention
from subclasses.ragged.attention.row_dropout import ragged_attention_dropout
from subclasses.ragged.base import first_ragged, is_ragged, shown
from subclasses.ragged.checks import is_traced
from subclasses.ragged.jagged import JaggedTensor
from subclasses.ragged.jagged.operands import check_counts_match
from subclasses.ragged.padded.operands import check_same_rows
from subclasses.ragged.padded.tensor import PaddedTensor
from subclasses.ragged.registry import Rules
from subclasses.slow_paths import say_once

RULES = Rules()

_SEEDS = 1 << 62  # seeds of dropout on the CPU

# ---- the rule --------------------------------------------------------------------------------------------------


@RULES.of(F.scaled_dot_product_attention)
def _attend(  # noqa: PLR0913
    func: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    rows, key, value = attention_rows(func, query, key, value)
    if rows is not query:
        return _attend(func, rows, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa).to_dense()
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"{func.__name__}: expected a dropout_p between 0 and 1, got {dropout_p}")
    jagged = query.rows_first
    value = key.alongside(func, value) if jagged else value
    by_rows = jagged and attn_mask is None
    kernel = kernel_for(query, key, value, is_causal) if by_rows else None
    if kernel is None and not (by_rows and query.stored.device.type == "cpu"):
        options = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
        _say_padded(query, jagged, attn_mask, is_causal, dropout_p)
        if is_causal and attn_mask is None and _share_rows(query, key):
            # The padding of a row comes after each query that exists, so the causal mask hides it.
            options["is_causal"] = True
        else:
            options["attn_mask"] = score_mask(query, key, attn_mask, is_causal)
        return attend_tables(functools.partial(func, **options), query, key, value)
    q, k, v = _heads_first(query), _heads_first(key), _heads_first(value)
    if enable_gqa and k.shape[0] != q.shape[0]:
        k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], 0) for x in (k, v))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if kernel is not None:
        out = attend_fused(kernel, query, key, (q, k, v), is_causal, dropout_p, scale)
    else:
        rows = query.offsets, key.offsets, query.lengths, key.lengths
        out = _attend_rows(q, k, v, rows, is_causal, scale, dropout_p)
    return _with_heads(query, out)


def _as_rows(jagged: bool, x: Any) -> Any:
    """Returns a dense operand ``[B, T, D]`` or ``[B, H, T, D]`` as rows of one length; a ragged one unchanged."""
    if is_ragged(x):
        return x
    if not isinstance(x, Tensor) or hasattr(type(x), "__spec__") or x.dim() not in (3, 4):
        _check_operand(JaggedTensor if jagged else PaddedTensor, x)
    rows = (JaggedTensor if jagged else PaddedTensor).of_dense(x if x.dim() == 3 else x.transpose(1, 2))
    return rows if x.dim() == 3 else rows.transpose(1, 2)


def attention_rows(func: Any, query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
    """Returns the operands of an attention as matching rows; operands that are the same tensor stay the same.

    Raises:
        DispatchError: the ragged dimension of an operand is not the last but one.
        ValueError: the operands have different dtypes or numbers of rows.
    """
    query, key, value = all_as_rows(query, key, value)
    _check_rows(func, query, key, value)
    return query, key, value


def all_as_rows(*operands: Any) -> tuple[Any, ...]:
    """Returns operands, of which one is ragged, as rows; operands that are the same tensor stay the same."""
    if all(map(is_ragged, operands)):
        return operands
    jagged = first_ragged(operands).rows_first
    rows_by_id = {id(x): _as_rows(jagged, x) for x in operands}
    return tuple([rows_by_id[id(x)] for x in operands])


def _with_heads(query: Any, out: Tensor) -> Any:
    """Returns results ``[H, entries, D]`` with the dimensions of heads of the query: none, one or several."""
    heads = query._raw_values.shape[:-2]
    if len(heads) != 1:  # a reshape to the same size would compare the number of entries with 1
        out = out.unflatten(0, heads) if heads else out[0]
    return query.with_values(out)


def _check_rows(func: Any, query: Any, key: Any, value: Any) -> None:
    """Raises if operands do not match."""
    jagged = query.rows_first
    for x in (query, key, value):
        _check_operand(JaggedTensor if jagged else PaddedTensor, x, func.__name__)
    if not jagged:
        check_same_rows(key, func, key, value)
    if not query.stored.dtype == key.stored.dtype == value.stored.dtype:
        dtypes = ", ".join(str(x.dtype) for x in (query, key, value))
        raise ValueError(
            f"{func.__name__}: expected query, key and value of one dtype, got {dtypes}; convert them by x.to(dtype)"
        )
    if query.shape[0] != key.shape[0]:
        raise ValueError(f"{func.__name__}: {shown(query)} and {shown(key)} have other numbers of rows")
    if jagged:
        check_counts_match(func, query, key)


def _check_operand(kind: Any, x: Any, name: str = "scaled_dot_product_attention") -> None:
    """Raises unless the rows of an operand are numbered by dimension 0 and ragged along the last but one."""
    if isinstance(x, kind) and (n := x.rank) >= 3 and x.row_dims == (0, n - 2):
        return
    layout, first = (
        ("ragged", "") if kind is JaggedTensor else ("padded", "the batch dimension is first and ")
    )
    subject = "the ragged dimension is" if kind is JaggedTensor else "the ragged one"
    raise DispatchError(
        f"{name}: expected {layout} query, key and value [B, ..., T, D], got {shown(x)}",
        code="row-dims",
        hint=f"transpose so that {first}{subject} the last but one",
    )


def _attend_rows(  # noqa: PLR0913
    q: Tensor, k: Tensor, v: Tensor, rows: Any, is_causal: bool, scale: float, dropout_p: float
) -> Tensor:
    """Computes the attention of ``[H, total, D]`` on the CPU."""
    if dropout_p:
        seed = torch.randint(_SEEDS, ())
        return run(ragged_attention_dropout, q, k, v, seed, *rows, is_causal, scale, dropout_p)
    if q.shape[-1] == v.shape[-1]:
        return run(ragged_attention, q, k, v, *rows, is_causal, scale)[0]
    # PyTorch's kernel for the CPU takes heads of one width. Features of 0 change no score.
    width = max(q.shape[-1], v.shape[-1])
    parts = (F.pad(x, [0, width - x.shape[-1]]) for x in (q, k, v))
    return run(ragged_attention, *parts, *rows, is_causal, scale)[0][..., : v.shape[-1]]


# ---- by padded tables ------------------------------------------------------------------------------------------


def _share_rows(query: Any, key: Any) -> bool:
    """Returns whether query and key share the lengths of their rows, without a comparison of the lengths."""
    if query is key or torch.compiler.is_dynamo_compiling():
        return query is key
    return query.lengths is key.lengths and (not query.rows_first or query.offsets is key.offsets)


def _say_padded(query: Any, jagged: bool, attn_mask: Any, is_causal: bool, dropout_p: float) -> None:
    """Reports that attention computes padded tables, unless a compiler fuses a mask of padding alone."""
    is_fused = not (jagged or dropout_p or is_causal) and is_traced(query.lengths)
    if is_fused and attn_mask is not None:
        say_once(
            "compiled attention of a PaddedTensor with an attn_mask writes the mask anew for each row",
            _remedy_for(attn_mask),
        )
    if is_fused:
        return
    if not jagged:
        say_once(
            "attention of a PaddedTensor, in eager mode, with dropout or with is_causal, computes and masks every "
            "padded score",
            "use x.to_jagged() for query, key and value, or without dropout and is_causal compile the function",
        )
    elif attn_mask is not None:
        say_once(
            "attention of a JaggedTensor with an attn_mask, also with dropout, computes every score of a padded table",
            _remedy_for(attn_mask),
        )
    else:
        say_once(
            f"attention of {query.dtype} rows on {query.device.type} computes every score of a padded table",
            "use a dtype, a head width and a device of PyTorch's attention kernels, and rows without gaps",
        )


def _remedy_for(attn_mask: Any) -> str:
    remedy = "leave out a mask of padding, which does not exist, and pass is_causal=True for a causal mask"
    if not isinstance(attn_mask, Tensor) or attn_mask.dtype == torch.bool:
        return remedy
    return (
        f"{remedy}. With a bias, batch rows of about one length, or attend to a few long rows one by one, each with "
        "attn_mask[..., :n, :n]"
    )


def attend_tables(attend: Callable[..., Tensor], query: Any, key: Any, value: Any) -> Any:
    """Runs an attention with a mask of existing keys on padded tables, and returns its result as rows."""
    out = attend(*(x.to_dense() for x in (query, key, value)))
    # A row without keys attended to padding, so that no gradient is NaN; its result is 0.
    has_keys = (key.counts > 0).view(-1, *[1] * (out.dim() - 1))
    return query.from_table(torch.where(has_keys, out, 0))


def attend_by_hand(attend: Callable[..., Tensor], query: Any, key: Any, value: Any, attn_mask: Any) -> Any:
    """Runs the attention function of a model on padded tables, and returns its result as rows.

    Args:
        attend: takes tables ``[B, H, T, D]``, ``[B, H, S, D]``, ``[B, H, S, Dv]`` and a mask ``[B, 1, 1 or T, S]``,
            which it adds to the scores. It returns ``[B, H, T, Dv]``.
        query: ``[B, H, T, D]``, ragged or dense, as are the next two.
        key: ``[B, H, S, D]``.
        value: ``[B, H, S, Dv]``.
        attn_mask: a dense mask that broadcasts against ``[B, H, T, S]``, as for ``scaled_dot_product_attention``.

    Raises:
        DispatchError: the ragged dimension is not the last but one.
        ValueError: the operands have different dtypes or numbers of rows.
    """
    rows, key, value = attention_rows(F.scaled_dot_product_attention, query, key, value)
    say_once(
        f"attention by a function of the model computes every score of a padded table of {type(rows).__name__} rows",
        'load a model that supports it with attn_implementation="sdpa"',
    )
    mask = score_mask(rows, key, attn_mask, is_causal=False)
    if mask.dtype == torch.bool:
        bias = torch.zeros(mask.shape, dtype=rows.dtype, device=mask.device)
        mask = bias.masked_fill_(~mask, torch.finfo(rows.dtype).min)
    out = attend_tables(lambda *tables: attend(*tables, mask), rows, key, value)
    return out if is_ragged(query) else out.to_dense()


def score_mask(query: Any, key: Any, attn_mask: Any, is_causal: bool) -> Tensor:
    """Returns a bool mask, or a mask that is added to the scores: ``[B, 1..., T, S]``, with the caller's mask.

    A query that does not exist attends to all keys: a softmax without scores, and its derivative, would be NaN.
    """
    if attn_mask is not None and (not isinstance(attn_mask, Tensor) or hasattr(type(attn_mask), "__spec__")):
        raise DispatchError(
            "scaled_dot_product_attention: expected a dense attn_mask that broadcasts against [B, ..., T, S], got "
            f"{shown(attn_mask)}",
            code="argument-refused",
        )
    exists = key.mask() | (key.counts == 0).unsqueeze(1)
    exists = exists.view(exists.shape[0], *[1] * (query.dim() - 2), exists.shape[1])
    if is_causal:
        past = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        exists = exists & past
    if attn_mask is None:
        return exists
    is_query = query.mask()
    is_query = is_query.view(is_query.shape[0], *[1] * (query.dim() - 3), is_query.shape[1], 1)
    if attn_mask.dtype == torch.bool:
        return (exists & attn_mask) | ~is_query
    return torch.where(is_query, torch.where(exists, attn_mask, -math.inf), 0.0)


def _heads_first(x: JaggedTensor) -> Tensor:
    """Reshapes ``[..., total, D]`` to ``[H, total, D]``."""
    values = x.clean_values()
    return values if values.dim() == 3 else values.reshape(-1, *values.shape[-2:])
