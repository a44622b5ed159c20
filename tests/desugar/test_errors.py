"""The error of desugar, errors of the user's own code and their lines, and interrupts; the next call works."""

import gc
import traceback
import weakref
from unittest import mock

import optree
import pytest
import torch

import desugar
from desugar.errors import DesugarError
from desugar.recording import listeners
from desugar.user_code import (
    Line,
    find_line,
    find_line_of,
    is_library_file,
    is_users_file,
    line_of_node,
    stack_of_node,
)
from tests.desugar.classes import EVERY, Pair, TwoTensor, make
from tests.desugar.judge import EVERY_DOOR, by_pass, judge, snapshot
from tests.desugar.test_models import Held
from tests.doors import by_stock, by_torch
from tests.tables import giving

# ---- the error of desugar --------------------------------------------------------------------------------------


def test_the_message_says_what_where_and_what_to_do():
    error = DesugarError("x is odd", instead="use y", where="f.py:3: x")
    assert str(error) == "x is odd\n  where: f.py:3: x\n  instead: use y"
    assert (error.what, error.instead, error.where) == ("x is odd", "use y", "f.py:3: x")
    assert not error.stock_is_wrong
    default = DesugarError("a", instead="b")
    assert default.where is not None and default.where.startswith(__file__), "the line that raises"
    assert isinstance(error, RuntimeError) and desugar.DesugarError is DesugarError


def helper(x):
    return x.expand(2, *x.shape).zero_()  # the inner line


# A user's folder may have a library's name, and packages installed beside torch are not of this library.
OTHERS = (
    __file__,
    pytest.__file__,
    *(f"/home/me/{name}/model.py" for name in ("torch", "optree", "desugar")),
)
test_whose_files_are_whose = giving(
    {
        "of libraries": (
            lambda: [is_library_file(m.__file__) for m in (torch, optree, desugar, traceback)],
            [True] * 4,
        ),
        "made from text": (lambda: is_library_file("<string>"), True),
        "of others": (lambda: [*map(is_library_file, OTHERS)], [False] * len(OTHERS)),
        "typed in": (
            lambda: [*map(is_users_file, ("<stdin>", "<ipython-input-3-abc>", "<string>"))],
            [True, True, False],
        ),
    }
)


WRITES = {
    "a function that it calls": lambda x: (helper(x), x * 2)[1],
    "a module": Held(lambda layer, x: (helper(x), x * 2)[1]),
    "after a break": lambda x: (torch._dynamo.graph_break(), helper(x), x * 2)[2],
}


@pytest.mark.parametrize("cls", [torch.Tensor, TwoTensor])
@pytest.mark.parametrize("name", WRITES)
def test_the_line_of_the_user_is_named(name, cls):
    with pytest.raises(DesugarError) as caught:
        by_pass(WRITES[name])(make(cls, 3))
    assert caught.value.where is not None and caught.value.where in str(caught.value)
    assert caught.value.where.startswith(__file__) and caught.value.where.endswith("# the inner line")


# ---- errors of the user's own code ---------------------------------------------------------------------------


@pytest.mark.sweep(12)
@EVERY_DOOR
@pytest.mark.parametrize("kind", [LookupError, KeyboardInterrupt])
@pytest.mark.parametrize("cls", EVERY)
def test_an_error_in_the_function_passes_through(cls, kind, door):
    def fn(x, y):
        z = y.clone().add_(1)
        if y.shape[0] == 3:
            raise kind("mine")
        return x.sin() + 0 * z.sum() if cls is TwoTensor else x.sin()

    compiled, args = door(fn), (make(cls, 2, 6, grad=True), torch.ones(3))
    before = snapshot(args)
    with pytest.raises(kind, match="mine") as caught:
        compiled(*args)
    assert any(frame.line == 'raise kind("mine")' for frame in traceback.extract_tb(caught.tb))
    assert snapshot(args) == before and torch.is_grad_enabled()
    judge(fn, lambda: (make(cls, 2, 6, grad=True), torch.ones(4)), compiled)


@EVERY_DOOR
def test_errors_of_torch_pass_through(door):
    """Dynamo's run on fake tensors raises them, in a class of its own that is a RuntimeError, too."""
    fn, seen = lambda x: x @ torch.ones(7, 7), []
    for way in (by_stock, door):
        torch.compiler.reset()
        with pytest.raises(RuntimeError, match="same reduction dim") as caught:
            way(fn)(make(Pair, 2, 3))
        seen.append(type(caught.value))
    assert seen[0] is seen[1] is not DesugarError
    assert "fn, seen = lambda x: x @ torch.ones(7, 7)" in str(caught.value)


def test_an_error_with_sizes_that_changed():
    compiled = by_pass(torch.matmul)
    compiled(torch.ones(2, 3), torch.ones(3, 2))
    with pytest.raises(RuntimeError, match=r"\[2, 3\] X \[2, 2\]|2x3 and 2x2|must have same reduction dim"):
        compiled(torch.ones(2, 3), torch.ones(2, 2))


# ---- interrupts and compilers that fail ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [KeyboardInterrupt, ZeroDivisionError, DesugarError("not this time", instead="try again")],
    ids=["an interrupt", "an error", "a refusal"],
)
def test_an_error_of_the_compiler_leaves_everything_usable(error):
    fn, compile_graph = lambda x: x * 2, mock.Mock(side_effect=[error, *[mock.DEFAULT] * 2])
    compiled = by_pass(fn, backend=lambda graph, inputs: compile_graph(graph) and graph.forward, strict=True)
    with pytest.raises(type(error) if isinstance(error, DesugarError) else error):
        compiled(torch.ones(2))
    assert compiled.programs == [] and torch.is_grad_enabled()
    judge(fn, lambda: (torch.ones(2, requires_grad=True),), compiled, calls=2)
    assert len(compiled.programs) == 1


def test_what_a_failed_call_was_given_is_not_kept_alive():
    compiled, x = by_pass(lambda x: (helper(x), x + 1)[1]), torch.ones(2)
    alive = weakref.ref(x)
    with pytest.raises(DesugarError):
        compiled(x)
    del x
    gc.collect()
    assert alive() is None


# ---- the user's line -----------------------------------------------------------------------------------------


def test_the_line_of_an_error_is_where_it_was_raised():
    with pytest.raises(RuntimeError) as caught:
        torch.ones(2) @ torch.ones(3)
    assert find_line_of(caught.value).text == "torch.ones(2) @ torch.ones(3)"
    assert find_line_of(ValueError("not raised")) is None


def test_the_innermost_line_is_found_with_its_function():
    line = find_line()
    assert (line.text, line.function) == (
        "line = find_line()",
        "test_the_innermost_line_is_found_with_its_function",
    )
    assert str(line) == f"{__file__}:{line.number}: line = find_line()"
    assert str(Line("nowhere.py", 3)) == "nowhere.py:3"


def inner(x):
    return x * 2


def outer(x):
    return inner(x) + 1


def test_lines_that_nodes_of_graphs_and_ops_were_made_from():
    found = []
    with listeners.listen(lambda recording: found.extend((recording.graph.graph, [*recording.ops]))):
        by_torch(outer)(torch.ones(2))
    graph, ops = found
    mul, add = (node for node in graph.nodes if node.op == "call_function")
    assert [line.function for line in stack_of_node(mul)] == ["outer", "inner"]
    lines = ["return x * 2", "return inner(x) + 1"]
    assert [line_of_node(node).text for node in (mul, add)] == lines
    assert [(op.line.filename, op.line.text, op.line.function) for op in ops] == [
        (__file__, line, function) for line, function in zip(lines, ("inner", "outer"), strict=True)
    ]
