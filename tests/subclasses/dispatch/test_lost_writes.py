"""In-place ops whose write would be cast to another dtype, or whose rule returns nothing, are errors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import desugar
import subclasses
from subclasses import DispatchError, TensorSubclass, inner
from tests.subclasses.subjects import MODES


class Length(TensorSubclass):
    number: Tensor = inner()


@Length.implements(subclasses.arithmetic)
def _(func, x, y):
    return Length(*(func(*(v.number if isinstance(v, Length) else v for v in (x, y))),))


class Returning(TensorSubclass, fallback="materialize"):
    number: Tensor = inner()

    def materialize(self):
        return self.number * 2


@Returning.implements(torch.ops.aten.add_.Tensor)
def _(func, x, y):
    return Returning(func(x.number, y))


@Returning.implements(torch.ops.aten.sub_.Tensor)
def _(func, x, y):
    func(x.number, y)
    return x


@pytest.mark.parametrize("compiled", [False, True])
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
def test_no_dtype_is_narrowed(number, write, compiled):
    """As for plain tensors."""
    with pytest.raises(RuntimeError, match="can't be cast"):
        write(number.clone())
    x = Length(number.clone())
    run = desugar.compile(write, backend="eager") if compiled else write
    with pytest.raises(RuntimeError, match=r"result type .* can't be cast"):
        run(x)
    assert x.number.equal(number)


def test_what_can_be_cast_is_written():
    x = Length(torch.tensor([1.0, 2.0]))
    x *= 2
    x += Length(torch.tensor([1, 1]))
    assert x.number.tolist() == [3.0, 5.0]
    x = Length(torch.tensor([1, 2]))
    x.copy_(Length(torch.tensor([1.7, 2.7])))
    assert x.number.tolist() == [1, 2]


def test_a_rule_that_writes_is_taken():
    x = Returning(torch.ones(3))
    y = x
    x += 3
    x -= 1
    assert x is y and x.number.tolist() == [3, 3, 3]


def test_an_in_place_method_returns_something():
    @Returning.implements(Tensor.mul_)
    def _(func, x, y):
        x.number.mul_(y)

    with pytest.raises(DispatchError, match="returned None for these arguments, and callers expect a result"):
        Returning(torch.ones(3)).mul_(2)


# ---- a rule that writes returns what it wrote to -------------------------------------------------------------

aten = torch.ops.aten
OPS = {
    "an op": (aten.mul_.Tensor, lambda x: x.mul_(2)),
    "an operator": (aten.mul_.Tensor, lambda x: x.__imul__(2)),
    "out": (aten.mul.out, lambda x: torch.mul(x, 2, out=x)),
    "a method": (Tensor.mul_, lambda x: x.mul_(2)),
}


def ruled(op, rule):
    class Ruled(TensorSubclass):
        number: Tensor = inner()

    Ruled.implements(op)(lambda func, x, y, **_: rule(Ruled, x, y))
    return Ruled(torch.ones(2))


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


@pytest.mark.parametrize("rule", LOST)
@pytest.mark.parametrize("op", OPS)
def test_a_new_value_in_place_of_the_written_one_is_refused(op, rule):
    key, write = OPS[op]
    with pytest.raises(DispatchError, match=r"returned a value with memory of its own.*x\.number\.copy_"):
        write(ruled(key, LOST[rule]))


def written_beside_a_kept_one(grad):
    class Counted(TensorSubclass, fallback="map"):
        number: Tensor = inner()
        count: Tensor = inner(dtype=torch.int64)

    @Counted.implements(aten.sub_.Tensor)
    def _(func, x, y, alpha=1):
        return Counted(x.number - y, x.count)

    leaf = torch.ones(2, requires_grad=grad)
    return Counted(leaf * 1, torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize("grad", [False, True])
def test_a_new_value_that_shares_an_inner_tensor_of_ints_is_refused(grad):
    x = written_beside_a_kept_one(grad)
    with pytest.raises(DispatchError, match=r"returned a value with memory of its own.*x\.number\.copy_"):
        x.sub_(torch.ones(2))
    assert x.detach().number.tolist() == [1, 1]


@pytest.mark.parametrize("grad", [False, True])
def test_a_rule_that_assigns_inner_tensors(grad):
    class Assigned(TensorSubclass, fallback="map"):
        number: Tensor = inner()

    @Assigned.implements(aten.mul_.Tensor)
    def _(func, x, y):
        x.number = x.number * y
        return x

    leaf = torch.full((2,), 3.0, requires_grad=grad)
    x = Assigned(leaf * 1)
    assert x.mul_(2 * leaf) is x
    assert x.detach().number.tolist() == [18, 18]
    if grad:
        (gradient,) = torch.autograd.grad(x.unwrap("number").sum(), leaf)
        assert gradient.tolist() == [12, 12]


@pytest.mark.parametrize("rule", WRITTEN)
@pytest.mark.parametrize("op", OPS)
def test_what_was_written_is_returned_in_any_form(op, rule):
    key, write = OPS[op]
    x = ruled(key, WRITTEN[rule])
    write(x)
    assert x.number.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("rule", WRITTEN)
@pytest.mark.parametrize("op", ["an op", "an operator"])
def test_what_was_written_has_a_gradient_in_any_form(op, rule):
    key, write = OPS[op]
    x = ruled(key, WRITTEN[rule])
    leaf = x.number.requires_grad_()
    x = type(x)(leaf * 1)
    write(x)
    assert x.detach().number.tolist() == [2.0, 2.0]
    (gradient,) = torch.autograd.grad(x.unwrap("number").sum(), leaf)
    assert gradient.tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    "compiled",
    [
        lambda fn: desugar.compile(fn, backend="eager"),
        lambda fn: torch.compile(fn, backend="desugar", options={"backend": "eager"}),
        lambda fn: torch.compile(fn, backend="aot_eager"),
    ],
)
@pytest.mark.parametrize("op", ["an op", "a method"])
def test_rules_that_write_in_a_compiled_function(op, compiled):
    key, write = OPS[op]
    x = ruled(key, WRITTEN["itself"])
    compiled(write)(x)
    assert x.number.tolist() == [2.0, 2.0]


@pytest.mark.parametrize(("dtype", "wanted"), [(torch.float32, [2.0, 2.0]), (torch.float64, [2.0, 2.0])])
def test_a_plain_result_is_written_to_a_plain_out(dtype, wanted):
    x = ruled(aten.mul.Tensor, LOST["a plain tensor"])
    out = torch.empty(0, dtype=dtype)
    assert torch.mul(x, 2, out=out) is out
    assert out.tolist() == wanted and out.dtype == dtype


def test_a_plain_out_narrows_no_dtype():
    x, out = ruled(aten.mul.Tensor, LOST["a plain tensor"]), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(RuntimeError, match=r"float32 can't be cast to the torch\.int64 of out="):
        torch.mul(x, 2, out=out)
    assert out.tolist() == [0, 0]


def test_a_value_does_not_fit_a_plain_out():
    x = ruled(aten.mul.Tensor, LOST["a value"])
    with pytest.raises(DispatchError, match=r"passed as out=.*leave out= out, or pass a Ruled"):
        torch.mul(x, 2, out=torch.empty(2))


def test_set_of_a_plain_tensor_would_let_inner_tensors_share_memory():
    class Two(TensorSubclass, fallback="map"):
        a: Tensor = inner()
        b: Tensor = inner()

    x, y = Two(torch.zeros(2), torch.ones(2)), Two(torch.ones(2), torch.zeros(2))
    with pytest.raises(
        DispatchError, match=r"share memory; pass a Two, or set one inner tensor, as x\.a\.set_"
    ):
        x.set_(torch.ones(2))
    x.set_(y)
    assert x.a.data_ptr() == y.a.data_ptr() and x.b.data_ptr() == y.b.data_ptr()


# ---- x[index] = value --------------------------------------------------------------------------------------------

aten = torch.ops.aten


class Rows(TensorSubclass, fallback="materialize"):
    """Columns of a row come back plain, as the guide says of one case of a rule."""

    raw: Tensor = inner()

    def materialize(self):
        return self.raw * 2


@Rows.implements(aten.select, aten.slice)
def _(func, x, dim=0, *args):
    if dim % x.ndim == x.ndim - 1:
        return func(x.materialize(), dim, *args)
    return Rows(func(x.raw, dim, *args))


@Rows.implements(aten.copy_)
def _(func, x, y, non_blocking=False):
    func(x.raw, (y.materialize() if isinstance(y, Rows) else y) / 2)
    return x


class Product(TensorSubclass, fallback="views"):
    a: Tensor = inner()
    b: Tensor = inner()


@Product.implements(aten.select)
def _(func, x, dim, i):
    return func(x.a, dim, i) * func(x.b, dim, i)


class Copied(TensorSubclass, fallback="views"):
    a: Tensor = inner()


@Copied.implements(aten.select)
def _(func, x, dim, i):
    return Copied(func(x.a, dim, i).clone())


def add_to(x, index, value):
    x[index] += value


ITEMS = {
    "a column": (lambda: Rows(torch.ones(3, 4)), lambda x: x.__setitem__((slice(None), 1), torch.zeros(3))),
    "a number": (lambda: Rows(torch.ones(3, 4)), lambda x: x.__setitem__((slice(None), 1), 7.0)),
    "columns": (lambda: Rows(torch.ones(3, 4)), lambda x: x.__setitem__((slice(None), slice(1, 3)), 7.0)),
    "an added number": (lambda: Rows(torch.ones(3, 4)), lambda x: add_to(x, (slice(None), 1), 5)),
    "a product": (lambda: Product(torch.ones(3), torch.ones(3)), lambda x: x.__setitem__(0, 5.0)),
    "a copy": (lambda: Copied(torch.ones(3)), lambda x: x.__setitem__(0, Copied(torch.tensor(2.0)))),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ITEMS)
def test_an_item_whose_view_is_a_copy_is_not_written(name, mode):
    make, write = ITEMS[name]
    words = r"x\[...\] = value on a \w+: the rule for aten\.\w+\.\w+ returned .* with memory of its own"
    with pytest.raises(DispatchError, match=words):
        MODES[mode](write)(make())


@pytest.mark.parametrize("mode", MODES)
def test_an_item_whose_view_is_one_is_written(mode):
    x = Rows(torch.ones(3, 4))

    def write(x):
        x[1] = torch.full((4,), 6.0)

    MODES[mode](write)(x)
    assert x.materialize().tolist() == [[2] * 4, [6] * 4, [2] * 4]


# ---- a rule for copy_, by which other ops write ------------------------------------------------------------------


def ruled_by(copy):
    class Ruled(TensorSubclass, fallback="views"):
        a: Tensor = inner()

    @Ruled.implements(aten.mul)
    def _(func, x, y):
        return Ruled(func(x.a, y))

    Ruled.implements(aten.copy_)(copy)
    return Ruled(torch.ones(2))


WRITES = {
    "mul_": lambda x: x.mul_(2.0),
    "out": lambda x: torch.mul(x, 2.0, out=x),
    "copy_": lambda x: x.copy_(x * 2),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_rule_for_copies_that_makes_a_new_value_loses_no_write(write):
    x = ruled_by(lambda func, x, y, non_blocking=False: type(x)(y.a.clone()))
    with pytest.raises(DispatchError, match=r"returned a value with memory of its own"):
        WRITES[write](x)


def test_a_rule_for_copies_that_refuses_loses_no_write():
    x = ruled_by(lambda func, x, y, non_blocking=False: NotImplemented)
    with pytest.raises(DispatchError, match="for copy_, by which it writes, returned NotImplemented"):
        x.mul_(2.0)
