"""`desugar.compile` and `desugar.trace` as their users meet them."""

import bdb
import contextlib
import copy
import gc
import io
import linecache
import pickle
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import desugar
from desugar.ir.values import Plain, Wrapper
from tests.desugar.classes import EVERY, Labeled, Pair, TwoTensor, make, plain_parts
from tests.desugar.judge import backward, by_pass, judge
from tests.desugar.test_models import Net
from tests.tables import raising

# ---- functions -----------------------------------------------------------------------------------------------


def test_a_decorator_with_options():
    compiled = desugar.compile(backend="eager", dynamic=True)(documented)
    judge(documented, lambda: (make(Pair, 3, grad=True),), compiled)
    assert compiled.__name__ == "documented" and compiled.programs[0].is_dynamic


test_wrong_calls_of_compile = raising(
    {
        **{
            str(options): (
                lambda options=options: desugar.compile(lambda x: x, **options),
                *(TypeError, rf"{next(iter(options))}.*expected .*, got "),
            )
            for options in (
                *({"dynamic": "yes"}, {"strict": 1}, {"fullgraph": None}),
                *({"options": {"strict": "no"}}, {"options": [1]}),
            )
        },
        "no function": (lambda: desugar.compile(3), TypeError, "got int; pass what is to be called"),
        "no function, decorated": (lambda: desugar.compile(backend="eager")(3), TypeError, "got int"),
        "backend": (lambda: desugar.compile(documented, backend="nothing"), ValueError, "expected backend"),
        "backend alone": (lambda: desugar.compile(backend="nothing"), ValueError, "expected backend"),
        "mode": (
            lambda: desugar.compile(documented, backend="eager", mode="max-autotune"),
            *(ValueError, 'with backend="inductor" only'),
        ),
        "a pickled lambda": (
            lambda: pickle.dumps(by_pass(lambda x: x)),
            *((AttributeError, pickle.PicklingError), "lambda"),
        ),
    }
)


def triple(x):
    return x * 3


@desugar.compile(backend="eager")
def quadruple(x):
    return x * 4


def through_a_file(module):
    stored = io.BytesIO()
    torch.save(module, stored)
    stored.seek(0)
    return torch.load(stored, weights_only=False)


def pickled(value):
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_of_a_compiled_function(copied):
    compiled = by_pass(triple)
    compiled(torch.ones(2))
    other = copied(compiled)
    assert other.programs == [] and other._calls.backend.kwargs["options"] == {"backend": "eager"}
    judge(triple, lambda: (make(Pair, 3, grad=True),), other)
    assert len(compiled.programs) == 1  # the copy has the same code, so it shares that program
    assert pickled(quadruple) is quadruple


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, through_a_file])
def test_a_copy_of_a_compiled_module_keeps_how_it_is_compiled(copied):
    compiled = by_pass(nn.Linear(2, 2), dynamic=True)
    other = copied(compiled)
    for rows in (3, 4):
        other(torch.ones(rows, 2))
    assert len(other.programs) == 1 and other.programs[0].is_dynamic
    assert other._desugar_calls.backend.kwargs["options"] == {"backend": "eager"}
    assert compiled.programs == [] and other.weight is not compiled.weight


def test_a_deep_copy_of_what_holds_compiled_functions():
    holder, x = nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2)
    holder.run = by_pass(holder[0].forward)
    want = holder.run(x)
    copied = copy.deepcopy(holder)
    with torch.no_grad():
        copied[0].weight.zero_()
        copied[0].bias.zero_()
    assert torch.equal(copied.run(x), torch.zeros(1, 2)) and torch.equal(holder.run(x), want)


def documented(x, *, by=2):
    """Multiplies."""
    return x * by


documented.note = "mine"


def test_a_compiled_function_looks_like_the_function():
    compiled = by_pass(documented)
    seen = compiled.__name__, compiled.__doc__, compiled.__wrapped__, compiled.note
    assert seen == ("documented", "Multiplies.", documented, "mine")
    assert "documented" in repr(compiled) and compiled.programs == []
    compiled(torch.ones(2), by=3)
    (first,) = compiled.programs
    compiled(torch.ones(2), by=4)
    assert len(compiled.programs) == 2 and compiled.programs[0].is_dynamic and compiled.programs[1] is first


class Scaler:
    by = 2
    scaled = by_pass(lambda self, x: x * self.by)


def test_a_compiled_function_is_a_method():
    one, two = Scaler(), Scaler()
    two.by = 3
    assert [scaler.scaled(torch.ones(2)).tolist() for scaler in (one, two, one)] == [[2, 2], [3, 3], [2, 2]]


# ---- modules -------------------------------------------------------------------------------------------------


def test_a_compiled_module_is_the_module():
    module = Net().eval()
    compiled = by_pass(module)
    assert isinstance(compiled, Net) and compiled.__doc__ == Net.__doc__
    assert list(compiled.state_dict()) == list(module.state_dict())
    assert [id(p) for p in compiled.parameters()] == [id(p) for p in module.parameters()]
    compiled.shift = torch.zeros(6)
    assert module.shift.sum() == 0
    assert not compiled.training and compiled.train().training and module.training
    assert compiled.double() is compiled and module.shift.dtype == torch.float64


# ---- many programs -------------------------------------------------------------------------------------------


def test_beyond_the_limit_of_recompilations_a_whole_graph_is_refused():
    strict = by_pass(lambda x, mode: x * len(mode), fullgraph=True)
    with torch._dynamo.config.patch(recompile_limit=1):
        strict(torch.ones(2), "")
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            strict(torch.ones(2), "a")


# ---- one inside the other ------------------------------------------------------------------------------------


def test_inside_torch_compile():
    compiled = by_pass(lambda x: x * 2)
    outer = torch.compile(lambda x: compiled(x) + 1, backend="eager")
    judge(lambda x: x * 2 + 1, lambda: (make(TwoTensor, 3, grad=True),), outer)


# ---- nothing is kept -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad", [False, True])
def test_arguments_and_results_are_not_kept(grad):
    compiled, x = by_pass(lambda x: x * x), make(TwoTensor, 3, grad=True)
    compiled(x)
    gc.collect()  # which is far from due again
    out = compiled(x)
    refs = [weakref.ref(t) for t in (out, *plain_parts(out))]
    del out
    assert [ref() for ref in refs] == [None] * 3, "results are freed at once"
    x = make(TwoTensor, 3, grad=grad)
    refs = [weakref.ref(t) for t in (x, *plain_parts(x))]
    compiled(x)
    del x
    gc.collect()
    assert [ref() for ref in refs] == [None] * 3


# ---- trace ---------------------------------------------------------------------------------------------------


def test_trace_gives_a_program_and_runs_nothing():
    calls, x = [], make(TwoTensor, 3, grad=True)
    fn = lambda x, k=None: (calls.append(x), x * 2 if k is None else (x * k, x + k))[1]  # noqa: E731
    program = desugar.trace(fn, x)
    assert isinstance(program, desugar.Program) and not any(call is x for call in calls)
    assert desugar.trace(fn, x, k=1).outputs != program.outputs


@pytest.mark.parametrize(
    "make_module", [lambda: nn.Sequential(nn.LazyLinear(3), nn.ReLU()), lambda: nn.LazyLinear(3)]
)
def test_a_lazy_module_is_made_by_its_first_call(make_module):
    module, x = make_module(), torch.ones(2, 4)
    compiled = by_pass(module)
    first = compiled(x)
    assert module.state_dict()
    assert torch.equal(compiled(x), first) and torch.equal(module(x), first)


# ---- threads that compile at once ----------------------------------------------------------------------------


@pytest.mark.sweep(2)
@pytest.mark.parametrize("round", range(3))
def test_different_functions_compile_in_threads_at_once(round):
    barrier, x = threading.Barrier(4), torch.arange(3.0, requires_grad=True)

    def run(n):
        compiled = by_pass(lambda x: (x * n).sin().sum())
        barrier.wait(timeout=60)
        return compiled(x)

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(run, range(1, 5)))
    torch.testing.assert_close(results, [(x * n).sin().sum() for n in range(1, 5)])


def test_a_thread_is_not_kept_waiting_by_a_call_that_is_compiled_already():
    compiled, entered, go_on = by_pass(torch.sin), threading.Event(), threading.Event()
    compiled(torch.ones(2))

    def slow(x):
        entered.set()
        go_on.wait(timeout=60)
        return x + 1

    with ThreadPoolExecutor(2) as pool, contextlib.ExitStack() as stack:
        stack.callback(go_on.set)
        waiting = pool.submit(by_pass(slow), torch.ones(2))
        assert entered.wait(timeout=60)
        torch.testing.assert_close(
            pool.submit(compiled, torch.ones(2)).result(timeout=30), torch.ones(2).sin()
        )
        go_on.set()
        torch.testing.assert_close(waiting.result(timeout=60), torch.full((2,), 2.0))


# ---- the description of a program, and its generated code in a debugger ---------------------------------------------


@pytest.mark.sweep(4)
@pytest.mark.parametrize("cls", EVERY)
@pytest.mark.parametrize("grad", [False, True])
def test_what_a_program_says_of_itself(cls, grad):
    program = desugar.trace(torch.mul, make(cls, 2, 6, grad=grad), torch.randn(6))
    first, second = program.inputs
    assert isinstance(first, Wrapper) and first.cls is cls and isinstance(second, Plain)
    assert (program.backward is not None) == (program.variants is not None) == grad
    assert (program.joint is program.forward) is not grad
    assert program.is_dynamic is (cls is Labeled) and program.saved_bytes == 0  # which has a dynamic int
    text = str(program)
    assert all(part in text for part in ("inputs:", "outputs:", "forward:", "wrapper:", cls.__name__))
    assert ("backward:" in text) == grad


def test_a_list_of_programs_is_a_line_each():
    compiled = by_pass(lambda x, y: x * y)
    compiled(make(Pair, 2, grad=True), torch.ones(2))
    compiled(torch.ones(3), 3)
    assert list(
        map(repr, [*compiled.programs, desugar.trace(lambda *xs: sum(xs), *map(torch.ones, [2] * 8))])
    ) == [
        "<Program x.size(0): int, x: Tensor, y: int -> Tensor; compiled, inference, dynamic sizes>",
        "<Program x: Pair, y: Tensor -> Pair; compiled, training>",
        "<Program xs[0]: Tensor, xs[1]: Tensor, xs[2]: Tensor, xs[3]: Tensor and 4 more -> Tensor; "
        "compiled, inference>",
    ]


def test_the_kept_graphs_are_not_what_the_compiler_gets():
    def calls(graph):
        return [node for node in graph.graph.nodes if node.op == "call_function"]

    def spoil(graph, inputs):
        run = torch.fx.GraphModule(graph, graph.graph).forward
        for node in calls(graph):
            node.meta.clear()
        return run

    compiled = by_pass(lambda x: (x * 2).sin(), backend=spoil)
    backward(compiled(make(Pair, 3, grad=True)))
    (program,) = compiled.programs
    for graph in (program.forward, program.backward, program.joint):
        assert all("val" in node.meta for node in calls(graph))


NESTED_INSIDE = """
import torch, desugar

def fn(x):
    return torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 1, 3])).values() * 2

for _ in range(2):
    print(desugar.compile(fn, backend="eager")(torch.ones(3, 2)).tolist())
from torch.nested._internal import nested_tensor
print(type(nested_tensor._dummy_instance._values).__name__, type(nested_tensor._dummy_instance._offsets).__name__)
"""


@pytest.mark.slow
def test_the_nested_tensor_that_pytorch_shares_is_never_one_of_a_trace():
    """In a process of its own: PyTorch makes it once."""
    told = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", NESTED_INSIDE], capture_output=True, text=True, check=True
    )
    *results, dummy = told.stdout.splitlines()
    assert results == ["[[2.0, 2.0], [2.0, 2.0], [2.0, 2.0]]"] * 2
    assert dummy == "Tensor Tensor"


# ---- generated code in a debugger ----------------------------------------------------------------------------


class Steps(bdb.Bdb):
    """Steps through a call line by line, and keeps what a debugger would show of generated code."""

    def user_line(self, frame):
        name = frame.f_code.co_filename
        if "desugar_wrapper" in name or name.startswith("<subclasses"):
            self.shown.append((frame.f_code.co_name, linecache.getline(name, frame.f_lineno).strip()))
        self.set_step()


def test_one_steps_through_the_wrapper_and_the_methods():
    compiled, x, steps = by_pass(lambda x: x * 2), make(Pair, 2), Steps()
    compiled(x)
    steps.shown = []
    trace = sys.gettrace()
    steps.runcall(lambda: (compiled(x), x + x))
    sys.settrace(trace)  # which a measurement of coverage has set
    shown = [text for function, text in steps.shown if function == "run"]
    assert shown[0] == "a0_a = a0.a" and shown[-1].startswith("return (out0")
    assert any("compiled_graph([" in text for text in shown)
    assert any(function == "__torch_dispatch__" for function, _ in steps.shown)
    assert all(text for _, text in steps.shown)
