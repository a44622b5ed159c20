"""Repeated layers, folded: in each list of a program, in its text, and its guards by name; runs of equal blocks."""

from __future__ import annotations

import re
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

import desugar
from desugar.explain.fold import fold_program, group_guards, join_names, span
from desugar.explain.folded_text import shorten
from desugar.explain.records import Guard, Leaf
from desugar.explain.repeats import Run, find_runs
from desugar.explain.text import render_text

LAYERS = 12


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Stack(nn.Module):
    def __init__(self, layers=LAYERS, width=4):
        super().__init__()
        self.first = nn.Linear(3, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture(scope="module")
def explanation():
    return desugar.explain(Stack(), torch.ones(2, 3))


@pytest.fixture(scope="module")
def folds(explanation):
    return fold_program(explanation.program)


# ------------------------------------------------------------------------------------------------- the lists


def test_ops_and_graphs_are_folded_and_named_by_their_parameters(explanation, folds):
    (ops,) = folds.ops
    assert (ops.length, ops.count) == (4, LAYERS)
    assert ops.label == f"self.layers[0] … self.layers[{LAYERS - 1}]"
    lines = explanation.program.graphs[0].text.splitlines()
    parameters, body = folds.graphs[0]
    assert lines[parameters.start].endswith("# self.layers[0].up.weight") and parameters.count == LAYERS
    assert body.count == LAYERS and body.label == ops.label
    assert "addmm" in "\n".join(lines[body.start : body.start + body.length])
    assert any(run.count == LAYERS for run in folds.graphs[1])


def test_what_is_saved_and_the_wrapper_are_folded(explanation, folds):
    assert {run.count for run in folds.saved} <= {LAYERS - 1, LAYERS} and folds.saved
    text = "\n".join(f"    x{n} = a{n}.qdata" for n in range(20))
    (run,) = fold_program(replace(explanation.program, wrapper=f"def run():\n{text}\n    return x0")).wrapper
    assert (run.start, run.length, run.count) == (1, 1, 20)


def test_other_sizes_are_no_repetition():
    leaves = tuple(Leaf(f"self[{n}].weight", "Tensor", (str(n + 1), "4"), "float32") for n in range(12))
    program = desugar.explain(torch.neg, torch.ones(2)).program
    assert fold_program(replace(program, captured=leaves)).captured == ()


# ------------------------------------------------------------------------------------------------- the text


def test_the_text_shows_the_first_of_each_run(explanation):
    text = explanation.text()
    assert f"x {LAYERS}, self.layers[0] … self.layers[{LAYERS - 1}]; the first of them:" in text
    assert "│ self.layers[0].up.weight: Tensor" in text
    assert "self.layers[1].up.weight: Tensor" not in text


def test_unfolded_text_shows_all(explanation):
    text, program = explanation.text(folded=False), explanation.program
    shown = [f"\nself.layers[{n}].up.weight: Tensor" for n in range(LAYERS)]
    shown += [graph.text.rstrip() for graph in program.graphs] + [program.wrapper.rstrip()]
    shown += [guard.text for guard in program.guards]
    assert not [part for part in shown if part not in text] and "the first of them" not in text
    assert len(render_text(program).splitlines()) < len(text.splitlines()) / 3


def test_every_line_of_the_user_is_above_its_ops(explanation):
    shown = re.search(r"== Line by line ==\n(.*?)\n\n==", explanation.text(), re.DOTALL)[1].splitlines()
    assert sum("return x + self.down(self.up(x).relu())" in line for line in shown) == 1
    assert "x = self.first(x)" in shown[0]


def test_a_long_line_loses_its_middle():
    line = ", ".join(f"x{n}" for n in range(400)) + " = kept"
    assert (
        len(shorten(line)) < 300 and shorten(line).endswith(" = kept") and shorten(line).startswith("x0, x1")
    )
    assert shorten("x" * 240) == "x" * 240


# ------------------------------------------------------------------------------------------------- the guards


def test_guards_are_grouped_by_name_and_those_of_layers_are_one(explanation, folds):
    of = {group.name: group for group in folds.guards}
    weight = of[f"self.layers[0 … {LAYERS - 1}].up.weight"]
    assert weight.count == LAYERS and len(weight.guards) == LAYERS
    assert weight.texts == (
        f"self.layers[0 … {LAYERS - 1}].up.weight: Tensor float32[8, 4] on cpu requires_grad",
    )
    assert of["x"].count == 1 and "self.first.weight" in of
    assert sum(len(group.guards) for group in folds.guards) == len(explanation.program.guards)


def test_the_most_checks_come_first_and_modes_last(explanation):
    program = explanation.program
    groups = fold_program(program).guards
    named = [group.checks for group in groups if group.name]
    assert named == sorted(named, reverse=True)
    assert not groups[-1].name and "modes" in groups[-1].texts[0] + groups[-2].texts[0]
    total = sum(guard.checks for guard in program.guards)
    assert sum(group.checks for group in groups) == total
    assert f"{total} checks of Dynamo's; names with the most" in render_text(program)


def test_a_layer_that_differs_stands_alone():
    guards = [Guard(f"a[{n}].k == 2", name=f"a[{n}].k") for n in range(5)]
    guards[2] = Guard("a[2].k == 3", name="a[2].k")
    assert [(group.texts, group.count) for group in group_guards(guards)] == [
        (("a[0, 1 … 4].k == 2",), 4),
        (("a[2].k == 3",), 1),
    ]


@pytest.mark.parametrize(
    ("names", "joined"),
    [
        (["a[0].b", "a[1].b", "a[2].b"], "a[0 … 2].b"),
        (["a[0].b[1]", "a[0].b[2]", "a[1].b[1]", "a[1].b[2]"], "a[0 … 1].b[1 … 2]"),
        (["a[0]", "a[4]", "a[9]"], "a[0, 4, 9]"),
        (["x"], "x"),
    ],
)
def test_names_are_joined(names, joined):
    assert join_names(names) == joined


@pytest.mark.parametrize(
    ("first", "last", "name"),
    [
        (["x", "m[0].a[1].w"], ["x", "m[7].a[1].w"], "m[0] … m[7]"),
        (["m[1].a[0].w"], ["m[1].a[5].w"], "m[1].a[0] … m[1].a[5]"),
        (["x"], ["x"], ""),
        ([], [], ""),
    ],
)
def test_a_run_is_named_by_the_first_index_that_differs(first, last, name):
    assert span(first, last) == name


# ---- runs of equal blocks ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("items", "runs"),
    [
        (["embed", *["norm", "linear", "relu"] * 36, "head"], [Run(1, 3, 36)]),
        (["a", "b", "a", "c"] * 5, [Run(0, 4, 5)]),  # a block may hold an item twice
        (["start", *["up", "down"] * 8, "end"] * 4, [Run(0, 18, 4, "", (Run(1, 2, 8),))]),
        ([*["a", "b"] * 6, "middle", *["c", "d", "e"] * 7], [Run(0, 2, 6), Run(13, 3, 7)]),
        # Nobody folds a list that is read at a glance.
        *((items, []) for items in ([], ["a"], ["a"] * 7, ["a", "b", "c", "d"] * 2, list("abcdefghijkl"))),
    ],
)
def test_runs_of_equal_blocks(items, runs):
    assert list(find_runs(items)) == runs


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 2), max_size=60))
def test_a_run_is_what_it_says(items):
    end = 0
    for run in find_runs(items):
        assert run.start >= end and run.count >= 3
        end = run.end
        block = items[run.start : run.start + run.length]
        assert items[run.start : run.end] == block * run.count


def test_a_long_graph_takes_no_time():
    layer = [f"op{n % 17}" for n in range(120)]
    items = [*map(str, range(300)), *layer * 60, *map(str, range(300))]
    start = time.perf_counter()
    (run,) = find_runs(items)
    assert (run.length, run.count) == (120, 60)
    assert time.perf_counter() - start < 20  # seconds; a tenth of it on an idle machine
