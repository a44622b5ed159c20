"""The variants of the backward: which there are, when they are compiled, and when the function runs again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from subclasses import TensorSubclass, inner
from subclasses.ragged import JaggedTensor, PaddedTensor
from tests.desugar.classes import Labeled, Nested, Pair, Tripled, TwoTensor, make, plain_parts
from tests.desugar.judge import BACKEND_DOORS, WAYS, assert_same_values, by_pass, judge, random_like


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
    assert len(variants.sources) == 3
    assert compiled.programs[0].source.endswith(variants.sources[-1])


def test_with_symbols_the_whole_backward_is_compiled_at_once():
    """What the compiler assumes of sizes belongs to the signature."""
    backend, graphs = counting()
    compiled = by_pass(three, backend=backend, dynamic=True)
    compiled(*two())
    assert len(graphs) == 2 and compiled.programs[0].variants.table == {}


def test_the_member_for_all_gradients_becomes_the_backward_and_hands_on_what_it_does_not_take():
    def gradients(function, pick, **options):
        x, y = (torch.arange(1.0, 4.0).requires_grad_() for _ in "xy")
        results, given = function(x, y), [torch.full((3,), 2.0)] * len(pick)
        return torch.autograd.grad([results[n] for n in pick], [x, y], given, allow_unused=True, **options)

    fn = lambda x, y: (x * y, (x * x).sin())  # noqa: E731
    compiled = by_pass(fn)
    for pick, options in [([0, 1], {}), ([0], {}), ([1], {}), ([0, 1], {"create_graph": True}), ([0, 1], {})]:
        assert_same_values(gradients(compiled, pick, **options), gradients(fn, pick, **options))
    (program,) = compiled.programs
    assert program.run.__globals__["Backward"].backward is program.variants.table[True, True]
    assert set(program.variants.table) == {(True, True), (True, False), (False, True)}


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


@pytest.mark.sweep(7)
@pytest.mark.parametrize("name", ["a sum", "a view and a sum", "inductor"])
@pytest.mark.parametrize("door", BACKEND_DOORS)
@pytest.mark.parametrize("cls", [torch.Tensor, TwoTensor, Pair, Labeled, Nested])
def test_each_gradient_has_memory_of_its_own(cls, door, name):
    """Written to in place afterwards, as a clipped one is; autograd copies what it knows to be shared."""
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
@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("cls", [Tensor, Pair])
def test_batches_of_gradients(cls, backend, is_known):
    """`is_grads_batched=True` and vmap over a backward; compiled code finds no memory in their gradients."""
    fn, x = lambda x: x.sin() * x, make(cls, 3, grad=True)
    compiled = by_pass(fn, backend=backend)
    if is_known:
        compiled(x).backward(make(cls, 3))
    for name in BATCHES if cls is Tensor else ["old vmap"]:  # vmap knows no subclass's inside
        assert_same_values([BATCHES[name](compiled(x), x)], [BATCHES[name](fn(x), x)])


def test_an_error_of_compiled_code_is_not_taken_for_a_batch_of_gradients():
    def fail(*args):
        raise RuntimeError("of the backend's own")

    compiled = by_pass(torch.sin, backend=lambda graph, _: fail if "tangents" in str(graph.graph) else graph)
    out = compiled(torch.ones(3, requires_grad=True))
    with pytest.raises(RuntimeError, match="of the backend's own"):
        out.sum().backward()


def of_a_ragged_value(cls):
    """A function, and arguments: the offsets, which every gradient of a class holds, are no gradient."""
    rows = [torch.randn(n, 4) for n in (3, 0, 2)]
    return (
        lambda x, w: (x * w, w.sum(), (x * 2) * w),
        lambda: (cls.from_tensors(rows).requires_grad_(), torch.ones(4, requires_grad=True)),
    )


MISSING = {
    "jagged": (*of_a_ragged_value(JaggedTensor), ((0, 2), (0,), (1, 2), ())),
    "padded": (*of_a_ragged_value(PaddedTensor), ((0, 2), (0,), (1, 2), ())),
    # The other inner tensor gets zeros, as in eager mode.
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


class Twice(TensorSubclass, fallback="materialize"):
    held: Tensor = inner()

    def materialize(self):
        return self.held * 2


@pytest.mark.parametrize("door", WAYS)
def test_a_gradient_with_a_conjugate_bit(door):
    """What uses a result of a class as a whole gives plain gradients, which formulas of complex numbers conjugate."""
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
