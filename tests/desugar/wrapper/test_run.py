"""The generated wrappers: what they do with gradients, and what their text leaves out."""

from __future__ import annotations

import contextlib
import gc
import weakref

import expecttest
import pytest
import torch
from torch import Tensor

import desugar
from desugar import DesugarError
from tests.desugar.classes import (
    DECLARED,
    EVERY,
    HAND_WRITTEN,
    Beside,
    Halves,
    Labeled,
    Pair,
    Tagged,
    TwoTensor,
    make,
    plain_parts,
)
from tests.desugar.judge import as_cotangents, assert_same_values, by_pass, facts, judge, random_like

declared = pytest.mark.parametrize("cls", DECLARED)

# ---- the text ------------------------------------------------------------------------------------------------


def text_of(fn, *args):
    compiled = by_pass(fn)
    result = compiled(*args)
    for leaf in result if isinstance(result, tuple) else (result,):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf.backward(torch.ones_like(leaf), retain_graph=True)
    (program,) = compiled.programs
    return program.source


@pytest.mark.sweep(2)
@declared
@pytest.mark.parametrize("grad", [False, True])
def test_what_is_proved_is_not_checked_again(cls, grad):
    x, y = (make(cls, 2, 6, grad=grad) for _ in "xy")
    text = text_of(lambda x, y: x.sin() * y.sin(), x, y)
    for absent in (
        "isinstance",
        "__tensor_flatten__",
        "__tensor_unflatten__",
        "tree_",
        "unflatten",
        "hasattr",
        "getattr",
    ):
        assert absent not in text, absent
    assert "for " not in text and "while " not in text and "{" not in text
    assert text.count("make_wrapper_subclass(") == text.count('_dict["_layout"]')


@pytest.mark.parametrize("cls", HAND_WRITTEN)
def test_by_hand_the_metadata_is_compared_by_value(cls):
    text = text_of(lambda x: x.sin(), make(cls, 2, 6, grad=True))
    assert "isinstance" not in text and "tree_" not in text and "for " not in text
    constant = cls in (TwoTensor, Halves)  # their methods return constants, and store inner tensors only
    assert ("__tensor_flatten__" in text) is not constant


def test_behind_dynamo_nothing_is_checked():
    seen = []

    def keep(graph, inputs):
        seen.append(graph)
        return graph.forward

    from desugar.dynamo.backend import dynamo_backend

    def backend(gm, inputs):
        compiled = dynamo_backend(gm, inputs, options={"backend": keep})
        texts.append(compiled.program.source)
        return compiled

    texts: list[str] = []
    torch.compile(lambda x, y: x * y, backend=backend)(make(Pair, 2), torch.ones(2))
    (text,) = texts
    assert "MISS" not in text and "same_tensors" not in text and "if " not in text
    assert seen


@declared
def test_plain_arguments_cost_nothing_but_the_check(cls):
    text = text_of(lambda x, a, b, c: x * (a + b + c), make(cls, 2, 6), *(torch.ones(6) for _ in "abc"))
    assert sum("a1" in line for line in text.splitlines()) == 2  # a parameter, handed over


class TestSamples(expecttest.TestCase):
    """Two texts in full; EXPECTTEST_ACCEPT=1 brings them up to date."""

    maxDiff = None

    def test_inference(self):
        text = text_of(lambda x, w: (x * w, w), make(Pair, 2, 3), torch.ones(3))
        self.assertExpectedInline(
            text,
            """\
def run(a0, a1):
    a0_a = a0.a
    a0_b = a0.b
    r0, r1 = compiled_graph([a0_a, a0_b, a1])
    out0 = make_wrapper_subclass(Pair, (2, 3), None, None, None, float32, strided, cpu)
    out0_dict = out0.__dict__
    out0_dict["a"] = r0
    out0_dict["b"] = r1
    out0_dict["_layout"] = layout
    return (out0,)
""",
        )

    def test_training(self):
        text = text_of(lambda x, w: x * w, make(Pair, 2, 3, grad=True), torch.ones(3))
        self.assertExpectedInline(
            text,
            """\
class Backward(Function):
    @staticmethod
    def forward(ctx, items, kept, *differentiable):
        x0, x1 = kept
        i0, i1, i2 = items
        r0, r1 = compiled_graph(items)
        out0 = make_wrapper_subclass(Pair, (2, 3), None, None, None, float32, strided, cpu)
        out0_dict = out0.__dict__
        out0_dict["a"] = r0
        out0_dict["b"] = r1
        out0_dict["_layout"] = layout
        ctx.save_for_backward(x1)
        ctx.alive = (ref(x0),)
        ctx.set_materialize_grads(False)
        return out0

    @staticmethod
    def backward(ctx, tangent0):  # until backward_1 takes its place
        return backwards[tangent0 is not None,](ctx, tangent0)


apply = super(Function, Backward).apply


def run(a0, a1):
    a0_a = a0.a
    a0_b = a0.b
    out0_1 = apply([a0_a, a0_b, a1], (a0, a1), a0)
    return (out0_1,)


def backward_1(ctx, tangent0):
    if type(tangent0) is Pair:
        tangent0 = as_gradient(Pair, tangent0)
    if is_grad_enabled() or type(tangent0) is not Pair_Cotangent or tangent0._layout is not layout:
        return another_backward(ctx, (tangent0,))
    g0 = tangent0.a.contiguous()
    g1 = tangent0.b.contiguous()
    saved = ctx.saved_tensors
    grad0, grad1 = compiled_graph([saved[0], g0, g1])
    d0 = make_wrapper_subclass(Pair_Cotangent, (2, 3), None, None, None, float32, strided, cpu)
    d0_dict = d0.__dict__
    d0_dict["a"] = grad0
    d0_dict["b"] = grad1
    d0_dict["_layout"] = layout
    return None, None, d0
""",
        )


# ---- gradients -----------------------------------------------------------------------------------------------


@pytest.mark.sweep(2)
@pytest.mark.parametrize("cls", EVERY)
def test_an_unused_input_has_no_gradient(cls):
    compiled = judge(
        lambda x, y, z: x * 2,
        lambda: (make(cls, 2, 6, grad=True), make(cls, 2, 6, grad=True), torch.randn(3, requires_grad=True)),
    )
    x, y, z = make(cls, 2, 6, grad=True), make(cls, 2, 6, grad=True), torch.randn(3, requires_grad=True)
    out = compiled(x, y, z)
    out.backward(torch.ones_like(out))
    assert x.grad is not None and y.grad is None and z.grad is None


def test_subsets():
    f = lambda x, w: (x * w, w * w, x + 1)  # noqa: E731
    x, w = make(TwoTensor, 3, grad=True), torch.ones(3, requires_grad=True)
    compiled = by_pass(f)
    for outs, ins in (([0], [0]), ([0], [1]), ([1], [1]), ([0, 2], [0, 1]), ([2], [0]), ([1, 2], [0, 1])):
        found = []
        for fn in (compiled, f):
            results, args = fn(x, w), (x, w)
            outputs = [results[n] for n in outs]
            found.append(
                torch.autograd.grad(outputs, [args[n] for n in ins], [torch.ones_like(o) for o in outputs])
            )
        assert_same_values(*found)


def test_missing_subclass_tangent_keeps_the_type():
    x, w = make(TwoTensor, 3, grad=True), torch.ones(3, requires_grad=True)
    _, plain = by_pass(lambda x, w: (x * w, w * w))(x, w)
    (grad,) = torch.autograd.grad(plain, w, torch.ones(3))
    assert type(grad) is Tensor


def test_retain_graph_and_a_freed_graph():
    x = make(TwoTensor, 3, grad=True)
    out = by_pass(lambda x: x * x)(x)
    grad = torch.ones_like(out)
    out.backward(grad, retain_graph=True)
    out.backward(grad)
    torch.testing.assert_close(x.grad.a, 4 * x.a)
    with pytest.raises(RuntimeError, match="second time"):
        out.backward(grad)


def test_gradients_accumulate():
    x, compiled = make(Pair, 3, grad=True), by_pass(lambda x: x * x)
    for _ in range(3):
        out = compiled(x)
        out.backward(torch.ones_like(out))
    torch.testing.assert_close(x.grad.b, 6 * x.b)


@pytest.mark.parametrize(
    "strides",
    [
        lambda t: t,
        lambda t: t.t().contiguous().t(),
        lambda t: t[:1].expand(2, 3),
        lambda t: torch.stack([t, t], -1)[..., 0],
    ],
    ids=["contiguous", "transposed", "expanded", "strided"],
)
def test_the_callers_gradient_is_never_changed(strides):
    x = make(TwoTensor, 2, 3, grad=True)
    grad = TwoTensor(strides(torch.randn(2, 3)), strides(torch.randn(2, 3)))
    before = facts(grad), [p.clone() for p in plain_parts(grad)], [id(p) for p in plain_parts(grad)]
    by_pass(lambda x: x.sin())(x).backward(grad)
    assert facts(grad) == before[0] and [id(p) for p in plain_parts(grad)] == before[2]
    for got, want in zip(plain_parts(grad), before[1], strict=True):
        assert torch.equal(got, want) and got._version == 0
    torch.testing.assert_close(x.grad.a, torch.cos(x.a) * grad.a)


@pytest.mark.parametrize("around", [torch.enable_grad, torch.no_grad])
def test_hooks_on_arguments_and_results(around):
    seen = []
    x = make(TwoTensor, 3, grad=True)
    y = x * 2
    y.register_hook(lambda g: seen.append(("argument", type(g))) or g * 3)
    out = by_pass(torch.sin)(y)
    out.register_hook(lambda g: seen.append(("result", type(g))))
    out.backward(torch.ones_like(out))
    assert seen == [("result", TwoTensor), ("argument", TwoTensor)]
    torch.testing.assert_close(x.grad.a, 6 * torch.cos(2 * x.a))
    with around():
        assert out.grad_fn is not None


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Error detected in")
@pytest.mark.parametrize("check_nan", [False, True])
def test_anomaly_mode(check_nan):
    compiled = by_pass(lambda x: (x - x.detach()).sqrt())
    with torch.autograd.detect_anomaly(check_nan=check_nan):
        for _ in range(2):
            x = make(Pair, 3, grad=True)
            out = compiled(x)
            context = pytest.raises(RuntimeError, match="nan") if check_nan else contextlib.nullcontext()
            with context:
                out.backward(torch.ones_like(out) * 0)


@pytest.mark.parametrize("warm", [True, False])
def test_saved_tensor_hooks_run_once_each(warm):
    packed, unpacked = [], []
    x, w = make(TwoTensor, 3, grad=True), torch.ones(3, requires_grad=True)
    compiled = by_pass(lambda x, w: (x * w).sin())
    if warm:
        compiled(x, w)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: packed.append(t) or t, lambda t: unpacked.append(t) or t
    ):
        out = compiled(x, w)
    assert unpacked == [] and len(packed) == len({id(t) for t in packed})
    out.backward(torch.ones_like(out))
    assert len(unpacked) == len(packed)


def test_compiled_autograd():
    x = make(TwoTensor, 3, grad=True)
    out = by_pass(lambda x: x * x)(x)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        out.backward(torch.ones_like(out))
    torch.testing.assert_close(x.grad.a, 2 * x.a.detach())


# ---- versions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["wrapper", "plain"])
def test_a_saved_tensor_that_changed_is_noticed(which):
    x, w = make(TwoTensor, 3, grad=True), torch.ones(3, requires_grad=True)
    out = by_pass(torch.mul)(x, w)
    with torch.no_grad():
        (x if which == "wrapper" else w).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(torch.ones_like(out))


# ---- gradients of other kinds --------------------------------------------------------------------------------


def test_a_plain_gradient_for_a_subclass():
    fn, x = (lambda x: x * x), make(TwoTensor, 3, grad=True)
    found = []
    for f in (by_pass(fn), fn):
        found.append(torch.autograd.grad(f(x), x, torch.ones(3)))
    assert_same_values(*found)


def test_a_subclass_gradient_for_a_plain_result():
    fn, x = (lambda x: x * x), torch.ones(3, requires_grad=True)
    found = [torch.autograd.grad(f(x), x, make(TwoTensor, 3).fill_(2)) for f in (by_pass(fn), fn)]
    assert_same_values(*found)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("cls", [TwoTensor, Beside])
def test_a_gradient_of_another_kind_where_the_argument_is_gone(cls, twice):
    """Only the result is saved, as in eager mode; nobody holds `x * 2`."""
    x, found = make(cls, 2, 6, grad=True), []
    for f in (by_pass(torch.tanh), torch.tanh):
        f(make(cls, 2, 6, grad=True))
        out = f(x * 2)
        grad = as_cotangents(out.detach() * 3) if twice else torch.ones(2, 6)
        found.append(torch.autograd.grad(out, x, grad, create_graph=twice))
    assert_same_values(*found)


def test_a_gradient_with_other_metadata():
    x = make(Tagged, 3, grad=True)
    out, grad = by_pass(lambda x: x * 2)(x), Tagged(torch.ones(3), torch.ones(3), "other")
    try:
        (got,) = torch.autograd.grad(out, x, grad)
    except DesugarError:
        return
    assert_same_values([got], torch.autograd.grad(x * 2, x, grad))


def test_double_backward():
    def second(fn, x, w):
        out = fn(x, w)
        first = torch.autograd.grad(out, [x, w], torch.ones_like(out), create_graph=True)
        total = first[0] * w + first[1]
        return torch.autograd.grad(total, [x, w], torch.ones_like(total))

    x, w = make(TwoTensor, 3, grad=True), torch.rand(3, requires_grad=True)
    fn = lambda x, w: (x * w).sin() * x  # noqa: E731
    assert_same_values(second(by_pass(fn), x, w), second(fn, x, w))


HIGHER = {
    "a product": lambda x, w: (x * w).sin() * x,
    "an intermediate written": lambda x, w: (x.sin()).mul_(w).add_(x).exp(),
    "part of an intermediate written": lambda x, w: _part_written(x.sin(), w),
    "reductions": lambda x, w: (x * w).logsumexp(0) * x.norm(),
    "only the result saved": lambda x, w: torch.tanh(x * w),
    "several results": lambda x, w: (x * w, (x + w).sin()),
}


def _part_written(y, w):
    y[:2].mul_(w[1:])
    return y * y


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", HIGHER)
def test_gradients_of_gradients_are_those_of_differences(name):
    args = [torch.rand(3, dtype=torch.float64).add_(0.5).requires_grad_() for _ in range(2)]
    compiled = by_pass(HIGHER[name])
    assert torch.autograd.gradcheck(compiled, args)
    assert torch.autograd.gradgradcheck(compiled, args)


@pytest.mark.sweep(7)
@pytest.mark.parametrize("cls", EVERY)
def test_third_derivatives(cls):
    def third(fn):
        x = make(cls, 3, 6, grad=True)
        value, seeds = fn(x), torch.Generator().manual_seed(3)
        for _ in range(3):
            (value,) = torch.autograd.grad(value, x, random_like(value, seeds), create_graph=True)
        return [value.detach()]

    def fn(x):
        return (x * x).sin() * x

    results = []
    for function in (by_pass(fn), fn):
        torch.manual_seed(2)
        results.append(third(function))
    assert_same_values(*results)


@pytest.mark.sweep(8)
@pytest.mark.parametrize("cls", EVERY)
def test_second_derivatives_of_views_of_one_intermediate(cls):
    def fn(x):
        y = x * x * x
        return y.view(6, 3), y.view(2, 9)

    def second(function):
        torch.manual_seed(2)
        x, seeds = make(cls, 3, 6, grad=True), torch.Generator().manual_seed(3)
        first, other = function(x)
        seeds = [random_like(y, seeds) for y in (first, other)]
        (g,) = torch.autograd.grad([first * first, other], x, seeds, create_graph=True)
        return list(torch.autograd.grad(g, x, g.detach()))

    assert_same_values(second(by_pass(fn)), second(fn))


def test_an_argument_that_was_written_is_differentiated_once():
    def outer(function):
        x = torch.rand(3, dtype=torch.float64, requires_grad=True)
        out = function(x * 1)
        return x, out

    def fn(y):
        return y.add_(y * 3).cos()

    x, out = outer(by_pass(fn))
    (first,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
    assert first is not None
    with pytest.raises(DesugarError, match="write to its arguments again"):
        torch.autograd.grad(out.sum(), x, create_graph=True)[0].sum().backward()


def test_double_backward_with_randomness_is_refused():
    x = make(Pair, 3, grad=True)
    out = by_pass(lambda x: torch.dropout(x * x, 0.5, True))(x)
    with pytest.raises(DesugarError, match="random"):
        torch.autograd.grad(out, x, torch.ones_like(out), create_graph=True)


# ---- memory --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_saved_values_go_when_the_graph_does():
    x, w = make(TwoTensor, 3, grad=True), torch.ones(3, requires_grad=True)
    compiled = by_pass(lambda x, w: (x * w).sum())
    compiled(x * 2, w)
    y = x * 2
    ref = weakref.ref(y.a)
    out = compiled(y, w)
    del y
    gc.collect()
    assert ref() is not None, "the backward needs it"
    out.backward(TwoTensor(torch.tensor(1.0), torch.tensor(1.0)))
    gc.collect()
    assert ref() is None


def test_optional_inner_tensors_and_dynamic_ints_of_gradients():
    judge(
        lambda x: x * 2,
        lambda: (Labeled(torch.randn(3), torch.randn(3), count=5, label="q").requires_grad_(),),
    )


def test_gradients_of_beside_are_beside():
    x = make(Beside, 2, 6, grad=True)
    out = desugar.compile(lambda x: x.sin(), backend="eager")(x)
    out.backward(torch.ones_like(out))
    want = x.detach().requires_grad_()
    want.sin().backward(torch.ones_like(want))
    assert type(x.grad) is type(want.grad)
