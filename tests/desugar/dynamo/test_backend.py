"""`torch.compile(backend="desugar")`, the installed entry point, and the programs that it makes for calls."""

from __future__ import annotations

import functools
import itertools
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import desugar
from desugar import DesugarError
from desugar._torch import compiled_call
from desugar.backends.choose import choose_backend
from desugar.dynamo.backend import MAX_PROGRAMS, Specialized, facts_of
from subclasses import TensorSubclass, inner
from subclasses.ragged import JaggedTensor, PaddedTensor
from tests.desugar.classes import EVERY, Labeled, Pair, TwoTensor, make
from tests.desugar.judge import assert_same_values, by_dynamo, by_pass, judge, strictly, warned
from tests.doors import by_stock, by_torch

aten = torch.ops.aten


# ---- the entry point -----------------------------------------------------------------------------------------


def test_the_entry_point_is_installed():
    (point,) = entry_points(group="torch_dynamo_backends", name="desugar")
    assert point.value == "desugar.dynamo.backend:dynamo_backend"
    assert "desugar" in torch._dynamo.list_backends()


@pytest.mark.slow  # a process of its own
def test_importing_the_package_is_enough(tmp_path):
    code = f"""
import importlib.metadata, sys
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
found = importlib.metadata.entry_points
importlib.metadata.entry_points = lambda **wanted: found(**wanted | {{"name": "none"}})
import torch, desugar
assert not importlib.metadata.entry_points(group="torch_dynamo_backends")
double = torch.compile(lambda x: x * 2, backend="desugar", options={{"backend": "eager"}}, fullgraph=True)
assert double(torch.ones(2)).tolist() == [2, 2]
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120, cwd=tmp_path)


@pytest.mark.sweep(14)
@pytest.mark.parametrize("cls", EVERY)
def test_no_graph_is_handed_on(cls, caplog):
    judge(
        lambda x, w: ((x * w).sin(), x.sum()),
        lambda: (make(cls, 2, 6, grad=True), torch.randn(6, requires_grad=True)),
        way=by_dynamo,
    )
    assert warned(caplog) == []


@pytest.mark.parametrize(("door", "is_timed"), [(by_pass, False), (by_dynamo, False), (by_stock, True)])
def test_guards_of_other_backends_alone_are_timed(door, is_timed):
    """PyTorch empties the processor's caches to time the guards."""
    door(lambda x: x * 3)(torch.ones(3))
    *_, metrics = torch._dynamo.utils.get_compilation_metrics()
    assert (metrics.guard_latency_us > 0) == is_timed


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"mode": "max-autotune-no-cudagraphs"}, marks=pytest.mark.slow),
        pytest.param({"options": {"epilogue_fusion": False}}, marks=pytest.mark.slow),
    ],
)
def test_with_inductor(options):
    fn = lambda x, w: (x * w).sin()  # noqa: E731
    judge(
        fn,
        lambda: (make(Pair, 2, 6, grad=True), torch.randn(6, requires_grad=True)),
        torch.compile(fn, backend="desugar", **options),
    )


# ---- behaviour of Dynamo -------------------------------------------------------------------------------------


def apart(grad=False):
    return make(TwoTensor, 3, grad=grad), make(TwoTensor, 3, grad=grad)


def crossed():
    a, b = torch.randn(3), torch.randn(3)
    return TwoTensor(a, b).requires_grad_(), TwoTensor(b, a).requires_grad_()


def shared():
    a, b = torch.zeros(3), torch.zeros(3)
    return TwoTensor(a, b), TwoTensor(a, b)


CALLS = {
    "graph breaks": (
        lambda x: (lambda y: (torch._dynamo.graph_break(), y.sin())[1])(x * 2),
        by_torch,
        [lambda: (make(TwoTensor, 3, grad=True),)] * 2,
    ),
    "recompiles": (
        lambda x, n: x * n,
        by_dynamo,
        [lambda n=n: (make(Pair, 3, grad=True), n) for n in (1, 2, 1)],
    ),
    "a dynamic int": (
        lambda x: x * 2,
        by_dynamo,
        [lambda: (Labeled(torch.randn(3), count=3).requires_grad_(),)],
    ),
    **{
        f"dynamic={dynamic}": (
            lambda x: (x * 2, x.sum()),
            functools.partial(by_dynamo, dynamic=dynamic),
            [lambda n=n: (make(TwoTensor, n, n + 2, grad=True),) for n in (4, 5, 6)],
        )
        for dynamic in (True, False, None)
    },
    "one argument twice": (torch.mul, by_dynamo, [lambda: (make(TwoTensor, 3, grad=True),) * 2]),
    "shared inner tensors": (torch.mul, by_dynamo, [crossed, lambda: apart(grad=True)]),
    # Stock is known to be wrong for these, so they are not left to it.
    "an inner tensor is written": (
        lambda x, y: (x.a.add_(1), x * 2)[1],
        by_dynamo,
        [shared, apart, shared],
    ),
    "a wrapper that shares is written": (
        lambda x, y: (x.add_(1), y * 2)[1],
        by_dynamo,
        [shared, apart, shared],
    ),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", CALLS)
def test_calls(name):
    fn, way, calls = CALLS[name]
    compiled = way(fn)
    for make_args in calls:
        judge(fn, make_args, compiled)


# ---- graphs that AOTAutograd compiles, and graphs that it does not -------------------------------------------


class Plain(Tensor):
    """A subclass of Tensor without inner tensors."""


@pytest.mark.sweep(16)
@pytest.mark.parametrize("door", [by_pass, by_dynamo, desugar.compile])
@pytest.mark.parametrize("fn", [lambda x: x * 2, lambda x: x.sum() + 1, lambda x: x.mul_(2)])
def test_a_class_that_is_no_wrapper(fn, door, caplog):
    x, y = (torch.ones(2).as_subclass(Plain) for _ in range(2))
    out, want = door(fn)(x), fn(y)
    assert type(out) is type(want) is Plain
    assert out.equal(want) and x.equal(y)
    instead = "AOTAutograd compiles this graph" if door is desugar.compile else "this graph runs op by op"
    assert f"{instead} instead" in warned(caplog)[0]


class Edges(TensorSubclass, fallback="views", dtype_from="weight"):
    source: Tensor = inner(dtype=torch.int64)
    weight: Tensor = inner(differentiable=True)


@Edges.implements(aten.index_put)
def _(func, x, index, values, accumulate=False):
    return Edges(
        func(x.source, index, values.source, accumulate), func(x.weight, index, values.weight, accumulate)
    )


def replace(x, mask, values):
    x[mask] = values
    return x


def edges(picked, total):
    """Leaves, and arguments that are made of them."""
    w, v = (torch.ones(n, requires_grad=True) for n in (total, len(picked)))
    mask = torch.zeros(total, dtype=torch.bool)
    mask[picked] = True
    values = Edges(torch.full((len(picked),), 9), v * 3)
    return (w, v), (Edges(torch.arange(total), w).clone(), mask, values)


@pytest.mark.slow
@pytest.mark.parametrize("compiling", [by_pass, by_torch])
def test_what_aotautograd_cannot_compile_either_runs_op_by_op(compiling, caplog):
    """The derivative of a write by a mask depends on data; that the value is written and read, stock refuses."""
    compiled = compiling(replace)
    for picked, total in (([0, 2], 3), ([1], 3), ([], 3), ([0, 1, 2, 4], 5)):
        results = []
        for fn in (replace, compiled):
            leaves, (x, *rest) = edges(picked, total)
            out = fn(x, *rest)
            assert out is x
            (out.weight**2).sum().backward()
            results.append((out.source, out.weight.detach(), *(t.grad for t in leaves)))
        assert_same_values(results[1], results[0])
    assert "AOTAutograd compiles this graph instead" in warned(caplog)[0]
    assert (
        "AOTAutograd cannot compile this graph either (DispatchError): it runs op by op" in warned(caplog)[1]
    )


def test_what_aotautograd_cannot_compile_either_is_an_error_where_strict():
    _, (x, *rest) = edges([0, 2], 3)
    with pytest.raises(DesugarError, match="depends on the data of a tensor"):
        strictly(replace)(x, *rest)
    assert x.weight.tolist() == [1, 1, 1] and x.source.tolist() == [0, 1, 2]


@pytest.mark.sweep(4)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("cls", [JaggedTensor, PaddedTensor], ids=lambda cls: cls.__name__)
def test_symbols_that_are_equal_reach_inductor_under_one_name(cls, grad):
    def block(x, w):
        return x + torch.relu(torch.nn.functional.linear(x, w))

    compiled, w = torch.compile(block, backend="desugar", fullgraph=True), torch.randn(4, 4)
    for lengths in ([3, 1, 2], [2, 4]):
        x = cls.from_tensors([torch.randn(n, 4) for n in lengths]).detach().requires_grad_(grad)
        torch.testing.assert_close(compiled(x, w).to_tensors(), block(x, w).to_tensors())


@pytest.mark.slow
def test_an_argument_that_is_negated_lazily_is_refused_where_compiled_code_would_read_its_memory():
    fn, negated = lambda x: x * 2, torch.complex(torch.zeros(3), torch.ones(3)).conj().imag
    compiled = torch.compile(fn, backend="desugar")
    assert negated.is_neg()
    for x in (negated, TwoTensor(torch.ones(3), torch._neg_view(torch.ones(3)))):
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="resolve_neg") as caught:
            compiled(x)
        assert isinstance(caught.value.inner_exception, DesugarError)
    for result in (by_dynamo(fn)(negated), compiled(negated.resolve_neg())):
        torch.testing.assert_close(result, torch.full((3,), -2.0))


# ---- programs for calls that Dynamo has not looked at ---------------------------------------------------------------


def specialized(fn):
    graph = torch.fx.symbolic_trace(lambda x: x)
    return Specialized(lambda leaves: (fn(*leaves),), choose_backend("eager"), "", graph, ())


@pytest.mark.parametrize("cls", EVERY)
def test_equal_calls_have_equal_facts(cls):
    one, same, wider, grad = (
        facts_of([make(cls, 2, size, grad=grad), 3, "text"])
        for size, grad in ((6, False), (6, False), (8, False), (6, True))
    )
    assert one == same and one != wider and one != grad


A, B = torch.zeros(4), torch.zeros(4)
UNLIKE = [
    [Pair(A, B), Pair(torch.zeros(4), torch.zeros(4))],
    [Pair(A, B), Pair(A, torch.zeros(4))],
    [A[:3], B[1:]],
    [A, A],
    [0.0],
    [-0.0],
    [1],
    [True],
]


def test_calls_that_differ_in_identity_or_constants_have_other_facts():
    assert all(facts_of(one) != facts_of(other) for one, other in itertools.combinations(UNLIKE, 2))


def test_each_size_makes_a_program():
    compiled = specialized(lambda x, y: x * y)
    for n in (3, 4, 3):
        x, y = make(TwoTensor, n, 4), torch.randn(4)
        (got,) = compiled(x, y)
        assert_same_values([got], [x * y])
    assert len(compiled.entries) == 2


@pytest.mark.parametrize(
    ("fn", "make_x"),
    [
        (lambda x: x * 2 if x.shape[0] % 2 else x + 1, lambda n: torch.full((n,), 3.0)),
        (lambda x: x * 2 if x.count % 2 else x + 1, lambda n: Labeled(torch.full((3,), 3.0), count=n)),
    ],
)
def test_what_a_program_assumed_of_sizes_is_compared(fn, make_x):
    """No guard of Dynamo's does it for these calls."""
    compiled = specialized(fn)
    for n in (4, 6, 7, 9, 8, 5):
        assert_same_values(compiled(make_x(n)), [fn(make_x(n))])


def test_other_modes_make_other_programs():
    compiled, x = specialized(lambda x: x * 2), torch.ones(3, requires_grad=True)
    for around in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        for _ in range(2):
            with around():
                (got,) = compiled(x)
            assert got.requires_grad == (around is torch.enable_grad)
    assert len(compiled.entries) == 3


def test_beyond_the_limit_the_function_itself_runs(caplog):
    compiled = specialized(lambda x, n: x * n)
    for n in range(MAX_PROGRAMS + 2):
        assert compiled(torch.ones(2), n)[0][0] == n
    assert len(compiled.entries) == MAX_PROGRAMS
    assert [message.endswith("to a few sizes") for message in warned(caplog)] == [True]


# ---- both `desugar.compile` and `torch.compile` --------------------------------------------------------------


@pytest.mark.parametrize("way", [by_pass, by_dynamo])
def test_a_call_whose_arguments_overlap_runs_op_by_op(way, caplog):
    results, fn = [], lambda x, y: (x.mul_(2), y * 3)[1]
    compiled = way(fn)
    for run in (fn, compiled, compiled):
        leaf = TwoTensor(torch.arange(5.0), torch.arange(5.0)).requires_grad_()
        base = leaf * 1
        result = run(base[:4], base[1:])
        result.sum().backward()
        results.append([result, base, leaf.grad])
    assert_same_values(results[1], results[0])
    assert_same_values(results[2], results[0])
    (message,) = warned(caplog)
    assert message.startswith("slow: ") and message.endswith("clone() of such an argument")


# ---- which callable of `torch.compile` is being called --------------------------------------------------------------


class Net(nn.Module):
    def forward(self, x, *, by=2):
        return x * by

    def method(self, x):
        return x + 1


def free(x, *, by=2):
    return x * by


NET, LINEAR = Net(), nn.Linear(2, 2)


def calls_of(run):
    """The calls that are found while `run(backend)` compiles."""
    found = []
    run(lambda graph, inputs: (found.append(compiled_call()), graph.forward)[1])
    return found


WHAT = {
    "a function": free,
    "a module": NET,
    "a method": NET.method,
    "a forward": NET.forward,
    "a module of torch": LINEAR,
}


@pytest.mark.parametrize("what", WHAT.values(), ids=WHAT)
def test_what_was_compiled_and_its_arguments(what):
    x, kwargs = torch.ones(2), {} if what in (NET.method, LINEAR) else {"by": 3}
    (call,) = calls_of(lambda backend: torch.compile(what, backend=backend)(x, **kwargs))
    assert call.what == what and call.args[0] is x and call.kwargs == kwargs
    assert callable(call.backend)


def test_graphs_of_one_call_have_its_arguments():
    def breaks(x):
        y = x * 2
        torch._dynamo.graph_break()
        return y + 1

    first, rest = calls_of(lambda backend: torch.compile(breaks, backend=backend)(torch.ones(2)))
    assert first.args is rest.args and first.what is rest.what is breaks


def test_the_innermost_one_is_found():
    def run(backend):
        inner = torch.compile(free, backend=backend)
        in_eager_mode = torch._dynamo.disable(lambda x: inner(x), recursive=False)
        torch.compile(lambda x: in_eager_mode(x), backend=lambda graph, inputs: graph.forward)(torch.ones(2))

    (call,) = calls_of(run)
    assert call.what is free


def test_there_is_none_outside_of_calls():
    with ThreadPoolExecutor(1) as threads:
        assert compiled_call() is threads.submit(compiled_call).result() is None
