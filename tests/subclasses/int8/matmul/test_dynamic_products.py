"""The op that quantizes its input by row: it computes what the ops for each step compute, to the last bit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import desugar
from subclasses.int8 import Int8Tensor
from subclasses.int8.matmul import cpu_kernels, dynamic_products, integers, kernels
from tests.subclasses.int8.models import DYNAMIC, quantized

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LIBRARY = pytest.mark.skipif(cpu_kernels.library() is None, reason="needs a C++ compiler and AVX2")


@pytest.fixture(autouse=True)
def as_an_op(monkeypatch):
    """Has the op take small matrices too, which are multiplied in the graph otherwise."""
    monkeypatch.setattr(integers, "SMALL", 0)


@pytest.fixture(params=["vnni", "none"])
def _instructions(request, monkeypatch):
    """With and without instructions for products of integers, as far as the op looks at it."""
    monkeypatch.setattr(integers, "is_without_vnni", lambda: request.param == "none")


def weight(n, k, scales):
    return torch.randint(-128, 128, (n, k), dtype=torch.int8), torch.rand(scales, 1) / 512


def by_steps(x, qdata, scale):
    """The ops for each step, as they run where the op is not taken."""
    rows = kernels.quantize_rows(x, "row", symmetric=True)
    return kernels.int8_times_int8(rows, kernels.Rows(qdata, scale, None), x.dtype)


def assert_same(got, expected):
    assert got.dtype is expected.dtype and got.shape == expected.shape and got.is_contiguous()
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.nan_to_num(), expected.nan_to_num())


@pytest.mark.sweep(2)
@pytest.mark.usefixtures("_instructions")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scales", [1, 40])
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 8, 9, 40])
def test_values(dtype, scales, rows):
    for k in (64, 192):
        x = (torch.randn(rows, k) * torch.logspace(-3, 3, rows)[:, None]).to(dtype)
        w = weight(40, k, scales)
        assert_same(dynamic_products.dynamic_product(x, *w), by_steps(x, *w))


ROWS = {
    "zeros": torch.zeros(64),
    "the least number": torch.full((64,), 1e-45),
    "smaller than a scale": torch.full((64,), 1e-39),
    "the largest number": torch.full((64,), 3e38),
    "infinite": torch.cat([torch.full((1,), float("inf")), torch.ones(63)]),
    "below": torch.cat([torch.full((1,), -float("inf")), torch.ones(63)]),
    "no number": torch.cat([torch.ones(63), torch.full((1,), float("nan"))]),
    "no number, negative": torch.cat([torch.ones(63), -torch.full((1,), float("nan"))]),
    "halves": torch.arange(64) - 31.5,
    "both ends": torch.linspace(-1, 1, 64),
    "one entry": torch.cat([torch.zeros(63), torch.full((1,), -2.5)]),
}


@pytest.mark.sweep(2)
@pytest.mark.usefixtures("_instructions")
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("rows", [1, 3, 12])
@pytest.mark.parametrize("name", ROWS)
def test_rows_of_all_kinds(name, rows, dtype):
    x = torch.randn(rows, 64)
    x[0] = ROWS[name]
    w = weight(33, 64, 33)
    assert_same(dynamic_products.dynamic_product(x.to(dtype), *w), by_steps(x.to(dtype), *w))


@LIBRARY
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_integers_and_scales_are_those_of_the_ops(dtype):
    x = (torch.randn(50, 256) * torch.logspace(-30, 30, 50)[:, None]).to(dtype)
    q, scales = cpu_kernels.quantize_rows(x)
    expected = kernels.quantize_rows(x, "row", symmetric=True)
    assert torch.equal(q, expected.qdata) and torch.equal(scales, expected.scale[:, 0])


@pytest.mark.parametrize("make", [lambda: torch.randn(64, 5).t(), lambda: torch.randn(10, 128)[::2, 32:96]])
def test_strides_of_the_input(make):
    x, w = make(), weight(40, 64, 40)
    assert_same(dynamic_products.dynamic_product(x, *w), by_steps(x, *w))


def test_a_scale_with_strides():
    qdata, _ = weight(40, 64, 40)
    x, scale = torch.randn(3, 64), torch.rand(40, 2)[:, 1:]
    assert_same(dynamic_products.dynamic_product(x, qdata, scale), by_steps(x, qdata, scale))


@pytest.mark.parametrize("rows", [1, 8, 20])
def test_without_the_library(rows, monkeypatch):
    """As a package runs that was made on another machine."""
    x, w = torch.randn(rows, 64), weight(40, 64, 40)
    expected = by_steps(x, *w)
    monkeypatch.setattr(cpu_kernels, "library", lambda: None)
    assert not dynamic_products.takes(x, *w)
    assert_same(dynamic_products.dynamic_product(x, *w), expected)


@LIBRARY
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads(threads, monkeypatch):
    monkeypatch.setattr(cpu_kernels, "WORK", 64)
    monkeypatch.setattr(cpu_kernels, "WORK_OF_PASSES", 64)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows in (1, 3, 30):
            x, w = torch.randn(rows, 64), weight(41, 64, 41)
            assert_same(dynamic_products.dynamic_product(x, *w), by_steps(x, *w))
    finally:
        torch.set_num_threads(before)


@LIBRARY
def test_what_it_is_for():
    x, (qdata, scale) = torch.randn(2, 64), weight(40, 64, 40)
    assert dynamic_products.takes(x, qdata, scale)
    assert not dynamic_products.takes(x.double(), qdata, scale.double())
    assert not dynamic_products.takes(x, qdata[:, :32], scale), "no whole vectors, not contiguous"
    assert not dynamic_products.takes(x, qdata, torch.rand(40, 2)), "groups"
    assert not dynamic_products.takes(x.to("meta"), qdata.to("meta"), scale.to("meta"))


# ---- transformations ---------------------------------------------------------------------------------------


def test_is_a_proper_op():
    torch.library.opcheck(dynamic_products.dynamic_product, (torch.randn(3, 64), *weight(40, 64, 40)))


def test_a_batch_of_inputs_and_a_batch_of_weights():
    x, qdata, scale = torch.randn(5, 3, 64), weight(200, 64, 1)[0].view(5, 40, 64), torch.rand(5, 40, 1)
    op = dynamic_products.dynamic_product
    got = torch.func.vmap(op, (0, None, None))(x, qdata[0], scale[0])
    assert_same(got, torch.stack([op(one, qdata[0], scale[0]) for one in x]))
    got = torch.func.vmap(op, (None, 0, 0))(x[0], qdata, scale)
    assert_same(got, torch.stack([op(x[0], *one) for one in zip(qdata, scale, strict=True)]))


# ---- layers ------------------------------------------------------------------------------------------------


@pytest.mark.sweep(2)
@LIBRARY
@pytest.mark.parametrize("door", [desugar.compile, lambda fn, **o: torch.compile(fn, backend="aot_eager")])
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_a_compiled_layer_is_eagers_for_any_batch(door, dtype):
    layer = quantized(nn.Linear(64, 48, dtype=dtype).requires_grad_(False), DYNAMIC)
    assert isinstance(layer.weight, Int8Tensor)
    compiled = door(copy.deepcopy(layer), backend="eager")
    for rows in (1, 2, 8, 9, 33):
        x = torch.randn(rows, 64).to(dtype)
        assert torch.equal(compiled(x), layer(x))
        with torch.no_grad():
            assert torch.equal(compiled(x), layer(x))


@LIBRARY
def test_a_program_has_one_op_for_the_product():
    layer = quantized(nn.Linear(64, 48).requires_grad_(False), DYNAMIC)
    compiled = desugar.compile(layer, backend="eager")
    compiled(torch.randn(3, 64))
    names = [str(node.target) for node in compiled.programs[0].joint.graph.nodes]
    found = [name for name in names if "int8" in name or "mm" in name]
    assert found == ["subclasses.int8_dynamic_product.default"]


@pytest.mark.usefixtures("_instructions")
@pytest.mark.parametrize("learned", [False, True])
def test_gradients_are_straight_through(learned):
    """Of the input, and of the scale at the quantized input."""
    layer = quantized(nn.Linear(64, 48, bias=False), DYNAMIC)
    x = torch.randn(4, 64, requires_grad=True)
    qdata, scale, _ = layer.weight.detach().unwrap()
    scale = scale.clone().requires_grad_(learned)
    y = kernels.dynamic_linear(x, kernels.Rows(qdata, scale, None), "row", symmetric=True)
    assert torch.equal(y, by_steps(x.detach(), qdata, scale.detach()))
    cotangent = torch.randn_like(y)
    found = torch.autograd.grad(y, (x, scale) if learned else (x,), cotangent)
    torch.testing.assert_close(found[0], cotangent @ (qdata * scale.detach()))
    if learned:
        seen = kernels.quantize_rows(x.detach(), "row", symmetric=True).to_float(torch.float32)
        torch.testing.assert_close(
            found[1], (cotangent * (seen @ qdata.float().t())).sum(0)[:, None], rtol=1e-4, atol=1e-3
        )
