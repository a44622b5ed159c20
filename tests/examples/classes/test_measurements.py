"""Values of the gallery that carry more than numbers: a mask, names, a unit, an error, a position."""

import copy

import pytest
import torch

from classes import quantity as quantities, uncertain as uncertainties
from classes.masked import Masked
from classes.named import Named
from classes.quantity import Quantity, UnitError
from classes.ring_buffer import RingBuffer
from classes.uncertain import Uncertain
from subclasses import DispatchError
from subclasses.testing import suite
from tests.doors import by_desugar
from tests.examples.classes.checks import (
    agreeing,
    check_gradients,
    converted,
    formulas,
    normal,
    positive,
    refused,
)
from tests.tables import giving

aten = torch.ops.aten


def masked(rows=4):
    return Masked(torch.randn(rows, 6), torch.rand(rows, 6) > 0.4)


def whole(rows=4):
    """With every entry present, so that each op is that on the values."""
    return Masked(torch.randn(rows, 6), torch.ones(rows, 6, dtype=torch.bool))


def named(rows=4, dims=("a", "b")):
    return Named(torch.randn(rows, 6), dims=dims)


def quantity(rows=4, **unit):
    return Quantity.of(torch.randn(rows, 6), **(unit or {"m": 1}))


def uncertain(*size):
    size = size or (4, 6)
    return Uncertain(torch.rand(size) + 0.5, torch.rand(size))


def ring_buffer(capacity=4, count=9):
    return RingBuffer(torch.randn(capacity, 6), count=count)


# ---- the kit ---------------------------------------------------------------------------------------------------

OF_TWO_MASKED = (torch.add, torch.sub, torch.mul, torch.div, torch.maximum, torch.minimum)
OF_ONE_MASKED = (
    torch.abs,
    torch.neg,
    torch.exp,
    torch.log,
    torch.sqrt,
    torch.reciprocal,
    torch.sigmoid,
    torch.tanh,
)
OF_WHOLE = {
    **{op: lambda x: (x,) for op in (*OF_ONE_MASKED, torch.square, torch.relu, torch.isfinite, torch.isnan)},
    **{op: lambda x: (x, x[:1]) for op in (*OF_TWO_MASKED, torch.eq, torch.ne, torch.le, torch.ge, torch.gt)},
    torch.rsub: lambda x: (x, 2),
    torch.clamp: lambda x: (x, -0.5, 0.5),
    aten.permute: lambda x: (x, [1, 0]),
    aten.squeeze: lambda x: (x[:1], 0),
}
OF_ONE_NAMED = (torch.exp, torch.neg, torch.abs, torch.relu, torch.tanh, torch.square, torch.reciprocal)
OF_TWO_NAMED = (
    torch.add,
    torch.sub,
    torch.mul,
    torch.div,
    torch.maximum,
    torch.minimum,
    torch.eq,
    torch.lt,
    torch.ge,
)

OF_UNCERTAIN = {
    **{op: lambda x: (x,) for op in (*uncertainties.UNARY, torch.sum)},
    **{op: lambda x: (x, x[:1] * 2) for op in uncertainties.BINARY},
    torch.pow: lambda x: (x, 2),
    torch.mean: lambda x: (x, 0),
    aten.select: lambda x: (x, 0, 1),
    aten.view: lambda x: (x, [-1]),
    aten.slice: lambda x: (x, 0, 1, 3),
    aten.permute: lambda x: (x, [1, 0]),
    aten.transpose: lambda x: (x, 0, 1),
    aten.t: lambda x: (x,),
    aten.unsqueeze: lambda x: (x, 1),
    aten.squeeze: lambda x: (x[:1], 0),
}
globals().update(
    TestMasked=suite(masked, sizes=[lambda n=n: masked(n) for n in (5, 7)]),
    TestWhole=suite(whole, reference=lambda x: x.values, ops=OF_WHOLE, paths={}),
    TestNamed=suite(
        named,
        reference=lambda x: x.values,
        sizes=[lambda n=n: named(n) for n in (5, 7)],
        variants=[lambda: named(dims=("b", "a")), lambda: named(dims=("a", "c"))],
        skip={"mixed_metadata"},  # the reference has no names, by which values are aligned
    ),
    TestRulesOfNames=suite(
        named,
        reference=lambda x: x.values,
        ops={
            **{op: lambda x: (x,) for op in OF_ONE_NAMED},
            **{op: lambda x: (x, x + 1) for op in OF_TWO_NAMED},
            **{op: lambda x: (x, 0) for op in (torch.sum, torch.mean, torch.amax, torch.amin)},
            torch.pow: lambda x: (x, 2),
            torch.rsub: lambda x: (x, 2),
            torch.where: lambda x: (x > 0, x, 0.0),
        },
        paths={},
    ),
    TestQuantity=suite(
        quantity,
        reference=lambda x: x.value,
        ops={
            torch.pow: lambda x: (x, 3),
            torch.reciprocal: lambda x: (x,),
            aten.permute: lambda x: (x, [1, 0]),
            aten.squeeze: lambda x: (x[:1], 0),
            **{
                op: lambda x: (x, x[:1])
                for op in (aten.sub, aten.rsub, aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge)
            },
        },
        sizes=[lambda n=n: quantity(n) for n in (5, 7)],
        variants=[lambda: quantity(s=2), lambda: quantity(kg=1, m=-1)],
    ),
    TestWithoutUnit=suite(lambda: Quantity(torch.randn(4, 6)), reference=lambda x: x.value, paths={}),
    TestUncertain=suite(
        uncertain,
        ops={op: OF_UNCERTAIN[op] for op in (torch.mul, torch.exp, torch.sum, aten.select)},
        sizes=[lambda n=n: uncertain(n, 6) for n in (5, 7)],
    ),
    TestRulesOfErrors=suite(uncertain, ops=OF_UNCERTAIN, paths={}),
    TestRingBuffer=suite(
        ring_buffer,
        sizes=[lambda: ring_buffer(5, 11), lambda: ring_buffer(7, 3)],
        variants=[lambda: ring_buffer(count=2)],
    ),
)

# ---- values and gradients --------------------------------------------------------------------------------------


def expand(function, values, errors):
    """Value and first-order error of a function of independent entries."""
    value = function(*values)
    errors_of_entries = []
    for entry in value.reshape(-1):
        slopes = torch.autograd.grad(entry, values, create_graph=True, allow_unused=True)
        terms = [(s * e).square().sum() for s, e in zip(slopes, errors, strict=True) if s is not None]
        errors_of_entries.append(torch.stack(terms).sum().sqrt())
    return value, torch.stack(errors_of_entries).view(value.shape)


def of_units(length, time):
    speed = length / time
    return (0.5 * speed**2 + speed * speed[0]).sum(0).mean() - 2 * (1 / time**2)[0, 0] * length[0, 0] ** 2


def broadcast_and_viewed(x, y):
    z = x + y - y.expand(4, 6) * 3
    return (z[1:].t().reshape(-1)[::2] * -z[0, 0]).sum() * 1.0


def of_masks(x, y):
    return ((x.log() - 2 / y) * y.relu() / x.sqrt()).t().mean(0)


MASKS = [torch.rand(4, 6) > 0.3 for _ in range(2)]
MASKS[0][1] = False
BOTH = MASKS[0] & MASKS[1]
NAMES = ("a", "b"), ("c", "b"), ("c",)
test_values_and_gradients = formulas(
    {
        "masks": (
            lambda: [torch.rand(4, 6).masked_fill_(~mask, torch.nan) for mask in MASKS],
            lambda *leaves: map(Masked, leaves, MASKS),
            of_masks,
            lambda x, y: torch.stack(
                [of_masks(x[r][BOTH[r]], y[r][BOTH[r]]) for r in range(4) if BOTH[r].any()]
            ),
            lambda z: z.values[z.mask],  # NaN would differ
            {},
            torch.sum,
        ),
        "names": (
            normal((4, 3), (5, 3), (5,)),
            lambda *leaves: [Named(t, dims=dims) for t, dims in zip(leaves, NAMES, strict=True)],
            lambda x, y, z: (
                (x * y - 2 / z.exp()).sum("b").amax(0)
                + (1 - y).mean(("b", 0)) * x.at(a=0, b=slice(1, 3)).sum()
            ),
            lambda x, y, z: (
                (x[:, :, None] * y.T - 2 / z.exp()).sum(1).amax(0) + (1 - y).mean() * x[0, 1:3].sum()
            ),
            lambda t: t.values,
            {"dims": ("c",)},
            lambda t: t.square().sum(),
        ),
        "units": (
            positive((4, 6), (4, 6), least=1),
            lambda x, y: (Quantity.of(x, m=1), Quantity.of(y, s=1)),
            of_units,
            of_units,
            lambda t: t.value,
            {"unit": (("m", 2), ("s", -2))},
            torch.sum,
        ),
        "a broadcast sum, and views": (
            normal((4, 6), (6,)),
            lambda *leaves: [Quantity.of(t, m=1) for t in leaves],
            broadcast_and_viewed,
            broadcast_and_viewed,
            lambda t: t.value,
            {},
            torch.sum,
        ),
        **{
            f"errors of {name}": (
                positive(*[(4, 6)] * 4),
                lambda x, y, *errors: map(Uncertain, (x, y), errors),
                formula,
                lambda x, y, *errors, formula=formula: expand(formula, (x, y), errors),
                lambda t: (t.value, t.error),
                {},
                lambda t: (t[0].sin() + t[1]).sum(),
            )
            for name, formula in {
                "a difference": lambda x, y: (x - y).sum(0),
                "a product": lambda x, y: 3 * x[1] * y,
                "a quotient": lambda x, y: (2 - x.t() / y.t()).mean(),
                "powers": lambda x, y: x.mean(0, keepdim=True) ** 3 + y.sqrt(),
                "functions": lambda x, y: (2 / y.exp()).sum() * x.log().abs().mean(1),
                "views": lambda x, y: -x.square().view(-1)[::2] / 4,
            }.items()
        },
        "entries of a buffer": (
            normal((3, 2), (2, 2)),
            lambda *leaves: leaves,
            lambda storage, entries: (
                RingBuffer(storage, count=4).append(entries[0]).append(entries[1]).read()
            ),
            lambda storage, entries: torch.stack([storage[0], entries[0], entries[1]]),
            lambda t: t,
            {},
            lambda t: t.pow(3).sum(),
        ),
    },
    sweep=5,
)

# ---- masks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [*OF_ONE_MASKED, torch.square, torch.relu], ids=lambda op: op.__name__)
@pytest.mark.parametrize("missing", [torch.nan, torch.inf, 0.0, -1.0])
def test_a_missing_entry_reaches_no_gradient(op, missing):
    values = torch.tensor([0.5, missing], requires_grad=True)
    y = op(Masked(values, torch.tensor([True, False]))).sum()
    torch.testing.assert_close(y.values, op(values[:1]).sum())
    (gradient,) = torch.autograd.grad(y.values, values)
    assert gradient[0].isfinite() and gradient[1] == 0


def test_operands_broadcast(way):
    x, row, number = masked(), Masked(torch.randn(6), torch.arange(6) > 1), torch.tensor(3.0)
    y = way(lambda x, row, number: 1 - (x + row) * number)(x, row, number)
    assert torch.equal(y.mask, x.mask & (torch.arange(6) > 1))
    torch.testing.assert_close(y.filled(0), (1 - (x.values + row.values) * 3).masked_fill(~y.mask, 0))


EMPTY = Masked(torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.bool))


def test_views_of_inner_tensors_with_other_strides(way):
    x = Masked(torch.randn(4, 6), torch.rand(6, 4).t() > 0.5)
    row = way(lambda x: x[1] * 1)(x)
    assert torch.equal(row.mask, x.mask[1])
    torch.testing.assert_close(row.filled(0), x.filled(0)[1])
    with pytest.raises(NotImplementedError, match="the same strides mean other elements"):
        x.as_strided((2,), (1,))


SHORT, PLAIN = torch.ones(2, dtype=torch.bool), torch.zeros(4, 6)

# ---- names -----------------------------------------------------------------------------------------------------


X, Y, NUMBER = named(), Named(torch.randn(6, 4), dims=("b", "a")), Named(torch.tensor(2.0), dims=())


def told(x):
    """Names and numbers."""
    return x.dims, x.values.tolist()


# ---- units -----------------------------------------------------------------------------------------------------


@pytest.mark.sweep(3)
def test_a_unit_that_does_not_fit_is_an_error(way):
    x, y = quantity(m=1), quantity(s=1)
    for wrong in (torch.add, torch.sub, torch.lt, lambda x, y: x + 1, lambda x, y: 1 - x, lambda x, y: x > 0):
        with pytest.raises(Exception, match=r"m and (s|no unit) in one sum or comparison"):
            way(wrong)(x, y)


SPEED = Quantity.of(torch.ones(2), s=-1, m=1, kg=0)


def test_gradients_of_what_was_written_to():
    x, y = (torch.randn(3, 2, requires_grad=True) for _ in range(2))
    got = Quantity.of(x, m=1) * 1
    got[0] = Quantity.of(y, m=1)[1]
    got += Quantity.of(y, m=1)
    expected = torch.cat([y[1:2] + y[:1], (x + y)[1:]])
    options = {"leaves": (x, y), "loss": lambda v: v.pow(3).sum() + v.detach().sum()}
    first = got.value * 1
    got[0] = Quantity.of(y, m=1)[1]
    check_gradients(first, expected, **options)
    check_gradients(got.value, torch.cat([y[1:2], (x + y)[1:]]), **options)


def test_a_leaf_gets_a_gradient_with_its_unit():
    x = quantity().requires_grad_()
    x.value.sum().backward()
    assert isinstance(x.grad, Quantity) and x.grad.unit == x.unit and x.grad.value.eq(1).all()


# ---- errors ----------------------------------------------------------------------------------------------------


def test_errors_agree_with_random_measurements():
    x, y = Uncertain(torch.tensor(2.0), torch.tensor(0.01)), Uncertain(torch.tensor(3.0), torch.tensor(0.02))
    a, b = (t.value + t.error * torch.randn(200_000) for t in (x, y))
    errors, deviations = [(x / y).error, (x * y).error], [(a / b).std(), (a * b).std()]
    torch.testing.assert_close(errors, deviations, rtol=0.02, atol=0)


ONE = uncertain(1)

# ---- a ring buffer ---------------------------------------------------------------------------------------------


@pytest.mark.sweep(20)
@pytest.mark.parametrize("capacity", [1, 3])
@pytest.mark.parametrize("append", ["append", "append_"])
def test_it_reads_as_a_list_that_forgets(way, append, capacity):
    def step(buffer, entry):
        buffer = getattr(buffer, append)(entry)
        return buffer, buffer.read()

    step, buffer, entries = way(step), RingBuffer(torch.zeros(capacity, 2)), []
    assert buffer.read().shape == (0, 2)
    for _ in range(7):
        entries.append(torch.randn(2))
        buffer, held = step(buffer, entries[-1])
        assert torch.equal(held, torch.stack(entries[-capacity:]))
    assert buffer.count == 7


def test_append_leaves_the_buffer_as_it_was():
    buffer = ring_buffer()
    before = buffer.read()
    other = buffer.append(torch.ones(6))
    assert torch.equal(buffer.read(), before)
    assert torch.equal(other.read(), torch.cat([before[1:], torch.ones(1, 6)]))
    shared = buffer.append_(torch.ones(6))
    assert shared.storage.data_ptr() == buffer.storage.data_ptr()
    assert torch.equal(shared.read(), other.read())


def test_few_programs_serve_all_positions():
    step = by_desugar(lambda buffer, entry: buffer.append(entry))
    buffer = ring_buffer(5, 0)
    for i in range(30):
        buffer = step(buffer, torch.full((6,), float(i)))
    assert buffer.read()[:, 0].tolist() == [25, 26, 27, 28, 29]
    assert len(step.programs) <= 3  # for 0, for 1, and for the rest


ENTRY, LEARNED = (torch.randn(size, requires_grad=True) for size in ((6,), (4, 6)))

# ---- every class ---------------------------------------------------------------------------------------------


def reduced(x, dim, keepdim):
    """Sums and means of the entries that are present, and whether there are any."""
    n, total = x.mask.sum(dim, keepdim), x.values.masked_fill(~x.mask, 0).sum(dim, keepdim)
    results = {x.sum(dim, keepdim): total, x.mean(dim, keepdim=keepdim): (total / n).nan_to_num()}
    return [((y.filled(0), y.mask), (expected, n > 0)) for y, expected in results.items()]


def by_name(x, reduce, name, position, keepdim):
    """A reduction by names and by positions; both keep the names of the other dims."""
    y, z = (getattr(x, reduce)(dim, keepdim) for dim in (name, position))
    plain = getattr(torch, reduce)(x.values, (0, 1) if position is None else position, keepdim=keepdim)
    return [(y.values, plain), (z.values, plain), (y.dims == z.dims and len(y.dims) == y.ndim, True)]


test_values = agreeing(
    {
        **{
            f"reductions of masks by {dim}, {keepdim}": (
                [masked],
                lambda x, dim=dim, keepdim=keepdim: reduced(x, dim, keepdim),
            )
            for dim in (None, 0, -1, (0, 1))
            for keepdim in (False, True)
        },
        **{
            f"{reduce} by {name}, {keepdim}": (
                [named],
                lambda x, case=(reduce, name, position, keepdim): by_name(x, *case),
            )
            for reduce in ("sum", "mean", "amax", "amin", "std", "var")
            for name, position in (("a", 0), ("b", -1), (("b", "a"), (1, 0)), (None, None))
            for keepdim in (False, True)
        },
        **{
            f"exact values get finite gradients of {name}": (
                [lambda: torch.zeros(3, requires_grad=True)],
                lambda error, run=run: [
                    (run(Uncertain(torch.ones(3), error)).error.any().item(), False),
                    (
                        torch.autograd.grad(run(Uncertain(torch.ones(3), error)).error.sum(), error)[
                            0
                        ].isfinite(),
                        torch.ones(3, dtype=torch.bool),
                    ),
                ],
            )
            for name, run in {
                "a sum": lambda x: x + x[0],
                "a product": lambda x: x * x[0],
                "all": lambda x: x.sum(),
                "a quotient": lambda x: x / x[0],
            }.items()
        },
        "copies and entries keep the position": (
            [
                ring_buffer,
                lambda: copy.deepcopy(ring_buffer()),
                lambda: ring_buffer().clone(),
                lambda: ring_buffer().long(),
            ],
            lambda x: [
                (x.count, 9),
                (x.append(torch.ones(6, dtype=x.dtype)).read()[-1], torch.ones(6, dtype=x.dtype)),
            ],
        ),
        "a missing zero is no division by zero": (
            [lambda: masked().double(), lambda: masked().int()],
            lambda x: [((x / x).mask, x.mask), (x.sum(0).dtype == x.values.sum(0).dtype, True)],
        ),
        "an entry for a buffer that is learned": (
            [lambda: RingBuffer(torch.randn(4, 6, requires_grad=True), count=1)],
            lambda x: [(x.detach().append_(torch.zeros(6)).count, 2)],
        ),
    }
)
test_conversions = converted(
    {
        "conversions keep the mask": (
            [masked],
            [torch.bfloat16, torch.float64, torch.int32],
            lambda x: [x + 1, x * x, x.abs(), *([x.mean(), x.sum(0)] if x.is_floating_point() else [])],
        ),
        "conversions keep the names": (
            [named],
            [torch.bfloat16, torch.float64, torch.int32],
            lambda x: [x + 1, x * x, x.sum("a").to(x.dtype)],
        ),
        "conversions and copies keep the unit": (
            [quantity],
            [torch.bfloat16, torch.float64],
            lambda x: [copy.deepcopy(x), 2 * x, x / 2, x.sum(0), x[:0].sum(0), x[:1, :1].mean()],
        ),
        "conversions keep the errors": (
            [uncertain],
            [torch.bfloat16, torch.float64],
            lambda x: [x + x, 2 * x, 2 / x, x**2, x.sum(0), x.mean(), x.exp()],
        ),
        "conversions of entries": ([ring_buffer], [torch.bfloat16, torch.int64], lambda x: [x.read()]),
    }
)

test_what_is_refused = refused(
    {
        "what masked values refuse": (
            [masked],
            {
                "another mask": (
                    ValueError,
                    r"values of size \[3\] with a mask of size \[2\]",
                    [lambda x: Masked(torch.ones(3), SHORT)],
                ),
                "writes, and ops without a rule": (
                    DispatchError,
                    None,
                    [
                        lambda x: x.add_(1),
                        lambda x: x.__isub__(x),
                        lambda x: x.copy_(PLAIN),
                        lambda x: x.zero_(),
                        lambda x: x.cumsum(0),
                        lambda x: x @ x.t(),
                        lambda x: torch.mul(x, x, out=x),
                        lambda x: PLAIN.add_(x),
                    ],
                ),
            },
        ),
        "what named values refuse": (
            [named],
            {
                "other numbers of names": (
                    ValueError,
                    "need as many different names",
                    [
                        lambda x: Named(torch.ones(2, 2), dims=("a",)),
                        lambda x: Named(torch.ones(2, 2), dims=("a", "a")),
                        lambda x: Named(torch.ones(()), dims=("a",)),
                    ],
                ),
                "a name that is not there": (
                    ValueError,
                    r"no dimension c among \('a', 'b'\)",
                    [lambda x: x.sum("c")],
                ),
                "another size": (RuntimeError, "must match", [lambda x: x + named(5)]),
                "an order of some": (RuntimeError, None, [lambda x: x.order("a")]),
                "plain tensors": (
                    NotImplementedError,
                    "have no names",
                    [lambda x: x + torch.ones(6), lambda x: torch.ones(4, 6) * x],
                ),
                "ops without a rule": (
                    DispatchError,
                    "Named has no rule for aten",
                    [
                        lambda x: x.mul_(2),
                        lambda x: x.__isub__(x),
                        lambda x: x[0],
                        lambda x: x.T,
                        lambda x: x.cumsum(0),
                    ],
                ),
            },
        ),
        "what quantities refuse": (
            [quantity],
            {
                "another unit, in place": (
                    UnitError,
                    "in one sum or comparison",
                    [
                        lambda x: x.add_(1),
                        lambda x: x.copy_(PLAIN),
                        lambda x: x.copy_(quantity(s=1)),
                        lambda x: x.__setitem__(0, PLAIN[0]),
                    ],
                ),
                "writes": (
                    NotImplementedError,
                    None,
                    [lambda x: x.mul_(x), lambda x: x.zero_(), lambda x: x.fill_(1), lambda x: PLAIN.add_(x)],
                ),
                "ops without a rule": (
                    DispatchError,
                    "Quantity has no rule for aten",
                    [lambda x: x.exp(), lambda x: x.sqrt(), lambda x: x.cumprod(0), lambda x: x.softmax(0)],
                ),
                "powers": (NotImplementedError, None, [lambda x: x**0.5, lambda x: 2**x, lambda x: x**x]),
            },
        ),
        "what uncertain values refuse": (
            [uncertain],
            {
                "other errors": (
                    ValueError,
                    r"values of size \[3\] with errors of size \[2\]",
                    [lambda x: Uncertain(torch.ones(3), torch.ones(2))],
                ),
                "integers": (NotImplementedError, r"values of torch\.int64", [lambda x: x.long()]),
                "no rule": (DispatchError, "Uncertain has no rule for aten", [lambda x: x.tanh()]),
                "writes, and ops without a formula": (
                    NotImplementedError,
                    None,
                    [
                        lambda x: x.add_(1),
                        lambda x: x.__imul__(x),
                        lambda x: x.copy_(torch.zeros(4, 6)),
                        lambda x: x @ x.t(),
                        lambda x: x > 1,
                        lambda x: 2**x,
                        lambda x: x**x,
                        lambda x: torch.mul(x, x, out=x),
                    ],
                ),
            },
        ),
        "what ring buffers refuse": (
            [ring_buffer],
            {
                "no capacity": (
                    ValueError,
                    "needs a capacity of 1 or more",
                    [lambda x, size=size: RingBuffer(torch.zeros(size)) for size in ((), (0,), (0, 3))],
                ),
                "two entries": (RuntimeError, "expand", [lambda x: x.append(torch.ones(2, 6))]),
                # A gradient is never lost in silence.
                "gradients": (
                    RuntimeError,
                    "append_ takes no gradients; use append",
                    [
                        lambda x: x.append_(ENTRY),
                        lambda x: RingBuffer(LEARNED, count=1).append_(ENTRY.detach()),
                    ],
                ),
                "ops without a rule": (
                    DispatchError,
                    "RingBuffer has no rule for aten",
                    [lambda x: x + 1, lambda x: x.mul_(2), lambda x: x[0], lambda x: x.sum()],
                ),
            },
        ),
    }
)

test_results = giving(
    {
        f"{what}: {name}": case
        for what, cases in {
            "no entries one and zeros": {
                "sums of nothing": (lambda: EMPTY.sum(0).mask.tolist(), [False] * 3),
                "a mean of nothing": (lambda: EMPTY.mean().mask, False),
                "nothing, and one": (lambda: (EMPTY + 1).shape, (0, 3)),
                "a single entry": (
                    lambda: (2 / Masked(torch.tensor(2.0), torch.tensor(True))).mean().values,
                    1,
                ),
                # zeros are present
                **{
                    name: (
                        lambda zeros=zeros: (zeros().mask.all().item(), zeros().values.any().item()),
                        (True, False),
                    )
                    for name, zeros in {
                        "zeros_like": lambda: torch.zeros_like(masked()),
                        "new_zeros": lambda: masked().new_zeros(2, 3),
                    }.items()
                },
            },
            "names of results": {
                # the order of the operands does not matter
                "a sum": (lambda: told(X + Y), (("a", "b"), (X.values + Y.values.T).tolist())),
                "the other way": (lambda: told(Y + X), (("b", "a"), (X.values + Y.values.T).T.tolist())),
                # reductions by position, as PyTorch's parser has it
                "logsumexp": (lambda: told(torch.logsumexp(X, 0)), (("b",), X.values.logsumexp(0).tolist())),
                "any": (lambda: (X > 0).any("a").values.dtype, torch.bool),
                "all": (lambda: (X > 9).all("b").dims, ("a",)),
                "order": (lambda: X.order("new", "b", "a").values.tolist(), [X.values.T.tolist()]),
                "at": (lambda: told(X.at(b=2)), (("a",), X.values[:, 2].tolist())),
                "at none": (lambda: X.at(a=slice(0, 0)).shape, (0, 6)),
                # no entries, one, and no dimensions
                "a sum of nothing": (lambda: named(0).sum("a").values.tolist(), [0] * 6),
                "nothing": (lambda: (named(0) * 2).shape, (0, 6)),
                "one row": (lambda: (named(4) + named(1)).values.shape, (4, 6)),
                "a number": (lambda: (2 / NUMBER).sum().values, 1),
                "a number and a row": (lambda: (NUMBER * named(1)).dims, ("a", "b")),
            },
            "units are sorted and cancel": {
                "sorted": (lambda: SPEED.unit, (("m", 1), ("s", -1))),
                "a quotient": (lambda: (SPEED / SPEED).unit, ()),
                "a power of 0": (lambda: (SPEED**0).unit, ()),
                "an inverse": (lambda: (1 / SPEED).unit, (("m", -1), ("s", 1))),
                "a product": (lambda: (SPEED.view(1, 2) @ SPEED).unit, (("m", 2), ("s", -2))),
                "a number without unit": (lambda: (SPEED / SPEED + 1).value.tolist(), [2, 2]),
                "a number first": (lambda: (1 + SPEED / SPEED).value.tolist(), [2, 2]),
                "shown": (lambda: quantities.show((SPEED * SPEED).unit), "m^2 s^-2"),
            },
            "no entries and one": {
                "a sum of nothing": (lambda: uncertain(0, 3).sum(0).error.tolist(), [0] * 3),
                "a sum of one": (lambda: ONE.sum(0).error, ONE.error[0]),
                "one and nothing": (lambda: (ONE * uncertain(0)).shape, (0,)),
                "a mean": (lambda: uncertain(1, 1).mean().shape, ()),
            },
        }.items()
        for name, case in cases.items()
    }
)
