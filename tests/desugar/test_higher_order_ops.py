"""`torch.cond`, `while_loop` and the other higher-order ops inside a function; a Python `if` or loop is the judge.

Classes written by hand keep PyTorch's way: Dynamo cannot run the ops on them.
"""

import functools

import pytest
import torch
from torch._higher_order_ops import associative_scan, map as map_rows, scan, while_loop
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from desugar import DesugarError
from subclasses.ragged import JaggedTensor
from tests.desugar.classes import DECLARED, Beside, Labeled, Nested, Pair, TwoTensor, make, plain_parts
from tests.desugar.judge import by_pass, tensors_of

weight = torch.randn(4, requires_grad=True)


def slow(name):
    return pytest.param(name, marks=pytest.mark.slow)


def python_cond(pred, true_fn, false_fn, operands=()):
    return true_fn(*operands) if pred else false_fn(*operands)


PROGRAMS = {
    "one operand": lambda cond, pred, x: cond(pred, lambda x: x.sin(), lambda x: x * x, (x,)),
    "closes over a parameter": lambda cond, pred, x: cond(pred, lambda x: x * weight, lambda x: x + 1, (x,)),
    "closes over a result": lambda cond, pred, x: (lambda y: cond(pred, lambda: y.sin(), lambda: y * x))(
        x * 2
    ),
    "in a chain": lambda cond, pred, x: cond(pred, lambda x: x.sin(), lambda x: x * x, (x * 2,)) * 3,
    "nested": lambda cond, pred, x: cond(
        pred, lambda x: cond(pred, lambda x: x.sin(), lambda x: x.cos(), (x,)), lambda x: x * x, (x,)
    ),
    "two results": lambda cond, pred, x: cond(
        pred, lambda x: (x.sin(), x.cos()), lambda x: (x * x, x + 1), (x,)
    ),
    "the same twice": lambda cond, pred, x: cond(pred, lambda x, y: x * y, lambda x, y: x - y, (x, x)),
    "a plain operand": lambda cond, pred, x: cond(
        pred, lambda x, w: x * w, lambda x, w: x * w * w, (x, weight * 1)
    ),
    "operands in a dict": lambda cond, pred, x: cond(
        pred, lambda d: d["x"] * 2, lambda d: d["x"].sin(), ({"x": x},)
    ),
}


def compiled_cond(program, **options):
    return by_pass(lambda pred, *args: program(torch.cond, pred, *args), **options)


def gradients(result, leaves):
    """The plain parts of each gradient, or None."""
    total = sum(out.double().sum() for out in tensors_of(result) if out.requires_grad)
    found = torch.autograd.grad(total, leaves, allow_unused=True)
    return [g if g is None else plain_parts(g) for g in found]


def check(program, compiled, make_args, leaves=()):
    """Results and gradients equal a Python `if`, whichever branch runs."""
    for pred in (torch.tensor(True), torch.tensor(False)):
        args = make_args()
        want, got = program(python_cond, pred, *args), compiled(pred, *args)
        assert [type(t) for t in tensors_of(got)] == [type(t) for t in tensors_of(want)]
        for one, other in zip(tensors_of(got), tensors_of(want), strict=True):
            torch.testing.assert_close(plain_parts(one.detach()), plain_parts(other.detach()))
        wanted = [x for x in (*args, *leaves) if x.requires_grad]
        for ours, theirs in zip(*(gradients(y, wanted) for y in (got, want)), strict=True) if wanted else ():
            if theirs is None:
                assert ours is None or not any(part.any() for part in ours)
            else:
                torch.testing.assert_close(ours, theirs)


@pytest.mark.sweep(90)
@pytest.mark.parametrize("kind", [torch.Tensor, *DECLARED], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", PROGRAMS)
def test_both_branches(name, kind):
    program = PROGRAMS[name]
    compiled = compiled_cond(program)
    for _ in range(2):
        check(program, compiled, lambda: (make(kind, 3, 4, grad=True),), [weight])
    assert len(compiled.programs) == 1


@pytest.mark.parametrize("pred", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_second_derivatives(pred):
    def program(cond, pred, x):
        return cond(pred, lambda x: x.sin() * x, lambda x: x * x * x, (x,))

    found, x = [], make(Pair, 3, grad=True)
    for fn in (functools.partial(program, python_cond), compiled_cond(program)):
        y = fn(torch.tensor(pred), x)
        (first,) = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
        (second,) = torch.autograd.grad(first, x, torch.ones_like(first))
        found.append([part for t in (y, first, second) for part in plain_parts(t.detach())])
    torch.testing.assert_close(*found)


# The program, its arguments, call by call, and options.
OTHERS = {
    "dynamic sizes": (
        lambda cond, pred, x: cond(pred, lambda x: x.sin() * x.shape[0], lambda x: x * x, (x,)),
        [lambda rows=rows: (make(Pair, rows, 4, grad=True),) for rows in (3, 4, 5)],
        {"dynamic": True},
    ),
    "branches of different sizes": (
        lambda cond, pred, x: cond(pred, lambda x: x[:1] * 1, lambda x: x * 2, (x,)),
        [lambda: (make(Pair, 3, 4),)],
        {},
    ),
    "ragged operands": (
        lambda cond, pred, x, bias: cond(
            pred, lambda x: (x + bias).sin().mean(1), lambda x: (x * bias).sum(1), (x,)
        ),
        [
            lambda n=n: (
                JaggedTensor.from_tensors(torch.randn(sum(n), 3).split(n)).requires_grad_(),
                torch.randn(3, requires_grad=True),
            )
            for n in ([2, 4], [3, 1, 2])
        ],
        {},
    ),
    "inductor": (
        PROGRAMS["one operand"],
        [lambda: (make(Pair, 3, 4, grad=True),)],
        {"backend": "inductor"},
    ),
}


@pytest.mark.parametrize(
    "name", ["dynamic sizes", "branches of different sizes", slow("ragged operands"), slow("inductor")]
)
def test_other_programs(name):
    program, calls, options = OTHERS[name]
    compiled = compiled_cond(program, **options)
    for make_args in calls:
        check(program, compiled, make_args)
    assert len(compiled.programs) == 1 or name == "ragged operands"


def test_an_operand_written_afterwards_is_noticed():
    def fn(pred, y):
        z = torch.cond(pred, lambda y: y.sin(), lambda y: y * y, (y,))
        y.add_(1)
        return z

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        by_pass(lambda pred, x: fn(pred, x * 2))(TRUE, torch.randn(3, requires_grad=True))


TRUE = torch.tensor(True)
REFUSED = {
    "a subclass as predicate": (
        lambda x: torch.cond(x.sum() > 0, lambda x: x * 1, lambda x: -x, (x,)),
        "plain bool tensor of one element as the predicate, got a Pair",
    ),
    "a write": (
        lambda x: torch.cond(TRUE, lambda x: x.add_(1) * 1, lambda x: x * 2, (x * 2,)),
        "input mutation",
    ),
    "a write around it": (
        lambda x: torch.cond(TRUE, lambda: weight.detach().add_(1) * 1, lambda: weight.detach() * 2),
        "input mutation",
    ),
    "an operand as it is": (
        lambda x: torch.cond(TRUE, lambda x: x, lambda x: x * 2, (x,)),
        "do not support aliasing",
    ),
    "sizes, with a gradient": (
        lambda x: torch.cond(TRUE, lambda x: x[:1] * 1, lambda x: x * 2, (x,)),
        "Mismatch in shape",
    ),
    "types": (
        lambda x: torch.cond(TRUE, lambda x: x.a * 1, lambda x: x * 2, (x,)),
        "branches of torch.cond give different results",
    ),
    "structure": (
        lambda x: torch.cond(TRUE, lambda x: (x + 1, x * 2), lambda x: x * 2, (x,)),
        "branches of torch.cond give different results",
    ),
    # The backward would draw others; stock does, silently.
    "random numbers, with a gradient": (
        lambda x: torch.cond(TRUE, lambda x: torch.rand_like(x) * x, lambda x: x * 2, (x,)),
        "draws random numbers",
        torch.ones(3, requires_grad=True),
    ),
}


# ---- while_loop and the other higher-order ops ---------------------------------------------------------------

outside = torch.full((4,), 2.0)


def thrice(body):
    """The body three times, as a `while_loop` and in Python."""

    def loop(x):
        return while_loop(lambda n, x: n < 3, lambda n, x: (n + 1, body(x)), (torch.tensor(0), x))[1]

    return loop, lambda x: body(body(body(x)))


def same(got, want):
    assert type(got) is type(want)
    torch.testing.assert_close(plain_parts(got.detach()), plain_parts(want.detach()))


@pytest.mark.sweep(20)
@pytest.mark.parametrize(
    "kind", [torch.Tensor, Pair, Beside, Nested, Labeled], ids=lambda kind: kind.__name__
)
@pytest.mark.parametrize("body", [lambda x: x * 2, lambda x: x.sin() + outside], ids=["own", "closure"])
@pytest.mark.parametrize("backend", ["eager", slow("inductor")])
def test_loops(kind, body, backend):
    loop, python = thrice(body)
    compiled = by_pass(loop, backend=backend)
    for _ in range(3):
        x = make(kind, 3, 4)
        same(compiled(x), python(x))
    assert len(compiled.programs) == 1


def test_the_condition_looks_into_a_subclass():
    compiled = by_pass(lambda x: while_loop(lambda x: x.a.sum() < 100, lambda x: (x * 2,), (x,))[0])
    for size in (1.0, 30.0, 200.0):
        want = Pair(torch.full((3,), size), torch.ones(3))
        while want.a.sum() < 100:
            want = want * 2
        same(compiled(Pair(torch.full((3,), size), torch.ones(3))), want)


def shared():
    t = torch.ones(3)
    return Pair(t, t)


LOOPS = {
    "inner tensors that are one at first": (thrice(lambda x: Pair(x.a * 2, x.b * 3)), shared),
    "ragged": (
        tuple(lambda x, loop=loop: loop(x).sum(1) for loop in thrice(lambda x: x * 2)),
        lambda: JaggedTensor.from_tensors([torch.randn(2, 3), torch.randn(4, 3)]),
    ),
    "a closure over a traced tensor": (
        tuple(lambda x, n=n: thrice(lambda z: z * (x * 2))[n](torch.ones_like(x)) for n in (0, 1)),
        lambda: make(Pair, 3, 4),
    ),
}


@pytest.mark.parametrize("name", LOOPS)
def test_other_loops(name):
    (loop, python), make_x = LOOPS[name]
    x = make_x()
    same(by_pass(loop)(x), python(x))


@pytest.mark.slow
def test_gradients_through_plain_loops():
    x = torch.randn(3, requires_grad=True)
    loop, python = thrice(lambda x: x * 2)
    torch.testing.assert_close(*(torch.autograd.grad(fn(x).sum(), x) for fn in (by_pass(loop), python)))


ROWS = torch.ones(3, 4)
REFUSED |= {
    "a class written by hand": (
        lambda x: thrice(lambda x: x * 2)[0](TwoTensor(x, x + 1)),
        "while_loop: PyTorch cannot run it on a TwoTensor, a wrapper class written by hand",
        ROWS,
    ),
    "another type": (
        lambda x: while_loop(lambda x: x.a.sum() < 9, lambda x: (x.a * 1,), (Pair(x, x + 1),)),
        "same structure, classes and metadata",
        ROWS,
    ),
    "another size": (
        lambda x: while_loop(lambda x: x.a.sum() < 9, lambda x: (x[:1] * 1,), (Pair(x, x + 1),)),
        "same metadata",
        ROWS,
    ),
    "map": (lambda x: map_rows(lambda row: row.sin(), Pair(x, x + 1)), "map_impl", ROWS),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    """By Dynamo, by PyTorch's op or by the class; in either case nothing is changed."""
    fn, match, *argument = REFUSED[name]
    before = weight.detach().clone()
    with pytest.raises(RuntimeError, match=match):
        by_pass(fn)(argument[0] if argument else make(Pair, 3, 4, grad=True))
    assert torch.equal(weight, before)


@pytest.mark.skipif(torch.__version__ < "2.15", reason="Dynamo refuses the loop")
def test_a_class_written_by_hand_is_named():
    with pytest.raises(DesugarError, match="while_loop over a TwoTensor, a class written by hand"):
        by_pass(REFUSED["a class written by hand"][0], strict=True)(torch.ones(3, 4))


# ---- over plain tensors PyTorch's own ops are traced as they are ---------------------------------------------

q, k, v = (torch.randn(1, 2, 16, 8) for _ in range(3))
causal = create_block_mask(lambda b, h, i, j: i >= j, None, None, 16, 16, device="cpu")

# Each with the same in Python.
PLAIN = {
    "map": (lambda x: map_rows(lambda row, w: row.sin() * w, x, outside), lambda x: x.sin() * outside),
    "scan": (
        lambda x: scan(lambda carry, row: (carry + row, carry * row), torch.zeros(4), x),
        lambda x: (x.sum(0), (x.cumsum(0) - x) * x),
    ),
    "associative_scan": (
        lambda x: associative_scan(lambda a, b: a + b, x, 0, combine_mode="generic"),
        lambda x: x.cumsum(0),
    ),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", PLAIN)
def test_plain_ones(name):
    (fn, python), x = PLAIN[name], torch.randn(3, 4)
    torch.testing.assert_close(by_pass(fn)(x), python(x))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("wrapped", [False, True])
def test_flex_attention_where_masks_are_plain(wrapped):
    fn = by_pass(lambda x: flex_attention(x.a if wrapped else x, k, v, block_mask=causal))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(fn(TwoTensor(q, q.clone()) if wrapped else q), want)
