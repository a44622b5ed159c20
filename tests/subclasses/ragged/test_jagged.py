"""Making ragged tensors, converting and printing them, and what is refused."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from subclasses import DispatchError, _torch
from subclasses.ragged import JaggedTensor, PaddedTensor
from tests.doors import DOORS
from tests.subclasses.ragged.judge import JAGGED, check_parts, classes, make_batch, refused
from tests.subclasses.ragged.serving import Model, NoReading
from tests.tables import giving, raising

# ---- making one ------------------------------------------------------------------------------------------------


def test_from_tensors_and_a_table():
    rows = [torch.randn(n, 4, dtype=torch.float64, requires_grad=True) for n in (3, 0, 5)]
    x = JaggedTensor.from_tensors(rows)
    assert (len(x), x.shape, x.stride(), x.dtype) == (3, (3, 5, 4), (20, 4, 1), torch.float64)
    assert x.is_contiguous() and x.row_lengths().tolist() == [3, 0, 5]
    torch.testing.assert_close(x.to_tensors(), rows)
    assert all((grad == 1).all() for grad in torch.autograd.grad(x.sum(), rows))
    padded = torch.randn(3, 5, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda p: JaggedTensor.from_padded(p, [3, 0, 5]).to_dense(fill=2), [padded]
    )


OFFSETS = torch.tensor([0, 2, 6])
SIX = JaggedTensor(torch.randn(6, 2), OFFSETS, max_length=9)
NO_ROWS = JaggedTensor(torch.randn(0, 4), torch.zeros(1, dtype=torch.int64))
NO_ENTRIES = JaggedTensor.from_tensors([torch.randn(0, 4)] * 2)
HOLES = make_batch("holes").x.detach()

test_sizes_and_likenesses = giving(
    {
        # max_length is an upper bound
        "an upper bound": (lambda: SIX.shape, (2, 9, 2)),
        "as dense": (lambda: SIX.to_dense().shape, (2, 9, 2)),
        "a mask": (lambda: SIX.mask().sum(), 6),
        "without a bound": (lambda: JaggedTensor(SIX.values, OFFSETS).shape, (2, 4, 2)),
        # no rows, and no entries
        "no rows": (lambda: NO_ROWS.shape, (0, 0, 4)),
        "no rows as tensors": (lambda: NO_ROWS.to_tensors(), []),
        "no rows, pointwise": (lambda: (NO_ROWS * 2 + 1).shape, (0, 0, 4)),
        "sums of no rows": (lambda: NO_ROWS.sum(1).shape, (0, 4)),
        "a sum of nothing": (lambda: NO_ROWS.sum(), 0),
        "no rows as dense": (lambda: NO_ROWS.to_dense().shape, (0, 0, 4)),
        "a layer of no rows": (lambda: F.linear(NO_ROWS, torch.randn(3, 4)).shape, (0, 0, 3)),
        "softmax of no entries": (lambda: NO_ENTRIES.softmax(1).shape, (2, 0, 4)),
        "sums of no entries": (lambda: NO_ENTRIES.sum(1).tolist(), [[0] * 4] * 2),
        "sums of no positions": (lambda: NO_ENTRIES.sum(0).shape, (0, 4)),
        "a mask of no entries": (lambda: NO_ENTRIES.mask().shape, (2, 0)),
        "no entries beside dense ones": (lambda: (NO_ENTRIES + torch.ones(2, 1, 4)).sum(), 0),
        # likenesses are ragged
        **{
            f.__name__: (
                lambda f=f: (type(f(HOLES)), f(HOLES).offsets is HOLES.offsets),
                (JaggedTensor, True),
            )
            for f in (torch.zeros_like, torch.ones_like, torch.empty_like, torch.randn_like)
        },
        "a dtype": (lambda: torch.zeros_like(HOLES, dtype=torch.int64).dtype, torch.int64),
        "full_like": (lambda: torch.full_like(HOLES, 3.0).sum(), 3 * 9 * 4),
        "new_zeros": (lambda: type(HOLES.new_zeros(3)), Tensor),
    }
)


test_bad_input = raising(
    [
        (lambda: JaggedTensor([1.0], torch.tensor([0, 1])), TypeError, "JaggedTensor.values"),
        (lambda: JaggedTensor(torch.ones(2), [0, 2]), TypeError, "JaggedTensor.offsets"),
        (lambda: JaggedTensor(torch.ones(2), torch.tensor([0.0, 2])), ValueError, "expected dtype torch.int64"),
        (lambda: JaggedTensor(torch.ones(2), torch.tensor([0, 2], dtype=torch.int32)), ValueError, "torch.int64"),
        (lambda: JaggedTensor(torch.ones(2), torch.tensor(2)), ValueError, r"expected shape \[B \+ 1\]"),
        (lambda: JaggedTensor(torch.tensor(1.0), torch.tensor([0, 1])), ValueError, "got a scalar"),
        (lambda: JaggedTensor(torch.ones(4), torch.tensor([0, 3, 2, 4])), ValueError, "increasing offsets"),
        (lambda: JaggedTensor(torch.ones(4), torch.tensor([0, 5])), ValueError, "at most 4"),
        (lambda: JaggedTensor(torch.ones(4), torch.tensor([0, 3])), ValueError, "Give lengths"),
        (lambda: JaggedTensor(torch.ones(4), torch.tensor([1, 4])), ValueError, "Give lengths"),
        (
            lambda: JaggedTensor(torch.ones(4), torch.tensor([0, 2, 4]), lengths=torch.tensor([3, 1])),
            ValueError,
            r"\[2, 2\], got \[3, 1\]",
        ),
        (
            lambda: JaggedTensor(torch.ones(4), torch.tensor([0, 4]), lengths=torch.tensor([3, 1])),
            ValueError,
            r"expected shape \[1\]",
        ),
        (lambda: JaggedTensor(torch.ones(4), torch.tensor([0, 4]), ragged_dim=2), ValueError, "from 0 to 1"),
        (lambda: JaggedTensor(torch.ones(4), torch.tensor([0, 4]), ragged_dim=True), ValueError, "ragged_dim"),
        (lambda: JaggedTensor(torch.ones(4), torch.tensor([0, 4]), max_length=-1), ValueError, "non-negative"),
        (lambda: JaggedTensor.from_tensors([]), ValueError, "at least one row"),
        (lambda: JaggedTensor.from_tensors(torch.ones(2, 3)), TypeError, "a list of tensors"),
        (lambda: JaggedTensor.from_tensors([torch.ones(2), 3]), TypeError, "a list of tensors"),
        (lambda: JaggedTensor.from_tensors([torch.tensor(1.0)]), ValueError, "one dimension, and row 0 has none"),
        (lambda: JaggedTensor.from_tensors([torch.ones(2, 3), torch.ones(2, 4)]), ValueError, r"row 1 \(2, 4\)"),
        (lambda: JaggedTensor.from_tensors([torch.ones(2), torch.ones(2).double()]), ValueError, "float64"),
        (lambda: JaggedTensor.from_lengths(torch.ones(4), [2, 3]), ValueError, "add up to 5"),
        (lambda: JaggedTensor.from_lengths(torch.ones(4), [5, -1]), ValueError, "at least 0"),
        (lambda: JaggedTensor.from_padded(torch.ones(2, 3), [4, 1]), ValueError, "from 0 to 3"),
        (lambda: JaggedTensor.from_padded(torch.ones(2, 3), [1]), ValueError, "lengths"),
        (lambda: JaggedTensor.from_nested(torch.ones(2)), TypeError, "layout=torch.jagged"),
        (
            lambda: JaggedTensor(torch.ones(2), torch.tensor([0, 2], device="meta"), max_length=2),
            ValueError,
            "offsets: expected device",
        ),
    ]
)  # fmt: skip
test_what_is_refused = refused(
    {
        "a table of another size": (
            lambda x: x.like_dense(torch.ones(4, 5, 3)),
            ValueError,
            r"size \(4, 5, 4\)",
        ),
        "merged rows as nested ones": (lambda x: x.flatten(0, 1).to_nested(), DispatchError, "unflatten"),
    },
    ["back to back"],
)

# ---- converting ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", JAGGED)
def test_to_dense_and_mask(layout):
    batch = make_batch(layout)
    x = batch.x
    dense, mask = x.to_dense(fill=-1.0), x.mask()
    assert dense.shape == x.shape and mask.shape == (4, 5)
    at = dense.movedim(batch.ragged_dim, 1)
    for i, row in enumerate(batch.rows):
        n = row.shape[batch.ragged_dim - 1]
        torch.testing.assert_close(at[i, :n], row.movedim(batch.ragged_dim - 1, 0))
        assert (at[i, n:] == -1).all() and mask[i].sum() == n
    check_parts(batch, x.like_dense(dense).to_tensors(), batch.rows)


# ---- being a tensor --------------------------------------------------------------------------------------------


@classes
def test_second_derivatives(cls):
    offsets, shapes = torch.tensor([0, 2, 2, 5]), [(5, 4), (4, 4), (3, 1, 4)]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]

    def run(values, weight, bias):
        x = JaggedTensor(values, offsets, max_length=3)
        x = x if cls is JaggedTensor else x.to_padded(multiple=4)
        y = (F.linear(x, weight) + bias).softmax(-1) * x
        return y.sum(1), y.mean(), y.unwrap(cls.__spec__.size_from)

    assert torch.autograd.gradcheck(run, inputs) and torch.autograd.gradgradcheck(run, inputs)


def test_inference_mode_and_threads():
    layer, batch = nn.Linear(4, 4), make_batch()
    with torch.inference_mode():
        x = JaggedTensor(torch.randn(9, 4), batch.offsets)
        got = layer(x).transpose(1, 2).mT.reshape(-1, 4).unflatten(0, (4, 5))[1:]
        torch.testing.assert_close(got.to_tensors(), [layer(row) for row in x.to_tensors()[1:]])
    expected = torch.stack([F.gelu(row * 2).sum(0) for row in batch.rows])
    with ThreadPoolExecutor(4) as pool:
        sums = pool.map(lambda _: [F.gelu(batch.x * 2).sum(1) for _ in range(20)], range(4))
        assert all(torch.allclose(each, expected) for found in sums for each in found)


# ---- a model, for ever-new lengths -----------------------------------------------------------------------------

BATCHES = [[3, 7, 5], [2, 9], [4, 4, 4, 4], [11, 2, 0, 5, 6], [19, 18]]
TABLES = [[5, 3, 9], [16, 1, 2], [0, 4, 4]]  # as many rows of one bucket


def loss_of(model, tokens, targets, merged):
    operands = model(tokens), targets
    return F.cross_entropy(*(t.flatten(0, 1) if merged else t.mT if t.dim() == 3 else t for t in operands))


def loss_of_rows(model, rows):
    losses = [F.cross_entropy(model(row[None])[0], (row + 1) % 9, reduction="none") for row in rows]
    return torch.cat(losses).mean()


def batch_of(layout, rows):
    """Rows of tokens and of targets; what does not exist is no token."""
    if layout == "jagged":
        tokens = JaggedTensor.from_tensors(rows)
        return tokens, tokens.with_values((tokens.values + 1) % 9)
    x = PaddedTensor.from_tensors(rows, multiple=16)
    dense = x.to_dense(fill=10**6)
    return x.with_padded(dense), x.with_padded(torch.where(dense < 9, (dense + 1) % 9, dense))


@pytest.mark.sweep(3)
@pytest.mark.parametrize("door", ["eager", "stock", "desugar"])
@pytest.mark.parametrize(("layout", "batches"), [("jagged", BATCHES), ("padded", TABLES)])
def test_one_program_serves_all_lengths(layout, batches, door):
    model, counter = Model().double(), CompileCounterWithBackend("aot_eager")
    step = functools.partial(loss_of, model, merged=layout == "jagged")
    options = {"dynamic": None if layout == "jagged" else False}
    stock = door == "stock"
    compiled: Any = (
        torch.compile(step, fullgraph=True, backend=counter, **options)
        if stock
        else DOORS[door](step, **options)
    )
    for lengths in batches:
        rows = [torch.randint(0, 9, (n,)) for n in lengths]
        losses = compiled(*batch_of(layout, rows)), loss_of_rows(model, rows)
        torch.testing.assert_close(*losses)
        torch.testing.assert_close(*(torch.autograd.grad(loss, list(model.parameters())) for loss in losses))
    assert door == "eager" or (counter.frame_count if door == "stock" else len(compiled.programs)) == 1


def test_a_training_step_of_a_table_reads_nothing():
    model, rows = Model().double(), [torch.randint(0, 9, (n,)) for n in TABLES[0]]
    batch = batch_of("padded", rows)
    with NoReading(), pytest.raises(AssertionError, match="reads data"):
        torch.ones(2)[0].item()
    with NoReading():
        loss = loss_of(model, *batch, merged=False)
        loss.backward()
    torch.testing.assert_close(loss, loss_of_rows(model, rows))


# ==== printing ======================================================================================================

CLASSES = JaggedTensor, PaddedTensor
MANY = [torch.full((i % 3,), i) for i in range(500)]
LONG = [torch.arange(n) for n in (900, 400, 2)]
VECTORS = [torch.ones(2, 3), torch.ones(1, 3)]
NOTHING, ONE = torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)


def ones(cls):
    return cls.from_tensors([torch.ones(2), torch.ones(1)])


def end(x):
    """What follows the last row."""
    return repr(x).rpartition("],")[2]


def without_gradients(f):
    with torch.inference_mode():
        return f()


def with_edges_of_one(f):
    with _torch.printing_with(edgeitems=1):
        return f()


CASES = {
    "few rows": (
        lambda cls: cls.from_tensors([torch.tensor([1.0, 2.0]), torch.tensor([3.0])]),
        "([\n  tensor([1., 2.]),\n  tensor([3.]),\n], size=(2, 2))",
    ),
    "integers": (
        lambda cls: ones(cls).long(),
        "([\n  tensor([1, 1]),\n  tensor([1]),\n], size=(2, 2))",
    ),
    "half precision": (
        lambda cls: ones(cls).half(),
        "([\n  tensor([1., 1.], dtype=torch.float16),\n  tensor([1.], dtype=torch.float16),\n], size=(2, 2))",
    ),
    "many rows": (
        lambda cls: cls.from_tensors(MANY),
        "([\n  tensor([], dtype=torch.int64),\n  tensor([1]),\n  tensor([2, 2]),\n  ... (494 rows)\n"
        "  tensor([497, 497]),\n  tensor([], dtype=torch.int64),\n  tensor([499]),\n], size=(500, 2))",
    ),
    "long rows": (
        lambda cls: cls.from_tensors(LONG),
        "([\n  tensor([  0,   1,   2,  ..., 897, 898, 899]),\n  tensor([  0,   1,   2,  ..., 397, 398, 399]),\n"
        "  tensor([0, 1]),\n], size=(3, 900))",
    ),
}

test_whole = giving(
    {
        f"{name}, {cls.__name__}": (lambda make=make, cls=cls: repr(make(cls)), cls.__name__ + text)
        for cls in CLASSES
        for name, (make, text) in CASES.items()
    }
)
test_parts = giving(
    {
        f"{name}, {cls.__name__}": (lambda call=call, cls=cls: call(cls), expected)
        for cls in CLASSES
        for name, (call, expected) in {
            "str": (lambda cls: str(ones(cls)) == repr(ones(cls)), True),
            "format": (lambda cls: f"{ones(cls)}" == repr(ones(cls)), True),
            "20 rows": (lambda cls: repr(cls.from_tensors(MANY[:20])).count("tensor("), 20),
            "edges of one": (
                lambda cls: with_edges_of_one(lambda: repr(cls.from_tensors(MANY)).count("tensor(")),
                2,
            ),
            "300 entries": (lambda cls: repr(cls.from_tensors(LONG)[:, :300]).count("..."), 0),
            "the options are put back": (lambda cls: str(torch.arange(900)).count(","), 899),
            "a leaf": (lambda cls: end(ones(cls).requires_grad_()), " size=(2, 2), requires_grad=True)"),
            "a result": (
                lambda cls: end(ones(cls).requires_grad_() * 2),
                " size=(2, 2), grad_fn=<MulBackward0>)",
            ),
            "inference mode": (lambda cls: without_gradients(lambda: end(ones(cls) * 2)), " size=(2, 2))"),
            "turned": (
                lambda cls: end(cls.from_tensors(VECTORS).transpose(1, 2)),
                " size=(2, 3, 2), ragged_dim=2)",
            ),
            "merged": (lambda cls: repr(cls.from_tensors(VECTORS).flatten(0, 1)).count("tensor("), 2),
            "merged, where": (
                lambda cls: repr(cls.from_tensors(VECTORS).flatten(0, 1)).count("ragged_dim=0"),
                1,
            ),
        }.items()
    }
    | {
        "no rows": (
            lambda: repr(JaggedTensor(torch.ones(0, 4), ONE)),
            "JaggedTensor([], size=(0, 0, 4))",
        ),
        "no padded rows": (
            lambda: repr(PaddedTensor(torch.ones(0, 3), NOTHING)),
            "PaddedTensor([], size=(0, 3))",
        ),
        "no integers": (
            lambda: repr(PaddedTensor(NOTHING[:, None], NOTHING)),
            "PaddedTensor([], size=(0, 1), dtype=torch.int64)",
        ),
        "lengths beyond the table": (
            lambda: repr(PaddedTensor(torch.ones(2, 2), torch.tensor([5, 1]))),
            "PaddedTensor([\n  tensor([1., 1.]),\n  tensor([1.]),\n], size=(2, 2))",
        ),
        "rows second": (
            lambda: end(PaddedTensor.from_tensors(VECTORS).transpose(0, 1)),
            " size=(2, 2, 3), ragged_dim=0, batch_dim=1)",
        ),
    }
)


@classes
def test_under_a_mode(cls):
    x, mode, first = ones(cls), _torch.fake_mode(), cls.__spec__.inner_names[0]
    text = repr(x)

    class Refusing(_torch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            raise AssertionError(f"{func} was seen")

    with Refusing():
        assert repr(x) == text
    fake = repr(mode.from_tensor(x))
    with mode:
        assert repr(x) == text
    assert fake.startswith(f"{cls.__name__}({first}=FakeTensor(...") and "ragged_dim=1" in fake
    assert repr(x.to("meta")).startswith(f"{cls.__name__}({first}=tensor(..., device='meta'")
