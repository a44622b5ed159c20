"""Rules and ops that write in training: to views, new values, masks, and fields that a rule passes on."""

from functools import partial
from operator import iadd, imul

import pytest
import torch

import subclasses
from subclasses import DispatchError, inner
from tests.doors import DOORS
from tests.subclasses.autograd.judge import agree, agreeing, gradients, numbers
from tests.subclasses.subjects import declare
from tests.tables import raising

aten = torch.ops.aten

every_door = pytest.mark.parametrize("door", DOORS)
ROW = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)


# ---- views that a rule wrote to: Python ends `x[0] *= 2` with a copy of the view onto itself -------------------


def ratio_class(fallback):
    """A class whose rules leave the second inner tensor as it is, or move the first one alone."""
    Ratio = declare(
        keywords={"fallback": fallback},
        num=inner(differentiable=True),
        den=inner(differentiable=True),
        rules={
            aten.mul.Tensor: lambda func, x, y: Ratio(x.num * y, x.den.clone()),
            aten.add.Tensor: lambda func, x, y, *, alpha=1: Ratio(x.num + alpha * x.den * y, x.den.clone()),
        },
    )
    return Ratio


def put(x, index, value):
    x[index] = value
    return x


def times(x, index, factor):
    """``x[index] *= factor``, as Python writes it."""
    return put(x, index, imul(x[index], factor))


def plus(x, index, other):
    return put(x, index, iadd(x[index], other))


def of_a_view_of_a_view(x, d):
    row = x[0]
    end = row[1:]
    end *= 2.0
    row += d
    x[1] = row
    return x


FIRST, END = torch.tensor([1.0, 0.0])[:, None], torch.tensor([0.0, 1.0, 1.0])
REST = (slice(None), slice(1, None))
# The write, and the same write to plain tensors.
WRITES = {
    "scaled": (lambda x, d: times(x, 0, 2.0), lambda num, den, d: (num * (1 + FIRST), den)),
    "moved": (lambda x, d: plus(x, 0, d), lambda num, den, d: (num + FIRST * den * d, den)),
    "of a slice": (
        lambda x, d: plus(times(x, REST, 3.0), REST, d[1:]),
        lambda num, den, d: (num * (1 + 2 * END) + END * den * d, den),
    ),
    "to another row": (
        lambda x, d: put(x, 1, imul(x[0], 2.0)),
        lambda num, den, d: (torch.stack([2 * num[0]] * 2), torch.stack([den[0]] * 2)),
    ),
    "to another value": (
        lambda x, d: put(torch.zeros_like(x), 1, iadd(x[0], d)),
        lambda num, den, d: (
            torch.stack([0 * d, num[0] + den[0] * d]),
            torch.stack([0 * d, den[0]]),
        ),
    ),
    "of a view of a view": (
        of_a_view_of_a_view,
        lambda num, den, d: (
            torch.stack([num[0] * (1 + END) + den[0] * d] * 2),
            torch.stack([den[0]] * 2),
        ),
    ),
}


def of_ratio(name, cls):
    """A write to a value of a class, and the sines of its inner tensors."""
    write, plain = WRITES[name]
    return (
        lambda num, den, d: [t.sin() for t in write(cls(num * 1.0, den * 1.0), d).unwrap()],
        lambda num, den, d: [t.sin() for t in plain(num, den, d)],
        [(2, 3), (2, 3), 3],
    )


test_gradients_are_those_of_the_rules = agreeing(
    {
        f"{name}, {fallback}": of_ratio(name, ratio_class(fallback))
        for name in WRITES
        for fallback in ("views", "map")
    }
)


def class_with_exp(fallback):
    """A class with a rule for an op whose derivative saves the result."""
    Grown = declare(
        keywords={"fallback": fallback},
        one=inner(differentiable=True),
        rules={
            aten.exp.default: lambda func, x: Grown(x.one.exp()),
            aten.mul.Tensor: lambda func, x, y: Grown(x.one * y),
        },
    )
    return Grown


def written_through_a_view(cls, x):
    z = cls(x).exp()
    z[1:].mul_(2.0)
    return z.unwrap("one").sum()


test_a_rule_saved_what_a_view_of_its_result_writes_to = raising(
    {
        f"{door}, {fallback}": (
            lambda door=door, fallback=fallback: DOORS[door](
                partial(written_through_a_view, class_with_exp(fallback))
            )(torch.ones(3, requires_grad=True)).backward(),
            RuntimeError,
            "modified by an inplace operation",
        )
        for door in DOORS
        for fallback in ("views", "map")
    }
)


@pytest.mark.parametrize("name", ["scaled", "moved", "to another row"])
def test_a_write_counts_once(name):
    """And the node of a view stays the same object as long as nothing is written."""
    x = ratio_class("views")(torch.rand(2, 3), torch.rand(2, 3, requires_grad=True) * 1)
    part = x[0]
    part *= 2.0
    assert part._version == x._version == 1
    assert part.grad_fn is part.grad_fn
    plain = torch.rand(2, 3, requires_grad=True) * 1
    plain[0].mul_(2.0)
    for t in (x, plain):
        WRITES[name][0](t, torch.rand(3))
    assert x._version == plain._version


def turned(func, x):
    func(x.num)
    func(x.den)
    return x


Turned = declare(
    keywords={"fallback": "views"},
    num=inner(differentiable=True),
    den=inner(differentiable=True),
    rules={aten.t_.default: turned, aten.mul.Tensor: lambda func, x, y: Turned(x.num * y, x.den * x.num)},
)


def sines_of_turned(x):
    return x.t_().num.sin(), x.den.cos()


test_rules_that_change_the_size_in_place = agreeing(
    {
        "of a value": (
            lambda num, den: sines_of_turned(Turned(num * 1.0, den * 1.0)),
            lambda num, den: (num.t().sin(), den.t().cos()),
            [(2, 3), (2, 3)],
        ),
        "of a result": (
            lambda num, den: sines_of_turned(Turned(num * 1.0, den * 1.0) * 3.0),
            lambda num, den: ((num * 3).t().sin(), (den * num).t().cos()),
            [(2, 3), (2, 3)],
        ),
    }
)


def test_a_rule_that_changes_the_size_of_another_value():
    Other = declare(name="Turned", rules={aten.t_: lambda func, x: Other(x.held.t())})
    with pytest.raises(
        DispatchError, match=r"in place of the Turned that is to have its sizes; .*x\.held\.t_\(\.\.\.\)"
    ):
        Other(torch.ones(2, 3)).t_()


# ---- values that an op made anew -----------------------------------------------------------------------------


# Two tensors, whose product is a function of both.
Pair = declare(
    keywords={"fallback": "map"},
    a=inner(differentiable=True),
    b=inner(differentiable=True),
    rules={
        aten.mul: lambda func, x, y: Pair(x.a * y.a, x.b * y.b + x.a),
        aten.add: lambda func, x, y, alpha=1: Pair(x.a + alpha * y.a, x.b + alpha * y.b),
    },
)
NEW = {
    "zeros_like": torch.zeros_like,
    "new_zeros": lambda x: x.new_zeros(x.shape),
    "by hand": lambda x: Pair(*torch.zeros(2, *x.shape, dtype=x.dtype)),
}


def each_row(t, x):
    for i in range(x.shape[0]):
        t[i] += (x * x)[i]
    return t


TO_NEW = {
    "added": (lambda t, x: iadd(t, x * x), lambda a, b: (a * a, b * b + a)),
    "added twice": (
        lambda t, x: t.add_(x).add_(x * x, alpha=2),
        lambda a, b: (a + 2 * a * a, b + 2 * (b * b + a)),
    ),
    "first row": (lambda t, x: put(t, 0, (x * x)[0]), lambda a, b: (a * a * ROW, (b * b + a) * ROW)),
    "each row": (each_row, lambda a, b: (a * a, b * b + a)),
    "copied": (lambda t, x: t.copy_(x * x), lambda a, b: (a * a, b * b + a)),
}


test_gradients_of_what_is_written_to_a_new_value = agreeing(
    {
        f"{name}, {made}": (
            lambda a, b, write=write, make=make: write(make(Pair(a, b)), Pair(a, b)).unwrap(),
            plain,
            [3, 3],
        )
        for name, (write, plain) in TO_NEW.items()
        for made, make in NEW.items()
    }
)


@pytest.mark.parametrize("made", ["zeros_like", "new_zeros"])
def test_a_new_value_has_no_derivative(made):
    t = NEW[made](Pair(*(torch.randn(3, requires_grad=True) for _ in "ab")))
    assert not t.a.requires_grad and not (t * t).b.requires_grad


def writes_to_a_value(func, x, y):
    t = type(x)(2 * x.a)
    t.add_(y)
    return t


def writes_to_a_plain_tensor(func, x, y):
    t = torch.zeros_like(x.a)
    t[:2] = x.a[:2] * y.a[:2]
    t.index_add_(0, torch.tensor([2]), x.a[2:].sin())
    return type(x)(t)


def ruled(rule):
    Writing = declare(keywords={"fallback": "map"}, a=inner(differentiable=True), rules={aten.mul: rule})
    return lambda a: (Writing(a) * Writing(a)).a


test_what_a_rule_may_write_to = agreeing(
    {
        "a value": (ruled(writes_to_a_value), lambda a: 3 * a, [3]),
        "a plain tensor": (
            ruled(writes_to_a_plain_tensor),
            lambda a: torch.cat([a[:2] ** 2, a[2:].sin()]),
            [3],
        ),
    }
)


# ---- a mask besides the numbers ------------------------------------------------------------------------------


def masked(func, x, y):
    known = [t.known for t in (x, y) if isinstance(t, Masked)]
    x, y = (t.numbers if isinstance(t, Masked) else t for t in (x, y))
    return Masked(func(x, y), known[0].clone() if len(known) == 1 else known[0] & known[1])


def kept(func, x, y):
    if not (isinstance(x, Kept) and isinstance(y, Kept)):
        return Kept(func(x.numbers, y), x.known.clone())
    return Kept(torch.where(x.known & y.known, func(x.numbers, y.numbers), x.numbers), x.known & y.known)


Masked = declare(
    keywords={"fallback": "views"},
    numbers=inner(),
    known=inner(dtype=torch.bool),
    rules={subclasses.arithmetic: masked},
)
# Unknown entries stay as they are; the backward of the rule finds them by the mask.
Kept = declare(Masked, keywords={"fallback": "views"}, rules={subclasses.arithmetic: kept})


def multiplied_twice(x, y):
    z = x + 0.0
    z *= y
    z *= y
    return z


# In-place ops, and the same without a write.
IN_PLACE = {
    "added": (lambda x, y: (x * 1.0).add_(y).mul_(2.0), lambda x, y: (x + y) * 2),
    "of a copy": (lambda x, y: x.clone().sub_(y) * 3.0, lambda x, y: (x - y) * 3),
    "twice": (multiplied_twice, lambda x, y: x * y * y),
}


@pytest.mark.sweep(20)
@every_door
@pytest.mark.parametrize("cls", [Masked, Kept])
@pytest.mark.parametrize("same", [True, False], ids=["equal masks", "other masks"])
@pytest.mark.parametrize("name", IN_PLACE)
def test_gradients_are_those_of_the_ops_that_write_nothing(name, same, cls, door):
    masks = [torch.tensor([True, False, True]), torch.tensor([True, False, same])]
    write, functional = IN_PLACE[name]
    run = DOORS[door](write)

    def made_by(f):
        def call(a, b):
            values = [cls(t, m.clone()) for t, m in zip((a, b), masks, strict=True)]
            out = f(*values)
            assert all(torch.equal(t.known, m) for t, m in zip(values, masks, strict=True))
            return out.unwrap("numbers"), out.known

        return call

    agree(made_by(run), made_by(functional), numbers(3, 3))


KNOWN = torch.tensor([True, False, True])


def by_a_view(a, b):
    z = times(Masked(a, KNOWN) * 1.0, slice(1), 3.0)
    return plus(z, slice(1, None), Masked(b, KNOWN.clone())[1:]).unwrap("numbers")


test_writes_to_views_beside_a_mask = agreeing(
    {"two": (by_a_view, lambda a, b: a * (1 + 2 * ROW) + b * (1 - ROW), [3, 3])}
)


def with_copies(copies_values=True):
    def copying(func, x, source, non_blocking=False):
        if copies_values and isinstance(source, Known):
            x.held.copy_(source.held)
            x.known.copy_(source.known)
        else:
            x.held.copy_(source)
            x.known.fill_(True)
        return x

    Known = declare(
        name="Known",
        keywords={"fallback": "views"},
        held=inner(),
        known=inner(dtype=torch.bool),
        rules={aten.copy_: copying, aten.mul: lambda func, x, y: Known(x.held * y, x.known.clone())},
    )
    return Known


@pytest.mark.parametrize("door", ["eager", "desugar"])
def test_a_rule_for_copy_writes_the_mask_of_a_view(door):
    cls = with_copies()

    def assign(x, source):
        x[1].copy_(source[1])
        return x

    run = DOORS[door](assign)

    def assigned(a, b):
        y = run(
            cls(a * 1, torch.zeros(2, 2, dtype=torch.bool)), cls(b * 1, torch.ones(2, 2, dtype=torch.bool))
        )
        assert y.known.tolist() == [[False, False], [True, True]]
        return y.unwrap("held")

    agree(assigned, lambda a, b: torch.stack([a[0], b[1]]), numbers((2, 2), (2, 2)))


def test_a_rule_for_copy_that_takes_no_value_is_named():
    x = with_copies(copies_values=False)(torch.ones(2), torch.zeros(2, dtype=torch.bool))
    x.copy_(torch.full((2,), 5.0))
    assert x.held.tolist() == [5, 5] and x.known.all()
    with pytest.raises(AttributeError) as found:
        x.mul_(2)
    notes = str(found.value.__notes__)
    assert "copying (" in notes and "isinstance(source, Known)" in notes


# ---- a rule for a composite op returns no view: a write to it loses a gradient --------------------------------


def part_of(func, x, *args):
    found = func(x.depth, *args)
    return [Depth(t) for t in found] if isinstance(found, list | tuple) else Depth(found)


Depth = declare(
    depth=inner(differentiable=True),
    rules={
        **dict.fromkeys([aten.reshape, aten.narrow, aten.chunk, aten.split], part_of),
        aten.mul: lambda func, x, y: Depth(func(x.depth, y)),
    },
)

PARTS = {
    "reshape": lambda x: x.reshape(2, 2),
    "narrow": lambda x: x.narrow(0, 1, 2),
    "chunk": lambda x: x.chunk(2)[1],
    "split": lambda x: x.split(2)[1],
    "split by sizes": lambda x: x.split([1, 3])[1],
    "twice": lambda x: x.reshape(2, 2).reshape(4).narrow(0, 1, 2),
}


@pytest.mark.sweep(3)
@every_door
@pytest.mark.parametrize("part", PARTS)
def test_a_write_that_loses_a_gradient_is_an_error(part, door):
    def write(x):
        y = x * 1
        PARTS[part](y).mul_(3)
        return y

    words = "PyTorch differentiates a view" if part == "split" else "is a view and is being modified inplace"
    with pytest.raises(RuntimeError, match=words):
        DOORS[door](write)(Depth(torch.ones(4, requires_grad=True)))


@pytest.mark.parametrize("part", PARTS)
def test_without_gradients_the_value_is_written(part):
    x, plain = Depth(torch.ones(4)), torch.ones(4)
    for t in (x, plain):
        PARTS[part](t).mul_(3)
    assert x.depth.equal(plain)


def thrice(part):
    return lambda x: PARTS[part](x * 1) * 3


WITHOUT_VIEWS = [part for part in PARTS if part != "split"]  # a view, by a rule
test_derivatives_of_results_of_composite_ops = agreeing(
    {
        part: (lambda depth, part=part: thrice(part)(Depth(depth)).depth, thrice(part), [4])
        for part in WITHOUT_VIEWS
    }
)


@pytest.mark.sweep(16)
@every_door
@pytest.mark.parametrize("part", WITHOUT_VIEWS)
def test_derivatives_by_a_leaf(part, door):
    x, plain = Depth(*numbers(4)).requires_grad_(), numbers(4)[0].requires_grad_()
    (found,) = gradients(DOORS[door](thrice(part))(x).depth, [x])
    torch.testing.assert_close([found.depth], gradients(thrice(part)(plain), [plain]))


# ---- a rule passes a float field on: an in-place form does not write to it, and saved tensors stay valid --------


def brightened(func, x, y):
    first = x if isinstance(x, Image) else y
    a, b = (t.pixels if isinstance(t, Image) else t for t in (x, y))
    return Image(func(a, b), first.white)


Image = declare(
    keywords={"fallback": "materialize", "kind": "structure"},
    pixels=inner(),
    white=inner(shape="3"),
    materialize=lambda self: self.pixels * self.white,
    rules={subclasses.arithmetic: brightened, aten.neg_: lambda func, x: (x.pixels.neg_(), x)[1]},
)

# The write, and the pixels of the result.
WRITTEN = {
    "once": (lambda p, w: (Image(p, w) * 1).sub_(0.5), lambda p: p - 0.5),
    "twice": (lambda p, w: (Image(p, w) * 2).sub_(0.5).neg_().mul_(3), lambda p: -(p * 2 - 0.5) * 3),
}


WHITE = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)


def of_image(name):
    """A function of pixels and white, and the same of plain tensors."""
    fn, pixels = WRITTEN[name]

    def of_value(p, w):
        x = fn(p, w)
        return x.sin(), x.unwrap("white") ** 2

    return of_value, lambda p, w: ((pixels(p) * w).sin(), w**2), [(2, 3), 3]


test_the_gradient_beside_a_constant_field = agreeing(
    {
        **{name: of_image(name) for name in WRITTEN},
        **{
            f"{name}, frozen": (
                lambda p, name=name: of_image(name)[0](p, WHITE),
                lambda p, name=name: of_image(name)[1](p, WHITE),
                [(2, 3)],
            )
            for name in WRITTEN
        },
    }
)


def test_it_is_not_written_to():
    white = torch.rand(3)
    x = Image(torch.rand(2, 3, requires_grad=True), white) * 1
    before = x.white._version
    x.sub_(0.5)
    assert x.white.data_ptr() == white.data_ptr() and white._version == before


def test_a_rule_that_changes_it_writes():
    Drifting = declare(
        keywords={"fallback": "map"},
        a=inner(),
        w=inner(),
        rules={subclasses.arithmetic: lambda func, x, y: Drifting(func(x.a, y), x.w + 1)},
    )
    w = torch.zeros(2)
    x = Drifting(torch.rand(2, requires_grad=True), w) * 1
    x.mul_(2)
    assert x.w.tolist() == [2, 2] and w.tolist() == [0, 0]
