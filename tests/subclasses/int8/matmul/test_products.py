"""Products of floats and int8 matrices: values, derivatives, programs for any batch, and the kernel for CUDA."""

import copy

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import desugar
import subclasses
from subclasses.int8 import affine
from subclasses.int8.matmul import cpu_kernels, products
from tests.doors import by_desugar
from tests.subclasses.int8.models import LAYOUTS, PRODUCTS as CONFIGS, frozen, integers
from tests.tables import giving
from tests.triton_kernels import compile_for_hopper, interpret, needs_triton, triton_cache  # noqa: F401

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
COUNTS = [None, (1, 1), (64, 1), (64, 4), (8, 1), (1, 8), (1, 96), (16, 96)]


@pytest.fixture(autouse=True)
def as_an_op(monkeypatch):
    """Has the op take small matrices too, which are multiplied in the graph otherwise."""
    monkeypatch.setattr(products, "SMALL", 0)


def reference(x, q, scale, zero_point):
    one = torch.ones(1, 1, dtype=torch.float64)
    w = affine.from_int8(q, one if scale is None else scale, zero_point, torch.float64)
    return x.double() @ w.t()


def assert_near(got, expected, x):
    """Compares with an error of the dtype relative to the size of the result as a whole."""
    assert got.dtype is x.dtype and got.shape == expected.shape and got.is_contiguous()
    error = (got.double() - expected).norm() / expected.norm().clamp(min=1e-9)
    assert error < 6 * torch.finfo(x.dtype).eps


# ---- values ------------------------------------------------------------------------------------------------


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("part_bytes", [2**23, 2**12, 1])
def test_values(dtype, counts, symmetric, part_bytes, monkeypatch):
    monkeypatch.setattr(products, "PART_BYTES", part_bytes)
    scale = None if counts is None else torch.rand(counts) / 512
    zero_point = None if symmetric else integers(*(counts or (64, 1)))
    for rows in (1, 2, 16, 17):
        x, q = torch.randn(rows, 96).to(dtype) / 64, integers(64, 96)
        assert_near(products.int8_product(x, q, scale, zero_point), reference(x, q, scale, zero_point), x)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layouts_and_extents(layout, dtype):
    for n, k in ((1, 1), (1, 64), (33, 64), (64, 31), (32, 32), (96, 160)):
        for x in (torch.randn(3, k), torch.randn(k, 1).t(), torch.randn(2, 2 * k)[:, ::2]):
            x, q = x.to(dtype), LAYOUTS[layout](n, k)
            assert_near(products.int8_product(x, q, None, None), reference(x, q, None, None), x)


# The sum of 4096 ones, one by one in bfloat16, is 256.
test_sums_of_bfloat16_are_not_rounded_on_the_way = giving(
    {
        str(rows): (
            lambda rows=rows: (
                products.int8_product(
                    torch.ones(rows, 4096, dtype=torch.bfloat16),
                    torch.ones(32, 4096, dtype=torch.int8),
                    None,
                    None,
                )
                .unique()
                .tolist()
            ),
            [4096],
        )
        for rows in (1, 4, 16, 17)
    }
)
test_empty = giving(
    {
        f"{rows}, {n}, {k}": (
            lambda rows=rows, n=n, k=k: products.int8_product(
                torch.randn(rows, k), integers(n, k), None, None
            ).tolist(),
            [[0] * n] * rows,
        )
        for rows, n, k in ((0, 4, 8), (3, 0, 8), (3, 4, 0))
    }
)


# ---- transformations ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [(None, None), *((torch.rand(64, n), integers(64, n)) for n in (1, 8))])
def test_is_a_proper_op(how):
    torch.library.opcheck(products.int8_product, (torch.randn(3, 32), integers(64, 32), *how))


@pytest.mark.parametrize("symmetric", [True, False])
def test_derivatives(symmetric):
    q, zero_point = integers(4, 6), None if symmetric else integers(4, 2)
    leaves = [t.double().requires_grad_() for t in (torch.randn(3, 6), torch.rand(4, 2))]

    def product(x, scale):
        return products.multiply(x, q, scale, zero_point)

    assert torch.autograd.gradcheck(product, leaves, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(product, leaves)


def test_a_batch_of_inputs_and_a_batch_of_weights():
    x, q, scale = torch.randn(5, 3, 8), integers(5, 4, 8), torch.rand(5, 4, 1)
    got = torch.func.vmap(products.int8_product, (0, None, None, None))(x, q[0], None, None)
    torch.testing.assert_close(got, x @ q[0].float().t())
    got = torch.func.vmap(products.int8_product, (None, 0, 0, None))(x[0], q, scale, None)
    torch.testing.assert_close(got, x[0] @ (q * scale).mT)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", CONFIGS)
def test_the_gradient_of_the_input(dtype, config):
    layer = frozen(64, 96, CONFIGS[config], dtype=dtype)
    x, g = torch.randn(5, 64).to(dtype).requires_grad_(), torch.randn(5, 96).to(dtype)
    (got,) = torch.autograd.grad(layer(x), x, g)
    assert_near(got, g.double() @ layer.weight.dequantize(torch.float64), x)


# ---- compiled ----------------------------------------------------------------------------------------------

COMPILERS = {
    "torch.compile": lambda f, backend: torch.compile(f, backend=backend),
    "desugar backend": lambda f, backend: torch.compile(f, backend="desugar", options={"backend": backend}),
    "desugar.compile": lambda f, backend: desugar.compile(f, backend=backend),
}


@pytest.mark.sweep(144)
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [32, 1])
def test_kernels_of_inductor(n, compiler, config, dtype):
    layer = frozen(64, n, CONFIGS[config], dtype=dtype)
    compiled = COMPILERS[compiler](layer, "inductor")
    most = 1e-5 if dtype is torch.float32 else 2e-2  # eager mode rounds the scale of an input in bfloat16
    with torch.no_grad(), subclasses.strict():
        for x in (
            torch.randn(1, 64),
            torch.randn(1, 128)[:, ::2],
            torch.randn(64, 1).t(),
            torch.randn(3, 64),
            torch.randn(9, 64),
        ):
            got, expected = compiled(x.to(dtype)), layer(x.to(dtype))
            assert got.dtype is dtype and (got - expected).norm() < most * expected.norm()


@pytest.mark.sweep(2)
@pytest.mark.skipif(cpu_kernels.has_avx2_alone(), reason="with AVX2 alone the op multiplies")
@pytest.mark.parametrize("config", ["weights", "asymmetric groups"])
@pytest.mark.parametrize(
    ("size", "dynamic", "fuses"),
    [
        ((8, 64), False, True),
        ((2, 4, 64), False, True),
        ((0, 64), False, True),
        ((9, 64), False, False),
        ((8, 64), True, False),
    ],
)
def test_few_products_are_a_sum_that_a_compiler_fuses(config, size, dynamic, fuses):
    """The limit is 2**14 products: eight rows of 64 by 32 numbers. A symbolic number of rows may exceed it."""
    layer, seen, x = frozen(64, 32, CONFIGS[config]), [], torch.randn(size)

    def backend(graph, inputs):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    compiled = desugar.compile(layer, backend=backend, dynamic=dynamic)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), layer(x))
    assert any("int8_product" in target for target in seen) is not fuses
    assert any("sum" in target for target in seen) is fuses


@pytest.mark.sweep(16)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("door", ["stock", "desugar"])
def test_ever_new_batches_have_one_program(config, grad, door):
    layer, counter = frozen(64, 32, CONFIGS[config]), CompileCounter()
    other, stock = copy.deepcopy(layer), door == "stock"
    compiled = torch.compile(other, backend=counter, dynamic=True) if stock else by_desugar(other)
    with torch._dynamo.config.patch(recompile_limit=3, fail_on_recompile_limit_hit=True):
        for rows in (2, 3, 16, 17, 40, 300) if stock else (1, 2, 3, 16, 17, 40, 300):
            x = torch.randn(rows, 64, requires_grad=grad)
            torch.testing.assert_close(compiled(x), layer(x))
    assert counter.frame_count == stock


@pytest.mark.parametrize(
    "zero_point", [None, torch.tensor([[3]], dtype=torch.int8)], ids=["symmetric", "asymmetric"]
)
def test_a_small_matrix_is_multiplied_in_the_graph(zero_point, monkeypatch):
    monkeypatch.undo()
    x, q, scale = torch.randn(4, 32, requires_grad=True), integers(16, 32), torch.rand(16, 1)
    with torch.profiler.profile() as profile:
        y = products.multiply(x, q, scale, zero_point)
        (grad,) = torch.autograd.grad(y.sum(), x)
    assert not [event for event in profile.events() if "int8_product" in event.name]
    w = affine.from_int8(q, scale, zero_point, torch.float64)
    assert_near(y, x.double() @ w.t(), x)
    assert_near(grad, w.sum(0).expand(4, -1), x.detach())


# ==== the kernel for CUDA =========================================================================================

# What the kernel gets is what `int8_rows` hands it: the op is called as the interpreter runs it, without a device.
VALUES = """
import torch
from subclasses.int8 import Int8Tensor
from subclasses.int8.matmul import cuda_products
torch.library.wrap_triton = lambda kernel: kernel
product = cuda_products.int8_rows._init_fn
torch.manual_seed(0)
for rows, columns, width in ((1, 5, 7), (16, 40, 300), (20, 16, 256), (33, 17, 513), (64, 24, 1024)):
    x = torch.randn(rows, width).to(torch.float16)
    blocks = [(1, width), (columns, width)]
    blocks += [(height, group) for height in (1, columns) for group in (16, 32, 128, 256, 512) if width % group == 0]
    for block_size in blocks:
        for symmetric in (True, False):
            weight = Int8Tensor.from_float(
                torch.randn(columns, width).to(torch.float16), block_size=block_size, symmetric=symmetric
            )
            y = product(x, weight.qdata, weight.scale, weight.zero_point)
            expected = (x.double() @ weight.dequantize().double().t()).to(torch.float16)
            torch.testing.assert_close(y, expected, atol=2e-2, rtol=1e-2)
print("all agree")
"""


@pytest.mark.slow
@needs_triton
def test_the_kernel_for_a_few_rows_computes_what_eager_does():
    """Runs it by Triton's interpreter, on the CPU; it has no products of bfloat16, so in float16."""
    assert interpret(VALUES) == "all agree"


@pytest.mark.sweep(3)
@needs_triton
@pytest.mark.usefixtures("triton_cache")
@pytest.mark.parametrize("rows", [16, 32, 64])
def test_the_kernel_reads_16_bytes_a_thread_and_spills_nothing(rows):
    from subclasses.int8.matmul import cuda_products as products

    width = products.BLOCK_K if rows <= 32 else products.BLOCK_K_OF_MANY
    arguments = dict.fromkeys(("rows", "columns", "width", "group_width", "row_step"), "i32")
    arguments |= {"x_ptr": "*bf16", "w_ptr": "*i8", "scale_ptr": "*bf16", "zero_ptr": "*i8", "y_ptr": "*bf16"}
    constants = {"BLOCK_M": rows, "BLOCK_N": products.BLOCK_N, "BLOCK_K": width, "PART": width}
    constants |= {"IS_GROUPED": False, "HAS_ZERO": False}
    found = compile_for_hopper(products.int8_rows_kernel, arguments, constants, num_warps=4, num_stages=4)
    assert found.count(r"cp\.async\.cg\.shared\.global [^;]*, 0x10") > 0, "no asynchronous copy of 16 bytes"
    assert found.count(r"cp\.async\.ca") == 0, "a copy of fewer bytes"
    assert (
        found.spills == 0 and found.registers <= 168
    )  # three programs of 128 threads for each multiprocessor
    assert found.shared <= 99 * 1024
