"""The variants of the backward: which there are, when they are compiled, and when the function runs again."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

import desugar
from subclasses import TensorSubclass, inner
from subclasses.ragged import JaggedTensor, PaddedTensor
from tests.desugar.classes import Labeled, Nested, Pair, Tripled, TwoTensor, make, plain_parts
from tests.desugar.judge import WAYS, assert_same_values, by_pass, judge, random_like


def three(x, y):
    return x.sin(), x * y, y.cos()


def counting():
    """A backend that counts the graphs it gets."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    return backend, graphs


TWOS = torch.full((3,), 2.0)


def test_members_are_compiled_when_they_are_met():
    backend, graphs = counting()
    compiled = desugar.compile(three, backend=backend)
    sizes = []
    for missing in ((), (0,), (0, 2), (0,), ()):
        judge(
            three,
            lambda: (make(Pair, 2, 3, grad=True), make(Pair, 2, 3, grad=True)),
            compiled,
            missing=missing,
        )
        sizes.append(len(graphs))
    assert sizes == [2, 3, 4, 4, 4]  # a forward, then one backward for each combination
    variants = compiled.programs[0].variants
    assert set(variants.table) == {(True,) * 3, (False, True, True), (False, True, False)}
    assert len(variants.sources) == 3
    assert compiled.programs[0].source.endswith(variants.sources[-1])


def test_with_symbols_the_whole_backward_is_compiled_at_once():
    """What the compiler assumes of sizes belongs to the signature."""
    backend, graphs = counting()
    compiled = desugar.compile(three, backend=backend, dynamic=True)
    compiled(make(Pair, 2, 3, grad=True), make(Pair, 2, 3, grad=True))
    assert len(graphs) == 2
    assert compiled.programs[0].variants.table == {}


def test_the_member_for_all_gradients_becomes_the_backward_and_hands_on_what_it_does_not_take():
    def fn(x, y):
        return x * y, (x * x).sin()

    compiled = desugar.compile(fn, backend="eager")

    def gradients(function, pick, **options):
        x, y = (torch.arange(1.0, 4.0).requires_grad_() for _ in "xy")
        outs = function(x, y)
        return torch.autograd.grad(
            [outs[n] for n in pick], [x, y], [TWOS] * len(pick), allow_unused=True, **options
        )

    for pick, options in [([0, 1], {}), ([0], {}), ([1], {}), ([0, 1], {"create_graph": True}), ([0, 1], {})]:
        assert_same_values(gradients(compiled, pick, **options), gradients(fn, pick, **options))
    (program,) = compiled.programs
    backward = program.run.__globals__["Backward"].backward
    assert backward is program.variants.table[True, True]
    assert set(program.variants.table) == {(True, True), (True, False), (False, True)}


def test_second_derivatives_compile_a_function_of_their_own():
    backend, graphs = counting()
    compiled, known = desugar.compile(lambda x: (x * x * x).sum(), backend=backend), []
    x = torch.tensor([2.0, 3.0], requires_grad=True)
    for _ in range(3):
        (g,) = torch.autograd.grad(compiled(x), x, create_graph=True)
        (h,) = torch.autograd.grad(g.sum(), x, create_graph=True)
        (k,) = torch.autograd.grad(h.sum(), x)
        torch.testing.assert_close((g, h, k), (3 * x**2, 6 * x, torch.full((2,), 6.0)))
        known.append(len(graphs))
    assert known == known[:1] * 3  # the second time round nothing is compiled


def test_threads_build_a_member_once():
    backend, graphs = counting()
    compiled = desugar.compile(three, backend=backend)

    def work(seed):
        x, y = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
        compiled(x, y)[1].sum().backward()
        return x.grad, y.grad

    with ThreadPoolExecutor(4) as pool:
        for gx, gy in pool.map(work, range(12)):
            torch.testing.assert_close(gx, torch.ones(3))
            torch.testing.assert_close(gy, torch.ones(3))
    assert len(graphs) in (2, 4, 6, 8)  # threads that begin at the same moment may compile for themselves


# ---- whose memory a gradient is ------------------------------------------------------------------------------


@pytest.mark.sweep(7)
@pytest.mark.parametrize("name", ["a sum", "a view and a sum", "inductor"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("cls", [torch.Tensor, TwoTensor, Pair, Labeled, Nested])
def test_each_gradient_has_memory_of_its_own(cls, way, name):
    """Written to in place afterwards, as a clipped one is; autograd copies what it knows to be shared."""

    def fn(x, y):
        return x + (y.view(6).view(2, 3) if name == "a view and a sum" else y)

    compiled = way(fn)
    if name == "inductor":
        compiled = desugar.compile(fn) if way is by_pass else torch.compile(fn, backend="desugar")
    x, y = make(cls, 2, 3, grad=True), make(cls, 2, 3, grad=True)
    out = compiled(x, y)
    tangent = random_like(out, torch.Generator().manual_seed(1))
    wanted = [part.clone() for part in plain_parts(tangent)]
    out.backward(tangent)
    for part in plain_parts(x.grad):
        part.zero_()
    assert all(map(torch.equal, plain_parts(tangent), wanted))
    assert all(map(torch.equal, plain_parts(y.grad), wanted))


def of_old_vmap(out, x):
    return torch.autograd.grad(out, x, torch.eye(3), is_grads_batched=True)[0]


def of_vmap(out, x):
    return torch.func.vmap(lambda g: torch.autograd.grad(out, x, g, retain_graph=True)[0])(torch.eye(3))


@pytest.mark.sweep(3)
@pytest.mark.parametrize("is_known", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("cls", [None, Pair])
def test_batches_of_gradients(cls, backend, is_known):
    """`is_grads_batched=True` and vmap over a backward; compiled code finds no memory in their gradients."""

    def fn(x):
        return x.sin() * x

    compiled = desugar.compile(fn, backend=backend)
    x = (torch.arange(1.0, 4.0) if cls is None else make(cls, 3)).requires_grad_()
    if is_known:
        compiled(x).backward(torch.ones(3) if cls is None else make(cls, 3))
    for differentiate in (of_old_vmap, of_vmap)[: 2 if cls is None else 1]:  # vmap knows no subclass's inside
        assert_same_values([differentiate(compiled(x), x)], [differentiate(fn(x), x)])


def test_an_error_of_compiled_code_is_not_taken_for_a_batch_of_gradients():
    def backend(graph, inputs):
        def run(*args):
            if "tangents" in str(graph.graph):
                raise RuntimeError("of the backend's own")
            return graph(*args)

        return run

    x = torch.ones(3, requires_grad=True)
    out = desugar.compile(lambda x: x.sin(), backend=backend)(x)
    with pytest.raises(RuntimeError, match="of the backend's own"):
        out.sum().backward()


def of_a_ragged_value(x, w):
    return x * w, w.sum(), (x * 2) * w


def of_inner_tensors(x, w):
    return x.unwrap("a").sin(), x.unwrap("b") * w, w.cos()


def ragged(cls):
    rows = [torch.randn(n, 4) for n in (3, 0, 2)]
    return cls.from_tensors(rows).requires_grad_(), torch.ones(4, requires_grad=True)


def pair():
    return make(Pair, 2, 3, grad=True), torch.ones(3, requires_grad=True)


MISSING = {
    # The offsets, which every gradient of a class holds, are no gradient.
    "jagged": (of_a_ragged_value, lambda: ragged(JaggedTensor), ((0, 2), (0,), (1, 2), ())),
    "padded": (of_a_ragged_value, lambda: ragged(PaddedTensor), ((0, 2), (0,), (1, 2), ())),
    # The other inner tensor gets zeros, as in eager mode.
    "one of two inner tensors": (of_inner_tensors, pair, ((0, 2), (1,), (0, 1), (0,), (1, 2), ())),
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


@pytest.mark.parametrize("way", WAYS)
def test_arguments_that_nobody_keeps(way):
    """Plain gradients are common for such a class, so the program keeps what it needs to run again."""

    def gradient(call):
        p = torch.full((3,), 0.5, requires_grad=True)
        return torch.autograd.grad(call(Tripled(p * 1)).exp().sum(), p)[0]

    def fn(x):
        return x * 2

    assert torch.equal(gradient(fn), gradient(WAYS[way](fn)))


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

    def gradients(call, read, wrap):
        p, q = torch.full((3,), 0.5, requires_grad=True), torch.arange(1.0, 4.0, requires_grad=True)
        return torch.autograd.grad(read(call(wrap(p), q)).sum(), (p, q))

    of_values, of_plain = READ[read]
    for call in (fn, desugar.compile(fn, backend="eager")):
        got = gradients(call, of_values, lambda p: Tripled(p * 1))
        torch.testing.assert_close(got, gradients(fn, of_plain, lambda p: 3 * p))


@pytest.mark.parametrize("door", WAYS)
def test_a_gradient_with_a_conjugate_bit(door):
    """What uses a result of a class as a whole gives plain gradients, which formulas of complex numbers conjugate."""

    class Twice(TensorSubclass, fallback="materialize"):
        held: Tensor = inner()

        def materialize(self):
            return self.held * 2

    held = torch.complex(torch.rand(3), torch.rand(3)).requires_grad_()
    weight = torch.complex(torch.rand(3), torch.rand(3))
    gradients = []
    for call in (lambda f: f, WAYS[door]):
        result = call(lambda t: Twice(t * t))(held)
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
