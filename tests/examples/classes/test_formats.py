"""Quantized formats of the gallery: torchao's numbers, the kit, frozen layers with adapters, files, one program."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from classes import float8, int4_kernel, int4_weight, mxfp8, nf4, nvfp4
from subclasses import strict
from subclasses.testing import suite
from tests.distributed.models import Adapted
from tests.doors import by_desugar
from tests.examples.classes.checks import agreeing, converted, refused

aten, X = torch.ops.aten, torch.linspace(-1, 1, 3 * 64).view(3, 64)
FORMATS = {
    "Float8": float8.Float8.from_float,
    "MXFP8": mxfp8.MXFP8.from_float,
    "NVFP4": nvfp4.NVFP4.from_float,
    "NF4": partial(nf4.NF4.from_float, block=8, group=16),
    "Int4Weight": int4_weight.Int4Weight.from_float,
    "KernelInt4Weight": partial(int4_kernel.KernelInt4Weight.from_float, group=32),
}
SMALL = {name: FORMATS[name] for name in ("MXFP8", "NVFP4", "NF4")}  # these keep no matrix for a backward
WIDTHS = [torch.float32, torch.bfloat16]


def make(name, rows=4, dtype=torch.float32, **options):
    return FORMATS[name](torch.randn(rows, 64, dtype=dtype), **options)


# ---- the kit ---------------------------------------------------------------------------------------------------

OPS = {F.linear: lambda x: (X, x), aten._to_copy: lambda x: (x,)}
OF_FLOAT8 = {
    aten.mm: lambda x: (x, x.t()),
    aten.addmm: lambda x: (X[:, :4], X, x.t()),
    aten.permute: lambda x: (x, [1, 0]),
}
OPTIONS = {
    "Float8": ({"dtype": torch.bfloat16}, OPS | OF_FLOAT8),
    "NF4": ({"block": 16}, {F.linear: OPS[F.linear]}),
}
globals().update(
    {
        f"Test{name}": suite(
            partial(make, name),
            ops=ops,
            sizes=[partial(make, name, n) for n in (6, 8)],
            variants=[partial(make, name, **variant)],
        )
        for name, (variant, ops) in (dict.fromkeys(SMALL, (OPTIONS["Float8"][0], OPS)) | OPTIONS).items()
    },
    TestQuantizedScales=suite(lambda rows=4: nf4.QuantizedScales.from_float(torch.rand(rows, 8), 16)),
)

# ---- torchao ---------------------------------------------------------------------------------------------------


# For each class the module of torchao, its value, and pairs of inner tensors; a first pair is of the floats.
TORCHAO = {
    "Float8": (
        "torchao.quantization",
        lambda m, w: m.Float8Tensor.from_hp(w, torch.float8_e4m3fn, m.PerTensor()),
        lambda a, b: [(a, b.dequantize()), (a.qdata, b.qdata), (a.scale, b.scale)],
    ),
    "MXFP8": (
        "torchao.prototype.mx_formats.mx_tensor",
        lambda m, w: m.MXTensor.to_mx(w, torch.float8_e4m3fn),
        lambda a, b: [(a, b.dequantize()), (a.qdata, b.qdata), (a.scale, b.scale)],
    ),
    "NVFP4": (
        "torchao.prototype.mx_formats.nvfp4_tensor",
        lambda m, w: m.NVFP4Tensor.to_nvfp4(w, per_tensor_scale=m.per_tensor_amax_to_scale(w.abs().max())),
        lambda a, b: [
            (a, b.dequantize()),
            (a.qdata, b.qdata),
            (a.scale, b.scale),
            (a.tensor_scale, b.per_tensor_scale),
        ],
    ),
    "NF4": (
        "torchao.quantization.quantize_.workflows.nf4.nf4_tensor",
        lambda m, w: m.to_nf4(w),
        lambda a, b: [
            (a, b.get_original_weight()),
            (a.packed, b.quantized_data),
            (a.scale.qdata, b.quantized_scalers),
            (a.scale.factor, b.quantization_factor.repeat_interleave(256 // a.scale.piece)),
            (a.scale.mean, b.scaler_mean),
        ],
    ),
}


@pytest.mark.parametrize("factor", [1.0, 1e-20, 1e20])
@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize("name", TORCHAO)
def test_the_numbers_and_scales_are_torchaos(name, dtype, factor):
    """Bit by bit; with numbers of many sizes, rows of 192 that end within a group, and some that are halfway."""
    module, make_theirs, pairs = TORCHAO[name]
    w = torch.randn(256, 192) * torch.logspace(-2, 2, 192)
    w[1], w[2, :16] = torch.arange(192) / 16, 0.0
    w = (w * factor).to(dtype)
    ours = getattr(FORMATS[name], "func", FORMATS[name])(w.t().contiguous().t())  # the strides do not matter
    for one, other in pairs(ours, make_theirs(pytest.importorskip(module), w)):
        one = one.materialize() if type(one) is type(ours) else one
        assert one.dtype == other.dtype
        assert torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (one, other)))


# ---- layers ----------------------------------------------------------------------------------------------------


@pytest.mark.sweep(3)
@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize("name", FORMATS)
def test_an_adapter_trains_beside_a_frozen_layer(name, dtype, way):
    model = Adapted(nn.Linear(64, 4))
    model.linear.weight = nn.Parameter(make(name), requires_grad=False)
    model = model.to(dtype)
    assert type(model.linear.weight.data) is type(make(name)) and model.linear.weight.dtype == dtype
    plain, x = copy.deepcopy(model), X.clone().to(dtype).requires_grad_()
    plain.linear.weight = nn.Parameter(model.linear.weight.materialize(), requires_grad=False)
    found = []
    for layer in (way(model), plain):
        layer(x).square().mean().backward()
        found.append([x.grad, *(p.grad for p in layer.parameters() if p.requires_grad)])
        x.grad = None
    torch.testing.assert_close(*found, **({} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}))


@pytest.mark.parametrize("name", SMALL)
def test_a_backward_keeps_the_format_and_no_matrix(name):
    x, w, kept = X.clone().requires_grad_(), make(name, 32), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        F.linear(x, w).sum().backward()
    assert [type(t) for t in kept] == [type(w)]
    torch.testing.assert_close(x.grad, w.materialize().sum(0).expand(3, 64))


@pytest.mark.parametrize("name", FORMATS)
def test_one_program_serves_all_batches_and_weights(name):
    layer = by_desugar(lambda x, w: F.linear(x, w).relu(), fullgraph=True, dynamic=True)
    for rows in (3, 5, 8):
        x, w = torch.randn(rows, 64), make(name)
        with strict():
            got = layer(x, w)
        torch.testing.assert_close(got, F.linear(x, w.materialize()).relu())
    assert len(layer.programs) == 1


EDGES = [torch.zeros(0, 64), torch.zeros(4, 64), torch.full((4, 64), -6.0)]
test_no_rows_zeros_and_one_number = agreeing(
    {
        name: ([lambda w=w: w for w in EDGES], lambda w, name=name: [(FORMATS[name](w).materialize(), w)])
        for name in FORMATS
    }
)


# ---- float8 ----------------------------------------------------------------------------------------------------


def factors(**options):
    return [float8.Float8.from_float(torch.randn(n, 32, **options)) for n in (16, 48)]


def test_what_goes_to_the_hardware(monkeypatch):
    x, y = factors()
    torch.testing.assert_close(F.linear(x, y, torch.ones(48)), x.materialize() @ y.materialize().t() + 1)
    assert not float8.fits_scaled_mm(x, y.t())
    monkeypatch.setattr(float8, "has_scaled_mm", lambda device: True)
    assert float8.fits_scaled_mm(x, y.t()) and not float8.fits_scaled_mm(x[:3], y.t())
    for other in (float8.Float8(y.qdata.t().contiguous(), y.scale), y.materialize().t()):
        assert not float8.fits_scaled_mm(x, other)


@pytest.mark.gpu
def test_on_the_hardware():
    if not float8.has_scaled_mm("cuda"):
        pytest.skip("needs compute capability 8.9")
    x, y = factors(device="cuda", dtype=torch.bfloat16)
    assert float8.fits_scaled_mm(x, y.t())
    torch.testing.assert_close(x @ y.t(), x.materialize() @ y.materialize().t(), rtol=0.02, atol=0.1)


def test_a_bias_trains_through_a_layer_with_narrow_inputs():
    layer, x = float8.Float8Linear(nn.Linear(32, 16)), torch.randn(8, 32, requires_grad=True)
    optimizer, before = torch.optim.SGD(layer.parameters(), lr=0.1), layer(x).square().mean()
    before.backward()
    optimizer.step()
    assert layer(x).square().mean() < before and x.grad.abs().sum() > 0


# ---- every class ---------------------------------------------------------------------------------------------

test_conversions = converted(
    {
        "conversions keep the format": (
            [partial(make, name) for name in FORMATS],
            [torch.bfloat16, torch.float64],
            lambda w: [
                w.materialize(),
                F.linear(X.to(w.dtype), w if type(w) is float8.Float8 else w.float()),
            ],
        ),
    }
)

test_what_is_refused = refused(
    {
        "what formats refuse": (
            [partial(make, name) for name in SMALL],
            {
                "other sizes and dtypes": (
                    ValueError,
                    "need (float32 or bfloat16 in blocks|whole groups)",
                    [
                        lambda w: type(w).from_float(torch.randn(4, 65)),
                        lambda w: type(w).from_float(torch.randn(4, 72)),
                    ],
                ),
                "other scales": (
                    ValueError,
                    "scales of size",
                    [lambda w: type(w)(*(t[..., :4] if t.ndim else t for t in w.unwrap()))],
                ),
                "writes": (
                    NotImplementedError,
                    None,
                    [lambda w: w.mul_(2), lambda w: w.copy_(torch.zeros(4, 64))],
                ),
            },
        ),
    }
)
