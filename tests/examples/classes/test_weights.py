"""Weights of the gallery, declared and by hand: layers equal layers of the whole matrix, and inner tensors train."""

from contextlib import contextmanager
from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import desugar
from by_hand.low_rank import LowRank as ByHand
from classes.adam_states import State8
from classes.block_sparse import BlockSparse
from classes.int4_kernel import KernelInt4Weight, int4_linear
from classes.int4_weight import Int4Weight
from classes.low_rank import LowRank
from classes.master_weight import Linear, MasterWeight
from subclasses import DispatchError, strict
from subclasses.testing import suite
from tests.examples.classes.checks import agreeing, check_gradients, converted, formulas, normal, refused
from tests.tables import giving

aten = torch.ops.aten

X, Y = (torch.linspace(-1, 1, 3 * n).view(3, n) for n in (6, 8))
ROW, COLUMN, NARROW = [0, 1, 1], [1, 0, 2], [torch.bfloat16, torch.float64]


def int4(cls=Int4Weight, rows=4, group=4):
    return cls.from_float(torch.randn(rows, 8), group)


def block_sparse(count=3, grid=(2, 3), dtype=None):
    row, column = (torch.tensor((places * 3)[:count], dtype=torch.int64) for places in (ROW, COLUMN))
    return BlockSparse(torch.randn(count, 2, 2, dtype=dtype), row, column, grid=grid)


def low_rank(cls, rows=4, rank=2, columns=6, dtype=None):
    return cls(torch.randn(rows, rank, dtype=dtype), torch.randn(rank, columns, dtype=dtype))


def master_weight(rows=4, compute=torch.bfloat16):
    return MasterWeight(torch.randn(rows, 6), compute=compute)


# ---- the kit ---------------------------------------------------------------------------------------------------


def suite_of(make, ops, **options):
    return suite(make, ops=ops, sizes=[partial(make, n) for n in (5, 7)], **options)


OF_INT4 = {F.linear: lambda x: (Y, x)}
OF_LOW_RANK = {F.linear: lambda x: (X, x), torch.matmul: lambda x: (x, X.t())}
globals().update(
    TestInt4Weight=suite_of(
        partial(int4, Int4Weight), OF_INT4, variants=[partial(int4, group=n) for n in (2, 8)]
    ),
    TestInt4WeightOfBfloat16=pytest.mark.slow(
        suite(lambda: int4().bfloat16(), paths={}, rtol=0.05, atol=0.05)
    ),
    TestKernelInt4Weight=suite_of(partial(int4, KernelInt4Weight), OF_INT4),
    TestBlockSparse=suite_of(
        block_sparse,
        {F.linear: lambda x: (torch.cat([X, X], 1)[:, : x.shape[1]], x)},
        variants=[lambda: block_sparse(grid=(3, 3))],
    ),
    TestLowRank=suite_of(partial(low_rank, LowRank), OF_LOW_RANK),
    TestByHand=suite_of(partial(low_rank, ByHand), OF_LOW_RANK, construct=ByHand),
    TestMasterWeight=suite_of(
        master_weight,
        {F.linear: lambda x: (X.bfloat16(), x)},
        variants=[lambda: master_weight(compute=torch.float16), lambda: master_weight(compute=torch.float64)],
        rtol=0.05,
        atol=0.05,
    ),
    TestState8=suite(
        lambda rows=4: State8.from_float(torch.randn(rows, 8), 16),
        ops={
            aten.lerp: lambda x: (x, X[:, :1].new_ones(len(x), 8), 0.5),
            aten.mul.Tensor: lambda x: (x, 2.0),
        },
        sizes=[lambda n=n: State8.from_float(torch.randn(n, 8), 16) for n in (5, 7)],
        variants=[lambda: State8.from_float(torch.randn(4, 8), 8)],
        rtol=0.1,
        atol=0.1,
    ),
    TestWide=suite(
        lambda: master_weight(compute=torch.float64), ops={F.linear: lambda x: (X.double(), x)}, paths={}
    ),
)


# ---- layers ----------------------------------------------------------------------------------------------------


def whole(blocks, row, column, grid):
    """The matrix, block by block."""
    rows = [[torch.zeros(blocks.shape[1:]) for _ in range(grid[1])] for _ in range(grid[0])]
    for block, i, j in zip(blocks, row.tolist(), column.tolist(), strict=True):
        rows[i][j] = rows[i][j] + block
    return torch.cat([torch.cat(row, 1) for row in rows])


SCALES = torch.rand(4, 2, dtype=torch.float64) + 0.5
PACKED = {cls: int4(cls) for cls in (Int4Weight, KernelInt4Weight)}
BLOCKS = block_sparse(4)  # two blocks in one place
PLACES = BLOCKS.row, BLOCKS.column, BLOCKS.grid
# The part of a weight that trains, the width of an input, the weight and a plain layer.
LAYERS = {
    **{
        cls.__name__: (
            SCALES,
            8,
            lambda scale, w=w: type(w)(w.packed, scale, **{"group": 4} if type(w) is Int4Weight else {}),
            lambda x, scale, bias, w=w: F.linear(
                x,
                (w.materialize() / w.scale.repeat_interleave(4, 1)).round() * scale.repeat_interleave(4, 1),
                bias,
            ),
        )
        for cls, w in PACKED.items()
    },
    "block sparse": (
        torch.randn(4, 2, 2, dtype=torch.float64),
        6,
        lambda blocks: BlockSparse(blocks, *PLACES[:2], grid=PLACES[2]),
        lambda x, blocks, bias: F.linear(x, whole(blocks, *PLACES), bias),
    ),
    **{
        f"master weight, {compute}": (
            torch.randn(4, 6),
            6,
            lambda master, compute=compute: MasterWeight(master, compute=compute),
            lambda *leaves, compute=compute: F.linear(*(t.to(compute) for t in leaves)),
        )
        for compute in (torch.bfloat16, torch.float64, torch.float32)
    },
}


def chain(x, a, b):
    return F.linear(x @ a, b, x[0] @ a @ b.mT @ torch.ones(4, 4, dtype=x.dtype)).tanh() @ a


test_values_and_gradients = formulas(
    {
        f"{name}, {size}": (
            lambda part=part, size=(*size, width): [
                torch.randn(size, dtype=part.dtype),
                part.clone(),
                torch.randn(4, dtype=part.dtype),
            ],
            lambda *leaves: leaves,
            lambda x, part, bias, wrap=wrap: F.linear(x, wrap(part), bias).tanh(),
            lambda *leaves, plain=plain: plain(*leaves).tanh(),
            lambda y: y,
            {},
            lambda y: y.square().sum(),
        )
        for name, (part, width, wrap, plain) in LAYERS.items()
        for size in [(), (3,), (2, 3), (0,), (1,)]
    }
    | {
        f"products of low rank, {cls.__module__}": (
            normal((3, 4), (4, 2), (2, 6), (4, 2), (2, 6)),
            lambda x, a, b, c, d, cls=cls: (x, cls(a, b), cls(c, d)),
            chain,
            lambda x, a, b, c, d: chain(x, a @ b, c @ d),
            lambda y: y,
            {},
            lambda y: y.square().sum(),
        )
        for cls in (LowRank, ByHand)
    },
    sweep=32,
)


WEIGHTS = {
    **{cls.__name__: (partial(int4, cls), Y) for cls in PACKED},
    "block sparse": (block_sparse, X),
    **{f"master weight of {n} rows": (partial(master_weight, n), X) for n in (0, 1, 4)},
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", WEIGHTS)
def test_a_compiled_layer_makes_no_matrix(name, way):
    make, x = WEIGHTS[name]
    w = make()
    with strict():  # no op of the layer makes the matrix by the fallback
        got = way(lambda x, w: F.linear(x, w).relu())(x, w)
    torch.testing.assert_close(got, F.linear(x.to(w.dtype), w.materialize()).relu())


TWO, THREE, THREE_SCALES = torch.zeros(2).long(), torch.zeros(3).long(), torch.ones(4, 3)


def writes(size, error):
    """The writes that each weight refuses."""
    return (error, None, [lambda w: w.mul_(2), lambda w: w.__isub__(w), lambda w: w.copy_(torch.zeros(size))])


# ---- int4 ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_op_is_well_formed():
    w = int4(KernelInt4Weight)
    x, scale = torch.randn(3, 2, 4, requires_grad=True), w.scale.clone().requires_grad_()
    torch.library.opcheck(int4_linear, (x, w.packed, scale))
    doubles = [t.detach().double().requires_grad_() for t in (x, scale)]
    assert torch.autograd.gradcheck(lambda x, scale: int4_linear(x, w.packed, scale), doubles)


# The largest number of each row is 7.
NUMBERS = torch.cat([torch.full((2, 1), 7), torch.arange(-7, 8).tile(2)[:26].view(2, 13)], 1) * 0.5
LEAST = torch.tensor([[0x0F]], dtype=torch.uint8)


def test_compiled_code_holds_one_node_for_the_kernel():
    layer = desugar.compile(lambda x, w: F.linear(x, w), backend="eager")
    layer(Y, int4(KernelInt4Weight))
    code = layer.programs[0].forward.code
    assert code.count("gallery.int4_linear.default(") == 1 and "bitwise_and" not in code


# ---- blocks ----------------------------------------------------------------------------------------------------


def test_one_program_serves_every_pattern():
    layer = desugar.compile(lambda x, w: F.linear(x, w), backend="eager")
    for pattern in ([0, 0, 1], [1, 1, 1], [0, 1, 0]):
        w = BlockSparse(torch.randn(3, 2, 2), torch.tensor(pattern), torch.tensor(COLUMN), grid=(2, 3))
        torch.testing.assert_close(layer(X, w), X @ w.materialize().T)
    assert len(layer.programs) == 1


LARGEST = torch.arange(24.0).view(4, 6)


# ---- low rank --------------------------------------------------------------------------------------------------

low_rank_classes = pytest.mark.parametrize("cls", [LowRank, ByHand], ids=["declared", "by hand"])


@contextmanager
def no_matrix():
    """Raises where an op makes the matrix."""
    with strict(), mock.patch.object(ByHand, "materialize", side_effect=AssertionError):
        yield


@low_rank_classes
def test_gradients_of_products_and_of_the_matrix_add_up(cls):
    factors = torch.randn(4, 2, requires_grad=True), torch.randn(2, 6, requires_grad=True)
    results = [(torch.ones(3, 4) @ w, w * w) for w in (cls(*factors), factors[0] @ factors[1])]
    check_gradients(*results, factors, lambda t: t[0].square().sum() + t[1].sum())


@pytest.mark.sweep(12)
@pytest.mark.parametrize("ranks", [(1, 3), (3, 1), (2, 2)])
@low_rank_classes
def test_a_product_of_two_keeps_the_smaller_rank(cls, way, ranks):
    a, b = low_rank(cls, 4, ranks[0], 6), low_rank(cls, 6, ranks[1], 5)
    with no_matrix():
        product = way(torch.matmul)(a, b)
    assert isinstance(product, cls) and product.left.shape[1] == min(ranks)
    torch.testing.assert_close(product.materialize(), a.materialize() @ b.materialize())


@low_rank_classes
def test_no_product_makes_the_matrix(cls, way):
    w = low_rank(cls, 400, 2, 600)
    with no_matrix():
        got = way(lambda w, x, v: (w @ x, w @ v, F.linear(v, w)))(w, torch.randn(600, 3), torch.ones(600))
    assert [t.shape for t in got[1:]] == [(400,), (400,)]


# ---- master weights --------------------------------------------------------------------------------------------


def test_a_module_is_converted_without_a_loss():
    layer = nn.Linear(6, 4)
    weight = layer.weight.detach().clone()
    layer.weight = nn.Parameter(MasterWeight(weight, compute=torch.float32), requires_grad=False)
    layer = layer.bfloat16()
    assert layer(X).dtype == torch.bfloat16
    torch.testing.assert_close(layer.float()(X), F.linear(X, weight, layer.bias))


def test_a_step_that_bfloat16_would_lose(way):
    layer = Linear(torch.ones(4, 6), torch.bfloat16)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-4)
    way(layer)(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(layer.master.detach(), torch.full((4, 6), 1 - 1e-4), rtol=0, atol=1e-7)
    assert torch.equal(layer.master.bfloat16(), torch.ones(4, 6).bfloat16())


# ---- every class ---------------------------------------------------------------------------------------------

test_results_are_those_of_the_matrix = agreeing(
    {
        "the nearest four-bit numbers": (
            [partial(cls.from_float, NUMBERS.double(), 14) for cls in PACKED],
            lambda w: [
                (w.packed.numel(), 14),
                (w.scale.tolist(), [[0.5], [0.5]]),
                (w.materialize(), NUMBERS.double()),
                (2 / (w + 9), 2 / (NUMBERS.double() + 9)),
            ],
        ),
        "blocks": (
            [partial(block_sparse, count) for count in (0, 4)],
            lambda w: [
                (w.materialize(), whole(*w.unwrap(), w.grid)),
                (F.linear(X, w), X @ whole(*w.unwrap(), w.grid).T),
                (2 / (w + 1), 2 / (whole(*w.unwrap(), w.grid) + 1)),
            ],
        ),
        **{
            f"batches, vectors and keywords, {tuple(x.shape)}": (
                [partial(low_rank, cls, 4, 2, 4) for cls in (LowRank, ByHand)],
                lambda w, x=x: [
                    (x @ w, x @ w.materialize()),
                    (w @ x.unsqueeze(-1), w.materialize() @ x.unsqueeze(-1)),
                    (F.linear(x, weight=w, bias=X[0, :4]), F.linear(x, w.materialize(), X[0, :4])),
                ],
            )
            for x in (torch.randn(4), torch.randn(2, 3, 4), torch.randn(0, 4))
        },
        "sizes of none and one": (
            [
                partial(low_rank, cls, *size)
                for cls in (LowRank, ByHand)
                for size in ((0, 1, 3), (3, 0, 2), (1, 1, 1), (8, 3, 8))
            ],
            lambda w: [
                (w.shape, (len(w.left), w.right.shape[1])),
                (w @ torch.ones(w.shape[1], 2), w.materialize() @ torch.ones(w.shape[1], 2)),
            ],
        ),
        "a conversion keeps the master": (
            [lambda: torch.randn(4, 6, requires_grad=True)],
            lambda master: [
                (type(MasterWeight(master).int()) is torch.Tensor, True),
                *(
                    pair
                    for wide in [MasterWeight(master).half().double()]
                    for pair in (
                        (type(wide) is MasterWeight and wide.dtype == wide.compute == torch.float64, True),
                        (wide.master, master.detach()),
                        (torch.autograd.grad(F.linear(X, wide).sum(), master)[0], X.sum(0).expand(4, 6)),
                    )
                ),
            ],
        ),
        "the nearest matrix": (
            [
                partial(low_rank, cls, n, r, n, torch.float64)
                for cls in (LowRank, ByHand)
                for n, r in ((1, 1), (8, 3))
            ],
            lambda w: [(type(w).nearest(w.materialize(), w.left.shape[1]).materialize(), w.materialize())],
        ),
    }
)
test_conversions = converted(
    {
        "conversions of int4 weights": (
            [int4, partial(int4, KernelInt4Weight)],
            [torch.float16, *NARROW],
            lambda w: [w.materialize(), F.linear(Y.to(w.dtype), w), F.linear(Y.to(w.dtype), w.float())],
        ),
        "conversions keep the places": ([block_sparse], NARROW, lambda w: [F.linear(X.to(w.dtype), w)]),
        "conversions of matrices of low rank": (
            [partial(low_rank, LowRank), partial(low_rank, ByHand)],
            NARROW,
            lambda w: [w @ torch.ones(6, dtype=w.dtype), 2 / w - w],
        ),
    }
)

test_what_is_refused = refused(
    {
        "what int4 weights refuse": (
            [int4, partial(int4, KernelInt4Weight)],
            {
                "other groups": (
                    ValueError,
                    "an even group that divides the row",
                    [lambda w: int4(type(w), group=3), lambda w: int4(type(w), group=16)],
                ),
                "other scales": (
                    ValueError,
                    r"scales of size \[4, 3\]( for groups of 4 in 4 x 8)?",
                    [
                        lambda w: type(w)(
                            w.packed, THREE_SCALES, **{"group": 4} if type(w) is Int4Weight else {}
                        )
                    ],
                ),
                "writes": writes((4, 8), DispatchError),
                # The second has as many numbers as three rows.
                "an input of another length": (
                    RuntimeError,
                    "unflatten|cannot be multiplied",
                    [lambda w: F.linear(torch.ones(3, 7), w), lambda w: F.linear(torch.ones(4, 6), w)],
                ),
            },
        ),
        "what block sparse weights refuse": (
            [block_sparse],
            {
                "other places": (
                    ValueError,
                    r"need \[n, height, width\], \[n\], \[n\]",
                    [lambda w: BlockSparse(torch.ones(2, 2, 2), THREE, TWO, grid=(1, 1))],
                ),
                "writes": writes((4, 6), NotImplementedError),
            },
        ),
        "what matrices of low rank refuse": (
            [partial(low_rank, LowRank), partial(low_rank, ByHand)],
            {
                "other factors": (
                    ValueError,
                    r"factors of sizes \[4, 2\] and \[3, 6\]",
                    [lambda w: type(w)(torch.ones(4, 2), torch.ones(3, 6))],
                ),
                "writes": writes((4, 6), NotImplementedError),
                "more writes": (
                    NotImplementedError,
                    None,
                    [lambda w: w.__iadd__(w), lambda w: w.__setitem__(0, 1.0)],
                ),
            },
        ),
        "what master weights refuse": (
            [master_weight],
            {
                "another dtype": (
                    ValueError,
                    r"expected dtype torch\.float32",
                    [lambda w: MasterWeight(w.master.half())],
                ),
                "writes": writes((4, 6), DispatchError),
            },
        ),
    }
)

test_results = giving(
    {
        f"{what}: {name}": case
        for what, cases in {
            "the least number no rows zeros and one group": {
                "the least number": (
                    lambda: Int4Weight(LEAST, torch.ones(1, 1), group=2).materialize().tolist(),
                    [[7, -8]],
                ),
                "no columns": (
                    lambda: Int4Weight.from_float(torch.zeros(2, 0), 4).materialize().shape,
                    (2, 0),
                ),
                **{
                    f"{name}, {cls.__name__}": (
                        lambda cls=cls, size=size: F.linear(Y, cls.from_float(*size)).tolist(),
                        expected,
                    )
                    for cls in PACKED
                    for name, size, expected in (
                        ("no rows", (torch.zeros(0, 8), 4), [[]] * 3),
                        ("zeros", (torch.zeros(2, 8), 8), [[0, 0]] * 3),
                    )
                },
            },
            "the largest blocks": {
                f"{count}": (
                    lambda count=count: BlockSparse.largest(LARGEST, 2, 3, count).materialize().tolist(),
                    expected.tolist(),
                )
                for count, expected in ((4, LARGEST), (1, F.pad(LARGEST[2:, 3:], (3, 0, 2, 0))))
            },
        }.items()
        for name, case in cases.items()
    }
)
