"""The user's line: on the stack, of an error, and of a node of a graph of Dynamo's."""

from __future__ import annotations

import pytest
import torch

from desugar.recording import listeners
from desugar.user_code import Line, find_line, find_line_of, is_users_file, line_of_node, stack_of_node
from tests.doors import by_torch


def fails():
    torch.ones(2) @ torch.ones(3)


def test_the_line_of_an_error_is_where_it_was_raised():
    with pytest.raises(RuntimeError) as caught:
        fails()
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


def test_what_is_typed_in_is_the_users():
    assert (
        is_users_file("<stdin>") and is_users_file("<ipython-input-3-abc>") and not is_users_file("<string>")
    )


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
    assert (line_of_node(mul).text, line_of_node(add).text) == ("return x * 2", "return inner(x) + 1")
    assert [(op.line.filename, op.line.text, op.line.function) for op in ops] == [
        (__file__, "return x * 2", "inner"),
        (__file__, "return inner(x) + 1", "outer"),
    ]
