"""One compiled signature: what it reports of itself, and its generated code in a debugger."""

from __future__ import annotations

import bdb
import inspect
import linecache
import subprocess
import sys

import pytest
import torch

import desugar
from desugar.ir.values import Plain, Wrapper
from tests.desugar.classes import EVERY, Labeled, Pair, make
from tests.desugar.judge import backward, by_pass


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
    many = desugar.trace(lambda *xs: sum(xs), *map(torch.ones, [2] * 8))
    assert list(map(repr, [*compiled.programs, many])) == [
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
    steps.runcall(lambda: (compiled(x), x + x))
    shown = [text for function, text in steps.shown if function == "run"]
    assert shown[0] == "a0_a = a0.a" and shown[-1].startswith("return (out0")
    assert any("compiled_graph([" in text for text in shown)
    assert any(function == "__torch_dispatch__" for function, _ in steps.shown)
    assert all(text for _, text in steps.shown)


def test_inspect_knows_the_wrapper():
    program = desugar.trace(lambda x: x * 2, torch.ones(2))
    assert inspect.getsource(program.run) in program.source
