"""Ragged values in compiled functions: sizes from data, rows, numbers of programs, frames left to Python."""

import copy
import functools
import itertools
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from subclasses._torch import dims_marked_dynamic
from subclasses.keyed import KeyedJaggedTensor
from subclasses.ragged import JaggedTensor, PaddedTensor
from subclasses.ragged.data_sizes import size_of, true_positions
from subclasses.ragged.indexing.splitting import extent_of_slice
from tests.doors import COMPILED, by_desugar
from tests.subclasses.ragged.judge import make_batch, same
from tests.tables import raising


def stored(result):
    """The parts of a result; ragged values are split into inner tensors."""
    found = []
    for part in result if isinstance(result, tuple | list) else [result]:
        found += part.unwrap() if isinstance(part, JaggedTensor) else [part]
    return found


def check_calls(compiled, fn, calls):
    """Compares calls with eager mode, gradients too."""
    for x in calls:
        y = x.detach().requires_grad_(x.requires_grad)
        results = got, expected = compiled(x), fn(y)
        parts = [stored(result) for result in results]
        torch.testing.assert_close(*parts, equal_nan=True)
        if isinstance(got, JaggedTensor):
            assert got.shape == expected.shape
        recorded = [[t for t in each if isinstance(t, Tensor) and t.requires_grad] for each in parts]
        assert len(recorded[0]) == len(recorded[1])
        if recorded[0]:
            losses = [
                sum(n * t.nan_to_num().square().sum() for n, t in enumerate(each, 1)) for each in recorded
            ]
            grads = [
                torch.autograd.grad(loss, leaf)[0].values for loss, leaf in zip(losses, (x, y), strict=True)
            ]
            torch.testing.assert_close(*grads)


def count_programs(door, fn, calls, **options):
    """Compares calls with eager mode, and returns how many programs they took."""
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(fn, backend=counter) if door == "stock" else by_desugar(fn, **options)
    check_calls(compiled, fn, calls)
    return counter.frame_count if door == "stock" else len(compiled.programs)


# ---- sizes that data determines --------------------------------------------------------------------------------

KERNEL = torch.linspace(-1, 1, 18).view(3, 3, 2)
ODD_ROWS = torch.tensor([1, 0, 1])


def convolved(x):
    """Rows shorter by one entry."""
    return F.conv1d(x.mT, KERNEL).mT


SIZED = {
    "convolution": convolved,
    "pool": lambda x: F.max_pool1d(x.mT, 2, 1).mT,
    "from_padded": lambda x: JaggedTensor.from_padded(x.to_dense(), x.row_lengths()),
    "from_mask": lambda x: JaggedTensor.from_mask(x.to_dense(), x.mask()),
    "to_jagged": lambda x: x.to_padded(multiple=8).to_jagged(),
    "two of other sizes": lambda x: convolved(x) + F.max_pool1d(x.mT, 2, 1).mT,
    "beside a slice": lambda x: x[:, 1:] * convolved(x),
    "joined": lambda x: torch.cat([convolved(x), x], 1),
    "taken apart": lambda x: JaggedTensor(convolved(x).values, convolved(x).offsets, max_length=x.shape[1]),
    "a slice": lambda x: convolved(x)[:, 1:],
    "rows by numbers": lambda x: x[ODD_ROWS],
    "rows by a list": lambda x: x[[0, -1]],
    "rows by a mask": lambda x: x[x.row_lengths() > 2],
    "entries by a mask": lambda x: x[x.select(2, 0) > 0],
    "elements by a mask": lambda x: x[x > 0],
    "features by a mask": lambda x: x[..., torch.tensor([True, False, True])],
}

BOUNDS = [None, *range(-6, 7)]
SLICES = list(itertools.product(range(5), BOUNDS, BOUNDS))
# The second batch has no entry in some results.
BATCHES = ([3, 2, 5], [2, 2], [4, 3, 2, 2], [2, 6])


def batch(lengths):
    """Rows of these lengths, with gradients."""
    generator = torch.Generator().manual_seed(sum(lengths))
    rows = [torch.randn(n, 3, generator=generator) for n in lengths]
    return JaggedTensor.from_tensors(rows).requires_grad_()


def read_inside(f):
    """A function that reads the inner tensors of its result, inside."""

    def read(x):
        y = f(x)
        return y.values.mean(), y.unwrap("values"), y.offsets, y.row_lengths(), y

    return read


@pytest.mark.sweep(100)
@pytest.mark.parametrize("door", COMPILED)
@pytest.mark.parametrize("name", SIZED)
def test_values_are_those_of_eager_mode(name, door):
    f = read_inside(SIZED[name])
    check_calls(COMPILED[door](f, fullgraph=True), f, map(batch, BATCHES))


KERNELS = {name: functools.partial(torch.compile, backend=name) for name in ("inductor", "desugar")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "door", "mode", "batches"),
    [
        *itertools.product(
            ["convolution", "elements by a mask"], KERNELS.values(), [torch.enable_grad], [BATCHES]
        ),
        *(
            ("from_padded", by_desugar, mode, ([3, 2, 5], [0, 1], [0, 0], [1, 1, 1]))
            for mode in (torch.no_grad, torch.inference_mode)
        ),
    ],
)
def test_values_are_those_of_eager_mode_in_kernels_and_without_gradients(name, door, mode, batches):
    f = read_inside(SIZED[name])
    with mode():
        check_calls(door(f, fullgraph=True), f, map(batch, batches))


sum_of_some = by_desugar(lambda x, mask: x[mask].values.sum(0))
sum_of_table = by_desugar(lambda table, lengths: JaggedTensor.from_padded(table, lengths).values.sum())
test_sizes = same(
    {
        **{
            f"rows of the mask {mask}": lambda mask=mask: (
                sum_of_some(batch([3, 2]), torch.tensor(mask)),
                batch([3, 2])[torch.tensor(mask)].values.sum(0),
            )
            for mask in ([True, False], [False, False])
        },
        "lengths of a table": lambda: (
            sum_of_table(torch.ones(2, 3), torch.tensor([1, 3])),
            torch.tensor(4.0),
        ),
        # in eager mode
        "size_of": lambda: (size_of(torch.tensor(3)), 3),
        "true_positions": lambda: (true_positions(torch.tensor([True, False, True])).tolist(), [0, 2]),
        "numbers_below": lambda: (torch.ops.subclasses.numbers_below(torch.tensor(3)).tolist(), [0, 1, 2]),
        "extents of slices": lambda: (
            [extent_of_slice(extent, slice(*bounds)) for extent, *bounds in SLICES],
            [len(range(extent)[slice(*bounds)]) for extent, *bounds in SLICES],
        ),
    }
)
test_sizes_that_do_not_fit = raising(
    {
        **{
            f"lengths {lengths} of a table": (
                lambda lengths=lengths: sum_of_table(torch.ones(2, 3), torch.tensor(lengths)),
                RuntimeError,
                "from_padded: a length is negative, or beyond the extent",
            )
            for lengths in ([2, 4], [2, -1])
        },
        "a mask of another number of rows": (
            lambda: batch([3, 2])[torch.tensor([True])],
            IndexError,
            "expected a mask of 2 rows, got one of 1",
        ),
    }
)


# ---- rows as plain tensors -------------------------------------------------------------------------------------

# The lengths are extents that the compiler leaves open.
ROWS = {
    "unbind": lambda x: list(x.unbind()),
    "of results": lambda x: [row.t() for row in (x * 2).unbind()],
    "looped": lambda x: [sum((row.softmax(0) * 2).sum() for row in x)],
    "selected": lambda x: [x[1] * 2, x[-1]],
    "lengths read": lambda x: [row.shape[0] * row.sum() for row in x.unbind()],
    "parts of a field": lambda x: [*x.unwrap("values").split([2, 4]), *x.values.chunk(3), x.values[1:3]],
}
CALLS = {
    "lengths": ("back to back", [(2, 4), (3, 5), (7, 1)]),
    "empty rows": ("back to back", [(2, 4), (0, 3), (5, 0), (0, 0)]),
    "one entry": ("back to back", [(2, 4), (0, 1), (1, 0)]),
    "no entry first": ("back to back", [(0, 0), (2, 1), (3, 4)]),
    "holes": ("holes", [(2, 4), (3, 1), (1, 0)]),
    "features first": ("ragged dim 2", [(2, 4), (3, 1), (1, 7)]),
    "six entries": ("back to back", [(2, 4)]),
}
CASES = [
    (door, case, name)
    for name in ROWS
    for door, case in [*(("desugar", case) for case in CALLS), ("stock", "lengths"), ("inside", "holes")]
    if (case == "six entries") is (name == "parts of a field")
]
CASES += [(door, "six entries", "parts of a field") for door in ("stock", "inside")]


def leaf(layout, lengths, grad=True):
    torch.manual_seed(sum(lengths))
    return make_batch(layout, lengths, (3,)).x.detach().requires_grad_(grad)


@pytest.mark.sweep(84)
@pytest.mark.parametrize(("door", "case", "name"), CASES)
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
def test_rows(door, case, name, grad):
    fn, (layout, calls) = ROWS[name], CALLS[case]
    compiled = COMPILED[door](fn, fullgraph=True, **{"strict": True} if door == "desugar" else {})
    check_calls(compiled, fn, [leaf(layout, lengths, grad) for lengths in calls])


@pytest.mark.sweep(8)
@pytest.mark.parametrize("name", list(ROWS)[:-1])
def test_one_program_for_rows_of_all_lengths(name):
    calls = [leaf("back to back", lengths) for lengths in ((2, 4), (3, 5), (9, 2), (4, 4), (2, 8))]
    assert count_programs("desugar", ROWS[name], calls, fullgraph=True) == 1


# ---- one program for values of any sizes -----------------------------------------------------------------------

# Sizes of ragged values are symbols in the first program, whatever lies between the constructor and the call.
BATCHES_OF_ALL_SIZES = [(3, 5), (4, 2, 7), (9, 8, 3, 2), (2, 6), (3, 3, 3, 3, 3)]
# The longest rows are also as long as an entry has elements, or as a part of one has.
LONGEST = [(3, 7), (4, 3, 3), (3, 2, 3), (9, 8, 3, 5), (5, 4)]
triple = by_desugar(lambda x: x * 3)


def rows(lengths):
    return JaggedTensor.from_tensors([torch.randn(n, 4) for n in lengths])


def keyed(lengths):
    both = torch.tensor([*lengths, *lengths[::-1]])
    return KeyedJaggedTensor(["a", "b"], torch.randn(int(both.sum())), both)


WAYS = {
    "op": lambda x: x * 2,
    "conversion": lambda x: x.to(torch.float64),
    "detach": lambda x: x.detach(),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "all of it": lambda x: x[:],
    "slice of each row": lambda x: x[:, 1:],
    "merged": lambda x: x.flatten(0, 1),
    "ragged along 2": lambda x: x.transpose(1, 2),
    "result of a program": lambda x: triple(x),
    "as made": lambda x: x,
}
PARTS = {
    "all of it": lambda x: x[:, slice(0, None), :],
    "all but the last": lambda x: x[:, :-1],
    "all but the first and the last": lambda x: x[:, 1:-1],
    "last two": lambda x: x[:, -2:],
    "last two, read": lambda x: x[:, -2:].values.sum(),
    "view": lambda x: x.view(*x.shape[:2], -1, 2),
    "reshape": lambda x: x.reshape(*x.shape[:2], 2, -1),
    "first entry": lambda x: x[:, :1].mean(1),
    "all but the first": lambda x: x[:, 1:].to_dense().sum(1),
    "in the middle": lambda x: x[:, -4:-1].sum(1),
    "the greatest": lambda x: x.topk(1, 1).values.sum(1),
    "narrow": lambda x: x.narrow(1, 0, 2) + 1,
}
# A function, and functions that make its values from lengths.
PROGRAMS = {
    **{name: (lambda x: x.sin() + 1, [lambda n, way=way: way(rows(n))]) for name, way in WAYS.items()},
    "constructor and ops": (torch.sin, [lambda n: rows(n) * 2, rows]),
    **{
        f"keyed, {name}": (lambda x: x["a"].sin(), [lambda n, change=change: change(keyed(n))])
        for name, change in {
            "as made": lambda x: x,
            "conversion": lambda x: x.to(torch.float64),
            "permuted": lambda x: x.permute([1, 0]),
        }.items()
    },
    **{f"guards, {name}": (f, [rows]) for name, f in PARTS.items()},
}


@pytest.mark.sweep(34)
@pytest.mark.parametrize("door", ["desugar", "stock"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_one_program(name, door):
    fn, makes = PROGRAMS[name]
    lengths = LONGEST if name.startswith("guards") else BATCHES_OF_ALL_SIZES
    calls = [make(n) for make, n in zip(itertools.cycle(makes), lengths)]
    assert count_programs(door, fn, calls) == 1


def test_dims_marked_dynamic():
    """A feature as long as the rows gets no symbol; a user's mark adds to the marks of the class."""
    x = rows((4, 2))  # as long as the features are many
    assert x.shape == (2, 4, 4) and dims_marked_dynamic(x) == [0, 1]
    torch._dynamo.maybe_mark_dynamic(x, 2)
    assert dims_marked_dynamic(x) == [0, 1, 2]


# ---- a longest row of 1 ------------------------------------------------------------------------------------------

SHORT = [(2, 5, 1), (1, 1, 1), (4, 3), (0, 1, 1, 0)]


# How many programs a function takes at most: a guard separates those where the results differ.
FUNCTIONS = {
    "sum": (1, lambda x: x.sum(1)),
    "mean": (1, lambda x: x.mean(1)),
    "softmax": (2, lambda x: x.softmax(1)),  # PyTorch's view of a table compares its sizes
    "sin": (1, lambda x: x.sin() * 2),
    "a comparison": (2, lambda x: x.sum(1) * (3 if x.shape[1] > 1 else 5)),
    "the first": (2, lambda x: x[:, :1].sum(1)),
    "all but the first": (2, lambda x: x[:, 1:].sum(1)),
    "squeeze": (2, lambda x: x.to_dense(0).squeeze(1)),
    "a dense operand": (2, lambda x: x + torch.ones(x.shape[1], 1)),
    "positions": (2, lambda x: x * x.to_dense(1).sum(0)),
}


@pytest.mark.sweep(8)
@pytest.mark.parametrize("first", range(len(SHORT)))
@pytest.mark.parametrize("name", FUNCTIONS)
def test_programs_for_a_longest_row_of_1(name, first):
    most, fn = FUNCTIONS[name]
    calls = [rows(lengths) for lengths in SHORT[first:] + SHORT[:first]]
    assert count_programs("desugar", fn, calls) <= most


def test_features_with_a_longest_row_of_1_do_not_multiply_programs():
    """Constants would make a program of each combination of features."""
    compiled = by_desugar(lambda *xs: [x.sum(1) for x in xs])
    for short in range(4):
        xs = [rows((1, 1, 0) if n == short else (2, 3, 1)) for n in range(4)]
        torch.testing.assert_close(compiled(*xs), [x.sum(1) for x in xs])
    assert len(compiled.programs) == 1


# ==== frames that are left to Python ================================================================================

MAKE = {
    "jagged": lambda: JaggedTensor(torch.arange(5.0), torch.tensor([0, 2, 5]), max_length=3),
    "padded": lambda: PaddedTensor.from_tensors([torch.ones(2), torch.ones(3)]),
    "keyed": lambda: KeyedJaggedTensor(["a"], torch.arange(3.0), torch.tensor([1, 2]), max_length=2),
}


def read(x):
    return (x.padded if isinstance(x, PaddedTensor) else x.values).sum()


def in_a_loop(x, printed):
    total = 0
    for n in range(2):
        printed(n)  # breaks the graph, where Dynamo cannot go on
        total = total + read(x)
    return total


@pytest.mark.sweep(12)
@pytest.mark.parametrize("door", COMPILED)
@pytest.mark.parametrize("kind", MAKE)
def test_inner_tensors_are_read(kind, door):
    x, seen = MAKE[kind](), []
    optional, loop = map(COMPILED[door], (lambda x: None if x is None else read(x), in_a_loop))
    assert optional(None) is None
    for _ in range(2):
        assert optional(x) == read(x)
        assert loop(x, torch._dynamo.disable(seen.append)) == 2 * read(x)
    assert seen == [0, 1, 0, 1]


@pytest.mark.sweep(8)
@pytest.mark.filterwarnings("ignore::UserWarning")  # Dynamo's, of the graph that breaks
@pytest.mark.parametrize("door", COMPILED)
@pytest.mark.parametrize("kind", MAKE)
def test_a_value_is_printed(kind, door, capsys):
    def fn(x):
        print(x)
        return f"{x}"

    x = MAKE[kind]()
    assert COMPILED[door](fn)(x) == str(x)
    assert capsys.readouterr().out == f"{x}\n"


PART = PaddedTensor.from_tensors(
    [torch.tensor([1.0, 5.0]), torch.tensor([3.0]), torch.tensor([2.0])], batch_multiple=4
)
COPY = PART.with_lengths(PART.padded.clone(), PART.lengths.clone())
test_a_copy_keeps_which_rows_are_real = same(
    {
        "rows": lambda: (COPY, list(PART.to_tensors())),
        "a mean": lambda: (COPY.mean(1).mean(), PART.mean(1).mean()),
        "not where that is not wanted": lambda: (
            PART.with_lengths(PART.padded, PART.lengths, None).row_count is None,
            True,
        ),
    }
)


BUILD = {
    "offsets": lambda: JaggedTensor(torch.arange(5.0), torch.tensor([0, 2, 5])),
    "lengths": lambda: JaggedTensor.from_lengths(torch.arange(5.0), torch.tensor([2, 3])),
    "a mask": lambda: MAKE["jagged"]()[torch.tensor([True, False])],
    "keyed": lambda: KeyedJaggedTensor(["a"], torch.arange(3.0), torch.tensor([1, 2])),
    "text": lambda: repr(MAKE["padded"]()),
}


@pytest.mark.parametrize("build", BUILD)
def test_rows_are_made_while_another_thread_compiles(build):
    compiling, go_on = threading.Event(), threading.Event()

    def backend(graph, _):
        compiling.set()
        assert go_on.wait(timeout=60)
        return graph

    thread = threading.Thread(target=lambda: torch.compile(torch.neg, backend=backend)(torch.ones(2)))
    thread.start()
    try:
        assert compiling.wait(timeout=60)
        assert torch.compiler.is_compiling()  # says torch, of the whole process
        BUILD[build]()
    finally:
        go_on.set()
        thread.join()
