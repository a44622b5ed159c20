"""Slow paths are said once, with a remedy, through the log and the report; fast paths say nothing."""

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import desugar
from desugar.explain.collector import Collector
from desugar.explain.text import render_report_text
from subclasses import slow_paths
from subclasses.int8 import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, PerGroup, quantize_
from subclasses.int8.matmul import cpu_kernels
from subclasses.ragged import JaggedTensor, PaddedTensor
from tests.doors import DOORS

ROWS = [torch.randn(n, 8) for n in (3, 5, 2)]
FULL = JaggedTensor.from_tensors([torch.randn(n, 8) for n in (400, 390, 380)])
JAGGED, PADDED = JaggedTensor.from_tensors(ROWS), PaddedTensor.from_tensors(ROWS)


def attend(x, mask=None, dropout=0.0, is_causal=False):
    heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
    options = {"attn_mask": mask, "dropout_p": dropout, "is_causal": is_causal}
    return F.scaled_dot_product_attention(heads, heads * 2, heads, **options)


def quantized(layer, config, **options):
    quantize_(layer.requires_grad_(False), config, **options)
    return layer


def make_attention(**options):
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    return lambda x: attention(x, x, x, **options)


def said(caplog, call):
    """The lines that two runs of a call log."""
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        call()
        call()
    return [record.message for record in caplog.records if record.message.startswith("slow: ")]


MASK = torch.ones(5, 5, dtype=torch.bool).tril()
CONV = quantized(nn.Conv1d(4, 4, 3), Int8WeightOnlyConfig(), filter_fn=lambda module, name: True)
SLOW = {
    "jagged, a mask": (lambda: attend, (JAGGED, MASK), "leave out a mask of padding"),
    "jagged, a bias": (lambda: attend, (JAGGED, torch.randn(5, 5)), "attend to a few long rows one by one"),
    "jagged, a mask and dropout": (
        lambda: lambda x, m: attend(x, m, 0.5),
        (JAGGED, MASK),
        "leave out a mask",
    ),
    "padded, dropout": (lambda: lambda x: attend(x, None, 0.5), (PADDED,), "x.to_jagged()"),
    "padded, causal": (lambda: lambda x: attend(x, is_causal=True), (PADDED,), "x.to_jagged()"),
    "jagged, nearly full rows": (lambda: attend, (FULL,), "use x.to_padded()"),
    "weights of attention": (make_attention, (JAGGED,), "need_weights=False"),
    "a convolution": (lambda: CONV, (torch.randn(2, 4, 6),), "leave the layer out of quantize_"),
}
FAST = {
    "jagged": (lambda: attend, (JAGGED,)),
    "jagged, dropout": (lambda: lambda x: attend(x, None, 0.5), (JAGGED,)),
    "attention": (lambda: make_attention(need_weights=False), (JAGGED,)),
    "int8": (
        lambda: quantized(nn.Linear(8, 8), Int8DynamicActivationInt8WeightConfig()),
        (torch.randn(4, 8),),
    ),
}


@pytest.mark.sweep(48)
@pytest.mark.parametrize("compiler", DOORS)
@pytest.mark.parametrize("case", SLOW | FAST)
def test_a_slow_path_is_said_once_and_a_fast_one_never(case, compiler, caplog):
    make, args, *remedy = (SLOW | FAST)[case]
    call = DOORS[compiler](make(), fullgraph=True)
    lines = said(caplog, lambda: call(*args))
    assert [part in line for part, line in zip(remedy, lines, strict=True)] == [True] * len(remedy)


# By mask, whether the line says that the mask is written anew: in eager mode, and in a compiler, which fuses masks.
MASKS = {
    "none": (None, [False], []),
    "float": (torch.randn(5, 5), [False], [True]),
    "bool": (MASK, [False], [True]),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("compiler", DOORS)
@pytest.mark.parametrize("name", MASKS)
def test_masks_of_padded_rows(name, compiler, caplog):
    (mask, *expected), call = MASKS[name], DOORS[compiler](attend, fullgraph=True)
    lines = said(caplog, lambda: call(PADDED, mask))
    assert ["writes the mask anew" in line for line in lines] == expected[compiler != "eager"]


def no_kernel_for_rows():
    empty, offsets = torch.empty(10, 8, device="meta"), torch.empty(4, dtype=torch.int64, device="meta")
    rows = JaggedTensor(empty, offsets, max_length=5)
    return lambda: attend(rows)


def dynamic_layer_with_groups():
    weight = quantized(nn.Linear(64, 8), Int8WeightOnlyConfig(PerGroup(32))).weight
    dynamic = type(weight)(weight.qdata, weight.scale, activation="row")
    return lambda: F.linear(torch.randn(2, 64), dynamic)


def changing_module():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    compiled, x = desugar.compile(model, backend="eager"), torch.randn(2, 4)

    def call():
        for _ in range(12):
            model.noted = object()
            compiled(x)

    return call


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (no_kernel_for_rows, "torch.float32 rows on meta"),
        (dynamic_layer_with_groups, "PerRow()"),
        (changing_module, "calls of Sequential check Dynamo's guards one by one"),
    ],
)
def test_other_slow_paths_are_said_once(make, words, caplog):
    (line,) = said(caplog, make())
    assert words in line


def test_kernels_that_were_not_built(caplog, monkeypatch):
    def fail(*args):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(cpu_kernels, "_build", fail)
    monkeypatch.setattr(cpu_kernels.Path, "exists", lambda path: False)
    monkeypatch.setattr(cpu_kernels, "FLAGS", {torch.backends.cpu.get_cpu_capability(): []})
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"architecture": "x86_64"}, raising=False)
    lines = said(caplog, cpu_kernels.library.__wrapped__)
    assert lines == [
        "slow: int8 products run on PyTorch's kernels, for ours were not built; install a C++ compiler: no compiler"
    ]


def test_the_report_lists_slow_paths_again():
    """Also one that was logged before the report began; each once."""
    attend(JAGGED, MASK)
    collector = Collector()
    with collector.collecting():
        for _ in range(2):
            attend(JAGGED, MASK)
            attend(JAGGED)
    report = collector.report("a script")
    (line,) = report.slow
    assert "attn_mask" in line
    assert f"slow: {line}" in render_report_text(report)
    assert not slow_paths.watchers
