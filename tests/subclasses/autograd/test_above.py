"""Rules for ops of a structure: they run once, above autograd, which derives what they compute."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from torch import Tensor, nn

import desugar
import subclasses
from subclasses import DispatchError, TensorSubclass, inner, static

aten = torch.ops.aten


class Log(TensorSubclass, fallback="materialize", kind="structure"):
    """Positive numbers by their logarithms: a product is a sum, so PyTorch's formula is not that of the logarithm."""

    log: Tensor = inner(shape="...")

    def materialize(self):
        return self.log.exp()


def as_log(x):
    return x.log if isinstance(x, Log) else torch.as_tensor(x, dtype=torch.float64).log()


@Log.implements(subclasses.arithmetic)
def _(func, x, y):
    if func is torch.add:
        return Log(func(as_log(x).exp(), as_log(y).exp()).log())
    if any(
        isinstance(t, Tensor) and not isinstance(t, Log) for t in (x, y)
    ):  # it may be negative, as a gradient
        return func(*(t.materialize() if isinstance(t, Log) else t for t in (x, y)))
    if func is torch.div:
        return x * (1 / y)  # another rule of the class
    return Log(as_log(x) + as_log(y))


@Log.implements(aten.aminmax)
def _(func, x, *, dim=None, keepdim=False):
    return tuple(Log(t) for t in func(x.log, dim=dim, keepdim=keepdim))


@Log.implements(aten.pow_)
def raised_in_its_own_way(func, x, power):
    x.log.mul_(power)
    return x


DOORS = {
    "eager": lambda f: f,
    "stock": lambda f: torch.compile(f, backend="aot_eager"),
    "desugar": lambda f: desugar.compile(f, backend="eager"),
}


def numbers(*shape):
    return torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) + 0.5


# What a function does with a value and a plain tensor.
MADE = {
    "by a number": lambda x, q: x * 3,
    "a sum": lambda x, q: x + q,
    "two values": lambda x, q: (x + 1) * x,
    "a rule that calls another": lambda x, q: (x + q) / 3,
    "a row of them": lambda x, q: ((x * 2 + q) * x + 1) * 0.5,
    "a view of one": lambda x, q: (x * 3)[0],
    "one of a view": lambda x, q: x[0] * 3,
    "a copy of one": lambda x, q: (x * 3).clone(),
    "turned twice": lambda x, q: (x.t() * 3).t() + q,
    "in place": lambda x, q: (x * 1).mul_(3) + q,
    "in place at last": lambda x, q: (x + q).mul_(2),
    "several results": lambda x, q: (lambda found: found[0] * found[1])(torch.aminmax(x + q, dim=1)),
}

READ = {
    "inner": (lambda y: y.unwrap("log"), torch.log),
    "materialized": (lambda y: y.materialize().square(), torch.square),
    "whole": (lambda y: y.sin(), torch.sin),
    "both": (lambda y: y.sin() + y.unwrap("log"), lambda t: t.sin() + t.log()),
}


@pytest.mark.sweep(96)
@pytest.mark.parametrize("way", ["eager", "desugar", "inside", "stock, inside"])
@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize("made", MADE)
def test_gradients_are_those_of_plain_tensors(made, read, way):
    """PyTorch's formula for ``x * 3`` scales a cotangent by 3, and the logarithm's derivative is 1."""
    fn, (of_value, of_plain) = MADE[made], READ[read]
    torch.compiler.reset()

    def both(x, q):
        return of_value(fn(x, q))

    calls = {
        "eager": both,
        "desugar": lambda x, q: of_value(desugar.compile(fn, backend="eager")(x, q)),
        "inside": desugar.compile(both, backend="eager"),
        "stock, inside": torch.compile(both, backend="aot_eager"),
    }
    p, q = numbers(2, 2).requires_grad_(), numbers(2, 2).requires_grad_()
    expected_value = of_plain(fn(p * 1, q))
    expected = torch.autograd.grad(expected_value.sum(), (p, q), allow_unused=True)
    value = calls[way](Log((p * 1).log()), q)
    torch.testing.assert_close(value, expected_value)
    got = torch.autograd.grad(value.sum(), (p, q), allow_unused=True)
    for one, other in zip(got, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert type(one) is Tensor
            torch.testing.assert_close(one, other)


def test_second_derivatives():
    def third_power_by_logarithms(p):
        return ((Log(p.log()) * 3) * Log(p.log())).unwrap("log")

    p = numbers(3).requires_grad_()
    assert torch.autograd.gradcheck(third_power_by_logarithms, (p,))
    assert torch.autograd.gradgradcheck(third_power_by_logarithms, (p,))


def test_what_is_read_is_the_memory_of_the_value():
    y = Log(numbers(3).requires_grad_()) * 3
    read = y.unwrap("log")
    assert read.data_ptr() == y.detach().log.data_ptr()
    with pytest.raises(RuntimeError, match="modified inplace"):
        read.add_(1)


@pytest.mark.parametrize("is_read", [False, True])
def test_a_write_without_gradients_to_the_result(is_read):
    """It is no part of the function, as for plain tensors."""
    p = numbers(3).requires_grad_()
    y = Log(p) * 3
    if is_read:
        y.unwrap("log")
    with torch.no_grad():
        y.mul_(2)
    read = y.unwrap("log")
    torch.testing.assert_close(read, p + torch.tensor(6.0, dtype=torch.float64).log())
    (gradient,) = torch.autograd.grad(read.square().sum(), p)
    torch.testing.assert_close(gradient, 2 * read)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("door", DOORS)
def test_a_write_to_a_view_is_in_the_value_and_its_other_views(door):
    def f(p, q):
        y = Log(p) * 3
        y += Log(q)
        first, column = y[0], y.t()[1]
        first.mul_(Log(q[1]))
        y[2].mul_(Log(p[0]))
        column.add_(Log(p[:, 0]))
        if door == "stock":  # returns the value, and has no other views of it
            return (y.unwrap("log"),)
        return y.unwrap("log"), column.unwrap("log"), y.t().unwrap("log")

    def reference(p, q):
        y = torch.logaddexp(p + torch.tensor(3.0, dtype=p.dtype).log(), q)
        y = torch.stack([y[0] + q[1], y[1], y[2] + p[0]])
        y = torch.stack([y[:, 0], torch.logaddexp(y[:, 1], p[:, 0])], -1)
        return y, y[:, 1], y.t()

    p, q = (numbers(3, 2).requires_grad_() for _ in range(2))
    found = DOORS[door](f)(p, q)
    expected = reference(p, q)[: len(found)]
    torch.testing.assert_close(found, expected)
    for one, other in zip(found, expected, strict=True):
        gradients = [torch.autograd.grad(t.sin().sum(), (p, q), retain_graph=True) for t in (one, other)]
        torch.testing.assert_close(*gradients)


def test_a_rule_that_overwrites_is_read_by_what_is_written():
    y = Log(numbers(3).requires_grad_()) * 1
    y.copy_(Log(numbers(3)))
    with torch.no_grad():
        assert torch.equal(y.materialize(), numbers(3).exp())


@pytest.mark.slow
def test_thousands_in_a_row():
    p = numbers(3).requires_grad_()
    x = Log(p)
    for _ in range(5000):
        x = x * 1.001
    (gradient,) = torch.autograd.grad(x.unwrap("log").sum(), p)
    assert torch.equal(gradient, torch.ones_like(p))
    del x  # neither a recursion of Python nor one of C ends it


# ---- the node of a value -------------------------------------------------------------------------------------


def _seen(y):
    """The gradients that a hook, `retain_grad` and `autograd.grad` see of a value."""
    hooked = []
    y.register_hook(hooked.append)
    y.retain_grad()
    y.unwrap("log").sum().backward(retain_graph=True)
    retained = y.grad  # a second backward adds to it
    return [*hooked, retained, *torch.autograd.grad(y.unwrap("log").sum(), y)]


@pytest.mark.parametrize("made", ["by a number", "two values", "a copy of one", "in place at last", "a sum"])
def test_what_reaches_a_value_is_seen(made):
    y = MADE[made](Log(numbers(2, 2).requires_grad_()), numbers(2, 2))
    for gradient in _seen(y):
        assert type(gradient) is Log.Cotangent
        assert torch.equal(gradient.log, torch.ones_like(gradient.log))


def test_all_that_reaches_a_value_is_one_gradient():
    """Uses as a whole give plain cotangents, which are added by way of the inner tensors."""
    p = numbers(3).requires_grad_()
    y = Log(p) * 3
    y.retain_grad()
    (y.sin().sum() + y.unwrap("log").sum()).backward()
    held = (p.exp() * 3).detach()
    torch.testing.assert_close(y.grad.log, held.cos() * held + 1)
    torch.testing.assert_close(p.grad, held.cos() * held + 1)


def test_a_hook_changes_what_goes_on():
    p = numbers(3).requires_grad_()
    y = Log(p) * 3
    y.register_hook(lambda gradient: gradient * 7)
    y.unwrap("log").sum().backward()
    assert p.grad.tolist() == [7, 7, 7]


@pytest.mark.sweep(6)
@pytest.mark.parametrize("made", [name for name in MADE if name != "a view of one"])
def test_values_that_stock_programs_return(made):
    torch.compiler.reset()
    gradients = []
    for call in (MADE[made], torch.compile(MADE[made], backend="aot_eager")):
        p, q = numbers(2, 2).requires_grad_(), numbers(2, 2).requires_grad_()
        y = call(Log((p * 1).log()), q)
        gradients.append(torch.autograd.grad(y.unwrap("log").sum(), (p, q), allow_unused=True))
    torch.testing.assert_close(*gradients)


def test_a_second_backward():
    p = numbers(3).requires_grad_()
    y = Log(p) * 3
    read = y.unwrap("log").sum()
    read.backward(retain_graph=True)
    read.backward()
    assert p.grad.tolist() == [2, 2, 2]
    with pytest.raises(RuntimeError, match="second time"):
        read.backward()


def test_an_inner_tensor_that_no_gradient_reaches():
    first, second = (numbers(3).requires_grad_() for _ in range(2))
    y = -Ends(first, second)
    (gradient,) = torch.autograd.grad(y.unwrap("low").sum(), y, retain_graph=True)
    assert gradient.low.tolist() == [1, 1, 1] and gradient.high.tolist() == [0, 0, 0]


def test_threads_that_read_the_same_value():
    p = numbers(64).requires_grad_()
    for _ in range(20):
        y, found, barrier = ((Log(p) * 2) + 1) * 3, [], threading.Barrier(4)

        def read(y=y, found=found, barrier=barrier):
            barrier.wait()
            found.append(torch.autograd.grad(y.unwrap("log").sum(), p, retain_graph=True)[0])

        threads = [threading.Thread(target=read) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert len(found) == 4 and all(torch.equal(one, found[0]) for one in found)


def test_autocast_around_the_reading():
    p = torch.ones(2, 2, requires_grad=True)

    class Factor(TensorSubclass, fallback="materialize", kind="structure"):
        held: Tensor = inner()

        def materialize(self):
            return self.held

    @Factor.implements(aten.mul)
    def _(func, x, y):
        return Factor(x.held @ torch.eye(2) * y)

    y = Factor(p) * 3
    with torch.autocast("cpu", torch.bfloat16):
        read = y.unwrap("held")
    assert read.dtype == torch.float32
    assert torch.equal(torch.autograd.grad(read.sum(), p)[0], torch.full((2, 2), 3.0))


def test_a_value_with_a_history_is_copied_and_saved_without_it():
    y = (Log(numbers(3).requires_grad_()) * 3).detach()
    assert "_history" not in pickle.loads(pickle.dumps(y)).__dict__
    assert "_history" not in copy.deepcopy(y).__dict__


# ---- other kinds of classes ----------------------------------------------------------------------------------


class Ends(TensorSubclass):
    """Stands for no plain tensor."""

    low: Tensor = inner()
    high: Tensor = inner()
    unit: str = static(default="m")


@Ends.implements(aten.neg)
def _(func, x):
    return Ends(-x.high, -x.low, unit=x.unit)


class Mapped(TensorSubclass, fallback="map"):
    one: Tensor = inner()
    other: Tensor = inner()


@Mapped.implements(aten.flip)
def _(func, x, dims):
    return Mapped(2 * x.other, x.one)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("cls", "fn", "expected"),
    [(Ends, lambda x: -x, (0.0, -1.0)), (Mapped, lambda x: x.flip([0]) * 5, (0.0, 10.0))],
)
def test_inner_tensors_that_change_places(cls, fn, expected, compiled):
    """A formula of PyTorch's would give each cotangent to the inner tensor of its own name."""
    one, other = (numbers(3).requires_grad_() for _ in range(2))
    call = desugar.compile(fn, backend="eager") if compiled else fn
    first, _ = call(cls(one, other)).unwrap()[:2]
    gradients = torch.autograd.grad(first.sum(), (one, other), allow_unused=True)
    assert [0.0 if g is None else g[0].item() for g in gradients] == list(expected)


class Trained(Log, fallback="materialize", kind="structure", trainable=True):
    pass


@Trained.implements(subclasses.arithmetic)
def _(func, x, y):
    return Trained(as_log(x) + as_log(y)) if func is torch.mul else NotImplemented


@pytest.mark.parametrize("compiled", [False, True])
def test_training_by_a_loss_of_inner_tensors(compiled):
    parameter = nn.Parameter(Trained(numbers(4)))
    before = parameter.detach().log.clone()
    optimizer = torch.optim.SGD([parameter], lr=0.5)

    def loss(x):
        return (x * 3).unwrap("log").sum()

    for _ in range(2):
        optimizer.zero_grad()
        (desugar.compile(loss, backend="eager") if compiled else loss)(parameter).backward()
        optimizer.step()
    torch.testing.assert_close(parameter.detach().log, before - 1)


def writes_through_a_view(a, b):
    z = Log(a) * 1
    z[0].add_(Log(b)[1])
    return z


def writes_by_its_own_rule(a, b):
    z = Log(a) * 1
    z.pow_(b)
    return z


@pytest.mark.parametrize("door", DOORS)
def test_what_was_written_through_a_view_is_read_of_a_result(door):
    """The result of a graph has PyTorch's own node, and asks for the cotangent of its class."""
    a, b = (numbers(2, 2).requires_grad_() for _ in range(2))
    read = DOORS[door](writes_through_a_view)(a, b).unwrap("log")
    plain = torch.stack([torch.logaddexp(a[0], b[1]), a[1]])
    torch.testing.assert_close(read, plain)
    gradients = [torch.autograd.grad(t.sin().sum(), (a, b)) for t in (read, plain)]
    torch.testing.assert_close(*gradients)


@pytest.mark.sweep(10)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("target", ["what an op made", "a new value", "twice"])
def test_a_rule_that_writes_is_derived(target, door):
    """It runs on copies, as the rule for a form that writes nothing would."""

    def f(a, b):
        z = Log(a * 1) if target == "a new value" else Log(a) * 1
        if target == "twice":
            z.pow_(3)
        z.pow_(b)
        return z.unwrap("log").sin().sum(), z.detach().log

    a, b = (numbers(2, 2).requires_grad_() for _ in range(2))
    for _ in range(2):
        loss, held = DOORS[door](f)(a, b)
        found = torch.autograd.grad(loss, (a, b))
        product = (a * b * 3 if target == "twice" else a * b).requires_grad_()
        torch.testing.assert_close(held, product.detach())
        torch.testing.assert_close(found, torch.autograd.grad(product.sin().sum(), (a, b)))


@pytest.mark.parametrize("door", ["eager", "desugar"])
@pytest.mark.parametrize("write", [writes_through_a_view, writes_by_its_own_rule])
def test_a_write_has_a_derivative_as_a_whole(write, door):
    a, b = (numbers(2, 2).requires_grad_() for _ in range(2))
    written = DOORS[door](lambda a, b: write(a, b).sin().sum())
    written(a, b).backward()
    plain = [t.detach().clone().requires_grad_() for t in (a, b)]
    u, v = plain[0].exp(), plain[1].exp()
    value = torch.cat([(u[0] + v[1])[None], u[1:]]) if write is writes_through_a_view else u ** plain[1]
    value.sin().sum().backward()
    torch.testing.assert_close([a.grad, b.grad], [t.grad for t in plain])


# ---- rules that call others --------------------------------------------------------------------------


class Product(TensorSubclass, fallback="materialize", kind="structure"):
    """Two factors; its rule computes with the other operand as a whole."""

    v: Tensor = inner()
    g: Tensor = inner()

    def materialize(self):
        return self.v * self.g


@Product.implements(aten.mul)
def _(func, x, y):
    if isinstance(x, Product):
        return Product(x.v * y, x.g.clone())
    return func(x, y.materialize())


@pytest.mark.parametrize("way", [lambda f: f, lambda f: desugar.compile(f, backend="eager")])
def test_a_rule_that_computes_with_a_whole_operand(way):
    v, w = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    run = way(
        lambda v, w: (Product(v, torch.ones(3)) * Product(w, torch.full((3,), 2.0))).materialize().sum()
    )
    found = torch.autograd.grad(run(v, w), (v, w))
    assert [t.tolist() for t in found] == [[2.0] * 3, [2.0] * 3]
    run = way(lambda v, w: (Product(v, torch.ones(3)) * w).materialize().sum())
    run(v, w).backward()
    assert torch.equal(v.grad, torch.ones(3)) and torch.equal(w.grad, torch.ones(3))


class Beside(TensorSubclass):
    """Numbers, and others beside them that are no part of what it sums to."""

    a: Tensor = inner(differentiable=True)
    b: Tensor = inner(differentiable=True)

    def wrap_cotangent(self, cotangent):
        return Beside(cotangent, torch.zeros_like(self.b))


@Beside.implements(torch.Tag.pointwise)
def _(func, *args, **kwargs):
    x = next(t for t in args if isinstance(t, Beside))
    return Beside(func(*(t.a if isinstance(t, Beside) else t for t in args), **kwargs), x.b.clone())


@Beside.implements(aten.sum)
def _(func, x, *args, **kwargs):
    return func(x.a, *args, **kwargs)


ON_NUMBERS = {
    "abs": lambda x, w: x.abs(),
    "tanh": lambda x, w: x.tanh(),
    "by itself": lambda x, w: x * x,
    "by a tensor": lambda x, w: x * w,
    "twice": lambda x, w: (x * w).exp() * x,
    "in place": lambda x, w: (x * 1.0).mul_(w),
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    "way", [lambda f: f, lambda f: desugar.compile(f, backend="eager")], ids=["eager", "desugar"]
)
@pytest.mark.parametrize("made", ["leaf", "result"])
@pytest.mark.parametrize("name", ON_NUMBERS)
def test_a_plain_cotangent_is_wrapped_before_the_rule_is_derived(name, made, way):
    """PyTorch's formula would compute with the plain gradient and the value, whose second tensor is no gradient."""
    call = ON_NUMBERS[name]
    a, b, w = (torch.rand(3, requires_grad=True) for _ in range(3))

    def run(a, b, w):
        x = Beside(a, b)
        return call(x if made == "leaf" else x * 1.0, w).sum()

    got = torch.autograd.grad(way(run)(a, b, w), (a, b, w), allow_unused=True)
    expected = torch.autograd.grad(call(a, w).sum(), (a, w), allow_unused=True)
    torch.testing.assert_close(got[0], expected[0])
    assert got[1] is None or not got[1].any()
    if expected[1] is not None:
        torch.testing.assert_close(got[2], expected[1])


def test_second_derivatives_of_a_wrapped_cotangent():
    a, p = (torch.tensor([1.0, 2.0], requires_grad=True) for _ in range(2))
    (first,) = torch.autograd.grad((Beside(a, torch.ones(2)) ** 3).sum(), a, create_graph=True)
    (expected,) = torch.autograd.grad((p**3).sum(), p, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(first.sum(), a), torch.autograd.grad(expected.sum(), p))


class Dual(TensorSubclass, fallback="map"):
    a: Tensor = inner(differentiable=True)
    b: Tensor = inner(differentiable=True)


@Dual.implements(aten.mul.Tensor)
def _(func, x, y):
    return Dual(x.a * y.a, x.a * y.b + x.b * y.a)


class Holding(TensorSubclass, fallback="map"):
    dual: Tensor = inner(differentiable=True)


@pytest.mark.parametrize("door", DOORS)
def test_the_formula_of_an_op_on_what_holds_a_value_is_refused(door):
    """It would multiply the gradient by each inner tensor, which is not the derivative of the rule."""
    p = numbers(3).requires_grad_()
    run = DOORS[door](lambda p: (Holding(Dual(p, p * 2)) * Holding(Dual(p, p * 3))).unwrap("dual").b.sum())
    with pytest.raises(Exception, match=r"another value holds a Dual.*call the op on .*x\.unwrap\("):
        run(p).backward()
    q = Holding(Dual(p, p * 2))
    (q.dual * q.dual + q.dual).a.sum().backward()
    torch.testing.assert_close(p.grad, 2 * p.detach() + 1)


def test_a_rule_for_a_view_of_a_value_without_gradients():
    """A function of several ops takes the view, and the other operand requires grad."""

    class Turned(TensorSubclass):
        v: Tensor = inner(differentiable=True)

    Turned.implements(aten.t)(lambda func, x: Turned(x.v.t()))
    Turned.implements(aten.mm)(lambda func, x, y: func(x, y.v))
    x, v = numbers(2, 3).requires_grad_(), numbers(4, 3)
    out = nn.functional.linear(x, Turned(v))
    torch.testing.assert_close(out, x @ v.t())
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], v.sum(0).expand(2, 3))
    with pytest.raises(DispatchError, match="PyTorch differentiates a view"):
        nn.functional.linear(x, Turned(v.clone().requires_grad_()))
