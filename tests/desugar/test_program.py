"""One compiled signature: what it reports of itself, and the stages between."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

import desugar
from desugar.compilers import choose_backend
from desugar.graphs import output_nodes
from desugar.inputs import DynamicPolicy
from desugar.pipeline import compile_again
from desugar.program import Request, build_program
from desugar.signature import MISS, State
from desugar.state import find_state
from desugar.values import Plain, Same, Wrapper
from tests.desugar.classes import EVERY, Pair, TwoTensor, make
from tests.desugar.judge import assert_same_values, backward, leaves_of


@pytest.mark.parametrize("cls", EVERY)
@pytest.mark.parametrize("grad", [False, True])
def test_what_a_program_says_of_itself(cls, grad):
    program = desugar.trace(lambda x, y: (x * y, x), make(cls, 2, 6, grad=grad), torch.randn(6))
    first, second = program.inputs
    assert isinstance(first, Wrapper) and first.cls is cls and isinstance(second, Plain)
    assert program.outputs[1] == Same("input", 0)
    assert (program.backward is not None) == (program.family is not None) == grad
    assert program.is_dynamic is False and program.saved_bytes == 0
    text = str(program)
    parts = ["inputs:", "outputs:", "forward:", "wrapper:"] + ["backward:"] * grad
    assert all(part in text for part in parts) and cls.__name__ in text
    assert ("backward:" in text) == grad


def test_in_inference_forward_and_joint_are_one():
    program = desugar.trace(lambda x: x.sin(), make(Pair, 3))
    assert program.joint is program.forward


def test_the_kept_graphs_are_not_what_the_compiler_gets():
    def spoil(graph, inputs):
        run = torch.fx.GraphModule(graph, graph.graph).forward
        compiled = [node for node in graph.graph.nodes if node.op == "call_function"]
        for node in compiled:
            node.meta.clear()
        return run

    compiled = desugar.compile(lambda x: (x * 2).sin(), backend=spoil)
    x = make(Pair, 3, grad=True)
    backward(compiled(x))
    (program,) = compiled.programs
    for graph in (program.forward, program.backward, program.joint):
        assert all("val" in node.meta for node in graph.graph.nodes if node.op == "call_function")


def test_run_misses_another_signature():
    program = desugar.trace(lambda x, n: x * n, make(Pair, 2, 3), 2)
    assert program.run((make(Pair, 2, 3), 3), {}) is MISS
    assert program.run((make(TwoTensor, 2, 3), 2), {}) is MISS
    assert program.run((make(Pair, 3, 3), 2), {}) is MISS
    assert program.run((), {}) is MISS
    x = make(Pair, 2, 3)
    assert_same_values([program.run((x, 2), {})], [x * 2])


def test_modules_that_ran_are_in_the_state():
    seen = []

    class Inner(nn.Linear):
        pass

    used, unused = Inner(3, 3), Inner(3, 3)

    def find(leaves, modules):
        seen.extend(modules)
        return find_state(fn, leaves, modules)

    def fn(x):
        return used(x)

    request = Request(
        fn,
        (make(Pair, 2, 3),),
        {},
        choose_backend("eager"),
        DynamicPolicy(),
        find,
        lambda f: compile_again(f, backend=choose_backend("eager")),
    )
    program = build_program(request)
    assert used in seen and unused not in seen
    assert len([v for v in program.inputs if isinstance(v, Plain)]) == 2  # its weight and bias
    assert isinstance(find_state(fn, [], []), State)
    used.eval()
    assert program.run((make(Pair, 2, 3),), {}) is MISS


def test_saved_bytes_are_those_of_the_intermediates():
    """Sin saves its argument (at hand), exp its result (at hand); the product between them is neither."""

    def fn(x, w):
        return ((x @ w).sin() @ w).sum()

    program = desugar.trace(fn, make(Pair, 4, 8, grad=True), torch.randn(8, 8, requires_grad=True))
    split = program.family.partitioned
    extra = output_nodes(program.forward)[split.num_forward :]
    assert program.saved_bytes == sum(node.meta["val"].nbytes for node in extra) > 0
    assert program.saved_bytes <= 2 * 2 * 4 * 8 * 4  # x @ w and its sine, of each half
    for result in leaves_of(program.run((make(Pair, 4, 8, grad=True), torch.randn(8, 8)), {})):
        assert result is MISS or result.grad_fn is not None


NESTED_INSIDE = """
import torch, desugar

def fn(x):
    return torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 1, 3])).values() * 2

for _ in range(2):
    try:
        desugar.compile(fn, backend="eager")(torch.ones(3, 2))
    except desugar.DesugarError as error:
        print(error.what)
from torch.nested._internal import nested_tensor
print(type(nested_tensor._dummy_instance._values).__name__, type(nested_tensor._dummy_instance._offsets).__name__)
"""


def test_the_nested_tensor_that_pytorch_shares_is_never_one_of_a_trace():
    """In a process of its own: PyTorch makes it once."""
    told = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", NESTED_INSIDE], capture_output=True, text=True, check=True
    )
    *messages, dummy = told.stdout.splitlines()
    assert len(messages) == 2
    assert all("expected strided tensors, got one of PyTorch's nested" in message for message in messages)
    assert dummy == "Tensor Tensor"
