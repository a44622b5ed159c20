"""Products of floats and int8 matrices: values, derivatives, programs for any batch, and the kernels for CUDA."""

import copy

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import desugar
import subclasses
from bench.gpu.stages import int8
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
    scale = torch.ones(1, 1, dtype=torch.float64) if scale is None else scale
    return x.double() @ affine.from_int8(q, scale, zero_point, torch.float64).t()


def assert_near(got, expected, x):
    """Compares with an error of the dtype relative to the size of the result as a whole."""
    assert got.dtype is x.dtype and got.shape == expected.shape and got.is_contiguous()
    most = 6 * torch.finfo(x.dtype).eps * expected.norm().clamp(min=1e-9)
    assert (got.double() - expected).norm() < most


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
    assert [any(word in target for target in seen) for word in ("int8_product", "sum")] == [not fuses, fuses]


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


# ==== the kernels for CUDA ========================================================================================

# The op runs in the interpreter, without a device, and passes the kernel its usual arguments. Tiles are small, so that
# few numbers make several tiles and parts.
VALUES = """
import itertools
import torch
from subclasses.int8 import Int8Tensor
from subclasses.int8.matmul import cuda_products, kernels

torch.library.wrap_triton = lambda kernel: kernel
cuda_products.multiprocessors = lambda device: 1
Tiles = cuda_products.Tiles
cuda_products.ONE_ROW = Tiles(1, 2, 32, 8), Tiles(1, 1, 64, 16)
cuda_products.FEW_ROWS = Tiles(16, 32, 16), Tiles(16, 16, 32), Tiles(32, 16, 64), Tiles(64, 16, 32)
cuda_products.FEW_ROWS_OF_INTEGERS = Tiles(16, 32, 32), Tiles(16, 16, 64), Tiles(32, 16, 32), Tiles(64, 16, 32)
product, dynamic = cuda_products.int8_rows._init_fn, cuda_products.int8_by_int8_rows._init_fn
torch.manual_seed(0)
parts = set()
for rows, columns, width in (
    (1, 5, 7), (1, 41, 300), (1, 33, 256), (2, 16, 1024), (16, 40, 300), (20, 24, 384), (33, 17, 513)
):
    x = torch.randn(rows, width).to(torch.float16)
    blocks = [(1, width), (columns, width)]
    blocks += [(height, group) for height in (1, columns) for group in (8, 48, 96, 256) if width % group == 0]
    for block_size, symmetric in itertools.product(blocks, (True, False)):
        weight = Int8Tensor.from_float(
            torch.randn(columns, width).to(torch.float16), block_size=block_size, symmetric=symmetric
        )
        y = product(x, weight.qdata, weight.scale, weight.zero_point)
        expected = (x.double() @ weight.dequantize(torch.float32).double().t()).to(torch.float16)
        torch.testing.assert_close(y, expected, atol=2e-2, rtol=1e-2)
    if rows > 1:
        tiles = cuda_products.tiles_of_rows(cuda_products.FEW_ROWS, rows, columns, 1)
        parts.add(cuda_products.parts_of_rows(tiles, columns, width, 1))
assert parts == {1, 2}, parts
for (rows, columns, width), one in itertools.product(
    ((1, 5, 7), (3, 41, 300), (4, 16, 512), (16, 40, 300), (20, 32, 64), (33, 17, 513)), (True, False)
):
    q = torch.randint(-128, 128, (columns, width), dtype=torch.int8)
    scale = torch.rand(1 if one else columns, 1) / 512
    x = (torch.randn(rows, width) * torch.logspace(-3, 3, rows)[:, None]).to(torch.float16)
    x[1:2] = 0
    x[2:3] = torch.arange(width) / 2
    given = kernels.quantize_rows(x, "row", symmetric=True)
    expected = kernels.int8_times_int8(given, kernels.Rows(q, scale, None), x.dtype)
    assert torch.equal(dynamic(given.qdata, given.scale, q, scale, x.dtype), expected)
    if rows <= kernels.CUDA_ROWS_QUANTIZED_INSIDE:
        assert torch.equal(dynamic(x, None, q, scale, x.dtype), expected)
        x[0, 3] = float("nan")
        assert dynamic(x, None, q, scale, x.dtype).isnan().all(1).tolist() == [True] + [False] * (rows - 1)
print("all agree")
"""


@pytest.mark.slow
@needs_triton
def test_the_kernels_for_a_few_rows_compute_what_eager_does():
    """Runs them by Triton's interpreter, on the CPU; it does not round to bfloat16, so in float16."""
    assert interpret(VALUES) == "all agree"


FLOATS = {"IS_GROUPED": False, "HAS_ZERO": False}
GROUPED = {"IS_GROUPED": True, "HAS_ZERO": True, "PART": 128}
POINTERS = {"w_ptr": "*i8", "zero_ptr": "*i8", "scale_ptr": "*fp32", "x_scale_ptr": "*fp32", "y_ptr": "*bf16"}
# Kernels, their tiles, constants, the type of the input, and the most registers of a thread.
KINDS = {
    "one row": ("int8_row_kernel", lambda m: m.ONE_ROW, FLOATS, "*bf16", 104),
    "one row, groups": ("int8_row_kernel", lambda m: m.ONE_ROW, GROUPED, "*bf16", 128),
    "few rows": ("int8_rows_kernel", lambda m: m.FEW_ROWS, FLOATS, "*bf16", 112),
    "few rows, groups": ("int8_rows_kernel", lambda m: m.FEW_ROWS, GROUPED, "*bf16", 168),
    "few rows, measured": (
        "int8_rows_kernel",
        lambda m: [m.Tiles(rows, *tiles) for rows in (16, 64) for tiles in int8.TILES[rows]],
        FLOATS,
        "*bf16",
        128,
    ),
    "integers": (
        "int8_by_int8_rows_kernel",
        lambda m: m.FEW_ROWS_OF_INTEGERS,
        {"QUANTIZES": False},
        "*i8",
        80,
    ),
    "integers of floats": (
        "int8_by_int8_rows_kernel",
        lambda m: [tiles for tiles in m.FEW_ROWS_OF_INTEGERS if tiles.rows == 16],
        {"QUANTIZES": True, "X_ROWS": 4},
        "*bf16",
        80,
    ),
}


@pytest.mark.slow
@needs_triton
@pytest.mark.usefixtures("triton_cache")
@pytest.mark.parametrize(("name", "tables", "constants", "x", "registers"), KINDS.values(), ids=KINDS)
def test_the_kernels_read_16_bytes_a_thread_ahead_and_spill_nothing(name, tables, constants, x, registers):
    from subclasses.int8.matmul import cuda_products

    kernel, table = getattr(cuda_products, name), tables(cuda_products)
    for tiles in table:
        values = {
            "BLOCK_M": tiles.rows,
            "BLOCK_N": tiles.columns,
            "BLOCK_K": tiles.width,
            "PART": tiles.width,
            "X_ROWS": tiles.rows,
            "IS_DEPENDENT": tiles == table[0],
            **constants,
        }
        found = compile_for_hopper(
            kernel,
            {n: {**POINTERS, "x_ptr": x}.get(n, "i32") for n in kernel.arg_names if n not in values},
            {n: values[n] for n in kernel.arg_names if n in values},
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
        wide = r"ld\.global\.[\w:.]*v4\.b32" if tiles.rows == 1 else r"cp\.async\.cg[\w:.]* [^;]*, 0x10"
        ahead = (2 if tiles.rows == 1 else tiles.stages - 1) * tiles.columns * tiles.width
        assert found.count(wide) >= ahead // (16 * 32 * tiles.warps), f"{tiles}: loads of fewer bytes"
        # Before 3.9, Triton's copies to shared memory lose the policy.
        assert tiles.rows > 1 or found.count("evict_first")
        assert found.count("griddepcontrol") == 2 * (tiles == table[0]) and found.spills == 0
        assert found.registers <= registers and found.shared <= 99 * 1024, (
            f"{tiles}: {found.registers} registers"
        )


@needs_triton
def test_tiles_are_chosen_by_the_shape():
    """The tile, and the parts of a row, for layers of Llama-3-8B and a small one on 132 multiprocessors."""
    from subclasses.int8.matmul import cuda_products as m

    for (rows, columns, width), (tiles, parts) in {
        (1, 4096, 4096): ((1, 8, 512), None),
        (1, 28672, 4096): ((1, 1, 4096), None),
        (1, 64, 32): ((1, 8, 512), None),
        (16, 4096, 4096): ((16, 32, 256), 4),
        (16, 1024, 4096): ((16, 32, 256), 4),
        (16, 28672, 4096): ((16, 64, 128), 1),
        (64, 4096, 14336): ((64, 64, 128), 8),
    }.items():
        few = m.tiles_of_rows(m.FEW_ROWS, rows, columns, 132)
        found = m.tiles_of_one_row(columns, width, 132) if rows == 1 else few
        assert found[:3] == tiles, (rows, columns, width)
        assert parts in (None, m.parts_of_rows(few, columns, width, 132)), (rows, columns, width)
