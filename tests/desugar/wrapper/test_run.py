"""The generated wrappers: gradients, the steps that their text omits, and results as they are built."""

import contextlib
import gc
import itertools
import weakref

import expecttest
import pytest
import torch
from torch import Tensor

import desugar
from desugar import DesugarError
from desugar.codegen.runtime import restride
from desugar.dynamo.backend import dynamo_backend
from desugar.ir.fx_utils import output_nodes
from subclasses import DispatchError
from tests.desugar.classes import (
    DECLARED,
    EVERY,
    HAND_WRITTEN,
    Beside,
    Halves,
    Pair,
    Tagged,
    TwoTensor,
    make,
    plain_parts,
)
from tests.desugar.judge import as_cotangents, assert_same_values, backward, by_pass, facts, random_like

declared = pytest.mark.parametrize("cls", DECLARED)

# ---- the text ------------------------------------------------------------------------------------------------


def text_of(fn, *args):
    compiled = by_pass(fn)
    backward(compiled(*args))
    (program,) = compiled.programs
    return program.source


CHECKS = "isinstance __tensor_flatten__ __tensor_unflatten__ tree_ unflatten hasattr getattr".split()


@pytest.mark.sweep(2)
@declared
@pytest.mark.parametrize("grad", [False, True])
def test_what_is_proved_is_not_checked_again(cls, grad):
    text = text_of(lambda x, y: x.sin() * y.sin(), *(make(cls, 2, 6, grad=grad) for _ in "xy"))
    assert not [word for word in (*CHECKS, "for ", "while ", "{") if word in text]
    assert text.count("make_wrapper_subclass(") == text.count('_dict["_layout"]')


@pytest.mark.parametrize("cls", HAND_WRITTEN)
def test_by_hand_the_metadata_is_compared_by_value(cls):
    text = text_of(lambda x: x.sin(), make(cls, 2, 6, grad=True))
    assert "isinstance" not in text and "tree_" not in text and "for " not in text
    constant = cls in (TwoTensor, Halves)  # their methods return constants, and store inner tensors only
    assert ("__tensor_flatten__" in text) is not constant


def test_behind_dynamo_nothing_is_checked():
    texts = []

    def backend(gm, inputs):
        compiled = dynamo_backend(gm, inputs, options={"backend": "eager"})
        texts.append(compiled.program.source)
        return compiled

    torch.compile(lambda x, y: x * y, backend=backend)(make(Pair, 2), torch.ones(2))
    (text,) = texts
    assert not any(word in text for word in ("MISS", "same_tensors", "if "))


@declared
def test_plain_arguments_cost_nothing_but_the_check(cls):
    text = text_of(lambda x, a, b, c: x * (a + b + c), make(cls, 2, 6), *(torch.ones(6) for _ in "abc"))
    assert sum("a1" in line for line in text.splitlines()) == 2  # a parameter, handed over


class TestSamples(expecttest.TestCase):
    """Two texts in full; EXPECTTEST_ACCEPT=1 brings them up to date."""

    maxDiff = None

    def test_inference(self):
        self.assertExpectedInline(
            text_of(lambda x, w: (x * w, w), make(Pair, 2, 3), torch.ones(3)),
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
        self.assertExpectedInline(
            text_of(lambda x, w: x * w, make(Pair, 2, 3, grad=True), torch.ones(3)),
            """\
class Backward(Function):
    @staticmethod
    def forward(ctx, items, tensor_args, *differentiable):
        x0, x1 = tensor_args
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
    if (
        is_grad_enabled()
        or type(tangent0) is not Pair_Cotangent and type(tangent0) is not Pair
        or tangent0._layout is not layout and tangent0._layout is not layout_1
    ):
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


def assert_same(fn, run, *args):
    """Compares the tensors that `run` makes with a compiled function and with the function itself."""
    found = []
    for function in (by_pass(fn), fn):
        torch.manual_seed(2)
        found.append(list(run(function, *args)))
    assert_same_values(*found)


def of_subsets(fn):
    args = make(TwoTensor, 3, grad=True), torch.ones(3, requires_grad=True)
    for outs, ins in (([0], [0]), ([0], [1]), ([1], [1]), ([0, 2], [0, 1]), ([2], [0]), ([1, 2], [0, 1])):
        results = fn(*args)
        outputs = [results[n] for n in outs]
        yield from torch.autograd.grad(outputs, [args[n] for n in ins], [torch.ones_like(o) for o in outputs])


def of_an_argument_that_is_gone(fn, cls, twice):
    """Only the result is saved, as in eager mode; nobody holds `x * 2`."""
    x = make(cls, 2, 6, grad=True)
    fn(make(cls, 2, 6, grad=True))
    out = fn(x * 2)
    gradient = as_cotangents(out.detach() * 3) if twice else torch.ones(2, 6)
    return torch.autograd.grad(out, x, gradient, create_graph=twice)


def of_third_order(fn, cls):
    x = make(cls, 3, 6, grad=True)
    value, seeds = fn(x), torch.Generator().manual_seed(3)
    for _ in range(3):
        (value,) = torch.autograd.grad(value, x, as_cotangents(random_like(value, seeds)), create_graph=True)
    return [value.detach()]


def of_two_views(fn, cls):
    x, generator = make(cls, 3, 6, grad=True), torch.Generator().manual_seed(3)
    first, other = fn(x)
    seeds = [random_like(y, generator) for y in (first, other)]
    (g,) = torch.autograd.grad([first * first, other], x, seeds, create_graph=True)
    return torch.autograd.grad(g, x, g.detach())


views_of_one_intermediate = lambda x: (lambda y: (y.view(6, 3), y.view(2, 9)))(x * x * x)  # noqa: E731


FIRST = {
    **{
        f"of another kind where the argument is gone, {cls.__name__}, twice={twice}": (
            torch.tanh,
            *(of_an_argument_that_is_gone, cls, twice),
        )
        for cls in (TwoTensor, Beside)
        for twice in (False, True)
    },
    "of some results and arguments": (lambda x, w: (x * w, w * w, x + 1), of_subsets),
}


@pytest.mark.parametrize("name", FIRST)
def test_gradients(name):
    assert_same(*FIRST[name])


@pytest.mark.sweep(28)
@pytest.mark.parametrize("cls", EVERY)
@pytest.mark.parametrize(
    ("fn", "run"),
    [(lambda x: (x * x).sin() * x, of_third_order), (views_of_one_intermediate, of_two_views)],
    ids=["third", "second, of views of one intermediate"],
)
def test_higher_derivatives(fn, run, cls):
    # A second double backward of a program calls PyTorch's formulas instead of rules above autograd.
    refused = pytest.raises(DispatchError, match="PyTorch's formula for an op calls it")
    with refused if cls is Beside and run is of_third_order else contextlib.nullcontext():
        assert_same(fn, run, cls)


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

    def seen():
        return facts(grad), [(id(p), p.tolist(), p._version) for p in plain_parts(grad)]

    before = seen()
    by_pass(lambda x: x.sin())(x).backward(grad)
    assert seen() == before
    torch.testing.assert_close(x.grad.a, torch.cos(x.a) * grad.a)


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Error detected in")
@pytest.mark.parametrize("check_nan", [False, True])
def test_anomaly_mode(check_nan):
    compiled = by_pass(lambda x: (x - x.detach()).sqrt())
    raises = pytest.raises(RuntimeError, match="nan") if check_nan else contextlib.nullcontext()
    with torch.autograd.detect_anomaly(check_nan=check_nan):
        for _ in range(2):
            out = compiled(make(Pair, 3, grad=True))
            with raises:
                out.backward(torch.ones_like(out) * 0)


def test_a_tensor_is_packed_once():
    packed, x, w = [], make(TwoTensor, 3, grad=True), torch.ones(3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        by_pass(lambda x, w: (x * w).sin())(x, w)
    assert len(packed) == len({id(t) for t in packed})


# ---- gradients of other kinds --------------------------------------------------------------------------------


def test_a_gradient_with_other_metadata():
    x = make(Tagged, 3, grad=True)
    out, grad = by_pass(lambda x: x * 2)(x), Tagged(torch.ones(3), torch.ones(3), "other")
    with contextlib.suppress(DesugarError):
        assert_same_values(torch.autograd.grad(out, x, grad), torch.autograd.grad(x * 2, x, grad))


HIGHER = {
    "a product": lambda x, w: (x * w).sin() * x,
    "an intermediate written": lambda x, w: (x.sin()).mul_(w).add_(x).exp(),
    "part of an intermediate written": lambda x, w: (lambda y: (y[:2].mul_(w[1:]), y * y)[1])(x.sin()),
    "reductions": lambda x, w: (x * w).logsumexp(0) * x.norm(),
    "only the result saved": lambda x, w: torch.tanh(x * w),
    "several results": lambda x, w: (x * w, (x + w).sin()),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", HIGHER)
def test_gradients_of_gradients_are_those_of_differences(name):
    args = [torch.rand(3, dtype=torch.float64).add_(0.5).requires_grad_() for _ in range(2)]
    compiled = by_pass(HIGHER[name])
    assert torch.autograd.gradcheck(compiled, args)
    assert torch.autograd.gradgradcheck(compiled, args)


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (lambda x, y: x.add_(x * 3).cos(), "write to its arguments again"),
        (lambda x, y: (y.add_(1), x * x.sin())[1], "write to its arguments again"),
        (lambda x, y: torch.dropout(x * x, 0.5, True), "random"),
    ],
)
@pytest.mark.parametrize("cls", [Tensor, Pair])
def test_a_derivative_that_would_write_or_draw_again_is_refused(cls, fn, said):
    x = make(cls, 3, grad=True)
    out = by_pass(fn)(x * 1, make(cls, 3))
    grad = torch.ones_like(out)
    (first,) = torch.autograd.grad(out, x, grad, retain_graph=True)
    assert isinstance(first, cls)
    with pytest.raises(DesugarError, match=said):
        torch.autograd.grad(out, x, grad, create_graph=True)[0].backward(grad)


# ---- memory --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_saved_values_go_when_the_graph_does():
    x, w = make(TwoTensor, 3, grad=True), torch.ones(3, requires_grad=True)
    compiled = by_pass(lambda x, w: (x * w).sum())
    compiled(x * 2, w)
    y = x * 2
    ref, out = weakref.ref(y.a), compiled(y, w)
    del y
    gc.collect()
    assert ref() is not None, "the backward needs it"
    out.backward(TwoTensor(torch.tensor(1.0), torch.tensor(1.0)))
    gc.collect()
    assert ref() is None


# ---- results as they are built: sizes, strides and order ------------------------------------------------------------

STRIDES = [((2, 3), (3, 1)), ((2, 3), (1, 2)), ((1, 3), (7, 1)), ((0, 3), (3, 1)), ((2, 0), (1, 1)), ((), ())]


@pytest.mark.parametrize(("size", "stride"), STRIDES)
def test_sizes_and_strides_of_results(size, stride):
    x = Pair(torch.empty_strided(size, stride), torch.empty_strided(size, stride))
    y = desugar.compile(lambda x: x.detach(), backend="eager")(x)
    assert (y.size(), y.stride()) == (size, stride)
    assert y.is_contiguous() == y.a.is_contiguous()


def test_the_order_of_results_is_the_functions_own():
    compiled = desugar.compile(lambda x: {"b": x * 2, "a": (x, x.sin())}, backend="eager")
    for _ in range(2):
        y = compiled(x := make(Pair, 3))
        assert list(y) == ["b", "a"] and y["a"][0] is x and isinstance(y["a"][1], Tensor)
    assert len(output_nodes(compiled.programs[0].forward)) == 4


# ---- memory order --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensor", "order"),
    [
        (torch.tensor(1.0), ()),
        *itertools.product(
            [torch.randn(2, 3, 4), torch.randn(4, 3, 2).permute(2, 1, 0), torch.randn(2, 6, 4)[:, ::2]],
            itertools.permutations(range(3)),
        ),
    ],
)
def test_restride(tensor, order):
    out = restride(tensor, order)
    assert torch.equal(out, tensor) and out.permute(order).is_contiguous()
    assert (out is tensor) == tensor.permute(order).is_contiguous(), "copied only where it is not"
