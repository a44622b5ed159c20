"""The op that quantizes its input by row: it computes what the ops for each step compute, to the last bit."""

import copy
import itertools

import pytest
import torch
from torch import nn

from subclasses.int8.matmul import cpu_kernels, dynamic_products, integers, kernels
from tests.doors import by_desugar, by_stock
from tests.subclasses.int8.models import DYNAMIC, frozen, quantized

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


def check(x, qdata, scale):
    """Compares the op with the steps, to the last bit."""
    assert_same(dynamic_products.dynamic_product(x, qdata, scale), by_steps(x, qdata, scale))


def assert_same(got, expected):
    assert got.dtype is expected.dtype and got.shape == expected.shape and got.is_contiguous()
    assert torch.equal(got.isnan(), expected.isnan()) and torch.equal(got.nan_to_num(), expected.nan_to_num())


@pytest.mark.sweep(2)
@pytest.mark.usefixtures("_instructions")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scales", [1, 40])
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 8, 9, 40])
def test_values(dtype, scales, rows):
    for k in (64, 192):
        x = (torch.randn(rows, k) * torch.logspace(-3, 3, rows)[:, None]).to(dtype)
        check(x, *weight(40, k, scales))


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
    check(x.to(dtype), *weight(33, 64, 33))


@LIBRARY
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_integers_and_scales_are_those_of_the_ops(dtype):
    x = (torch.randn(50, 256) * torch.logspace(-30, 30, 50)[:, None]).to(dtype)
    q, scales = cpu_kernels.quantize_rows(x)
    expected = kernels.quantize_rows(x, "row", symmetric=True)
    assert torch.equal(q, expected.qdata) and torch.equal(scales, expected.scale[:, 0])


@pytest.mark.parametrize("x", [torch.randn(64, 5).t(), torch.randn(10, 128)[::2, 32:96]])
@pytest.mark.parametrize("scale", [torch.rand(40, 1), torch.rand(40, 2)[:, 1:]])
def test_strides_of_the_input_and_of_the_scale(x, scale):
    check(x, weight(40, 64, 40)[0], scale)


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
    for name in ("WORK", "WORK_OF_PASSES"):
        monkeypatch.setattr(cpu_kernels, name, 64)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows in (1, 3, 30):
            check(torch.randn(rows, 64), *weight(41, 64, 41))
    finally:
        torch.set_num_threads(before)


FITS = torch.randn(2, 64), *weight(40, 64, 40)
UNFIT = {
    "float64": lambda x, q, scale: (x.double(), q, scale.double()),
    "no whole vectors, not contiguous": lambda x, q, scale: (x, q[:, :32], scale),
    "groups": lambda x, q, scale: (x, q, torch.rand(40, 2)),
    "meta": lambda *tensors: [t.to("meta") for t in tensors],
}


@LIBRARY
@pytest.mark.parametrize("name", UNFIT)
def test_what_it_is_for(name):
    assert dynamic_products.takes(*FITS) and not dynamic_products.takes(*UNFIT[name](*FITS))


# ---- transformations ---------------------------------------------------------------------------------------


def test_is_a_proper_op():
    torch.library.opcheck(dynamic_products.dynamic_product, (torch.randn(3, 64), *weight(40, 64, 40)))


@pytest.mark.parametrize("dims", [(0, None, None), (None, 0, 0)])
def test_a_batch_of_inputs_and_a_batch_of_weights(dims):
    tensors = torch.randn(5, 3, 64), weight(200, 64, 1)[0].view(5, 40, 64), torch.rand(5, 40, 1)
    given = [t if dim == 0 else t[0] for t, dim in zip(tensors, dims, strict=True)]
    got = torch.func.vmap(dynamic_products.dynamic_product, dims)(*given)
    each = ([t[n] if dim == 0 else t for t, dim in zip(given, dims, strict=True)] for n in range(5))
    assert_same(got, torch.stack([dynamic_products.dynamic_product(*one) for one in each]))


# ---- layers ------------------------------------------------------------------------------------------------


@pytest.mark.sweep(2)
@LIBRARY
@pytest.mark.parametrize("door", [by_desugar, by_stock])
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_a_compiled_layer_is_eagers_for_any_batch(door, dtype):
    layer = frozen(64, 48, DYNAMIC, dtype=dtype)
    compiled = door(copy.deepcopy(layer))
    for rows, grad in itertools.product((1, 2, 8, 9, 33), (True, False)):
        x = torch.randn(rows, 64).to(dtype)
        with torch.set_grad_enabled(grad):
            assert torch.equal(compiled(x), layer(x))


@LIBRARY
def test_a_program_has_one_op_for_the_product():
    compiled = by_desugar(frozen(64, 48, DYNAMIC))
    compiled(torch.randn(3, 64))
    names = (str(node.target) for node in compiled.programs[0].joint.graph.nodes)
    assert [name for name in names if "int8" in name or "mm" in name] == [
        "subclasses.int8_dynamic_product.default"
    ]


@pytest.mark.usefixtures("_instructions")
@pytest.mark.parametrize("learned", [False, True])
def test_gradients_are_straight_through(learned):
    """Of the input, and of the scale at the quantized input."""
    x, (qdata, scale, _) = torch.randn(4, 64), quantized(nn.Linear(64, 48), DYNAMIC).weight.detach().unwrap()
    leaves = [x.clone().requires_grad_(), scale.clone().requires_grad_(learned)]
    y = kernels.dynamic_linear(leaves[0], kernels.Rows(qdata, leaves[1], None), "row", symmetric=True)
    assert torch.equal(y, by_steps(x, qdata, scale))
    cotangent = torch.randn_like(y)
    seen = kernels.quantize_rows(x, "row", symmetric=True).to_float(torch.float32)
    expected = [cotangent @ (qdata * scale), (cotangent * (seen @ qdata.float().t())).sum(0)[:, None]]
    found = torch.autograd.grad(y, leaves[: 1 + learned], cotangent)
    torch.testing.assert_close(list(found), expected[: len(found)], rtol=1e-4, atol=1e-3)
