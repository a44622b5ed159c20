"""Writes that would be cast or lost raise, and a backward raises if a write follows the save of its tensors."""

from operator import iadd, imul

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import subclasses
from subclasses import DispatchError, TensorSubclass, inner
from tests.doors import COMPILED, DOORS
from tests.subclasses.autograd.judge import agreeing
from tests.subclasses.subjects import declare
from tests.tables import giving, raising

aten = torch.ops.aten


def arithmetic(func, x, y):
    return Length(func(*(v.number if isinstance(v, Length) else v for v in (x, y))))


Length = declare(number=inner(), rules={subclasses.arithmetic: arithmetic})
Returning = declare(
    keywords={"fallback": "materialize"},
    number=inner(),
    materialize=lambda self: self.number * 2,
    rules={
        aten.add_.Tensor: lambda func, x, y: Returning(func(x.number, y)),
        aten.sub_.Tensor: lambda func, x, y: (func(x.number, y), x)[1],
        Tensor.mul_: lambda func, x, y: (x.number.mul_(y), None)[1],
    },
)


@pytest.mark.parametrize("door", ["eager", "desugar"])
@pytest.mark.parametrize(
    ("number", "write"),
    [
        (torch.tensor([1, 2, 3]), lambda x: x.mul_(1.5)),
        (torch.tensor([1, 2, 3]), lambda x: x.div_(2)),
        (torch.tensor([1.0, 2.0]), lambda x: x.mul_(1j)),
        (torch.tensor([True, False]), lambda x: x.add_(1)),
        (torch.tensor([1, 2]), lambda x: torch.mul(x, 1.5, out=x)),
    ],
    ids=["a factor", "a division", "a complex factor", "a bool", "out"],
)
def test_no_dtype_is_narrowed(number, write, door):
    """As for plain tensors."""
    with pytest.raises(RuntimeError, match="can't be cast"):
        write(number.clone())
    x = Length(number.clone())
    with pytest.raises(RuntimeError, match=r"result type .* can't be cast"):
        DOORS[door](write)(x)
    assert x.number.equal(number)


test_what_can_be_cast_is_written = giving(
    {
        "a product and a sum": (
            lambda: iadd(
                imul(Length(torch.tensor([1.0, 2.0])), 2), Length(torch.tensor([1, 1]))
            ).number.tolist(),
            [3.0, 5.0],
        ),
        "a copy": (
            lambda: Length(torch.tensor([1, 2])).copy_(Length(torch.tensor([1.7, 2.7]))).number.tolist(),
            [1, 2],
        ),
    }
)


def test_a_rule_that_writes_is_taken_and_returns_something():
    x = y = Returning(torch.ones(3))
    x += 3
    x -= 1
    assert x is y and x.number.tolist() == [3, 3, 3]
    with pytest.raises(DispatchError, match="returned None for these arguments, and callers expect a result"):
        x.mul_(2)


# ---- a rule that writes returns the tensor that it wrote to --------------------------------------------------

OPS = {
    "an op": (aten.mul_.Tensor, lambda x: x.mul_(2)),
    "an operator": (aten.mul_.Tensor, lambda x: x.__imul__(2)),
    "out": (aten.mul.out, lambda x: torch.mul(x, 2, out=x)),
    "a method": (Tensor.mul_, lambda x: x.mul_(2)),
}


def ruled(op, rule):
    cls = declare(name="Ruled", number=inner(), rules={op: lambda func, x, y, **_: rule(cls, x, y)})
    return cls(torch.ones(2))


LOST = {
    "a value": lambda cls, x, y: cls(x.number * y),
    "a plain tensor": lambda cls, x, y: x.number * y,
}
WRITTEN = {
    "itself": lambda cls, x, y: (x.number.mul_(y), x)[1],
    "what it holds": lambda cls, x, y: x.number.mul_(y),
    "a value of what it holds": lambda cls, x, y: cls(x.number.mul_(y)),
    "an alias": lambda cls, x, y: (x.number.mul_(y), x.detach())[1],
}


MEMORY = r"returned a value with memory of its own.*x\.number\.copy_"


test_a_new_value_in_place_of_the_written_one_is_refused = raising(
    {
        f"{op}, {rule}": (lambda key=key, write=write, rule=rule: write(ruled(key, LOST[rule])), MEMORY)
        for op, (key, write) in OPS.items()
        for rule in LOST
    }
)


@pytest.mark.parametrize("grad", [False, True])
def test_a_new_value_that_shares_an_inner_tensor_of_ints_is_refused(grad):
    cls = declare(
        keywords={"fallback": "map"},
        number=inner(),
        count=inner(dtype=torch.int64),
        rules={aten.sub_.Tensor: lambda func, x, y, alpha=1: cls(x.number - y, x.count)},
    )
    x = cls(torch.ones(2, requires_grad=grad) * 1, torch.zeros(2, dtype=torch.int64))
    with pytest.raises(DispatchError, match=MEMORY):
        x.sub_(torch.ones(2))
    assert x.detach().number.tolist() == [1, 1]


def assign(func, x, y):
    x.number = x.number * y
    return x


Assigning = declare(keywords={"fallback": "map"}, number=inner(), rules={aten.mul_.Tensor: assign})
test_the_gradient_of_a_rule_that_assigns_inner_tensors = agreeing(
    {
        "a product": (
            lambda t: Assigning(t * 1).mul_(2 * t).unwrap("number"),
            lambda t: 2 * t * t,
            [2],
        )
    },
    {"eager": DOORS["eager"]},
)


def test_a_rule_that_assigns_inner_tensors():
    x = Assigning(torch.full((2,), 3.0))
    assert x.mul_(torch.full((2,), 6.0)) is x and x.number.tolist() == [18, 18]


@pytest.mark.parametrize("rule", WRITTEN)
@pytest.mark.parametrize("op", OPS)
def test_what_was_written_is_returned_in_any_form(op, rule):
    key, write = OPS[op]
    x = ruled(key, WRITTEN[rule])
    write(x)
    assert x.number.tolist() == [2.0, 2.0]


def written(rule, op):
    key, write = OPS[op]
    cls = type(ruled(key, WRITTEN[rule]))

    def of_value(t):
        x = cls(t * 1)
        write(x)
        return x.unwrap("number"), x.detach().number

    return of_value


test_what_was_written_has_a_gradient_in_any_form = agreeing(
    {
        f"{rule}, {op}": (written(rule, op), lambda t: (2 * t, 2 * t.detach()), [2])
        for rule in WRITTEN
        for op in ("an op", "an operator")
    },
    {"eager": DOORS["eager"]},
)


@pytest.mark.parametrize("door", COMPILED)
@pytest.mark.parametrize("op", ["an op", "a method"])
def test_rules_that_write_in_a_compiled_function(op, door):
    key, write = OPS[op]
    x = ruled(key, WRITTEN["itself"])
    COMPILED[door](write)(x)
    assert x.number.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_plain_result_is_written_to_a_plain_out(dtype):
    x = ruled(aten.mul.Tensor, LOST["a plain tensor"])
    out = torch.empty(0, dtype=dtype)
    assert torch.mul(x, 2, out=out) is out
    assert out.tolist() == [2.0, 2.0] and out.dtype == dtype


def test_a_plain_out_narrows_no_dtype_and_takes_no_value():
    out = torch.zeros(2, dtype=torch.int64)
    for rule, error, words in (
        ("a plain tensor", RuntimeError, r"float32 can't be cast to the torch\.int64 of out="),
        ("a value", DispatchError, r"passed as out=.*leave out= out, or pass a Ruled"),
    ):
        with pytest.raises(error, match=words):
            torch.mul(ruled(aten.mul.Tensor, LOST[rule]), 2, out=out)
    assert out.tolist() == [0, 0]


def test_set_of_a_plain_tensor_would_let_inner_tensors_share_memory():
    Two = declare(name="Two", keywords={"fallback": "map"}, a=inner(), b=inner())
    x, y = Two(torch.zeros(2), torch.ones(2)), Two(torch.ones(2), torch.zeros(2))
    with pytest.raises(
        DispatchError, match=r"share memory; pass a Two, or set one inner tensor, as x\.a\.set_"
    ):
        x.set_(torch.ones(2))
    x.set_(y)
    assert x.a.data_ptr() == y.a.data_ptr() and x.b.data_ptr() == y.b.data_ptr()


# ---- x[index] = value --------------------------------------------------------------------------------------------


def columns_or_rows(func, x, dim=0, *args):
    if dim % x.ndim == x.ndim - 1:
        return func(x.materialize(), dim, *args)
    return Rows(func(x.raw, dim, *args))


def copied(func, x, y, non_blocking=False):
    func(x.raw, (y.materialize() if isinstance(y, Rows) else y) / 2)
    return x


# Columns of a row come back plain, as the guide says of one case of a rule.
Rows = declare(
    keywords={"fallback": "materialize"},
    raw=inner(),
    materialize=lambda self: self.raw * 2,
    rules={aten.select: columns_or_rows, aten.slice: columns_or_rows, aten.copy_: copied},
)
Product = declare(
    keywords={"fallback": "views"},
    a=inner(),
    b=inner(),
    rules={aten.select: lambda func, x, dim, i: func(x.a, dim, i) * func(x.b, dim, i)},
)
Copied = declare(
    keywords={"fallback": "views"},
    rules={aten.select: lambda func, x, dim, i: Copied(func(x.held, dim, i).clone())},
)


def set_item(index, value):
    return lambda x: x.__setitem__(index, value)


ITEMS = {
    "a column": (lambda: Rows(torch.ones(3, 4)), set_item((slice(None), 1), torch.zeros(3))),
    "a number": (lambda: Rows(torch.ones(3, 4)), set_item((slice(None), 1), 7.0)),
    "columns": (lambda: Rows(torch.ones(3, 4)), set_item((slice(None), slice(1, 3)), 7.0)),
    "an added number": (
        lambda: Rows(torch.ones(3, 4)),
        lambda x: set_item((slice(None), 1), x[:, 1].__iadd__(5))(x),
    ),
    "a product": (lambda: Product(torch.ones(3), torch.ones(3)), set_item(0, 5.0)),
    "a copy": (lambda: Copied(torch.ones(3)), set_item(0, Copied(torch.tensor(2.0)))),
}


test_an_item_whose_view_is_a_copy_is_not_written = pytest.mark.sweep(3)(
    raising(
        {
            f"{name}, {door}": (
                lambda make=make, write=write, door=door: DOORS[door](write)(make()),
                r"x\[...\] = value on a \w+: the rule for aten\.\w+\.\w+ returned .* with memory of its own",
            )
            for name, (make, write) in ITEMS.items()
            for door in DOORS
        }
    )
)


@pytest.mark.parametrize("mode", DOORS)
def test_an_item_whose_view_is_one_is_written(mode):
    x = Rows(torch.ones(3, 4))
    DOORS[mode](set_item(1, torch.full((4,), 6.0)))(x)
    assert x.materialize().tolist() == [[2] * 4, [6] * 4, [2] * 4]


# ---- a rule for copy_, by which other ops write ------------------------------------------------------------------


def ruled_by(copy):
    cls = declare(
        keywords={"fallback": "views"},
        a=inner(),
        rules={aten.mul: lambda func, x, y: cls(func(x.a, y)), aten.copy_: copy},
    )
    return cls(torch.ones(2))


WRITES = {
    "mul_": lambda x: x.mul_(2.0),
    "out": lambda x: torch.mul(x, 2.0, out=x),
    "copy_": lambda x: x.copy_(x * 2),
}


# Neither one that makes a new value, nor one that refuses.
COPYING = {
    "a new value": (lambda func, x, y, *_: type(x)(y.a.clone()), "returned a value with memory of its own"),
    "a refusal": (lambda func, x, y, *_: NotImplemented, "returned NotImplemented"),
}
test_a_rule_for_copies_loses_no_write = raising(
    {
        f"{name}, {copying}": (lambda write=write, copy=copy: write(ruled_by(copy)), words)
        for name, write in WRITES.items()
        for copying, (copy, words) in COPYING.items()
    }
)

# ---- a write makes saved inner tensors stale -------------------------------------------------------------------


# ---- views and their bases -----------------------------------------------------------------------------------

Mapped = declare(keywords={"fallback": "map"})
Views = declare(keywords={"fallback": "views"}, rules={aten.mul.Tensor: lambda func, x, y: Views(x.held * y)})
Ruled = declare(
    keywords={"fallback": "materialize", "trainable": True},
    materialize=lambda self: self.held * 2,
    rules=dict.fromkeys([aten.slice, aten.select], lambda func, x, *args: Ruled(func(x.held, *args))),
)
Box = declare(keywords={"fallback": "map"})

VIEWS = {
    "slice": lambda x: x[:1],
    "select": lambda x: x[0],
    "detach": lambda x: x.detach(),
    "of a view": lambda x: x[:2][:1],
}


def check_stale(loss):
    with pytest.raises(RuntimeError, match=r"in-?place|modified"):
        loss.backward()


def innermost(x):
    return innermost(x.unwrap("held")) if isinstance(x, TensorSubclass) else x


@pytest.mark.parametrize("cls", [Mapped, Views, Ruled, Box])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("written", ["the base", "the view"])
def test_a_write_to_one_is_seen_by_what_was_saved_of_the_other(cls, view, written):
    held = torch.tensor([3.0, 4.0, 5.0])
    x = Box(Mapped(held)) if cls is Box else cls(held)
    with torch.no_grad():
        y = VIEWS[view](x)
    saved, other = (y, x) if written == "the base" else (x, y)
    leaf = torch.tensor(2.0, requires_grad=True)
    loss = (leaf * innermost(saved)).sum()  # saves the inner tensor of one
    with torch.no_grad():
        (other.unwrap("held") if cls is Ruled else other).mul_(10)
    check_stale(loss)


def test_views_that_are_not_written_to_are_not_stale():
    x = Mapped(torch.tensor([3.0, 4.0])).requires_grad_()
    ((innermost(x[:1]) ** 2).sum() + (innermost(x) ** 2).sum()).backward()
    assert x.grad.held.tolist() == [12, 8]


def test_a_value_inside_of_a_parameter_that_changed_is_noticed():
    Outer = declare(
        keywords={"fallback": "materialize", "trainable": True},
        materialize=lambda self: self.held.materialize() if isinstance(self.held, Ruled) else self.held,
    )
    w = nn.Parameter(Outer(Ruled(torch.tensor([3.0]))))
    loss = (innermost(w) ** 2).sum()
    with torch.no_grad():
        w.mul_(10)
    check_stale(loss)


# ---- a rule that writes ----------------------------------------------------------------------------------------

WRITES_BY_RULES = {
    aten.add_.Tensor: lambda w: w.add_(torch.ones(3, 4)),
    aten.copy_.default: lambda w: w.copy_(torch.ones(3, 4)),
    aten.fill_.Scalar: lambda w: w.fill_(2.0),
    aten.zero_.default: lambda w: w.zero_(),
}


def linear(func, x, w, bias=None):
    change, base = w.unwrap()
    return func(x, base, bias) + func(x, change)


@pytest.mark.sweep(24)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("fallback", ["materialize", "map", "error"])
@pytest.mark.parametrize("op", WRITES_BY_RULES, ids=str)
def test_a_write_by_a_rule_between_forward_and_backward_is_refused(op, fallback, door):
    write = lambda func, x, *operands, **options: (func(x.change, *operands, **options), x)[1]  # noqa: E731
    Delta = declare(
        keywords={"fallback": fallback},
        change=inner(),
        base=inner(),
        materialize=lambda self: self.base + self.change,
        rules={F.linear: linear, op: write},
    )
    w, x = Delta(torch.ones(3, 4), torch.zeros(3, 4)), torch.ones(2, 4, requires_grad=True)
    out = DOORS[door](F.linear)(x, w).sum()
    WRITES_BY_RULES[op](w)
    check_stale(out)


INDEX = torch.tensor([2, 0, 1])


def multiplied(alias):
    """The first inner tensor after a write that follows from a rule, which passes on the second one."""

    def multiply(func, x, y):
        return Indexed(x.values * y, x.index.view_as(x.index) if alias else x.index)

    Indexed = declare(values=inner(), index=inner(dtype=torch.int64), rules={aten.mul: multiply})
    return lambda values: Indexed(values * 1, INDEX).mul_(2.0).unwrap("values")


test_a_write_that_follows_from_a_rule = agreeing(
    {
        "of what it has": (multiplied(False), lambda values: 2 * values, [3]),
        "of an alias": (multiplied(True), lambda values: 2 * values, [3]),
    }
)


@pytest.mark.parametrize("alias", [False, True])
def test_a_write_that_follows_from_a_rule_leaves_alone_what_the_rule_passes_on(alias):
    multiplied(alias)(torch.ones(3))
    assert INDEX._version == 0
