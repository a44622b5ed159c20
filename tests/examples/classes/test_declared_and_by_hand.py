"""Quaternions and log-probabilities, declared and by hand: values and gradients equal plain formulas."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from by_hand.log_probability import LogProbability as LogProbabilityByHand
from by_hand.quaternion import Quaternion as QuaternionByHand
from classes.log_probability import LogProbability
from classes.quaternion import Quaternion
from subclasses.testing import suite
from tests.examples.classes.checks import agreeing, check_gradients, converted, formulas, normal, refused

aten = torch.ops.aten
BOTH = {"declared": (Quaternion, LogProbability), "by hand": (QuaternionByHand, LogProbabilityByHand)}
of_quaternions, of_log_probabilities = (
    pytest.mark.parametrize("cls", [pair[n] for pair in BOTH.values()], ids=BOTH) for n in (0, 1)
)


def quaternion(cls, *size):
    return cls(torch.randn(*(size or (4, 6)), 4))


def log_probability(cls, rows=4):
    return cls(torch.randn(rows, 6))


OF_QUATERNIONS = {
    **{op: lambda x: (x,) for op in (torch.abs, torch.neg, torch.reciprocal, aten.sum)},
    **{op: lambda x: (x, x[:1]) for op in (torch.mul, torch.div, aten.add, aten.sub)},
    aten.select: lambda x: (x, -1, 2),
    aten.slice: lambda x: (x, 0, 1, 3),
    aten.unsqueeze: lambda x: (x, -1),
    aten.squeeze: lambda x: (x[:1], 0),
    aten.view: lambda x: (x, [-1]),
    aten.expand: lambda x: (x[:1], [4, 6]),
}
OF_LOG_PROBABILITIES = {
    aten.permute: lambda x: (x, [1, 0]),
    aten.squeeze: lambda x: (x[:1], 0),
    torch.prod: lambda x: (x, 0),
    torch.reciprocal: lambda x: (x,),
    **{op: lambda x: (x, x * 2) for op in (torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge)},
}


def suite_of(make, cls, ops, *more, **options):
    return suite(partial(make, cls), ops=ops, sizes=[partial(make, cls, n, *more) for n in (5, 7)], **options)


globals().update(
    TestQuaternion=suite_of(quaternion, Quaternion, OF_QUATERNIONS, 6),
    TestQuaternionByHand=suite_of(
        quaternion, QuaternionByHand, OF_QUATERNIONS, 6, construct=QuaternionByHand
    ),
    TestLogProbability=suite_of(log_probability, LogProbability, OF_LOG_PROBABILITIES),
    TestLogProbabilityByHand=suite_of(
        log_probability, LogProbabilityByHand, OF_LOG_PROBABILITIES, construct=LogProbabilityByHand
    ),
)

# ---- values and gradients --------------------------------------------------------------------------------------


def matrix(parts):
    """The real matrix [..., 4, 4] of the multiplication by a quaternion from the left."""
    a, b, c, d = parts.unbind(-1)
    rows = [(a, -b, -c, -d), (b, a, -d, c), (c, d, a, -b), (d, -c, b, a)]
    return torch.stack([torch.stack(row, -1) for row in rows], -2)


def times(x, y):
    return (matrix(x) @ y.unsqueeze(-1)).squeeze(-1)


def inverse(x):
    return torch.linalg.solve(matrix(x), torch.tensor([1.0, 0, 0, 0], dtype=x.dtype).expand_as(x))


def formula(x, y, r):
    z = x * y - 2 / y * x + -(r * x.conjugate()) / y.abs()
    return (z[1:] + z[0]).sum(0, keepdim=True)[..., ::2]


def by_matrices(x, y, r):
    sign = torch.tensor([1.0, -1, -1, -1], dtype=x.dtype)
    z = times(x, y) - 2 * times(inverse(y), x) - r[..., None] * x * sign / y.norm(dim=-1, keepdim=True)
    return (z[1:] + z[0]).sum(0, keepdim=True)[:, ::2]


def by_rodrigues(axis, angle, v):
    """A vector turned about an axis."""
    along = axis * (axis * v).sum(-1, keepdim=True)
    return (v - along) * angle.cos()[:, None] + torch.linalg.cross(axis, v) * angle.sin()[:, None] + along


def product_of_all(x, y):
    return ((x * y + 0.5 * x / y) * 2 + y[0]).sum(-1).prod(0) * (2 / y).prod()


AXIS, WEIGHTS = F.normalize(torch.randn(5, 3, dtype=torch.float64), dim=-1), torch.randn(1, 3, 4).double()

test_values_and_gradients = formulas(
    {
        **{
            f"{what}, {name}": case
            for what, (cls, _) in BOTH.items()
            for name, case in {
                "products": (
                    normal((4, 6, 4), (4, 6, 4), (6,)),
                    lambda x, y, r, cls=cls: (cls(x), cls(y), r),
                    formula,
                    by_matrices,
                    lambda z: z.parts,
                    {},
                    lambda t: (t * WEIGHTS).sum(),
                ),
                "a rotation turns vectors about its axis": (
                    normal((5,), (5, 3)),
                    lambda angle, v, cls=cls: (cls.about(AXIS, angle), v),
                    lambda q, v: (3 * q).rotate(v),
                    lambda angle, v: by_rodrigues(AXIS, angle, v),
                    lambda v: v,
                    {},
                    lambda t: t.prod(1).sum(),
                ),
            }.items()
        },
        **{
            f"{what}, probabilities": (
                normal((4, 3), (4, 3)),
                lambda *logs, cls=cls: map(cls, logs),
                product_of_all,
                lambda *logs: product_of_all(*(log.exp() for log in logs)).log(),
                lambda x: x.values,
                {},
                torch.sum,
            )
            for what, (_, cls) in BOTH.items()
        },
    },
    sweep=5,
)

# ---- quaternions -----------------------------------------------------------------------------------------------


@of_quaternions
def test_in_place_and_views(cls):
    x, y, leaf = quaternion(cls), quaternion(cls), torch.randn(4, requires_grad=True)
    kept, expected = x, x.parts + y.parts - y.parts[0]
    x += y
    x -= y[0]
    x[1] += y[1]
    x[2] = y[2]
    expected[1] += y.parts[1]
    expected[2] = y.parts[2]
    assert x is kept
    torch.testing.assert_close(x.parts, expected)
    x += cls(leaf)
    torch.testing.assert_close(*torch.autograd.grad(x.parts.sum(), leaf), torch.full((4,), 24.0))


PLAIN, ONES = torch.ones(4, 6), torch.ones(6)

# ---- log-probabilities -----------------------------------------------------------------------------------------


@pytest.mark.sweep(2)
@of_log_probabilities
def test_a_leaf_gets_the_gradient_by_its_logarithms(cls, way):
    x = log_probability(cls).requires_grad_()
    way(lambda x: (x * x + x).sum())(x).values.backward()
    logs = x.detach().values.clone().requires_grad_()
    torch.logaddexp(2 * logs, logs).logsumexp((0, 1)).backward()
    assert isinstance(x.grad, cls)
    torch.testing.assert_close(x.grad.values, logs.grad)


@of_log_probabilities
def test_what_underflows_as_a_probability(cls, way):
    x = cls(torch.full((2000,), 1e-3).log())
    assert x.materialize().prod() == 0
    torch.testing.assert_close(way(torch.prod)(x).values, torch.tensor(1e-3).log() * 2000)


MOVES = {
    "row": lambda x: x[1],
    "rows": lambda x: x[::2],
    "t": lambda x: x.t(),
    "mT": lambda x: x.mT,
    "view": lambda x: x.view(-1),
    "reshape": lambda x: x.t().reshape(-1),
    "permute": lambda x: x.permute(1, 0),
    "squeeze": lambda x: x[:1].squeeze(0),
    "unsqueeze": lambda x: x.unsqueeze(1),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
@of_log_probabilities
def test_gradients_of_moved_entries_and_of_all(cls, move):
    logs = torch.randn(4, 6, requires_grad=True)
    x = cls(logs)
    check_gradients(
        (move(x).values, x.values), (move(logs), logs), [logs], lambda t: t[0].square().sum() + t[1].sum()
    )


MAKES = [partial(log_probability, cls) for _, cls in BOTH.values()]

# ---- every class ---------------------------------------------------------------------------------------------

VECTORS, Z = torch.randn(5, 3), torch.tensor([0.0, 0, 1])
test_results = agreeing(
    {
        "rotations": (
            [partial(quaternion, cls, 5) for cls, _ in BOTH.values()],
            lambda q: [
                ((q * type(q)(F.pad(VECTORS, (1, 0))) / q).parts[:, 1:], q.rotate(VECTORS)),
                (q[0].rotate(torch.randn(2, 7, 3)).shape, (2, 7, 3)),
                (
                    type(q).about(Z, torch.tensor(math.pi / 2)).rotate(torch.tensor([1.0, 0, 5])),
                    torch.tensor([0.0, 1, 5]),
                ),
            ],
        ),
        "sizes and dtypes": (
            [
                lambda cls=cls, size=size, dtype=dtype: cls(torch.randn(*size, 4)).to(dtype)
                for cls, _ in BOTH.values()
                for size in ((), (1,), (0,), (0, 3), (1, 1))
                for dtype in (torch.float32, torch.bfloat16, torch.float64)
            ],
            lambda x: [
                *((y.shape, x.shape) for y in (x * x, x + x, 2 * x, 1 / x, -x, x.conjugate(), x.abs())),
                *(
                    (y.dtype == y.parts.dtype == x.dtype, True)
                    for y in (x * x, x + x, 2 * x, 1 / x, -x, x.sum())
                ),
                (x.sum().shape, ()),
                (x.sum().parts, x.parts.reshape(-1, 4).sum(0)),
            ],
        ),
        "no probabilities": (
            [lambda cls=cls: cls(torch.zeros(0, 3)) for _, cls in BOTH.values()],
            lambda x: [(x.sum(0).materialize(), torch.zeros(3)), (x.prod(0).materialize(), torch.ones(3))],
        ),
        "one probability": (
            [
                lambda cls=cls, size=size: cls(torch.zeros(size))
                for _, cls in BOTH.values()
                for size in ((), (1,), (1, 1))
            ],
            lambda x: [
                ((x + x).sum().materialize(), torch.tensor(2.0)),
                (x.sum((), keepdim=True).shape, x.shape),
            ],
        ),
    }
)
test_conversions = converted(
    {
        "numbers and conversions keep the dtype": (
            MAKES,
            [torch.float16, torch.bfloat16, torch.float64],
            lambda x: (2 * x, x / 2, 2 / x, x + 1, x.sum(0), x.prod()),
        ),
    }
)

test_what_is_refused = refused(
    {
        "what quaternions refuse": (
            [partial(quaternion, cls) for cls, _ in BOTH.values()],
            {
                "other parts": (
                    ValueError,
                    r"parts of size \[..., 4\], not \[3\]|expected shape \(... 4\), got \(3\)",
                    [lambda x: type(x)(torch.ones(3))],
                ),
                "strides": (
                    NotImplementedError,
                    "parts are not next to one another|the same strides mean other elements",
                    [lambda x: type(x)(torch.randn(4, 6).t()).as_strided((2,), (1,))],
                ),
                "numbers, writes, and ops without a rule": (
                    NotImplementedError,
                    None,
                    [
                        lambda x: x + 1,
                        lambda x: 1 - x,
                        lambda x: x.add_(1),
                        lambda x: x * 1j,
                        lambda x: x.mul_(x),
                        lambda x: x.mul_(2),
                        lambda x: x @ x.mT,
                        lambda x: x.exp(),
                        lambda x: x == x[0],
                        lambda x: x.conj(),
                        lambda x: x.copy_(PLAIN),
                        lambda x: PLAIN.add_(x),
                        lambda x: torch.mul(x, x, out=x),
                    ],
                ),
            },
        ),
        "what log probabilities refuse": (
            MAKES,
            {
                "a negative number": (
                    ValueError,
                    "cannot represent the negative number -1",
                    [lambda x: x * -1],
                ),
                "plain tensors": (
                    NotImplementedError,
                    r"pass LogProbability\(tensor.log\(\)\)",
                    [lambda x: x * ONES, lambda x: ONES * x, lambda x: x + ONES],
                ),
                "integers": (
                    NotImplementedError,
                    r"floating-point logarithms, not torch\.int64",
                    [lambda x: type(x)(torch.ones(2, dtype=torch.int64))],
                ),
                "a conversion to them": (
                    NotImplementedError,
                    r"no rule for aten\._to_copy",
                    [lambda x: x.long()],
                ),
                "ops without a rule": (
                    NotImplementedError,
                    "LogProbability has no rule for aten",
                    [
                        lambda x: x - x.clone(),
                        lambda x: x.sub_(x.clone()),
                        lambda x: x.mul_(x.clone()),
                        lambda x: x.exp(),
                        lambda x: -x,
                    ],
                ),
            },
        ),
    }
)
