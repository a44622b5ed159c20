"""Linear layers, products and lookups: values, gradients, every kind of block, every way to compile."""

import collections
import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad

import desugar
import subclasses
from subclasses._torch import TorchDispatchMode, fake_mode
from subclasses.int8 import (
    Int8DynamicActivationInt8WeightConfig,
    Int8Tensor,
    Int8WeightOnlyConfig,
    PerGroup,
    PerTensor,
    quantize_,
)
from subclasses.int8.matmul import kernels
from tests.doors import COMPILED, DOORS
from tests.subclasses.int8.models import DYNAMIC, LAYOUTS, WEIGHTS, frozen, integers, quantized, sqnr
from tests.tables import giving, raising

BLOCKS = [None, (8, 16), (1, 4), (2, 16), (4, 8)]


def rounded(x, activation, symmetric=True):
    """The input as a layer sees it."""
    if activation is None or x.numel() == 0:
        return x
    whole = (x.numel() // max(1, x.shape[-1]), x.shape[-1]) if activation == "tensor" else None
    flat = x.reshape(-1, x.shape[-1])
    return Int8Tensor.from_float(flat, block_size=whole, symmetric=symmetric).dequantize().reshape(x.shape)


# ---- linear ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", BLOCKS)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("activation", "activation_symmetric"),
    [(None, True), *itertools.product(("row", "tensor"), (True, False))],
)
def test_it_is_the_layer_on_the_floats_it_stands_for(block_size, symmetric, activation, activation_symmetric):
    """A dynamic layer rounds its input, too."""
    how = {"activation": activation, "activation_symmetric": activation_symmetric}
    w = Int8Tensor.from_float(torch.randn(8, 16), block_size=block_size, symmetric=symmetric, **how)
    bias, error = torch.randn(8), {} if activation is None else {"atol": 1e-4, "rtol": 1e-4}
    for shape in ((16,), (1, 16), (1, 1, 16), (3, 16), (2, 3, 16), (0, 16)):
        x = torch.randn(shape)
        expected = F.linear(rounded(x, activation, activation_symmetric), w.dequantize(), bias)
        torch.testing.assert_close(F.linear(x, w, bias), expected, **error)


test_no_rows_and_no_features = giving(
    {
        f"{rows} rows, {columns} features, {activation}": (
            lambda rows=rows, columns=columns, activation=activation: F.linear(
                torch.randn(rows, columns),
                Int8Tensor.from_float(torch.randn(4, columns), activation=activation),
            ).tolist(),
            [[0] * 4] * rows,
        )
        for rows, columns in ((0, 16), (2, 0))
        for activation in (None, "row")
    }
)


@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_does_not_overflow_before_it_is_scaled(autocast):
    dtype = torch.float32 if autocast else torch.half
    w, x = torch.rand(4, 1024).to(dtype), torch.full((2, 1024), 4.0, dtype=dtype)
    with torch.autocast("cpu", torch.float16, enabled=autocast):
        for rows in (1, 2):
            assert F.linear(x[:rows], Int8Tensor.from_float(w)).isfinite().all()


@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("activation_symmetric", [True, False])
def test_the_longest_sums_do_not_wrap_around(sign, symmetric, activation_symmetric):
    longest = kernels.longest_sum(activation_symmetric, symmetric)
    how = {"activation": "row", "activation_symmetric": activation_symmetric}
    for k in (longest, longest + 1):
        w = Int8Tensor.from_float(torch.full((1, k), sign), symmetric=symmetric, **how)
        got = F.linear(torch.full((1, k), sign), w)
        torch.testing.assert_close(got, torch.full((1, 1), float(k)), rtol=1e-2, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "config",
    [WEIGHTS, Int8WeightOnlyConfig(PerGroup(4)), DYNAMIC],
    ids=["weights", "groups", "dynamic"],
)
def test_autocast(dtype, config):
    linear = nn.Linear(16, 8)
    layer = quantized(copy.deepcopy(linear), config)
    for x in (torch.randn(3, 16), torch.randn(3, 16).bfloat16(), torch.randn(1, 16)):
        with torch.autocast("cpu", dtype):
            y, expected = layer(x), linear(x)
            product = x @ layer.weight.t()
        assert y.dtype == expected.dtype == product.dtype == dtype
        assert sqnr(expected.float(), y.float()) > 25


def test_products_and_convolutions():
    """Products take the integers, convolutions run on the floats."""
    w, x = Int8Tensor.from_float(torch.randn(16, 8), block_size=(16, 1)), torch.randn(3, 16)
    with subclasses.strict():
        products = [torch.matmul(x, w), x @ w, torch.mm(x, w)]
    torch.testing.assert_close([*products, (w.t() @ x.t()).t()], [x @ w.dequantize()] * 4)
    conv, x = quantized(nn.Conv2d(3, 4, 3), choose=lambda m, name: True), torch.randn(2, 3, 8, 8)
    assert conv.weight.block_size == (1, 3, 3, 3)
    torch.testing.assert_close(conv(x), F.conv2d(x, conv.weight.dequantize(), conv.bias))


# ---- embeddings --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [None, (10, 16), (1, 4), (2, 16), (5, 8)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_lookup_dequantizes_the_rows_found(block_size, symmetric):
    w = Int8Tensor.from_float(torch.randn(10, 16), block_size=block_size, symmetric=symmetric)
    for index in (torch.tensor([[0, 9], [3, 3]]), torch.tensor(4), torch.zeros(0, dtype=torch.int64)):
        with subclasses.strict():
            found = F.embedding(index, w, padding_idx=3)
        assert torch.equal(found, F.embedding(index, w.dequantize()))


TABLE = Int8Tensor.from_float(torch.randn(10, 16))
test_lookups_that_are_refused = raising(
    {
        "beyond the table": (lambda: F.embedding(torch.tensor([10]), TABLE), IndexError, "out of range"),
        "a norm": (
            lambda: F.embedding(torch.tensor([1]), TABLE, max_norm=0.1),
            NotImplementedError,
            "writes to",
        ),
    }
)


# ---- gradients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", BLOCKS)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("activation", [None, "row", "tensor"])
def test_gradients_of_input_and_scale(block_size, symmetric, activation):
    made = Int8Tensor.from_float(torch.randn(8, 16), block_size=block_size, symmetric=symmetric)
    x, cotangent = torch.randn(2, 3, 16, requires_grad=True), torch.randn(2, 3, 8)
    scale = made.scale.clone().requires_grad_()
    w = Int8Tensor(made.qdata, scale, made.zero_point, activation=activation)
    got = torch.autograd.grad(F.linear(x, w), (x, scale), cotangent)
    plain = Int8Tensor(made.qdata, scale, made.zero_point).dequantize()
    seen = x + (rounded(x, activation) - x).detach()
    expected = torch.autograd.grad(F.linear(seen, plain), (x, scale), cotangent)
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.filterwarnings("ignore:There is a performance drop because:UserWarning")  # vmap of torch._int_mm
@pytest.mark.parametrize("config", [WEIGHTS, DYNAMIC])
def test_function_transforms(config):
    layer, x, t = quantized(nn.Linear(16, 4), config), torch.randn(3, 16), torch.randn(3, 16)
    w = layer.weight.dequantize()
    torch.testing.assert_close(torch.func.jvp(layer, (x,), (t,))[1], t @ w.t(), atol=1e-4, rtol=1e-4)
    by_grad = torch.func.grad(lambda v: (layer(v) * torch.arange(4.0)).sum())(x)
    torch.testing.assert_close(by_grad, (torch.arange(4.0) @ w).expand(3, 16), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(torch.func.vmap(layer)(x[:, None])[:, 0], layer(x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("width", [8, 512], ids=["in the graph", "an op"])
@pytest.mark.parametrize("config", [WEIGHTS, Int8WeightOnlyConfig(PerGroup(4), symmetric=False), DYNAMIC])
def test_forward_mode_works_under_no_grad(config, width, grad):
    layer, (x, t) = frozen(width, width, config, bias=False), torch.randn(2, 3, width)
    with forward_ad.dual_level(), torch.set_grad_enabled(grad):
        tangent = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, t))).tangent
    torch.testing.assert_close(tangent, t @ layer.weight.dequantize().t(), atol=1e-4, rtol=1e-4)


# ---- compiled ----------------------------------------------------------------------------------------------


@pytest.mark.sweep(4)
@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_a_parameter_as_torchaos_users_make_it(door):
    """Its layer computes and passes gradients on; the step that would lose an update raises."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    weight = Int8Tensor.from_float(model[1].weight)
    model[1].weight = nn.Parameter(weight)
    x = torch.randn(3, 8)
    y = door(lambda x: model(x))(x)
    torch.testing.assert_close(y, F.linear(model[0](x), weight.dequantize(), model[1].bias))
    y.sum().backward()
    torch.testing.assert_close(model[0].bias.grad, 3 * weight.dequantize().sum(0))
    copy.deepcopy(model).bfloat16().load_state_dict(model.state_dict(), assign=True)
    before = model[0].weight.clone()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(subclasses.DispatchError, match=r"AdamW.step\(\): a Parameter is an Int8Tensor"):
        optimizer.step()
    assert torch.equal(model[0].weight, before)


@pytest.mark.sweep(24)
@pytest.mark.parametrize("door", COMPILED)
@pytest.mark.parametrize(
    "config",
    [
        WEIGHTS,
        Int8WeightOnlyConfig(PerGroup(4), symmetric=False),
        DYNAMIC,
        Int8DynamicActivationInt8WeightConfig((PerTensor(), PerTensor()), "asymmetric", symmetric=False),
    ],
    ids=["weights", "groups", "dynamic", "dynamic asymmetric"],
)
def test_compiled(door, config):
    model = quantized(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)), config)
    compiled = COMPILED[door](model)
    for rows in (3, 5, 0, 1):
        x = torch.randn(rows, 16, requires_grad=True)
        leaves = x, model[0].bias
        expected = torch.autograd.grad(model(x).square().sum(), leaves)
        with subclasses.strict():
            got = torch.autograd.grad(compiled(x).square().sum(), leaves)
        torch.testing.assert_close(got, expected)


@pytest.mark.slow
@pytest.mark.parametrize("door", COMPILED)
def test_quantizing_is_seen_by_a_compiled_model(door):
    model, x = nn.Linear(16, 4), torch.randn(3, 16)
    compiled = COMPILED[door](model)
    compiled(x)
    quantize_(model, WEIGHTS)
    torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize("first", LAYOUTS)
@pytest.mark.parametrize("second", LAYOUTS)
def test_integers_are_multiplied_exactly(first, second):
    for m, k, n in itertools.product((0, 1, 2, 17), (0, 1, 3, 8, 257), (1, 2, 33)):
        a, b = LAYOUTS[first](m, k), LAYOUTS[second](n, k)
        assert torch.equal(kernels.multiply_integers(a, b), a.int() @ b.int().t()), (m, k, n)


class Calls(TorchDispatchMode):
    """Notes ops with the sizes of their tensors."""

    def __init__(self):
        super().__init__()
        self.sizes = collections.defaultdict(list)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.sizes[func.name()].append([tuple(a.shape) for a in args if isinstance(a, torch.Tensor)])
        return func(*args, **(kwargs or {}))


needs_cuda_build = pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="needs a build with CUDA")


def on_cuda(*size, dtype=torch.int8):
    """A tensor without data, in a fake mode."""
    return torch.empty(size, dtype=dtype, device="cuda")


@needs_cuda_build
@pytest.mark.parametrize("m", [0, 1, 16, 17, 256])
@pytest.mark.parametrize(("k", "n"), [(104, 64), (100, 60)])
def test_what_cudas_kernel_is_given(k, n, m):
    """It takes more than 16 rows, and extents that are multiples of 8; tried on tensors without data."""
    with fake_mode(), Calls() as calls:
        assert kernels.multiply_integers(on_cuda(m, k), on_cuda(n, k)).shape == (m, n)
    assert calls.sizes["aten::_int_mm"] == ([[(max(m, 17), 104), (104, 64)]] if m else [])
    # A pad by nothing would copy the weight.
    pads = (m < 17) + (k < 104) * (1 + (m >= 17)) if m else 0
    assert len(calls.sizes["aten::constant_pad_nd"]) == pads


@needs_cuda_build
@pytest.mark.parametrize(
    "installed",
    [(torch.float32, True), (torch.bfloat16, True), (torch.float16, True), (torch.float16, False)],
)
@pytest.mark.parametrize(
    ("rows", "columns", "groups", "products"),
    [(1, 16, 1, 1), (2, 16, 1, 1), (2, 24, 3, 1), (2, 24, 4, 0)],  # groups of 8 and of 6 numbers
)
def test_a_few_rows_on_cuda_are_one_op_that_reads_the_integers(
    rows, columns, groups, products, installed, monkeypatch
):
    """Without Triton, PyTorch's ops compute them."""
    dtype, triton = installed
    monkeypatch.setattr(kernels, "has_triton", lambda: triton)
    if dtype is torch.float32 and groups > 1:
        pytest.skip("the product of floats is PyTorch's")
    with fake_mode(), torch.no_grad(), Calls() as calls:
        scale = on_cuda(8, groups, dtype=torch.float32 if groups == 1 else dtype)
        w = Int8Tensor(on_cuda(8, columns), scale, float_dtype=dtype)
        assert F.linear(on_cuda(rows, columns, dtype=dtype), w).dtype == dtype
    by_kernel = products and triton and dtype is not torch.float32
    assert len(calls.sizes["subclasses::int8_rows"]) == by_kernel
    assert len(calls.sizes["aten::mm"]) == (rows > 1 and not by_kernel)


@pytest.mark.gpu
def test_weight_only_on_a_gpu():
    kinds = {}, {"activation": "row"}, {"symmetric": False}, {"block_size": (1, 32)}
    for dtype, kind in itertools.product((torch.float32, torch.bfloat16), kinds):
        w = Int8Tensor.from_float(torch.randn(64, 128, device="cuda", dtype=dtype), **kind)
        for compiler in (lambda f: f, torch.compile, desugar.compile):
            torch.compiler.reset()
            linear = compiler(lambda x, w: F.linear(x, w))
            for rows in (1, 3, 16, 17, 40):
                x = torch.randn(rows, 128, device="cuda", dtype=dtype)
                with torch.no_grad():
                    got, expected = linear(x, w), F.linear(x, w.dequantize())
                assert got.dtype == dtype and sqnr(expected.float(), got.float()) > 30


@pytest.mark.gpu
def test_integers_are_multiplied_exactly_on_a_gpu():
    for m, k, n in ((1, 5, 3), (16, 64, 32), (33, 100, 7)):
        a, b = (integers(*s) for s in ((m, k), (n, k)))
        got = kernels.multiply_integers(a.cuda(), b.cuda())
        assert torch.equal(got.cpu(), a.int() @ b.int().t())
