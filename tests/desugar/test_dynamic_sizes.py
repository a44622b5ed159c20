"""Sizes and ints that change from call to call: at most two programs for ever-new ones, and one for 0 and 1 each."""

from __future__ import annotations

import functools
import operator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import desugar
from subclasses.ragged import JaggedTensor
from tests.desugar.classes import EVERY, Beside, Halves, Labeled, Nested, Pair, Tagged, TwoTensor, make
from tests.desugar.judge import BOTH_DOORS, STRICT_DOORS, assert_programs, by_dynamo, by_pass, judge, strictly

NEW = [4, 5, 6, 7, 2, 9, 30]


def rows(*classes, grad=True, width=6, numbers=NEW):
    """Calls with ever-new numbers of rows, one argument of each class."""
    return [lambda n=n: tuple(make(cls, n, width, grad=grad) for cls in classes) for n in numbers]


# ---- sizes ---------------------------------------------------------------------------------------------------


@pytest.mark.sweep(16)
@pytest.mark.parametrize("cls", [*EVERY, torch.Tensor])
def test_ever_new_sizes_take_two_programs(cls):
    compiled = assert_programs(lambda x: (x * 2, x.sin().sum()), rows(cls), 2)
    assert [p.is_dynamic for p in compiled.programs] == [True, cls is Labeled]  # which has a dynamic int


def split(cls, left, right):
    return lambda: (cls(torch.randn(3, left), torch.randn(3, right)).requires_grad_(),)


SPLIT = [(2, 2), (3, 3), (4, 5), (7, 2)]


def twice(make_part):
    """Calls with pairs of new parts."""
    return [lambda n=n: (TwoTensor(make_part(n), make_part(n)).requires_grad_(),) for n in NEW]


def labeled(counts, *size, grad=False):
    return [lambda n=n: (Labeled(torch.randn(size), count=n).requires_grad_(grad),) for n in counts]


def marked(mark):
    """Calls with tensors of ever-new sizes, whose first one is marked."""
    return [lambda n=n: (lambda x: (mark(x, 0), (x,))[1])(torch.randn(n, 3, requires_grad=True)) for n in NEW]


def slices(cls, grad=True):
    """Calls with slices of larger values, which begin elsewhere each time."""
    sizes = [(9, 5, 4, 2), (8, 7, 5, 3), (17, 16, 7, 9), (20, 11, 3, 2)]
    return [lambda s=s: (make(cls, s[0] + s[2], s[1] + s[3], grad=grad)[s[2] :, s[3] :],) for s in sizes]


double = lambda x: x * 2  # noqa: E731


write = lambda x: (x.mul_(2), x.sum())[1]  # noqa: E731


BY_ROWS = [TwoTensor, Pair, Labeled, Tagged, Nested]
SLICED = {"view": lambda x: (x[1:], x * 2), "itself": lambda x: (x, x.t() + 1, x.shape[0])}

# The function, its calls, how many programs they make, and whether sizes are dynamic from the start.
PROGRAMS = {
    "dynamic, by hand": (lambda x: (x * 2, x.cos()), rows(TwoTensor), 1, True),
    "dynamic, declared": (lambda x: (x * 2, x.cos()), rows(Pair), 1, True),
    "static": (double, rows(Pair) * 2, len(NEW), False),
    "equal by chance": (
        lambda x, y: (x * 2, y * 2),
        [
            lambda n=n: (make(TwoTensor, n[0], 3, grad=True), torch.randn(n[1], 2))
            for n in ((4, 4), (5, 5), (6, 7), (8, 3))
        ],
        2,
    ),
    "static sums, by hand": (double, [split(Halves, *size) for size in SPLIT], len(SPLIT), False),
    "static sums, declared": (double, [split(Beside, *size) for size in SPLIT], len(SPLIT), False),
    "sums": (lambda x: (x * 2, x.shape[-1]), [split(Beside, *size) for size in SPLIT], 2),
    "divisible": (
        lambda x: (x * 2).reshape(2, -1),
        [lambda n=n: (make(Pair, n, 3, grad=True),) for n in (4, 6, 8, 10)],
        2,
    ),
    "strides": (double, twice(lambda n: torch.randn(3, n).t()), 2),
    "storage offsets": (double, twice(lambda n: torch.randn(n, 6)[:, 1:4]), 2),
    "in the result": (lambda x: (x.shape, x * 2), rows(Pair), 2),
    "arithmetic": (lambda x: x * x.shape[0] + 1, rows(TwoTensor), 2),
    "a view": (lambda x: (x * 2).view(-1), rows(TwoTensor), 2),
    "a branch": (lambda x: x * 2 if x.shape[0] > 10 else x + 1, rows(TwoTensor), 3),
    "a product": (lambda x: (x @ x.t()).relu(), rows(TwoTensor), 2),
    "a size that became a constant": (
        lambda x: x.sum() if x.shape[0] == 5 else x * 2,
        rows(Tensor, numbers=(5, 7, 5, 9)),
        *(2, True),
    ),
    "a saved view": (
        lambda x, w: x.view(-1, w.shape[0]).t().sum(1) * w,
        [lambda n=n: (torch.randn(2 * n), torch.randn(n, requires_grad=True)) for n in (4, 6, 9)],
        *(1, True),
    ),
    **{
        f"a view by a computed size, {cls.__name__}": (
            lambda x, n: (x * 2, x[n.shape[0] // 2 + 1 :], (x * 3).sum()),
            [lambda n=n, cls=cls: (make(cls, 20, grad=True), torch.ones(n)) for n in (6, 8, 11)],
            *(1, True),
        )
        for cls in (torch.Tensor, TwoTensor, Pair)
    },
    **{
        f"a detached view, {cls.__name__}": (
            lambda x: (x[1:].detach()[:, :2], x * 2),
            [lambda n=n, cls=cls: (make(cls, n, 5),) for n in (4, 7, 3)],
            *(1, True),
        )
        for cls in (torch.Tensor, Pair)
    },
    "cat": (lambda x: torch.cat([x, x]).sum(0), rows(TwoTensor), 2),
    "expand": (lambda x: x.unsqueeze(0).expand(2, -1, -1) * 1, rows(TwoTensor), 2),
    "ints": (lambda x: (x.shape[0], x.size(0) * 2 + 1, x * 2), rows(TwoTensor), 2),
    "dynamic ints": (lambda x: x * x.count, labeled(NEW, 2, 3), 2),
    "dynamic ints, with gradients": (lambda x: x * x.count, labeled(NEW, 2, 3, grad=True), 2),
    "dynamic ints, 0 and 1": (lambda x: (x * x.count, x.count), labeled((3, 4, 0, 1, 5, 0, 1), 3), 4),
    "a dynamic int of a result": (
        lambda x: Labeled(x * 2, count=x.shape[0], label="w"),
        [lambda n=n: (torch.randn(n, 2),) for n in NEW],
        2,
    ),
    "marked": (double, marked(torch._dynamo.mark_dynamic), 1),
    "marked by maybe": (double, marked(torch._dynamo.maybe_mark_dynamic), 1),
    "marked static": (double, marked(torch._dynamo.mark_static), len(NEW)),
    **{
        f"slices and the value that they are of, {cls.__name__}": (
            lambda x, y, z: (y.add_(1), x * 2, z.sin())[1:],
            [lambda n=n, cls=cls: (lambda x: (x, x[1:-1], x[2:]))(make(cls, n, 6)) for n in NEW if n > 3],
            2,
        )
        for cls in (TwoTensor, Pair)
    },
    **{
        f"several arguments and dimensions, {cls.__name__}": (
            lambda x, y: (x @ y, y.shape[0]),
            [
                lambda n=n, cls=cls: (
                    make(cls, n, n + 3, grad=True),
                    torch.randn(n + 3, 2, requires_grad=True),
                )
                for n in NEW
            ],
            2,
        )
        for cls in BY_ROWS
    },
    **{
        f"zero and one have programs of their own, {cls.__name__}": (
            lambda x: (x * 2, x.sum()),
            rows(cls, numbers=(4, 5, 0, 1, 2, 0, 1, 8)),
            4,
        )
        for cls in (TwoTensor, Pair, Halves)
    },
    **{
        f"slices of larger values, {name}, {cls.__name__}, dynamic={dynamic}": (
            fn,
            slices(cls),
            *(count, dynamic),
        )
        for name, fn in SLICED.items()
        for cls in BY_ROWS
        for dynamic, count in ((None, 2), (True, 1))
    },
    "written slices, by hand": (write, slices(TwoTensor, grad=False), 1, True),
    "written slices, nested": (write, slices(Nested, grad=False), 1, True),
}


@pytest.mark.sweep(12)
@pytest.mark.parametrize("name", PROGRAMS)
def test_how_many_programs_calls_take(name):
    fn, calls, count, *dynamic = PROGRAMS[name]
    assert_programs(fn, calls, count, dynamic=dynamic[0] if dynamic else None)


def test_missing_tangents_of_dynamic_results():
    fn, compiled = lambda x, y: (x * 2, (x * y).sum(), y.sin()), None
    for make_args, missing in zip(rows(TwoTensor, Tensor), MISSING, strict=True):
        compiled = judge(fn, make_args, compiled, missing=missing)
    assert len(compiled.programs) == 2


# ---- numbers as results --------------------------------------------------------------------------------------

MISSING = [[], [0], [1], [2], [0, 1], [0, 2], [1, 2]]
NUMBERS = {
    "a quotient": lambda x: (x * 2, x.shape[0] / 2),
    "a quotient alone": lambda x: x.shape[0] / 4,
    "a product and a quotient": lambda x: (x.shape[0] * 2, x.shape[0] * 2.0, x.sin()),
    "a root": lambda x: (x.shape[0] ** 0.5, x * 2),
    "a comparison": lambda x: (x.shape[0] > 5, x * 2),
    "a comparison alone": lambda x: x.shape[0] == 6,
    "a division that leaves no rest": lambda x: (x.shape[0] // 2, x.shape[0] % 2, x * 2),
    "beside a number that data tells": lambda x: (x.sin(), x.detach().sum().item(), x.shape[0] / 2),
}


@pytest.mark.sweep(24)
@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dynamic", [None, True])
def test_numbers_computed_from_sizes(name, grad, dynamic):
    compiled = by_pass(NUMBERS[name], dynamic=dynamic)
    for make_args in rows(Tensor, grad=grad, width=2):
        judge(NUMBERS[name], make_args, compiled)


@pytest.mark.slow
def test_numbers_through_inductor():
    fn = UNBACKED["results"]
    judge(fn, lambda: (torch.arange(4.0, requires_grad=True),), desugar.compile(fn, dynamic=True))


MASKED = {
    "rows": lambda x, keep: x[keep] * 2,
    "rows and their number": lambda x, keep: (x[keep].sin(), x[keep].shape[0]),
    "both kinds": lambda x, keep: (x[keep] * 2, x[~keep].sin()),
    "in another shape": lambda x, keep: (x[keep] * 2).view(-1, 2, 3),
    "transposed": lambda x, keep: (x[keep] * 2).t(),
}


def capturing(way):
    """Sets the options by which Dynamo captures sizes and numbers that depend on data."""
    options = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}
    return lambda fn: torch._dynamo.config.patch(options)(way(fn))


whole = functools.partial(by_pass, fullgraph=True, strict=True)


@pytest.mark.sweep(120)
@pytest.mark.parametrize("way", [by_pass, capturing(whole), capturing(by_dynamo)])
@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("cls", [torch.Tensor, TwoTensor, Halves, Labeled])
def test_gradients_of_wrappers_whose_size_depends_on_data(cls, name, way):
    """Their outer size is a result of the forward, and no gradient is there yet to read it from."""
    compiled = way(MASKED[name])
    for keep in ([True, False, True, False], [True, True, True, False], [False] * 4):
        judge(MASKED[name], lambda k=keep: (make(cls, 4, 6, grad=True), torch.tensor(k)), compiled)


UNBACKED = {
    "item": lambda x: x * x.sum().item(),
    "nonzero": lambda x: x.nonzero() * 2,
    "mask": lambda x: x[x > 0] * 2,
    "unique": lambda x: x.detach().round().unique() + 1,
    "results": lambda x: (x.sin(), x.detach().sum().item(), x.shape[0] / 2),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", UNBACKED)
def test_numbers_and_sizes_that_only_data_tells_in_one_graph(name, grad):
    judge(
        UNBACKED[name],
        lambda: (torch.randn(5, requires_grad=grad),),
        capturing(whole)(UNBACKED[name]),
        calls=3,
    )


def test_a_size_is_read_once():
    compiled = assert_programs(
        lambda x: x[: x.shape[0] // 2] * 2, rows(Pair, grad=False, numbers=(4, 7, 9)), 1, dynamic=True
    )
    (program,) = compiled.programs
    assert program.wrapper.count("size(0)") <= 1 and ".size()" not in program.wrapper


# ---- sizes that turn out to be numbers -------------------------------------------------------------------------

CUTS = {
    "first": lambda x, n: x[:n],
    "from": lambda x, n: x[n:],
    "last": lambda x, n: x[-n:],
    "all but": lambda x, n: x[: x.shape[0] - n],
    "narrow": lambda x, n: x.narrow(0, 0, n),
}
CALLS = [
    [(3, 2), (1, 1)],
    [(3, 2), (1, 0)],
    [(3, 2), (5, 4), (5, 5)],
    [(3, 1), (3, 3), (3, 2)],
    [(8, 4), (8, 8), (1, 1), (9, 3)],
]


@pytest.mark.sweep(150)
@pytest.mark.parametrize("calls", CALLS, ids=str)
@pytest.mark.parametrize("cls", [torch.Tensor, Pair, Nested])
@pytest.mark.parametrize("name", CUTS)
def test_views_by_ints_that_a_run_finds_to_be_numbers(name, cls, calls):
    """As the last batch of an epoch: a run assumes that a symbol is 1, which a result was recorded by."""
    for door in STRICT_DOORS.values():
        fn = lambda x, n: (CUTS[name](x, n), x * x * x)  # noqa: E731 - Dynamo caches by code object
        compiled = door(fn)
        for rows_, n in calls:
            judge(fn, lambda r=rows_, n=n: (make(cls, r, 2, grad=True), n), compiled)


def test_their_second_derivatives():
    compiled = strictly(lambda x, n: (x[:n], x * x * x))
    for count, n in ((3, 2), (1, 1)):
        t = torch.full((count, 2), 2.0, requires_grad=True)
        (first,) = torch.autograd.grad(compiled(Pair(t, t), n)[1].unwrap()[0].sum(), t, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), t)
        assert torch.equal(second, 6 * t)


# ---- views ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("door", [by_pass, by_dynamo])
def test_a_write_to_a_slice_reaches_the_whole_and_its_gradient(door):
    compiled = door(lambda x: x.mul_(2))
    for n in (5, 6, 9):
        both = []
        for fn in (compiled, lambda x: x.mul_(2)):
            torch.manual_seed(0)
            leaf = make(Pair, n, 4, grad=True)
            whole = leaf * 1
            part = whole[2:]
            assert fn(part) is part and part._base is not None
            (whole * whole).sum().backward()
            both.append((*whole.unwrap(), *leaf.grad.unwrap()))
        torch.testing.assert_close(*both)


@pytest.mark.slow
def test_inductor_takes_slices():
    assert_programs(lambda x: (x * 2).sum(0), slices(Pair, grad=False), 1, backend="inductor", dynamic=True)


# ---- indices that are tensors of one number, and floats of Python ---------------------------------------------------

INDEXED = {
    "select": lambda x, i: x[i] * 2,
    "a view": lambda x, i: x[i],
    "two dims": lambda x, i: x[i, 1] + 1,
    "second dim": lambda x, i: x[1:, i] + 1,
    "slice up to": lambda x, i: x[:i] * 2,
    "slice from": lambda x, i: x[i:] * 2,
    "two numbers": lambda x, i: x[i, i] * 2,
    "item": lambda x, i: x * i.item(),
    "full": lambda x, i: x.new_ones(i.item()),
}


scale_row = lambda x, i: (x[i].mul_(3), x * 2)[1]  # noqa: E731


def square(cls=Tensor, grad=False):
    return lambda: make(cls, 4, 4, grad=grad)


NUMBERS_NUMBERS = {
    **{name: (fn, square(), (1, 3, 0, 2)) for name, fn in INDEXED.items()},
    **{f"{name}, with a gradient": (fn, square(grad=True), (1, 3, 0, 2)) for name, fn in INDEXED.items()},
    "a row is set": (lambda x, i: (x.__setitem__(i, 7.0), x * 2)[1], square(), (1, 3, 0, -1)),
    "a row is scaled": (scale_row, square(), (1, 3, 0, -1)),
    "a wrapper, select": (lambda x, i: x[i] * 2, square(Pair), (1, 3, 0)),
    "a wrapper, slice": (lambda x, i: x[:i] * 2, square(Pair), (1, 3, 0)),
    "a wrapper, a row is scaled": (scale_row, square(Pair), (1, 3, 0)),
    "a branch": (lambda x, i: x if i.item() > 2 else -x, square(), (3, 1, 3)),
    "an int": (lambda x, i: x * int(i), square(), (3, 1, 3)),
}


def call_with(fn, make_x, numbers, compiled, dtype=None):
    """Compares calls of one compiled function with ever new numbers, and returns it."""
    for number in numbers:
        judge(fn, lambda i=number: (make_x(), torch.tensor(i, dtype=dtype)), compiled)
    return compiled


@pytest.mark.sweep(5)
@BOTH_DOORS
@pytest.mark.parametrize("name", NUMBERS_NUMBERS)
def test_numbers_of_tensors(name: str, door):
    fn, make_x, numbers = NUMBERS_NUMBERS[name]
    call_with(fn, make_x, numbers, door(fn))


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", INDEXED)
def test_programs_for_numbers_of_tensors(name):
    """Dynamo guards the number in an index."""
    fn = INDEXED[name]
    assert len(call_with(fn, square(), (1, 3, 0, 2, 1), by_pass(fn)).programs) <= 4


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", ["slice up to", "slice from", "item"])
def test_numbers_in_a_graph_make_no_more_programs_than_in_pytorch(name):
    counter, fn = CompileCounterWithBackend("aot_eager"), INDEXED[name]
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        call_with(fn, square(), (1, 3, 0, 2, 1), torch.compile(fn, backend=counter))
        torch.compiler.reset()
        compiled = call_with(fn, square(), (1, 3, 0, 2, 1), by_pass(fn))
    assert len(compiled.programs) <= counter.frame_count


@pytest.mark.sweep(2)
@BOTH_DOORS
@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("cls", [Tensor, Pair])
def test_masks_of_bytes_where_dynamo_does_not_look(cls, door):
    inside = torch.compiler.disable(lambda x, m: x[m])
    fn = lambda x, m: inside(x, m) * 2  # noqa: E731
    call_with(fn, square(cls), ([1, 0, 2, 0], [1, 1, 1, 0]), door(fn), torch.uint8)


# ---- floats of Python that change, in programs that Inductor compiles ----------------------------------------

VALUES = (1.5, 2.0, 3.5, -0.5, 7.0, 1.5)


FUNCTIONS = {
    "product": (lambda x, t: x * t, 2),
    "quotient": (lambda x, t: t / x, 2),
    "comparison": (lambda x, t: torch.where(x > t, x, -x), 2),
    "in place": (lambda x, t: x.clone().mul_(t).add_(t), 2),
    "a number as a result": (lambda x, t: (x * t, t + 1.0), len(set(VALUES))),
    "an op of numbers": (lambda x, t: x.clamp(max=t), len(set(VALUES))),
    "a branch": (lambda x, t: x if t > 2 else x * t, 3),
}


def number(dtype, grad):
    return torch.tensor([-2.0, 0.25, 1.0, 3.0], dtype=dtype).requires_grad_(grad)


@pytest.mark.sweep(56)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("backend", [pytest.param("inductor", marks=pytest.mark.slow), "eager"])
def test_changing_float(backend, name, grad):
    fn, most = FUNCTIONS[name]
    compiled = desugar.compile(fn, backend=backend)
    for dtype in (torch.float32, torch.bfloat16)[: 1 if backend == "inductor" else 2]:
        for t in VALUES:
            judge(fn, lambda t=t, dtype=dtype: (number(dtype, grad), t), compiled)
        assert len(compiled.programs) <= most * (1 if dtype is torch.float32 else 2)


# ---- products of sizes in a graph have two factors each, as Inductor takes them -------------------------------------


def attend(q, bias):
    return F.scaled_dot_product_attention(q, q * 2, q, attn_mask=bias)


@pytest.mark.parametrize("width", [pytest.param(16, marks=pytest.mark.slow), 8])
def test_a_size_that_occurs_twice_in_a_stride(width):
    """The longest row, the mask and the heads have one size: a stride is the square of the symbol, or times others."""
    q = (
        JaggedTensor.from_tensors([torch.randn(n, 2, width) for n in (width, 5, 6)])
        .transpose(1, 2)
        .requires_grad_()
    )
    bias, products = torch.randn(width, width), []

    def backend(graph, inputs):
        products.extend(
            node for node in graph.graph.nodes if node.op == "call_function" and "val" in node.meta
        )
        return graph.forward

    results = [f(q, bias).values for f in (desugar.compile(attend, backend=backend, dynamic=True), attend)]
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), q)[0].values for y in results))
    numbers = [node for node in products if isinstance(node.meta["val"], torch.SymInt)]
    multiplied = [node for node in numbers if node.target is operator.mul]
    assert multiplied and all(len(node.args) == 2 for node in multiplied)
    assert {getattr(node.target, "__module__", None) for node in numbers} <= {
        "_operator",
        "torch._ops",
        "torch",
    }
