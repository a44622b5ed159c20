"""Modules of ``torch.nn`` on rows, and a loop over the rows through the same module as their judge."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.subclasses.ragged.judge import KINDS, check_leaves

DIM, LENGTHS = 8, (4, 3, 7, 5)


@dataclass
class Case:
    """A module, how it is called on rows ``[B, T, DIM]``, and whether it takes empty rows."""

    make: Callable[[], nn.Module]
    call: Callable[[Any, Any], Any] = lambda module, x: module(x)
    takes_empty: bool = False


square_mask = functools.partial(nn.Transformer.generate_square_subsequent_mask, dtype=torch.float64)


def channels_first(module: Any, x: Any) -> Any:
    return module(x.transpose(1, 2)).transpose(1, 2)


def aligned(module: Any, x: Any) -> Any:
    """A loss against two labels for each row."""
    lengths, labels = (
        torch.ones_like(x.detach()[..., 0]).sum(1).long(),
        torch.tensor([[1, 2]]).expand(x.shape[0], -1),
    )
    return module(x.log_softmax(-1).transpose(0, 1), labels, lengths, torch.full_like(lengths, 2))


def attend(module: Any, x: Any) -> Any:
    return module(x, x, x, need_weights=False)[0]


def attend_causally(module: Any, x: Any) -> Any:
    return module(x, x, x, need_weights=False, attn_mask=square_mask(x.shape[1]), is_causal=True)[0]


def attend_to_dense(module: Any, x: Any) -> Any:
    """To dense keys, and, from there, to the rows."""
    keys = torch.linspace(-1, 1, 5 * DIM, dtype=x.dtype).view(1, 5, DIM).expand(x.shape[0], -1, -1)
    dense = module(keys, x, x, need_weights=False)[0]
    return module(x, dense, keys)[0]


def encoder_layer(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(DIM, 2, 16, dropout=0.0, batch_first=True, **options)


CASES = {
    "attention": Case(lambda: nn.MultiheadAttention(DIM, 2, batch_first=True), attend, True),
    "attention, with weights": Case(
        lambda: nn.MultiheadAttention(DIM, 2, batch_first=True), lambda m, x: m(x, x, x)[0], True
    ),
    "attention, other widths": Case(
        lambda: nn.MultiheadAttention(DIM, 2, batch_first=True, kdim=DIM, vdim=4, bias=False),
        lambda m, x: m(x, x * 2, x[..., :4], need_weights=False)[0],
        True,
    ),
    "attention, places first": Case(
        lambda: nn.MultiheadAttention(DIM, 2), lambda m, x: m(*[x.transpose(0, 1)] * 3)[0].transpose(0, 1), True
    ),
    "attention, dense operands": Case(
        lambda: nn.MultiheadAttention(DIM, 2, batch_first=True), attend_to_dense
    ),
    **{
        f"attention, added keys {bias}, {zeros}": Case(
            lambda bias=bias, zeros=zeros: nn.MultiheadAttention(
                DIM, 2, batch_first=True, add_bias_kv=bias, add_zero_attn=zeros
            ),
            call,
        )
        for bias, zeros, call in ((True, False, attend), (False, True, attend_causally), (True, True, attend_causally))
    },
    "encoder layer": Case(encoder_layer, takes_empty=True),
    "encoder layer, norm first": Case(lambda: encoder_layer(norm_first=True, activation="gelu"), takes_empty=True),
    "encoder": Case(lambda: nn.TransformerEncoder(encoder_layer(), 2), takes_empty=True),
    "causal encoder": Case(
        lambda: nn.TransformerEncoder(encoder_layer(), 2),
        lambda m, x: m(x, mask=square_mask(x.shape[1]), is_causal=True),
    ),
    "decoder": Case(
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(DIM, 2, 16, dropout=0.0, batch_first=True), 2),
        lambda m, x: m(x, x * 2),
        True,
    ),
    **{
        name: Case(make, lambda m, x: m(x)[0])
        for name, make in {
            "lstm": lambda: nn.LSTM(DIM, 6, 2, batch_first=True),
            "lstm, both ways": lambda: nn.LSTM(DIM, 6, batch_first=True, bidirectional=True),
            "lstm, projected": lambda: nn.LSTM(DIM, 6, batch_first=True, proj_size=3),
            "gru": lambda: nn.GRU(DIM, 6, batch_first=True, bias=False),
            "gru, both ways": lambda: nn.GRU(DIM, 6, 2, batch_first=True, bidirectional=True),
            "rnn": lambda: nn.RNN(DIM, 6, batch_first=True),
            "rnn, relu": lambda: nn.RNN(DIM, 6, batch_first=True, nonlinearity="relu"),
        }.items()
    },
    "lstm, cell states": Case(
        lambda: nn.LSTM(DIM, 6, 2, batch_first=True, bidirectional=True), lambda m, x: m(x)[1][1].transpose(0, 1)
    ),
    "gru, states": Case(
        lambda: nn.GRU(DIM, 6, 2, batch_first=True, bidirectional=True), lambda m, x: m(x)[1].transpose(0, 1)
    ),
    **{
        f"{kind.__name__.lower()}, places first": Case(
            lambda kind=kind: kind(DIM, 6, bidirectional=True),
            lambda m, x: m(x.transpose(0, 1))[0].transpose(0, 1),
        )
        for kind in (nn.LSTM, nn.GRU, nn.RNN)
    },
    "conv": Case(lambda: nn.Conv1d(DIM, 6, 3), channels_first),
    "conv, same": Case(lambda: nn.Conv1d(DIM, 6, 3, padding="same", dilation=2), channels_first),
    "conv, padded": Case(lambda: nn.Conv1d(DIM, 6, 3, padding=1), channels_first),
    "conv, wide padding": Case(lambda: nn.Conv1d(DIM, 6, 2, padding=3), channels_first),
    "conv, stride": Case(lambda: nn.Conv1d(DIM, 6, 3, padding=1, stride=2, bias=False), channels_first),
    "conv, dilation": Case(lambda: nn.Conv1d(DIM, 6, 2, padding=1, stride=3, dilation=3), channels_first),
    "conv, groups": Case(lambda: nn.Conv1d(DIM, DIM, 3, padding=1, groups=DIM), channels_first),
    "conv, kernel 1": Case(lambda: nn.Conv1d(DIM, 6, 1), channels_first),
    **{
        f"conv of images{name}": Case(make, lambda m, x: m(x.unsqueeze(1)).transpose(1, 2))
        for name, make in {
            "": lambda: nn.Conv2d(1, 3, 3, padding=1),
            ", same": lambda: nn.Conv2d(1, 3, 3, padding="same", dilation=(2, 1)),
            ", stride": lambda: nn.Conv2d(1, 3, (3, 2), (2, 3), (1, 0), bias=False),
        }.items()
    },
    "conv of images, rows last": Case(
        lambda: nn.Conv2d(1, 3, (2, 3), (3, 2), (0, 1)), lambda m, x: m(x.mT.unsqueeze(1)).permute(0, 3, 1, 2)
    ),
    "transposed conv": Case(lambda: nn.ConvTranspose1d(DIM, 6, 3, stride=2), channels_first),
    "transposed conv, cropped": Case(
        lambda: nn.ConvTranspose1d(DIM, 6, 3, stride=2, padding=1, output_padding=1, dilation=2), channels_first
    ),
    "max pool": Case(lambda: nn.MaxPool1d(3, 1, 1), channels_first),
    "max pool, stride": Case(lambda: nn.MaxPool1d(2), channels_first),
    "max pool, dilation": Case(lambda: nn.MaxPool1d(2, 1, 1, dilation=3), channels_first),
    "mean pool": Case(lambda: nn.AvgPool1d(3, 2, 1), channels_first),
    "mean pool, what exists": Case(lambda: nn.AvgPool1d(3, 2, 1, count_include_pad=False), channels_first),
    "lp pool": Case(lambda: nn.LPPool1d(2, 3), channels_first),
    **{
        f"adaptive {name}": Case(make, lambda m, x: m(x.transpose(1, 2)))
        for name, make in {
            "mean pool": lambda: nn.AdaptiveAvgPool1d(3),
            "mean pool to 1": lambda: nn.AdaptiveAvgPool1d(1),
            "max pool": lambda: nn.AdaptiveMaxPool1d(4),
        }.items()
    },
    "bilinear": Case(lambda: nn.Bilinear(DIM, DIM, 3), lambda m, x: m(x, x + 1), True),
    "linear": Case(lambda: nn.Linear(DIM, 3), takes_empty=True),
    "layer norm": Case(lambda: nn.LayerNorm(DIM), takes_empty=True),
    "rms norm": Case(lambda: nn.RMSNorm(DIM), takes_empty=True),
    "group norm": Case(lambda: nn.GroupNorm(2, DIM), channels_first),
    "batch norm": Case(lambda: nn.BatchNorm1d(DIM).eval(), channels_first, True),
    "glu": Case(nn.GLU, takes_empty=True),
    "ctc": Case(lambda: nn.CTCLoss(reduction="none"), aligned),
}  # fmt: skip


def rows_of(lengths: Any = LENGTHS, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(n, DIM, dtype=dtype, requires_grad=True) for n in lengths]


def row_results(case: Case, module: Any, rows: list[Tensor]) -> list[Tensor]:
    """The result of each row by itself; an empty row has an empty result."""
    found = [case.call(module, row.unsqueeze(0)).squeeze(0) if len(row) else None for row in rows]
    like = next(f for f in found if f is not None)
    nothing = like.new_zeros(0, *like.shape[1:])
    return [nothing + row.sum() if f is None else f for f, row in zip(found, rows, strict=True)]


def judge(
    case: Case,
    kind: str,
    way: Callable[..., Any],
    lengths: Any = LENGTHS,
    dtype: torch.dtype = torch.float64,
    mode: Callable[[], Any] = torch.enable_grad,
) -> Any:
    """Compares a module on rows with the module on each; gradients too, with them and in double precision."""
    torch.manual_seed(0)
    module, rows = case.make().to(dtype), rows_of(lengths, dtype)
    module.train(module.training and mode is torch.enable_grad)
    with mode():
        expected = row_results(case, module, rows)
        got = way(case.call)(module, KINDS[kind](rows))
    is_compared = mode is torch.enable_grad and dtype is torch.float64
    leaves = [*rows, *module.parameters()] if is_compared else []
    check_leaves(got, expected, leaves, **({"atol": 0.05, "rtol": 0.05} if dtype is torch.bfloat16 else {}))
    return got
