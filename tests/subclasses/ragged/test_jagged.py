"""Ragged tensors made, converted and printed; beside torch.nested, in modules, optimizers, files and graphs."""

import copy
import io
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subclasses import DispatchError, _torch
from subclasses.ragged import JaggedTensor, PaddedTensor
from tests.doors import COMPILED, by_desugar
from tests.modules import Held
from tests.subclasses.ragged.judge import (
    JAGGED,
    LENGTHS as LENGTHS_OF_BATCH,
    check_parts,
    classes,
    make_batch,
    refused,
    same,
    with_holes,
)
from tests.tables import giving, raising

# ---- making one ------------------------------------------------------------------------------------------------


MADE = JaggedTensor.from_tensors([torch.randn(n, 4, dtype=torch.float64) for n in (3, 0, 5)])
OFFSETS = torch.tensor([0, 2, 6])
SIX = JaggedTensor(torch.randn(6, 2), OFFSETS, max_length=9)
NO_ROWS = JaggedTensor(torch.randn(0, 4), torch.zeros(1, dtype=torch.int64))
NO_ENTRIES = JaggedTensor.from_tensors([torch.randn(0, 4)] * 2)
HOLES = make_batch("holes").x.detach()

test_sizes_and_likenesses = giving(
    {
        "rows": (
            lambda: (len(MADE), MADE.shape, MADE.stride(), MADE.dtype, MADE.is_contiguous()),
            (3, (3, 5, 4), (20, 4, 1), torch.float64, True),
        ),
        "gradients of a table": (
            lambda: torch.autograd.gradcheck(
                lambda t: JaggedTensor.from_padded(t, [3, 0, 5]).to_dense(fill=2),
                [torch.randn(3, 5, 4, dtype=torch.float64, requires_grad=True)],
            ),
            True,
        ),
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
    x, place = batch.x, batch.ragged_dim - 1
    table = nn.utils.rnn.pad_sequence([row.movedim(place, 0) for row in batch.rows], True, -1.0)
    torch.testing.assert_close(x.to_dense(fill=-1.0), table.movedim(1, place + 1))
    assert torch.equal(x.mask(), torch.arange(5) < torch.tensor(LENGTHS_OF_BATCH)[:, None])
    check_parts(batch, x.like_dense(table.movedim(1, place + 1)).to_tensors(), batch.rows)


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


# ==== printing ======================================================================================================

CLASSES = JaggedTensor, PaddedTensor
MANY = [torch.full((i % 3,), i) for i in range(500)]
LONG = [torch.arange(n) for n in (900, 400, 2)]
VECTORS = [torch.ones(2, 3), torch.ones(1, 3)]
NOTHING, ONE = torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)


def ones(cls):
    return cls.from_tensors([torch.ones(2), torch.ones(1)])


def end(x):
    """The text of a repr after the last row."""
    return repr(x).rpartition("],")[2]


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
                lambda cls: _torch.printing_with(edgeitems=1)(
                    lambda: repr(cls.from_tensors(MANY)).count("tensor(")
                )(),
                2,
            ),
            "300 entries": (lambda cls: repr(cls.from_tensors(LONG)[:, :300]).count("..."), 0),
            "the options are put back": (lambda cls: str(torch.arange(900)).count(","), 899),
            "a leaf": (lambda cls: end(ones(cls).requires_grad_()), " size=(2, 2), requires_grad=True)"),
            "a result": (
                lambda cls: end(ones(cls).requires_grad_() * 2),
                " size=(2, 2), grad_fn=<MulBackward0>)",
            ),
            "inference mode": (
                lambda cls: torch.inference_mode()(lambda: end(ones(cls) * 2))(),
                " size=(2, 2))",
            ),
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


# ==== among what else there is ====================================================================================

KINDS = {
    "jagged": JaggedTensor.from_tensors,
    "padded": lambda rows: PaddedTensor.from_tensors(rows, multiple=4),
    "padded batch": lambda rows: PaddedTensor.from_tensors(rows, multiple=4, batch_multiple=4),
}
LENGTHS = [2, 0, 3]


MORE_KINDS = KINDS | {"holes": with_holes, "[T, B]": lambda rows: KINDS["padded"](rows).transpose(0, 1)}
kinds = pytest.mark.parametrize("kind", KINDS)


def rows_of(lengths=LENGTHS, **options):
    return [torch.randn(n, 2, dtype=torch.float64, **options) for n in lengths]


def check_rows(x, rows):
    torch.testing.assert_close(x.detach().to_tensors(), [row.detach() for row in rows])


# ---- torch.nested ----------------------------------------------------------------------------------------------


STARTS, COUNTS = torch.tensor([0, 1, 0]), torch.tensor([2, 3, 5])
jag = torch.nested.nested_tensor_from_jagged
# A nested tensor of a leaf, and the rows of it.
NESTED = {
    "back to back": (
        lambda t: jag(t.flatten(0, 1), torch.tensor([0, 2, 2, 15])),
        lambda t: t.flatten(0, 1).split([2, 0, 13]),
    ),
    "with holes": (
        lambda t: torch.nested.narrow(t, 1, STARTS, COUNTS, layout=torch.jagged),
        lambda t: [t[0, :2], t[1, 1:4], t[2]],
    ),
    "ragged along 2": (
        lambda t: jag(t, torch.tensor([0, 2, 5]), jagged_dim=2),
        lambda t: t.split([2, 3], 1),
    ),
    "without rows": (lambda t: jag(t[0, :0], torch.zeros(1, dtype=torch.int32)), lambda t: []),
    "short offsets": (
        lambda t: jag(t[0, :3], torch.tensor([0, 1, 3], dtype=torch.int32)),
        lambda t: t[0, :3].split([1, 2]),
    ),
}


@pytest.mark.parametrize("name", NESTED)
def test_from_nested_and_back_shares_and_is_differentiable(name):
    nest, part = NESTED[name]
    table = torch.randn(3, 5, 2, dtype=torch.float64, requires_grad=True)
    nested, rows = nest(table), part(table)
    x = JaggedTensor.from_nested(nested)
    assert (x.shape[0], x.offsets.dtype) == (len(rows), torch.int64)
    assert x.row_lengths().tolist() == [row.shape[x.ragged_dim - 1] for row in rows]
    check_rows(x, rows)
    if rows:
        assert x.values.data_ptr() == x.to_nested().values().data_ptr() == table.data_ptr()
        assert x.to_nested().offsets() is x.offsets
        losses = x.square().sum(), sum(r.square().sum() for r in rows)
        torch.testing.assert_close(*(torch.autograd.grad(loss, table) for loss in losses))


LEAF = torch.nested.nested_tensor(rows_of(), layout=torch.jagged, requires_grad=True)
test_a_nested_leaf = same(
    {
        "its offsets": lambda: (JaggedTensor.from_nested(LEAF).offsets is LEAF.offsets(), True),
        "its gradient": lambda: (
            torch.autograd.grad(JaggedTensor.from_nested(LEAF).square().sum(), LEAF)[0].values(),
            2 * LEAF.values().detach(),
        ),
    }
)


# ---- from values, tables and masks -----------------------------------------------------------------------------


def test_the_same_rows_from_everything():
    rows = rows_of()
    values = torch.cat(rows)
    table = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=torch.nan)
    mask = torch.arange(3) < torch.tensor(LENGTHS)[:, None]
    for x in (
        JaggedTensor.from_tensors(rows),
        JaggedTensor.from_lengths(values, LENGTHS),
        JaggedTensor.from_lengths(values, torch.tensor(LENGTHS, dtype=torch.int32)),
        JaggedTensor.from_lengths(values, LENGTHS, max_length=7),
        JaggedTensor.from_lengths(values, torch.tensor(LENGTHS)),
        JaggedTensor(values, torch.tensor([0, 2, 2, 5])),
        JaggedTensor.from_padded(table, LENGTHS),
        JaggedTensor.from_mask(table, mask),
        PaddedTensor(table, torch.tensor(LENGTHS)),
        PaddedTensor.from_mask(table, mask),
        PaddedTensor.from_mask(table, mask).to_jagged(),
        JaggedTensor.from_mask(table, mask).to_padded(multiple=8),
    ):
        check_rows(x, rows)
        assert torch.equal(x.mask()[:, :3], mask) and not x.mask()[:, 3:].any()
        torch.testing.assert_close(x.to_dense(fill=torch.nan)[:, :3], table, equal_nan=True)
    assert JaggedTensor.from_lengths(values, LENGTHS).values.data_ptr() == values.data_ptr()
    assert PaddedTensor.from_mask(table, mask).padded is table


TABLE, ANYWHERE = torch.randn(2, 4, requires_grad=True), torch.tensor([[0, 1, 1, 0], [0, 0, 0, 1]]) > 0
test_a_mask_may_lie_anywhere = same(
    {
        "rows": lambda: (JaggedTensor.from_mask(TABLE, ANYWHERE), [TABLE[0, 1:3], TABLE[1, 3:]]),
        "gradient": lambda: (
            torch.autograd.grad(JaggedTensor.from_mask(TABLE, ANYWHERE).sum(), TABLE)[0],
            ANYWHERE.float(),
        ),
    }
)


WRONG_MASKS = [
    torch.ones(2, 3),
    torch.ones(3, 2, dtype=torch.bool),
    torch.ones(2, dtype=torch.bool),
    [[True]],
]
test_a_wrong_mask = raising(
    [
        (
            lambda cls=cls, mask=mask: cls.from_mask(torch.ones(2, 3), mask),
            ValueError,
            rf"{cls.__name__}\.from_mask: expected .* a bool mask \[B, T\]",
        )
        for cls in CLASSES
        for mask in WRONG_MASKS
    ]
    + [
        (
            lambda: PaddedTensor.from_mask(torch.ones(2, 4), torch.tensor([[False, True, True, False]] * 2)),
            RuntimeError,
            r"first entries of each row.*JaggedTensor\.from_mask",
        )
    ]
)


# ---- copies and files ------------------------------------------------------------------------------------------


def through_a_file(x, **options):
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=True, **options)


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "file": through_a_file,
    "clone": torch.clone,
    "to": lambda x: x.to("cpu", copy=True),
}


@pytest.mark.parametrize("kind", MORE_KINDS)
@pytest.mark.parametrize("how", COPIES)
def test_copies(kind, how):
    x = MORE_KINDS[kind](rows_of())
    for original in (x, x.mT, x.transpose(0, 1) if kind == "[T, B]" else x.flatten(0, 1)):
        y = COPIES[how](original)
        assert type(y) is type(x) and y.shape == original.shape
        check_rows(y, original.to_tensors())
        check_rows(y + original, (2 * original).to_tensors())
    leaf = MORE_KINDS[kind](rows_of()).requires_grad_()
    if how not in ("clone", "to"):
        assert COPIES[how](leaf).requires_grad and COPIES[how](leaf).is_leaf


@kinds
def test_what_shares_memory_does_so_after_loading(kind):
    x = KINDS[kind](rows_of())
    loaded = through_a_file({"x": x, "view": x.transpose(1, 2)})
    loaded["x"].mul_(2)
    check_rows(loaded["view"], (2 * x).transpose(1, 2).to_tensors())
    assert through_a_file(x, map_location="meta").device.type == "meta"


CONVERSIONS = {
    "float": lambda x: x.float(),
    "to": lambda x: x.to(torch.float32),
    "to a device": lambda x: x.to("cpu", torch.float32),
    "type": lambda x: x.type(torch.float32),
    "to another": lambda x: x.to(x.float()),
}


def converted(kind, convert):
    rows = rows_of()
    return convert(KINDS[kind](rows)), [row.float() for row in rows]


def on_meta(kind):
    x = KINDS[kind](rows_of())
    found = (x.to("meta") * 2).sum(1)
    return [found.device.type == "meta", found.shape], [True, x.sum(1).shape]


test_conversions = same(
    {
        **{name: lambda kind, f=f: converted(kind, f) for name, f in CONVERSIONS.items()},
        "to what it is": lambda kind: (
            (lambda x: [x.to("cpu") is x, x.to(torch.float64) is x, x.cpu() is x])(KINDS[kind](rows_of())),
            [True] * 3,
        ),
        "to meta": on_meta,
    },
    *KINDS,
)


# ---- modules and optimizers ------------------------------------------------------------------------------------


class Holder(Held):
    """A module with a ragged buffer and a ragged parameter."""

    def forward(self):
        """Something of both."""
        return self.layer(self.buffer + self.parameter).square().sum()


def make_holder(kind, lengths=LENGTHS):
    buffer, parameter = (KINDS[kind](rows_of(lengths)) for _ in range(2))
    layer = nn.Linear(2, 3, dtype=torch.float64)
    return Holder({"buffer": buffer}, parameter=nn.Parameter(parameter), layer=layer)


@kinds
def test_state_dicts(kind):
    one, two = make_holder(kind), make_holder(kind)
    state = through_a_file(one.state_dict())
    two.load_state_dict(state)
    torch.testing.assert_close(two(), one())
    other = make_holder(kind, [3, 2, 0])  # as many rows, as wide, and of other lengths
    with pytest.raises(RuntimeError, match=r"same length, got lengths \[3, 2, 0.*and \[2, 0, 3"):
        other.load_state_dict(state)
    other.load_state_dict(state, assign=True)
    torch.testing.assert_close(other(), one())


@pytest.mark.sweep(3)
@kinds
def test_modules_are_moved_copied_and_compiled(kind):
    module = make_holder(kind)
    loss = module()
    torch.testing.assert_close(copy.deepcopy(module)(), loss)
    assert copy.deepcopy(module).to("meta")().device.type == "meta"
    half = copy.deepcopy(module).float()
    assert half.buffer.dtype == half.parameter.dtype == torch.float32
    compiled = by_desugar(module)()
    torch.testing.assert_close(compiled, loss)
    compiled.backward()
    expected = [row @ (2 * module.layer.weight) for row in module.layer(module.buffer + module.parameter)]
    assert type(module.parameter.grad) is type(module.buffer)
    check_rows(module.parameter.grad, expected)


OPTIMIZERS = "SGD Adam AdamW Adagrad RMSprop Adadelta NAdam RAdam Adamax ASGD Rprop".split()


@kinds
@pytest.mark.parametrize("name", [*OPTIMIZERS, "SGD, many at once", "AdamW, many at once"])
def test_optimizers_step_as_they_step_rows(kind, name):
    name, _, foreach = name.partition(", ")
    options = {"foreach": True} if foreach else {}
    rows = [nn.Parameter(row) for row in rows_of(LENGTHS * 2)]
    ragged = [nn.Parameter(KINDS[kind]([r.detach() for r in part])) for part in (rows[:3], rows[3:])]
    parameters = {"ragged": ragged, "rows": rows}
    optimizers = {k: getattr(torch.optim, name)(p, lr=0.1, **options) for k, p in parameters.items()}
    for _ in range(3):
        for k, optimizer in optimizers.items():
            optimizer.zero_grad()
            sum((p**3).sum() for p in parameters[k]).backward()  # type: ignore[union-attr]
            nn.utils.clip_grad_norm_(parameters[k], 1.5)
            optimizer.step()
        optimizers["ragged"].load_state_dict(copy.deepcopy(optimizers["ragged"].state_dict()))
    torch.testing.assert_close(
        [r.detach() for x in ragged for r in x.to_tensors()], [r.detach() for r in rows]
    )


# ---- compared as a whole ---------------------------------------------------------------------------------------


def compared(kind):
    """Rows, values that equal them, and values that do not."""
    rows = rows_of()
    x, make = KINDS[kind](rows), KINDS[kind]
    alike = [make(rows), x.clone(), x.clone().mT.mT]
    others = [x + 1, x[:, :2], x.mT, make(rows_of([3, 2, 0])), make(rows_of([2, 3]))]
    return [torch.equal(x, y) for y in (*alike, *others)], [True] * 3 + [False] * 5


test_equal = same({"all": compared}, *KINDS)
test_equal_to_a_dense_tensor_is_refused = raising(
    {
        kind: (
            lambda make=make: torch.equal(make(rows_of()), make(rows_of()).to_dense()),
            NotImplementedError,
            f"equal: expected two {'Jagged' if kind == 'jagged' else 'Padded'}Tensors",
        )
        for kind, make in KINDS.items()
    }
)


# ---- made inside a compiled function ---------------------------------------------------------------------------


def starts_of(lengths):
    return F.pad(lengths.cumsum(0), (1, 0))


BUILDERS = {
    "list": lambda table, lengths: JaggedTensor.from_tensors([table[0, :2], table[1, :0], table[2]]),
    "list, padded": lambda table, lengths: PaddedTensor.from_tensors([table[0, :2], table[1]], multiple=4),
    "values, lengths": lambda table, lengths: JaggedTensor.from_lengths(table.flatten(0, 1)[:5], lengths, max_length=4),
    "values, list": lambda table, lengths: JaggedTensor.from_lengths(table.flatten(0, 1)[:5], [2, 3]),
    "values, offsets": lambda table, lengths: JaggedTensor(table.flatten(0, 1)[:5], starts_of(lengths), max_length=3),
    "table": lambda table, lengths: JaggedTensor.from_padded(table, lengths),
    "table, padded": PaddedTensor,
    "mask": lambda table, lengths: PaddedTensor.from_mask(table, torch.arange(3) < lengths[:, None]),
    "padded to jagged": lambda table, lengths: PaddedTensor(table, lengths).to_jagged(),
    "jagged to padded": lambda table, lengths: JaggedTensor.from_padded(table, lengths).to_padded(multiple=2),
    "pad": lambda table, lengths: PaddedTensor.pad(table, dim=1, multiple=8),
}  # fmt: skip


@pytest.mark.sweep(84)
@pytest.mark.parametrize("door", COMPILED)
@pytest.mark.parametrize("builder", BUILDERS)
def test_made_inside_a_compiled_function(builder, door):
    def inside(table, lengths):
        return BUILDERS[builder](table, lengths).softmax(1).square().sum(1)

    table, lengths = torch.randn(3, 3, 2, dtype=torch.float64, requires_grad=True), torch.tensor(LENGTHS)
    got, expected = COMPILED[door](inside)(table, lengths), inside(table, lengths)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), table) for y in (got, expected)))
    whole = COMPILED[door](lambda *args: BUILDERS[builder](*args) * 2)(table, lengths)
    check_rows(whole, (BUILDERS[builder](table, lengths) * 2).to_tensors())


UNBOUNDED = {
    "lengths": lambda table, lengths: JaggedTensor.from_lengths(table.flatten(0, 1)[:5], lengths).sum(),
    "offsets": lambda table, lengths: JaggedTensor(table.flatten(0, 1)[:5], starts_of(lengths)).sum(),
}
test_what_a_compiled_function_cannot_know = raising(
    {
        name: (
            lambda build=build: by_desugar(build)(torch.randn(3, 3, 2), torch.tensor(LENGTHS)),
            torch._dynamo.exc.TorchRuntimeError,
            "give max_length",
        )
        for name, build in UNBOUNDED.items()
    }
)
