"""Modules of ``torch.nn`` that look along the rows: results and gradients equal the module on each row alone."""

import re

import pytest
import torch
from torch import Tensor, nn

import desugar
from subclasses import DispatchError
from subclasses.int8 import Int8WeightOnlyConfig, quantize_
from subclasses.ragged import JaggedTensor, PaddedTensor
from subclasses.ragged.modules.time_major import TimeMajor
from tests.doors import COMPILED, by_desugar, eager
from tests.subclasses.ragged.judge import KINDS, check_leaves, in_parts, kinds
from tests.subclasses.ragged.modules import coverage
from tests.subclasses.ragged.modules.cases import (
    CASES,
    DIM,
    aligned,
    channels_first,
    encoder_layer,
    judge,
    rows_of,
)
from tests.tables import giving, raising

# ---- one by one ----------------------------------------------------------------------------------------------


CONDITIONS = {
    "as it is": {},
    "no_grad": {"mode": torch.no_grad},
    "inference": {"mode": torch.inference_mode},
    "empty rows": {"lengths": (3, 0, 5, 1)},
    "bfloat16": {"dtype": torch.bfloat16},
}
IN_HALF_PRECISION = {"encoder", "lstm", "conv, stride", "mean pool", "attention, with weights"}
NOT_EVERYWHERE = {
    "empty rows": {name for name, case in CASES.items() if case.takes_empty},
    "bfloat16": IN_HALF_PRECISION,
}


@pytest.mark.sweep(16)
@kinds
@pytest.mark.parametrize(
    ("name", "condition"),
    [
        (name, condition)
        for condition in CONDITIONS
        for name in CASES
        if name in NOT_EVERYWHERE.get(condition, CASES)
    ],
)
def test_each_row_gives_what_it_gives_alone(name, condition, kind):
    got = judge(CASES[name], kind, eager, **CONDITIONS[condition])
    assert type(got) in (Tensor, PaddedTensor if kind == "padded" else JaggedTensor)
    assert got.dtype is CONDITIONS[condition].get("dtype", torch.float64)


# One of each family; the others are slow.
ONE_OF_EACH = {
    "encoder layer",
    "lstm",
    "conv, stride",
    "transposed conv",
    "max pool",
    "adaptive mean pool",
    "bilinear",
}


@pytest.mark.sweep(12)
@pytest.mark.parametrize("kind", ["jagged", "padded"])
@pytest.mark.parametrize("door", COMPILED)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ONE_OF_EACH else pytest.mark.slow) for name in CASES]
)
def test_compiled(name, kind, door):
    judge(CASES[name], kind, COMPILED[door])


# ---- attention -----------------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("average", [True, False])
def test_weights_of_keys_of_other_lengths(kind, average):
    module = nn.MultiheadAttention(DIM, 2, batch_first=True).double()
    queries, keys = rows_of((2, 4, 1)), rows_of((3, 1, 5))
    x, y = KINDS[kind](queries), KINDS[kind](keys)
    got, weights = module(x, y, y, average_attn_weights=average)
    for part, table, q, k in zip(got.to_tensors(), weights, queries, keys, strict=True):
        out, (each,) = module(q[None], k[None], k[None], average_attn_weights=average)
        torch.testing.assert_close(part, out[0])
        padding = (0, table.shape[-1] - len(k), 0, table.shape[-2] - len(q))
        torch.testing.assert_close(table, nn.functional.pad(each, padding))


# How a mask is made for rows up to a length, and the part of it for one row.
MASKS = {
    "bool": ("attn_mask", lambda t: torch.ones(t, t, dtype=torch.bool).triu(1), lambda m, b, n: m[:n, :n]),
    "float": ("attn_mask", lambda t: torch.randn(t, t, dtype=torch.float64), lambda m, b, n: m[:n, :n]),
    "each head": (
        "attn_mask",
        lambda t: torch.randn(8, t, t, dtype=torch.float64),
        lambda m, b, n: m[2 * b : 2 * b + 2, :n, :n],
    ),
    "keys": (
        "key_padding_mask",
        lambda t: torch.arange(t).expand(4, -1) == 1,
        lambda m, b, n: m[b : b + 1, :n],
    ),
}


@pytest.mark.sweep(2)
@kinds
@pytest.mark.parametrize("with_weights", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_masks(kind, mask, with_weights):
    module = nn.MultiheadAttention(DIM, 2, batch_first=True).double()
    rows, (name, make, part) = rows_of(), MASKS[mask]
    x = KINDS[kind](rows)
    given = make(x.shape[1])
    got, _ = module(x, x, x, need_weights=with_weights, **{name: given})
    expected = [
        module(*[row[None]] * 3, need_weights=with_weights, **{name: part(given, b, len(row))})[0][0]
        for b, row in enumerate(rows)
    ]
    torch.testing.assert_close(got.to_tensors(), expected)


@pytest.mark.parametrize("training", [True, False])
def test_dropout_in_training_drops(training):
    module = nn.MultiheadAttention(DIM, 2, dropout=0.5, batch_first=True).double().train(training)
    x = JaggedTensor.from_tensors(rows_of())
    one, other = (module(x, x, x, need_weights=False)[0].values for _ in range(2))
    assert torch.equal(one, other) != training


def test_time_major_goes_back():
    x = JaggedTensor.from_tensors(rows_of())
    swapped = x.transpose(0, 1)
    assert type(swapped) is TimeMajor and torch.equal(swapped.to_dense(2), x.to_dense(2).transpose(0, 1))
    assert [swapped.shape, swapped.transpose(1, 0).shape] == [(7, 4, DIM), x.shape]
    gradients = [
        *torch.autograd.grad(swapped.swapaxes(0, 1).values.sum(), x),
        *torch.autograd.grad(x.transpose(0, 1), x, torch.ones(7, 4, DIM)),
    ]
    assert all(torch.equal(g.values, torch.ones_like(g.values)) for g in gradients)


# ---- recurrences ---------------------------------------------------------------------------------------------

RECURRENT = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}


@kinds
@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("lengths", [(3, 0, 5, 1), (0, 0, 2), (0, 0)])
def test_states_are_given_and_an_empty_row_keeps_its_own(kind, name, lengths):
    """Each row runs by itself; the gradients of the given states equal the gradients of the rows' states."""
    module = RECURRENT[name](DIM, 6, 2, batch_first=True, bidirectional=True).double()
    rows, count, is_lstm = rows_of(lengths), len(lengths), name == "lstm"
    size = (4, count, 6)
    given = [torch.randn(size, dtype=torch.float64, requires_grad=True) for _ in range(1 + is_lstm)]
    out, ends = module(KINDS[kind](rows), tuple(given) if is_lstm else given[0])
    expected = [[] for _ in given]
    for row, part, *own in zip(rows, out.to_tensors(), *(h.split(1, 1) for h in given), strict=True):
        states = tuple(own) if is_lstm else own[0]
        if len(row):
            alone, states = module(row.unsqueeze(0), states)
            torch.testing.assert_close(part, alone[0])
        for found, state in zip(expected, states if is_lstm else (states,), strict=True):
            found.append(state)
    check_leaves(ends if is_lstm else [ends], [torch.cat(found, 1) for found in expected], [*given, *rows])


# ---- convolutions and pools ----------------------------------------------------------------------------------


@kinds
def test_rows_shorter_than_the_kernel_have_no_result(kind):
    module, rows = nn.Conv1d(DIM, 6, 4).double(), rows_of((6, 2, 0, 4))
    got = channels_first(module, KINDS[kind](rows)).to_tensors()
    assert [len(part) for part in got] == [3, 0, 0, 1]
    torch.testing.assert_close(got[0], channels_first(module, rows[0].unsqueeze(0))[0])


POOLS = {
    "max pool": lambda x: nn.functional.max_pool1d(x, 3, 2, 1, return_indices=True),
    "adaptive": lambda x: nn.functional.adaptive_max_pool1d(x, 2, return_indices=True),
}


@kinds
@pytest.mark.parametrize("pool", POOLS.values(), ids=POOLS)
def test_places_of_the_greatest_are_those_in_the_row(kind, pool):
    rows = rows_of()
    found = zip(*(list(part) for part in pool(KINDS[kind](rows).mT)), strict=True)
    torch.testing.assert_close(list(found), [tuple(p[0] for p in pool(row.mT[None])) for row in rows])


REFUSED = {
    **{
        name: (
            lambda x, option=option: nn.MultiheadAttention(
                DIM, 2, batch_first=True, **{option: True}
            ).double()(x, x, x),
            "pass need_weights=False",
        )
        for name, option in {"a bias of keys": "add_bias_kv", "keys of zeros": "add_zero_attn"}.items()
    },
    "scores by hand": (lambda x: (x @ x.mT).softmax(-1) @ x, "scaled_dot_product_attention"),
    "channels last": (lambda x: nn.Conv1d(DIM, 6, 3).double()(x), r"x\.transpose\(1, 2\)"),
    "images, channels last": (lambda x: nn.Conv2d(DIM, 6, 3).double()(x.unsqueeze(-1)), r"x\.unsqueeze\(1\)"),
    "frames second": (
        lambda x: aligned(lambda lp, *args: nn.CTCLoss()(lp.transpose(0, 1), *args), x),
        r"x\.transpose\(0, 1\)",
    ),
    "a length beyond its row": (
        lambda x: aligned(lambda lp, y, n, m: nn.CTCLoss()(lp, y, n + 1, m), x),
        "fewer frames",
    ),
    "a pad of a tensor": (lambda x: nn.functional.pad(x, (0, 0, torch.tensor(1), 0)), "pairs of ints"),
    "max pool, ceil": (lambda x: nn.MaxPool1d(2, ceil_mode=True)(x.mT), "ceil_mode=False"),
    "mean pool, ceil": (lambda x: nn.AvgPool1d(2, ceil_mode=True)(x.mT), "ceil_mode=False"),
    "circular": (
        lambda x: nn.Conv1d(DIM, 6, 3, padding=1, padding_mode="circular").double()(x.mT),
        "circular",
    ),
    "parts of an empty row": (lambda x: nn.AdaptiveAvgPool1d(2)(x[:, :0].mT), r"no entries|is empty"),
}


test_same_padding_keeps_the_rows = giving(
    {
        "offsets": (
            lambda: (lambda x: nn.Conv1d(DIM, 6, 3, padding=1).double()(x).offsets is x.offsets)(
                JaggedTensor.from_tensors(rows_of()).mT
            ),
            True,
        )
    }
)
test_what_is_refused = raising(
    {
        f"{name}, {kind}": (
            lambda run=run, kind=kind: run(KINDS[kind](rows_of())),
            (DispatchError, IndexError, RuntimeError),
            words,
        )
        for name, (run, words) in REFUSED.items()
        for kind in KINDS
    }
    | {
        "rows second": (
            lambda: JaggedTensor.from_tensors(rows_of()).transpose(0, 1) + 1,
            r"x\.transpose\(0, 1\) first",
        )
    }
)

# ---- the pages -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", coverage.LAYOUTS.values())
def test_the_pages_name_every_module_that_is_tested(page):
    text = (coverage.DOCS / page).read_text()
    (right,) = [part for part in text.split("\n\n") if part.startswith("Right, with gradients")]
    assert {coverage.name_of(case) for case in CASES.values()} <= set(re.findall(r"nn\.(\w+)", right))


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "page"), coverage.LAYOUTS.items())
def test_the_pages_are_what_the_command_writes(layout, page):
    text = (coverage.DOCS / page).read_text()
    assert coverage.replace_section(text, coverage.emit_section(coverage.outcomes(layout))) == text


# ==== modules in evaluation =========================================================================================

INPUTS = {"jagged": JaggedTensor.from_tensors, "padded": PaddedTensor.from_tensors, "dense": torch.stack}


def make_input(kind):
    return INPUTS[kind]([torch.randn(n, DIM) for n in ((4, 4, 4) if kind == "dense" else (5, 3, 4))])


def make_encoder(kind):
    encoder = nn.TransformerEncoder(encoder_layer(), 1, enable_nested_tensor=False).eval()
    if kind == "dense":
        quantize_(encoder, Int8WeightOnlyConfig())
    return encoder


PARTS = {
    "encoder": lambda encoder, x: encoder(x),
    "attention": lambda encoder, x: encoder.layers[0].self_attn(x, x, x, need_weights=False)[0],
}


@pytest.mark.sweep(36)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("door", COMPILED)
@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("part", PARTS)
def test_an_encoder_and_its_attention_are_one_graph(part, kind, door, mode):
    encoder, x, run = make_encoder(kind), make_input(kind), PARTS[part]
    compiled = COMPILED[door](lambda x: run(encoder, x), fullgraph=True)
    with mode():
        torch.testing.assert_close(*map(in_parts, (compiled(x), run(encoder, x))))


@pytest.mark.slow
def test_a_causal_hint_is_kept():
    """With it no score beyond a row is computed, and no padded table is made."""
    encoder, x = make_encoder("jagged"), make_input("jagged")
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
    compiled = by_desugar(lambda x, mask: encoder(x, mask=mask, is_causal=True), fullgraph=True)
    with torch.no_grad():
        got = compiled(x, mask)
        torch.testing.assert_close(got.values, encoder(x, mask=mask, is_causal=True).values)
    graph = str(compiled.programs[0].forward.code)
    assert "ragged_attention" in graph and "_transformer_encoder_layer_fwd" not in graph


def test_plain_tensors_keep_the_op():
    encoder, x = make_encoder("jagged"), torch.randn(3, 4, DIM)
    graphs = []
    compiled = torch.compile(encoder, fullgraph=True, backend=lambda gm, _: graphs.append(gm.code) or gm)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), encoder(x))
    assert "_transformer_encoder_layer_fwd" in graphs[0]


@pytest.mark.slow
def test_a_package_of_an_encoder(tmp_path):
    encoder, x = make_encoder("jagged"), make_input("jagged")
    with torch.no_grad():
        desugar.save(tmp_path / "encoder.pt2", encoder, desugar.call(x))
        package = desugar.load(tmp_path / "encoder.pt2", classes=[JaggedTensor])
        torch.testing.assert_close(package(x).values, encoder(x).values)
