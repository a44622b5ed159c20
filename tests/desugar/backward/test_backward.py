"""The values that a forward saves, how a backward reads them, and the text of a backward."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch import Tensor

from desugar import DesugarError
from desugar.codegen.text import join_saved
from desugar.ir.values import Wrapper
from subclasses import Outer, inner
from subclasses.ragged import JaggedTensor, PaddedTensor
from tests.desugar.classes import (
    EVERY,
    HAND_WRITTEN,
    Int8Like,
    Labeled,
    Nested,
    Pair,
    Tripled,
    TwoTensor,
    autograd_function,
    make,
    plain_parts,
    saving,
)
from tests.desugar.judge import (
    BACKEND_DOORS,
    WAYS,
    assert_same_values,
    backward,
    by_pass,
    judge,
    random_like,
    versions,
)
from tests.doors import by_desugar, by_torch
from tests.subclasses.subjects import declare


def text_of(fn, *args):
    """The text of the backward for all gradients, after one call."""
    compiled = by_pass(fn)
    backward(compiled(*args))
    (program,) = compiled.programs
    (text,) = program.variants.texts
    return text


DOORS = {"backend": by_torch, "desugar.compile": functools.partial(by_pass, strict=True)}
WRITES = {
    "to what lies in an argument": (torch.mul, lambda x, y, out: y.a.mul_(2)),
    "to an argument": (torch.mul, lambda x, y, out: y.add_(1)),
    "to what lies in a result": (lambda x, y: x.exp(), lambda x, y, out: out.b.mul_(2)),
}


@pytest.mark.parametrize("cls", [TwoTensor, Pair])
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", WRITES)
def test_a_write_to_what_is_saved_is_refused(name, door, cls):
    fn, write = WRITES[name]
    x, y = make(cls, 2, 3, grad=True), make(cls, 2, 3)
    out = DOORS[door](fn)(x, y)
    with torch.no_grad():
        write(x, y, out)
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        backward(out)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("cls", [TwoTensor, Pair])
@pytest.mark.parametrize("door", DOORS)
def test_an_assignment_to_an_argument_or_a_result_changes_no_gradient(cls, door):
    """Where a class maps its ops, PyTorch's formulas save the wrapper in eager mode, and do not see such a write."""
    x, y = make(cls, 2, 3, grad=True), make(cls, 2, 3)
    want = y.exp()
    out = DOORS[door](lambda x, y: (x * y.exp()).exp().log())(x, y)
    with torch.no_grad():
        y.a, out.b = y.a * 2, out.b * 3
    (grad,) = torch.autograd.grad(out, x, torch.ones_like(want))
    torch.testing.assert_close([grad.a, grad.b], [want.a, want.b])


@pytest.mark.parametrize("cls", [TwoTensor, Pair])
def test_a_backward_that_runs_the_function_again_refuses_what_was_assigned(cls):
    x, y = make(cls, 2, 3, grad=True), make(cls, 2, 3)
    out = by_pass(lambda x, y: x.sin() * y)(x, y)
    with torch.no_grad():
        y.a = y.a * 2
    with pytest.raises(DesugarError, match=r"and 'a' of its argument, an? \w+, has been assigned"):
        torch.autograd.grad(out, x, torch.ones_like(out), create_graph=True)


def test_a_saved_copy_serves_a_backward_that_runs_the_function_again():
    x, y = make(Pair, 2, 3, grad=True), make(Pair, 2, 3)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        out = by_pass(lambda x, y: x.sin() * y)(x, y)
    (grad,) = torch.autograd.grad(out, x, torch.ones_like(out), create_graph=True)
    torch.testing.assert_close(grad.a, x.a.cos() * y.a)


@pytest.mark.parametrize("door", DOORS)
def test_a_write_in_a_program_counts_for_what_lies_deep_inside(door):
    outer = make(Nested, 2, 3)
    before = versions(plain_parts(outer))
    DOORS[door](lambda x: x.mul_(2))(outer)
    assert all(t > old for t, old in zip(versions(plain_parts(outer)), before, strict=True))


def test_strides_of_gradients():
    """A dense gradient is not permuted; a transposed result wants a transposed gradient."""
    text = text_of(lambda x: x * 2, make(Pair, 2, 3, grad=True))
    assert "restride" not in text and text.count(".contiguous()") == 2
    text = text_of(lambda x: x.t().sin(), torch.randn(2, 3, requires_grad=True))
    assert "restride(" in text and "(1, 0)" in text
    judge(lambda x: x.t().sin(), lambda: (make(TwoTensor, 2, 3, grad=True),))


def test_what_has_no_gradient_is_shared_with_the_result():
    """int8 data of a gradient: compared by identity, then by value, and no input of the backward."""
    (program,) = judge(torch.clone, lambda: (make(Int8Like, 2, 3, grad=True),)).programs
    companion, *_ = program.variants.plan.others
    assert isinstance(program.outputs[0], Wrapper) and companion.endswith(".qdata")
    assert len(program.variants.interface.tangent_items) == 1 and "equal(" in program.variants.texts[0]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("cls", EVERY)
def test_the_check_of_a_gradient(cls):
    text = text_of(lambda x: x * 2, make(cls, 2, 6, grad=True))
    checks = text.split("is_grad_enabled()", 1)[1].split("):\n", 1)[0]
    assert checks.split()[:4] == ["or", "type(tangent0)", "is", "not"]
    assert ("_layout is not" in checks) == (cls not in HAND_WRITTEN)
    assert "isinstance" not in checks


# ---- saved tensors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "joined"),
    [
        (["saved[0]", "saved[1]", "saved[2]", "g0"], ["*saved", "g0"]),
        (["saved[0]", "saved[1]", "saved[2]", "saved[3].a", "g0"], ["*saved[:3]", "saved[3].a", "g0"]),
        (["saved[3]", "saved[1]", "saved[2]", "saved[3]"], ["saved[3]", "*saved[1:4]"]),
        (["saved[0]", "saved[1]"], ["saved[0]", "saved[1]"]),
        (["saved[2]", "saved[1]", "saved[0]"], ["saved[2]", "saved[1]", "saved[0]"]),
    ],
)
def test_saved_tensors_in_a_row_are_one_slice(arguments, joined):
    assert join_saved(arguments, 4 if "saved[3]" in " ".join(arguments) else 3) == joined


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "build", [lambda t: t, lambda t: TwoTensor(t, torch.ones(3)), lambda t: Pair(t, torch.ones(3))]
)
def test_a_gradient_that_is_negated_lazily(build, backend):
    """As the backward of `torch.complex(...).conj()` gives: its memory holds the opposite."""
    x, gradient = build(torch.ones(3)).requires_grad_(), build(torch._neg_view(torch.arange(1.0, 4.0)))
    out = by_pass(lambda x: x * 2, backend=backend)(x)
    assert type(gradient) is Pair or plain_parts(gradient)[0].is_neg()
    (grad,) = torch.autograd.grad(out, x, gradient)
    torch.testing.assert_close(plain_parts(grad)[0], torch.tensor([-2.0, -4.0, -6.0]))


# ---- the variants: which there are, when they are compiled, and when the function runs again ------------------------


def three(x, y):
    return x.sin(), x * y, y.cos()


def counting():
    """A backend that counts the graphs it gets."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    return backend, graphs


def two(cls=Pair):
    return make(cls, 2, 3, grad=True), make(cls, 2, 3, grad=True)


def test_members_are_compiled_when_they_are_met():
    backend, graphs = counting()
    compiled, sizes = by_pass(three, backend=backend), []
    for missing in ((), (0,), (0, 2), (0,), ()):
        judge(three, two, compiled, missing=missing)
        sizes.append(len(graphs))
    assert sizes == [2, 3, 4, 4, 4]  # a forward, then one backward for each combination
    variants = compiled.programs[0].variants
    assert set(variants.table) == {(True,) * 3, (False, True, True), (False, True, False)}
    assert len(variants.texts) == 3
    assert compiled.programs[0].source.endswith(variants.texts[-1])
    # The member for all gradients is the backward, and passes other sets of gradients on.
    assert compiled.programs[0].run.__globals__["Backward"].backward is variants.table[(True,) * 3]


def test_with_symbols_the_whole_backward_is_compiled_at_once():
    """The signature includes the compiler's assumptions about sizes."""
    backend, graphs = counting()
    compiled = by_pass(three, backend=backend, dynamic=True)
    compiled(*two())
    assert len(graphs) == 2 and compiled.programs[0].variants.table == {}


def test_second_derivatives_compile_a_function_of_their_own():
    backend, graphs = counting()
    compiled, known = by_pass(lambda x: (x * x * x).sum(), backend=backend), []
    x = torch.tensor([2.0, 3.0], requires_grad=True)
    for _ in range(3):
        (g,) = torch.autograd.grad(compiled(x), x, create_graph=True)
        (h,) = torch.autograd.grad(g.sum(), x, create_graph=True)
        (k,) = torch.autograd.grad(h.sum(), x)
        torch.testing.assert_close((g, h, k), (3 * x**2, 6 * x, torch.full((2,), 6.0)))
        known.append(len(graphs))
    assert known == known[:1] * 3  # the second time round nothing is compiled


# ---- whose memory a gradient is ------------------------------------------------------------------------------


@pytest.mark.sweep(14)
@pytest.mark.parametrize(
    "name", ["a sum", "a view and a sum", pytest.param("inductor", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("door", BACKEND_DOORS)
@pytest.mark.parametrize("cls", [torch.Tensor, TwoTensor, Pair, Labeled, Nested])
def test_each_gradient_has_memory_of_its_own(cls, door, name):
    """A user may clip a gradient in place, so no gradient shares memory with another one.

    Autograd copies a gradient only if it can see that another tensor shares the memory.
    """
    fn = (lambda x, y: x + y.view(6).view(2, 3)) if name == "a view and a sum" else (lambda x, y: x + y)
    x, y = two(cls)
    out = BACKEND_DOORS[door](fn, backend="inductor" if name == "inductor" else "eager")(x, y)
    tangent = random_like(out, torch.Generator().manual_seed(1))
    wanted = [part.clone() for part in plain_parts(tangent)]
    out.backward(tangent)
    for part in plain_parts(x.grad):
        part.zero_()
    for kept in (tangent, y.grad):
        assert all(map(torch.equal, plain_parts(kept), wanted))


BATCHES = {
    "old vmap": lambda out, x: torch.autograd.grad(out, x, torch.eye(3), is_grads_batched=True)[0],
    "vmap": lambda out, x: torch.func.vmap(lambda g: torch.autograd.grad(out, x, g, retain_graph=True)[0])(
        torch.eye(3)
    ),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("is_known", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("cls", [Tensor, Pair])
def test_batches_of_gradients(cls, backend, is_known):
    """`is_grads_batched=True` and vmap over a backward; compiled code finds no memory in their gradients."""
    fn, x = lambda x: x.sin() * x, make(cls, 3, grad=True)
    compiled = by_pass(fn, backend=backend)
    if is_known:
        compiled(x).backward(make(cls, 3))
    for name in BATCHES if cls is Tensor else ["old vmap"]:  # vmap does not support subclasses
        assert_same_values([BATCHES[name](compiled(x), x)], [BATCHES[name](fn(x), x)])


def test_an_error_of_compiled_code_is_not_taken_for_a_batch_of_gradients():
    def fail(*args):
        raise RuntimeError("of the backend's own")

    compiled = by_pass(torch.sin, backend=lambda graph, _: fail if "tangents" in str(graph.graph) else graph)
    out = compiled(torch.ones(3, requires_grad=True))
    with pytest.raises(RuntimeError, match="of the backend's own"):
        out.sum().backward()


def of_a_ragged_value(cls):
    """Returns a function and its arguments; the offsets, which every gradient of the class holds, have no gradient."""
    rows = [torch.randn(n, 4) for n in (3, 0, 2)]
    return (
        lambda x, w: (x * w, w.sum(), (x * 2) * w),
        lambda: (cls.from_tensors(rows).requires_grad_(), torch.ones(4, requires_grad=True)),
    )


def transposed(x, w):
    halves = (x * 2).view(4, 2, 3).transpose(0, 1)
    product = halves @ w
    return halves * 3, product


MISSING = {
    "jagged": (*of_a_ragged_value(JaggedTensor), ((0, 2), (0,), (1, 2), ())),
    "padded": (*of_a_ragged_value(PaddedTensor), ((0, 2), (0,), (1, 2), ())),
    # The other inner tensor gets zeros, as in eager mode.
    "summands with other strides": (
        transposed,
        lambda: (torch.randn(4, 6, requires_grad=True), torch.randn(3, 5, requires_grad=True)),
        ((0,), (1,), ()),
    ),
    "one of two inner tensors": (
        lambda x, w: (x.unwrap("a").sin(), x.unwrap("b") * w, w.cos()),
        lambda: (make(Pair, 2, 3, grad=True), torch.ones(3, requires_grad=True)),
        ((0, 2), (1,), (0, 1), (0,), (1, 2), ()),
    ),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("door", WAYS)
@pytest.mark.parametrize(
    ("name", "dynamic"), [*((name, None) for name in MISSING), ("one of two inner tensors", True)]
)
def test_gradients_of_some_results(name, dynamic, door):
    fn, make_args, subsets = MISSING[name]
    compiled = WAYS[door](fn, dynamic=dynamic)
    for missing in subsets:
        judge(fn, make_args, compiled, missing=missing)


# ---- backwards that run the function again -------------------------------------------------------------------


READ = {
    "as a whole": (lambda x: x.exp(), torch.exp),
    "materialized": (lambda x: x.materialize(), lambda t: t),
    "by its inner tensor": (lambda x: x.unwrap("third").sin(), lambda t: (t / 3).sin()),
    "both": (lambda x: x.exp() + x.unwrap("third"), lambda t: t.exp() + t / 3),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize("fn", [lambda x, q: x + q, lambda x, q: x + q.sum(), lambda x, q: x * q])
def test_the_gradient_of_a_plain_operand(fn, read):
    """It is plain, whatever gradients the result gets."""
    of_values, of_plain = READ[read]
    p, q = torch.full((3,), 0.5, requires_grad=True), torch.arange(1.0, 4.0, requires_grad=True)
    results = [of_plain(fn(3 * p, q)), *(of_values(f(Tripled(p * 1), q)) for f in (fn, by_pass(fn)))]
    wanted, *found = (torch.autograd.grad(result.sum(), (p, q)) for result in results)
    for got in found:
        torch.testing.assert_close(got, wanted)


Twice = declare(keywords={"fallback": "materialize"}, materialize=lambda self: self.held * 2)


@pytest.mark.parametrize("door", WAYS)
def test_a_gradient_with_a_conjugate_bit(door):
    """An op on a whole result returns plain gradients, which formulas of complex numbers conjugate."""
    held, weight = (torch.rand(3, dtype=torch.complex64) for _ in range(2))
    fn, gradients = lambda t: Twice(t * t), []
    for call in (fn, WAYS[door](fn)):
        result = call(held.requires_grad_())
        gradients += torch.autograd.grad((result.conj() * weight).real.sum(), held, retain_graph=True)
        gradients += torch.autograd.grad(result, held, weight.conj())
    torch.testing.assert_close(gradients[:2], gradients[2:])


def test_the_function_runs_again_under_its_autocast():
    fn, found = lambda x: (x @ x).sin(), []
    for call in (fn, by_pass(fn)):
        x = torch.linspace(0, 1, 9).view(3, 3).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = call(x)
        (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        found.append([first.detach(), *torch.autograd.grad(first.sum(), x)])
    torch.testing.assert_close(*found)


# ---- gradients of results that hold integers, and that are not linear in those that arrive --------------------------


def multiply(func, x, y):
    x, y = (t.materialize() if isinstance(t, Fixed) else t for t in (x, y))
    return Fixed((x * y * 256).round().to(torch.int16))


# Numbers in 256ths.
Fixed = declare(
    keywords={"fallback": "views"},
    rules={torch.ops.aten.mul.Tensor: multiply},
    raw=inner(dtype=torch.int16),
    outer=staticmethod(
        lambda raw: Outer(
            raw.shape, stride=raw.stride(), storage_offset=raw.storage_offset(), dtype=torch.float32
        )
    ),
    materialize=lambda self: self.raw.float() / 256,
)


TANGENTS_DOORS = {"backend": by_torch, "desugar.compile": functools.partial(by_desugar, strict=True)}
doors = pytest.mark.parametrize("door", TANGENTS_DOORS)


def product(x, y):
    return x * y, y.sin()


def make_tangents(size):
    return Fixed((torch.arange(size) * 256).short()), torch.randn(size).round().requires_grad_()


@pytest.mark.sweep(24)
@doors
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("wanted", [[0, 1], [0], [1]], ids=str)
def test_the_gradient_is_that_of_eager_mode(door, dynamic, wanted):
    compiled = TANGENTS_DOORS[door](product, dynamic=dynamic)
    for size in (2, 3, 0, 1):
        x, y = make_tangents(size)
        found, expected, given = compiled(x, y), product(x, y), [torch.randn(size) for _ in wanted]
        assert type(found[0]) is Fixed and found[0].raw.equal(expected[0].raw) and found[0].requires_grad
        grads = [torch.autograd.grad([out[n] for n in wanted], y, given) for out in (found, expected)]
        torch.testing.assert_close(*grads)


@doors
def test_without_gradients_there_is_none(door):
    x, y = make_tangents(3)
    compiled = TANGENTS_DOORS[door](product)
    assert [
        first.requires_grad
        for first, _ in (torch.no_grad()(compiled)(x, y), compiled(x, y), compiled(x, y.detach()))
    ] == [False, True, False]


@pytest.mark.slow
@doors
def test_a_second_derivative(door):
    x, y = make_tangents(3)
    weights = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    firsts = [
        torch.autograd.grad(fn(x, y)[0], y, weights, create_graph=True)[0]
        for fn in (TANGENTS_DOORS[door](product), product)
    ]
    torch.testing.assert_close(*firsts)
    torch.testing.assert_close(*(torch.autograd.grad(first.sum(), weights) for first in firsts))


# ---- autograd functions whose gradients are not linear in those that arrive ----------------------------------


# Brings a loss in on the side.
with_loss = autograd_function(
    lambda ctx, x, loss: saving(ctx, loss, x.clone()),
    lambda ctx, gradient: (gradient, torch.full_like(ctx.saved_tensors[0], 0.5)),
)


exponential = autograd_function(
    lambda ctx, x: (x * 1, x * 2), lambda ctx, first, second: first.exp() + second.exp() * 3
)

# Functions, and how many results each has.
FUNCTIONS = {
    "one": (lambda x, w: with_loss(x, (w * w).sum()), 1),
    "two": (lambda x, w: (with_loss(x * 2, (w * w).sum()), w + 1), 2),
    "three": (lambda x, w: (with_loss(x * 2, (w * w).sum()), x + w, torch.stack([w * 3, x])), 3),
    # Gives something for a gradient of zeros.
    "exponential": (lambda x, w: (*exponential(x), w + x), 3),
}


def plain():
    return torch.rand(3, requires_grad=True), torch.rand(3, requires_grad=True)


def wrapped():
    return tuple(TwoTensor(torch.rand(3), torch.rand(3)).requires_grad_() for _ in range(2))


@pytest.mark.sweep(24)
@pytest.mark.parametrize(
    ("compile", "make_tangents"), [(by_desugar, plain), (by_desugar, wrapped), (by_torch, plain)]
)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_whatever_gradients_arrive(name, compile, make_tangents):
    fn, count = FUNCTIONS[name]
    compiled = compile(fn)
    for missing in itertools.product((True, False), repeat=count):
        judge(fn, make_tangents, compiled, missing=[n for n in range(count) if missing[n]])


def test_with_random_numbers_it_is_refused():
    drop = by_desugar(lambda x, w: FUNCTIONS["two"][0](torch.dropout(x, 0.5, True), w))
    backward(drop(*plain()))
    with pytest.raises(DesugarError, match="run the function again"):
        backward(drop(*plain()), missing=[1])
