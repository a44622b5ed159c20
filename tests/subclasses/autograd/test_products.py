"""Derivatives of products, whose formulas ask a rule for the product of a plain gradient and a value."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from subclasses import DispatchError, inner
from tests.doors import DOORS
from tests.subclasses.autograd.judge import agree, agreeing, numbers, passing
from tests.subclasses.subjects import declare

aten = torch.ops.aten


def product(func, x, y):
    if not isinstance(x, Sum):
        x, y = y, x
    if isinstance(y, Sum):
        return type(x)(x.one * y.one + x.one * y.other + x.other * y.one, x.other * y.other)
    return type(x)(x.one * y, x.other * y)


# A number in two parts. Its product with a plain tensor is natural, but is not a cotangent of that tensor.
Sum = declare(
    keywords={"fallback": "materialize", "kind": "structure"},
    one=inner(),
    other=inner(),
    materialize=lambda self: self.one + self.other,
    rules={aten.mul: product, aten.sinh: lambda func, x: x},  # the derivative of the second one is one
)
# A sum that is one tensor, whose derivative is PyTorch's formula.
Whole = declare(Sum, keywords={"kind": "representation"})

# Functions of a value, another value and a plain tensor.
PRODUCTS = {
    "of two": lambda x, y, q: x * y,
    "of three": lambda x, y, q: x * y * x,
    "with a plain tensor": lambda x, y, q: x * q,
    "with a plain tensor that broadcasts": lambda x, y, q: x * q[:1],
    "with itself": lambda x, y, q: x * x,
    "with a power": lambda x, y, q: x * y**2,
    "and a use as a whole": lambda x, y, q: (x * y).sin() * x,
    "in place": lambda x, y, q: (x * 1.0).mul_(y),
    "in place, of a copy": lambda x, y, q: x.clone().mul_(y).mul_(q),
}

READ = {
    "whole": (lambda z: z.sum(), lambda t: t.sum()),
    "materialized": (lambda z: (z.materialize() * 3).sum(), lambda t: (t * 3).sum()),
    "inner": (lambda z: (z.unwrap("one") + z.unwrap("other")).sum(), lambda t: t.sum()),
    "both": (
        lambda z: z.sin().sum() + z.unwrap("one").sum() + z.unwrap("other").sum(),
        lambda t: t.sin().sum() + t.sum(),
    ),
}
PARTS = [
    torch.tensor(v, dtype=torch.float64) for v in ([1, 2, 3], [0.5, -1, 2], [3, 1, -2], [2, 2, 1], [2, -1, 3])
]


def product_case(name, read, cls=Sum):
    """A product of two values and a plain tensor, and the same of plain tensors."""
    fn, (of_value, of_plain) = PRODUCTS[name], READ[read]
    return (
        lambda a, b, c, d, q: of_value(fn(cls(a, b), cls(c, d), q)),
        lambda a, b, c, d, q: of_plain(fn(a + b, c + d, q)),
        PARTS,
    )


WHOLE_GRAPH = {name: partial(door, fullgraph=True) for name, door in DOORS.items()}
test_gradients_are_those_of_plain_tensors = agreeing(
    {
        **{f"{name}, {read}": product_case(name, read) for name in PRODUCTS for read in READ},
        **{
            f"{name}, {read}, of a representation": product_case(name, read, Whole)
            for name in PRODUCTS
            for read in ("whole", "materialized")
        },
    },
    WHOLE_GRAPH,
)
test_second_derivatives = agreeing(
    {
        name: product_case(name, "whole")
        for name in ("of two", "of three", "with a plain tensor", "with a power")
    },
    {name: WHOLE_GRAPH[name] for name in ("eager", "desugar")},
    twice=["eager", "desugar"],
)


def test_a_value_times_itself_in_place_is_refused_as_for_plain_tensors():
    for start in (PARTS[0].clone(), Whole(*PARTS[:2])):
        z = start.requires_grad_() * 1.0
        z.mul_(z)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()


# PyTorch refuses torch.autograd.grad through a reentrant checkpoint.
@pytest.mark.parametrize(("use_reentrant", "create_graph"), [(False, False), (False, True), (True, False)])
def test_a_checkpointed_product_is_computed_again_as_a_value(use_reentrant, create_graph):
    seen = []

    def product(a, b, q):
        z = Sum(a, b) * q
        seen.append(type(z))
        found = (z * z).sum()
        return found if create_graph else found + z.unwrap("one").sum()

    a, b, q = (t.clone().requires_grad_() for t in PARTS[:3])
    got = checkpoint(product, a, b, q, use_reentrant=use_reentrant)
    if use_reentrant:
        got.backward()
        found = (a.grad, b.grad, q.grad)
    else:
        found = torch.autograd.grad(got, (a, b, q), create_graph=create_graph)
    assert seen == [Sum, Sum]
    expected = ((a + b) * q).square().sum() + (0 if create_graph else (a * q).sum())
    torch.testing.assert_close(found, torch.autograd.grad(expected, (a, b, q)))


def test_python_code_in_a_backward_computes_with_values():
    def backward(g):
        made.append(Sum(torch.ones(2), torch.ones(2)) * g)
        return made[0].materialize()

    made, q = [], torch.ones(2, requires_grad=True)
    passing(backward)(q).sum().backward()
    assert type(made[0]) is Sum and q.grad.tolist() == [2, 2]


def test_the_gradient_of_a_plain_operand_is_plain_and_an_optimizer_takes_it():
    q = torch.nn.Parameter(torch.ones(2))
    (Sum(torch.ones(2), torch.ones(2)) * q).sum().backward()
    assert type(q.grad) is Tensor and q.grad.tolist() == [2, 2]
    torch.optim.SGD([q], lr=0.5).step()
    assert q.tolist() == [0, 0]


def test_the_gradient_of_a_value_that_is_a_leaf():
    x, y = (Whole(torch.full((2,), v), torch.ones(2)).requires_grad_() for v in (1.0, 3.0))
    (x * y).sum().backward()
    assert x.grad.tolist() == [4, 4] and y.grad.tolist() == [2, 2]


# ---- a rule that returns its operand -------------------------------------------------------------------------


def of_operand(made):
    def fn(one, other):
        x = Sum(one, other)
        return made(x).sinh().unwrap("one"), x.unwrap("other")

    return fn


# PyTorch's formula is cosh; it would also replace the derivative of the function that made the operand.
test_a_rule_that_returns_its_operand_has_the_derivative_of_that = agreeing(
    {
        "a leaf": (of_operand(lambda x: x), lambda one, other: (one, other), PARTS[:2]),
        "a result": (of_operand(lambda x: x * 5.0), lambda one, other: (one * 5.0, other), PARTS[:2]),
    },
    WHOLE_GRAPH,
)


def test_the_operand_stays_what_it_is():
    x = Sum(torch.ones(2), torch.ones(2)).requires_grad_()
    z = x.sinh()
    assert z is not x and z.one.data_ptr() == x.one.data_ptr() and x.is_leaf and z.grad_fn is not None
    q = torch.ones(2, requires_grad=True)
    Returns = declare(Sum, rules={aten.atan2: lambda func, x, y: y})
    found = torch.atan2(Returns(torch.ones(2), torch.ones(2)), q)
    assert found is not q and found.data_ptr() == q.data_ptr() and q.is_leaf


# ---- products of matrices inside of functions of several ops ---------------------------------------------------

# The classes represent matrices over the semiring of logarithms, in which a product is a sum and a sum is a logsumexp.
# So PyTorch's formula for a product of matrices is another one.


def matrix_product(a, b):
    return torch.logsumexp(a[..., :, :, None] + b[None], -2)


def batched(b, x):
    return torch.logsumexp(b[..., :, :, None] + x, -2)


def logs_class(*, values=False, **body):
    """A class with a rule for products.

    Args:
        values: Whether the product of two of its values is a value.
        body: More of the class.
    """

    def multiply(func, x, y):
        out = matrix_product(*(t.logs if isinstance(t, Logs) else t for t in (x, y)))
        return Logs(out) if values and isinstance(x, Logs) and isinstance(y, Logs) else out

    Logs = declare(logs=inner(shape="..."), rules={aten.mm: multiply}, **body)
    return Logs


def converted(self, cotangent):
    return type(self)(cotangent)


Logs = logs_class(wrap_cotangent=converted)
Matrix = logs_class(wrap_cotangent=converted, values=True)
Bare = logs_class(values=True)  # has no way to wrap a plain cotangent

# The sizes, a function of a class and two tensors, and the same without the class.
CALLS = {
    "matrix": ((3, 2), lambda cls, b, x: b @ cls(x), batched),
    "batch": ((3, 2, 2), lambda cls, b, x: b @ cls(x), batched),
    "4-D": ((2, 3, 2, 2), lambda cls, b, x: b @ cls(x), batched),
    "linear": ((3, 2, 2), lambda cls, b, x: F.linear(b, cls(x)), lambda b, x: batched(b, x.t())),
    "two uses": (
        (3, 2, 2),
        lambda cls, b, x: b @ cls(x) + (b @ cls(x)).sin(),
        lambda b, x: batched(b, x) + batched(b, x).sin(),
    ),
    "a power": (
        (2, 2),
        lambda cls, b, x: torch.matrix_power(cls(b), 3) + 0 * x,
        lambda b, x: matrix_product(matrix_product(b, b), b) + 0 * x,
    ),
    "a vector": (2, lambda cls, b, x: b @ cls(x), lambda b, x: batched(b[None], x)[0]),  # squeezed in place
}


def matrix_case(size, fn, plain, cls=Logs):
    return (partial(fn, cls), plain, [size, (2, 2)])


DEEP = {door: DOORS[door] for door in ("eager", "stock", "desugar")}
(FROZEN,) = numbers((2, 2))
test_the_gradient_is_that_of_the_rule_inside = agreeing(
    {
        **{name: matrix_case(*case) for name, case in CALLS.items()},
        **{
            f"{name}, frozen": (
                lambda b, fn=fn: fn(Logs, b, FROZEN),
                lambda b, plain=plain: plain(b, FROZEN),
                [size],
            )
            for name, (size, fn, plain) in CALLS.items()
        },
    },
    DEEP,
    twice=["eager"],
)


CHAINS = {
    "b X X": (
        (3, 2),
        lambda cls, b, x: torch.linalg.multi_dot([b, cls(x), cls(x)]),
        lambda b, x: matrix_product(b, matrix_product(x, x)),
    ),
    "b X Y X": (
        (3, 2),
        lambda cls, b, x: torch.linalg.multi_dot([b, cls(x), cls(2 * x), cls(x)]),
        lambda b, x: matrix_product(b, matrix_product(x, matrix_product(2 * x, x))),
    ),
    "one value twice": (
        (3, 2),
        lambda cls, b, x: torch.linalg.multi_dot([b, *[cls(x)] * 2]),
        lambda b, x: matrix_product(b, matrix_product(x, x)),
    ),
    "of a product": (
        (3, 2),
        lambda cls, b, x: torch.linalg.multi_dot([b, cls(x) @ cls(x), cls(x)]),
        lambda b, x: matrix_product(b, matrix_product(matrix_product(x, x), x)),
    ),
    "a value": (
        (2, 2),
        lambda cls, b, x: torch.linalg.multi_dot([cls(b), cls(x), cls(x)]).unwrap("logs"),
        lambda b, x: matrix_product(b, matrix_product(x, x)),
    ),
    "a power": (
        (2, 2),
        lambda cls, b, x: b @ torch.matrix_power(cls(x), 5),
        lambda b, x: matrix_product(
            b, matrix_product(matrix_product(matrix_product(x, x), matrix_product(x, x)), x)
        ),
    ),
    "a layer": (
        (4, 3, 2),
        lambda cls, b, x: F.linear(b, cls(x) @ cls(x)),
        lambda b, x: batched(b, matrix_product(x, x).t()),
    ),
}


test_values_in_the_middle_have_the_gradient_of_the_rule = agreeing(
    {
        f"{call}, {name}": matrix_case(*case, cls=cls)
        for call, case in CHAINS.items()
        for name, cls in {"wrapping": Matrix, "bare": Bare}.items()
    },
    DEEP,
    twice=["eager"],
)


def test_an_exception_half_way_leaves_nothing():
    (x,) = numbers((2, 2))
    value = Logs(x)
    for _ in range(2):
        with pytest.raises((DispatchError, RuntimeError)):
            torch.matmul(torch.rand(3, 2, 5), value)
        agree(lambda b: b @ value, lambda b: batched(b, x), numbers((3, 2, 2)))
