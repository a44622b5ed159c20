"""Rules for ops of a structure: they run once, above autograd, which derives what they compute."""

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import subclasses
from subclasses import DispatchError, inner, static
from tests.doors import DOORS
from tests.subclasses.autograd.judge import agree, agreeing, numbers
from tests.subclasses.subjects import declare

aten = torch.ops.aten

WAYS = [door for door in DOORS if door != "inside"]
two_ways = pytest.mark.parametrize("door", ["eager", "desugar"])


def as_log(x):
    return x.log if isinstance(x, Log) else torch.as_tensor(x, dtype=torch.float64).log()


def arithmetic(func, x, y):
    if func is torch.add:
        return Log(func(as_log(x).exp(), as_log(y).exp()).log())
    if any(
        isinstance(t, Tensor) and not isinstance(t, Log) for t in (x, y)
    ):  # it may be negative, as a gradient
        return func(*(t.materialize() if isinstance(t, Log) else t for t in (x, y)))
    if func is torch.div:
        return x * (1 / y)  # another rule of the class
    return Log(as_log(x) + as_log(y))


STRUCTURE = {"fallback": "materialize", "kind": "structure"}
# Positive numbers by their logarithms: a product is a sum, so PyTorch's formula for a product would be wrong for them.
Log = declare(
    __module__=__name__,
    name="Log",
    keywords=STRUCTURE,
    log=inner(shape="..."),
    materialize=lambda self: self.log.exp(),
    rules={
        subclasses.arithmetic: arithmetic,
        aten.aminmax: lambda func, x, **how: tuple(Log(t) for t in func(x.log, **how)),
        aten.pow_: lambda func, x, power: (x.log.mul_(power), x)[1],  # raised in its own way
    },
)


def leaf(*size):
    return numbers(size)[0].requires_grad_()


# Functions of a value and a plain tensor.
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


def log_case(made, read):
    """A function of logarithms, and the same of the numbers."""
    return (
        lambda p, q: READ[read][0](MADE[made](Log((p * 1).log()), q)),
        lambda p, q: READ[read][1](MADE[made](p * 1, q)),
        [(2, 2), (2, 2)],
    )


# PyTorch's formula for ``x * 3`` scales a cotangent by 3, and the logarithm's derivative is 1.
test_gradients_are_those_of_plain_tensors = agreeing(
    {f"{made}, {read}": log_case(made, read) for made in MADE for read in READ}, zeros=False
)


@pytest.mark.sweep(24)
@pytest.mark.parametrize(
    ("door", "made"),
    [("desugar", made) for made in MADE] + [("stock", made) for made in MADE if made != "a view of one"],
)
def test_values_that_programs_return(door, made):
    run, (of_value, of_plain) = DOORS[door](MADE[made]), READ["both" if door == "desugar" else "inner"]
    agree(
        lambda p, q: of_value(run(Log((p * 1).log()), q)),
        lambda p, q: of_plain(MADE[made](p * 1, q)),
        numbers((2, 2), (2, 2)),
        zeros=False,
    )


def test_what_is_read_is_the_memory_of_the_value():
    y = Log(leaf(3)) * 3
    read = y.unwrap("log")
    assert read.data_ptr() == y.detach().log.data_ptr()
    with pytest.raises(RuntimeError, match="modified inplace"):
        read.add_(1)


@pytest.mark.parametrize("is_read", [False, True])
def test_a_write_without_gradients_to_the_result(is_read):
    """The write does not change the function that autograd records, as for plain tensors."""
    p = leaf(3)
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
@pytest.mark.parametrize("door", WAYS)
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
        return (y, y[:, 1], y.t())[: 1 if door == "stock" else 3]

    agree(f, reference, numbers((3, 2), (3, 2)), door=door)


def test_a_rule_that_overwrites_is_read_by_what_is_written():
    y = Log(leaf(3)) * 1
    (other,) = numbers(3)
    y.copy_(Log(other))
    with torch.no_grad():
        assert torch.equal(y.materialize(), other.exp())


@pytest.mark.slow
def test_thousands_in_a_row():
    p = leaf(3)
    x = Log(p)
    for _ in range(5000):
        x = x * 1.001
    (gradient,) = torch.autograd.grad(x.unwrap("log").sum(), p)
    assert torch.equal(gradient, torch.ones_like(p))
    del x  # neither a recursion of Python nor one of C ends it


# ---- the node of a value -------------------------------------------------------------------------------------


@pytest.mark.parametrize("made", ["by a number", "two values", "a copy of one", "in place at last", "a sum"])
def test_what_reaches_a_value_is_seen(made):
    """By a hook, `retain_grad` and `autograd.grad`."""
    y, hooked = MADE[made](Log(leaf(2, 2)), *numbers((2, 2))), []
    y.register_hook(hooked.append)
    y.retain_grad()
    y.unwrap("log").sum().backward(retain_graph=True)
    retained = y.grad  # a second backward adds to it
    for gradient in (*hooked, retained, *torch.autograd.grad(y.unwrap("log").sum(), y)):
        assert type(gradient) is Log.Cotangent
        assert torch.equal(gradient.log, torch.ones_like(gradient.log))


def test_all_that_reaches_a_value_is_one_gradient():
    """Uses as a whole give plain cotangents, which are added by way of the inner tensors."""
    p = leaf(3)
    y = Log(p) * 3
    y.retain_grad()
    (y.sin().sum() + y.unwrap("log").sum()).backward()
    held = (p.exp() * 3).detach()
    torch.testing.assert_close((y.grad.log, p.grad), (held.cos() * held + 1,) * 2)


def test_a_hook_changes_what_goes_on():
    p = leaf(3)
    y = Log(p) * 3
    y.register_hook(lambda gradient: gradient * 7)
    y.unwrap("log").sum().backward()
    assert p.grad.tolist() == [7, 7, 7]


def test_an_inner_tensor_that_no_gradient_reaches():
    y = -Ends(leaf(3), leaf(3))
    (gradient,) = torch.autograd.grad(y.unwrap("low").sum(), y, retain_graph=True)
    assert gradient.low.tolist() == [1, 1, 1] and gradient.high.tolist() == [0, 0, 0]


def test_threads_that_read_the_same_value():
    p, barrier = leaf(64), threading.Barrier(4)

    def read(y):
        barrier.wait()
        return torch.autograd.grad(y.unwrap("log").sum(), p, retain_graph=True)[0]

    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            first, *others = pool.map(read, [((Log(p) * 2) + 1) * 3] * 4)
            assert len(others) == 3 and all(torch.equal(other, first) for other in others)


def test_autocast_around_the_reading():
    p = torch.ones(2, 2, requires_grad=True)
    Factor = declare(
        keywords=STRUCTURE,
        materialize=lambda self: self.held,
        rules={aten.mul: lambda func, x, y: Factor(x.held @ torch.eye(2) * y)},
    )
    y = Factor(p) * 3
    with torch.autocast("cpu", torch.bfloat16):
        read = y.unwrap("held")
    assert read.dtype == torch.float32
    assert torch.equal(torch.autograd.grad(read.sum(), p)[0], torch.full((2, 2), 3.0))


def test_a_value_with_a_history_is_copied_and_saved_without_it():
    y = (Log(leaf(3)) * 3).detach()
    assert "_history" not in pickle.loads(pickle.dumps(y)).__dict__
    assert "_history" not in copy.deepcopy(y).__dict__


# ---- other kinds of classes ----------------------------------------------------------------------------------

# Represents no plain tensor.
Ends = declare(
    low=inner(),
    high=inner(),
    unit=static(default="m"),
    rules={aten.neg: lambda func, x: Ends(-x.high, -x.low, unit=x.unit)},
)
Mapped = declare(
    keywords={"fallback": "map"},
    one=inner(),
    other=inner(),
    rules={aten.flip: lambda func, x, dims: Mapped(2 * x.other, x.one)},
)


# A formula of PyTorch's would give each cotangent to the inner tensor of its own name.
test_inner_tensors_that_change_places = agreeing(
    {
        "by a rule": (lambda a, b: (-Ends(a, b)).unwrap("low"), lambda a, b: -b, [3, 3]),
        "of a mapped class": (
            lambda a, b: (Mapped(a, b).flip([0]) * 5).unwrap("one"),
            lambda a, b: b * 10,
            [3, 3],
        ),
    }
)
Trained = declare(
    Log,
    keywords={**STRUCTURE, "trainable": True},
    rules={
        subclasses.arithmetic: lambda func, x, y: (
            Trained(as_log(x) + as_log(y)) if func is torch.mul else NotImplemented
        )
    },
)


@two_ways
def test_training_by_a_loss_of_inner_tensors(door):
    parameter = nn.Parameter(Trained(*numbers(4)))
    before = parameter.detach().log.clone()
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        DOORS[door](lambda x: (x * 3).unwrap("log").sum())(parameter).backward()
        optimizer.step()
    torch.testing.assert_close(parameter.detach().log, before - 1)


def writes_through_a_view(a, b):
    z = Log(a) * 1
    z[0].add_(Log(b)[1])
    return z


@pytest.mark.parametrize("door", WAYS)
def test_what_was_written_through_a_view_is_read_of_a_result(door):
    """The result of a graph has PyTorch's own node, whose cotangent has the class of the result."""
    run = DOORS[door](writes_through_a_view)
    agree(
        lambda a, b: run(a, b).unwrap("log"),
        lambda a, b: torch.stack([torch.logaddexp(a[0], b[1]), a[1]]),
        numbers((2, 2), (2, 2)),
    )


def raised(z):
    """By a rule that runs on copies, as the rule for a form that writes nothing would."""
    return lambda a, b: [t.sin() for t in z(a).pow_(b).unwrap()]


SQUARE = [(2, 2), (2, 2)]
test_a_write_has_the_derivative_of_the_rule = agreeing(
    {
        "what an op made": (raised(lambda a: Log(a) * 1), lambda a, b: (a * b).sin(), SQUARE),
        "a new value": (raised(lambda a: Log(a * 1)), lambda a, b: (a * b).sin(), SQUARE),
        "twice": (raised(lambda a: (Log(a) * 1).pow_(3)), lambda a, b: (a * b * 3).sin(), SQUARE),
        "of a view, as a whole": (
            lambda a, b: writes_through_a_view(a, b).sin().sum(),
            lambda a, b: torch.cat([(a.exp()[0] + b.exp()[1])[None], a.exp()[1:]]).sin().sum(),
            SQUARE,
        ),
        "as a whole": (
            lambda a, b: (Log(a) * 1).pow_(b).sin().sum(),
            lambda a, b: (a.exp() ** b).sin().sum(),
            SQUARE,
        ),
    }
)


# ---- rules that call others --------------------------------------------------------------------------

# Two factors; its rule computes with the other operand as a whole.
Product = declare(
    keywords=STRUCTURE,
    v=inner(),
    g=inner(),
    materialize=lambda self: self.v * self.g,
    rules={
        aten.mul: lambda func, x, y: (
            Product(x.v * y, x.g.clone()) if isinstance(x, Product) else func(x, y.materialize())
        )
    },
)


def with_whole_operands(v, w):
    x = Product(v, torch.ones_like(v))
    return (x * Product(w, torch.full_like(w, 2.0))).materialize(), (x * w).materialize()


test_a_rule_that_computes_with_a_whole_operand = agreeing(
    {"both": (with_whole_operands, lambda v, w: (2 * v * w, v * w), [3, 3])}
)


def on_numbers(func, *args, **kwargs):
    x = next(t for t in args if isinstance(t, Beside))
    return Beside(func(*(t.a if isinstance(t, Beside) else t for t in args), **kwargs), x.b.clone())


# Numbers, and other numbers beside them that do not enter its sum.
Beside = declare(
    a=inner(differentiable=True),
    b=inner(differentiable=True),
    wrap_cotangent=lambda self, cotangent: Beside(cotangent, torch.zeros_like(self.b)),
    rules={
        torch.Tag.pointwise: on_numbers,
        aten.sum: lambda func, x, *args, **kwargs: func(x.a, *args, **kwargs),
    },
)

ON_NUMBERS = {
    "abs": lambda x, w: x.abs(),
    "tanh": lambda x, w: x.tanh(),
    "by itself": lambda x, w: x * x,
    "by a tensor": lambda x, w: x * w,
    "twice": lambda x, w: (x * w).exp() * x,
    "in place": lambda x, w: (x * 1.0).mul_(w),
}


# PyTorch's formula would compute with the plain gradient and the value, whose second tensor is not a gradient.
test_a_plain_cotangent_is_wrapped_before_the_rule_is_derived = agreeing(
    {
        f"{name}, {made}": (
            lambda a, b, w, call=call, f=f: call(f(Beside(a, b)), w).sum(),
            lambda a, b, w, call=call: call(a, w).sum(),
            [3, 3, 3],
        )
        for name, call in ON_NUMBERS.items()
        for made, f in {"leaf": lambda x: x, "result": lambda x: x * 1.0}.items()
    }
)
test_second_derivatives = agreeing(
    {
        "a cube": (lambda a: (Beside(a, torch.ones(2)) ** 3).sum(), lambda p: (p**3).sum(), [2]),
        "of logarithms": (
            lambda p: ((Log(p.log()) * 3) * Log(p.log())).unwrap("log"),
            lambda p: (3 * p * p).log(),
            [3],
        ),
    },
    twice=["eager"],
)
Dual = declare(
    name="Dual",
    keywords={"fallback": "map"},
    a=inner(differentiable=True),
    b=inner(differentiable=True),
    rules={aten.mul.Tensor: lambda func, x, y: Dual(x.a * y.a, x.a * y.b + x.b * y.a)},
)
Holding = declare(keywords={"fallback": "map"}, dual=inner(differentiable=True))


@pytest.mark.parametrize("door", WAYS)
def test_the_formula_of_an_op_on_what_holds_a_value_is_refused(door):
    """It would multiply the gradient by each inner tensor, which is not the derivative of the rule."""
    p = leaf(3)
    run = DOORS[door](lambda p: (Holding(Dual(p, p * 2)) * Holding(Dual(p, p * 3))).unwrap("dual").b.sum())
    with pytest.raises(Exception, match=r"another value holds a Dual.*call the op on .*x\.unwrap\("):
        run(p).backward()
    q = Holding(Dual(p, p * 2))
    (q.dual * q.dual + q.dual).a.sum().backward()
    torch.testing.assert_close(p.grad, 2 * p.detach() + 1)


def test_a_rule_for_a_view_of_a_value_without_gradients():
    """A function of several ops takes the view, and the other operand requires grad."""
    Turned = declare(
        v=inner(differentiable=True),
        rules={aten.t: lambda func, x: Turned(x.v.t()), aten.mm: lambda func, x, y: func(x, y.v)},
    )
    (v,) = numbers((4, 3))
    agree(lambda x: nn.functional.linear(x, Turned(v)), lambda x: x @ v.t(), numbers((2, 3)))
    with pytest.raises(DispatchError, match="PyTorch differentiates a view"):
        nn.functional.linear(leaf(2, 3), Turned(v.clone().requires_grad_()))


# ---- calls that go to the class at once ------------------------------------------------------------------------------


class Seeing(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_the_op_of_a_product():
    x = leaf(3)
    x * x
    with Seeing() as mode:
        x * x
    assert mode.ops[0] is aten.mul.Tensor


def test_the_profiler_records_the_op_of_a_product():
    x = leaf(3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        x / x  # computed by a product of logarithms, and by no division
    assert "aten::div" in [event.name for event in profiler.events()]


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_rule_without_an_answer_is_refused_by_the_operator(requires_grad):
    cls = declare(
        a=inner(), rules={aten.mul.Tensor: lambda func, x, y: NotImplemented}, keywords={"kind": "structure"}
    )
    x = cls(torch.ones(2)).requires_grad_(requires_grad)
    with pytest.raises(TypeError, match="unsupported operand"):
        x * x


def test_a_dispatch_of_the_author_is_called_once_for_each_product():
    calls = []

    class Counted(subclasses.TensorSubclass, kind="structure"):
        a: Tensor = inner()

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            calls.append(func)
            return super().__torch_dispatch__(func, types, args, kwargs)

    @Counted.implements(aten.mul.Tensor)
    def mul(func, x, y):
        return Counted(x.a * y.a)

    x = Counted(torch.full((2,), 3.0)).requires_grad_()
    calls.clear()
    y = x * x
    assert calls.count(aten.mul.Tensor) == 1
    (gradient,) = torch.autograd.grad(y.unwrap("a").sum(), x)
    torch.testing.assert_close(gradient.unwrap("a"), torch.full((2,), 6.0))
