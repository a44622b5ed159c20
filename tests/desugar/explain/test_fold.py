"""Repeated layers, folded: in each list of a program, in its text, and its guards by name; runs of equal blocks."""

import re
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

import desugar
from desugar.explain.fold import Run, find_runs, fold_program, group_guards, join_names, shorten, span
from desugar.explain.records import Guard, Leaf
from desugar.explain.text import render_text
from tests.tables import giving

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


# ------------------------------------------------------------------------------------------------- the lists


def folded(explanation, **changes):
    return fold_program(replace(explanation.program, **changes))


def lines_of(explanation, run):
    return explanation.program.graphs[0].text.splitlines()[run.start : run.start + run.length]


def leaves(count):
    return tuple(Leaf(f"self[{n}].weight", "Tensor", (str(n + 1), "4"), "float32") for n in range(count))


def missing(parts, text):
    return [part for part in parts if part not in text]


def whole(program):
    """The lines of the unfolded text."""
    yield from (f"\nself.layers[{n}].up.weight: Tensor" for n in range(LAYERS))
    yield from (graph.text.rstrip() for graph in program.graphs)
    yield from (program.wrapper.rstrip(), *(guard.text for guard in program.guards))


def line_by_line(text):
    return re.search(r"== Line by line ==\n(.*?)\n\n==", text, re.DOTALL)[1].splitlines()


def checks_and_last(explanation):
    """The checks of the groups of guards with a name, and the texts of the last two groups."""
    groups = folded(explanation).guards
    return [group.checks for group in groups if group.name], groups[-2].texts[0] + groups[-1].texts[0]


NAMES = f"self.layers[0] … self.layers[{LAYERS - 1}]"
WEIGHTS = f"self.layers[0 … {LAYERS - 1}].up.weight"
FEW = "\n".join(f"    x{n} = a{n}.qdata" for n in range(20))

# Each case: a function that reads the explanation of the stack, and the expected value.
OF_THE_STACK = {
    "ops are named by their parameters": (
        lambda e: [(run.length, run.count, run.label) for run in folded(e).ops],
        [(4, LAYERS, NAMES)],
    ),
    "parameters of the forward graph": (
        lambda e: [(run.count, lines_of(e, run)[0].partition("# ")[2]) for run in folded(e).graphs[0][:-1]],
        [(LAYERS, "self.layers[0].up.weight")],
    ),
    "the forward graph": (
        lambda e: [
            (run.count, run.label, "addmm" in "\n".join(lines_of(e, run))) for run in folded(e).graphs[0][1:]
        ],
        [(LAYERS, NAMES, True)],
    ),
    "the backward graph": (lambda e: LAYERS in [run.count for run in folded(e).graphs[1]], True),
    "what is saved": (
        lambda e: (
            {run.count for run in folded(e).saved} <= {LAYERS - 1, LAYERS},
            bool(folded(e).saved),
        ),
        (True, True),
    ),
    "the wrapper": (
        lambda e: [
            (run.start, run.length, run.count)
            for run in folded(e, wrapper=f"def run():\n{FEW}\n    return x0").wrapper
        ],
        [(1, 1, 20)],
    ),
    "other sizes are no repetition": (lambda e: folded(e, captured=leaves(12)).captured, ()),
    "the text shows the first of each run": (
        lambda e: missing(
            [f"x {LAYERS}, {NAMES}; the first of them:", "│ self.layers[0].up.weight: Tensor"], e.text()
        ),
        [],
    ),
    "the text shows no other": (lambda e: "self.layers[1].up.weight: Tensor" in e.text(), False),
    "unfolded text shows all": (
        lambda e: (
            missing(whole(e.program), e.text(folded=False)),
            "the first of them" in e.text(folded=False),
            len(render_text(e.program).splitlines()) < len(e.text(folded=False).splitlines()) / 3,
        ),
        ([], False, True),
    ),
    "every line of the user is above its ops": (
        lambda e: (
            sum("return x + self.down(self.up(x).relu())" in line for line in line_by_line(e.text())),
            "x = self.first(x)" in line_by_line(e.text())[0],
        ),
        (1, True),
    ),
    "guards of layers are one": (
        lambda e: [
            (group.count, len(group.guards), group.texts)
            for group in folded(e).guards
            if group.name == WEIGHTS
        ],
        [(LAYERS, LAYERS, (f"{WEIGHTS}: Tensor float32[8, 4] on cpu requires_grad",))],
    ),
    "other guards are grouped by name": (
        lambda e: (
            [group.count for group in folded(e).guards if group.name == "x"],
            {"self.first.weight"} - {group.name for group in folded(e).guards},
        ),
        ([1], set()),
    ),
    "every guard is in a group": (
        lambda e: sum(len(group.guards) for group in folded(e).guards) - len(e.program.guards),
        0,
    ),
    "every check is counted": (
        lambda e: (
            sum(group.checks for group in folded(e).guards) - sum(guard.checks for guard in e.program.guards)
        ),
        0,
    ),
    "the most checks come first": (
        lambda e: checks_and_last(e)[0] == sorted(checks_and_last(e)[0], reverse=True),
        True,
    ),
    "modes come last": (
        lambda e: (folded(e).guards[-1].name, "modes" in checks_and_last(e)[1]),
        ("", True),
    ),
    "the text says the number of checks": (
        lambda e: (
            f"{sum(guard.checks for guard in e.program.guards)} checks of Dynamo's; names with the most"
            in render_text(e.program)
        ),
        True,
    ),
}
test_what_is_folded_of_a_stack = giving(OF_THE_STACK, "explanation")


LONG = ", ".join(f"x{n}" for n in range(400)) + " = kept"
GUARDS = [Guard(f"a[{n}].k == {3 if n == 2 else 2}", name=f"a[{n}].k") for n in range(5)]

test_names_and_lines = giving(
    {
        "a long line loses its middle": (
            lambda: (len(shorten(LONG)) < 300, shorten(LONG)[:6], shorten(LONG)[-7:]),
            (True, "x0, x1", " = kept"),
        ),
        "a line that is shown whole": (lambda: shorten("x" * 240), "x" * 240),
        "a layer that differs stands alone": (
            lambda: [(group.texts, group.count) for group in group_guards(GUARDS)],
            [(("a[0, 1 … 4].k == 2",), 4), (("a[2].k == 3",), 1)],
        ),
        "names of one index": (lambda: join_names(["a[0].b", "a[1].b", "a[2].b"]), "a[0 … 2].b"),
        "names of two indices": (
            lambda: join_names(["a[0].b[1]", "a[0].b[2]", "a[1].b[1]", "a[1].b[2]"]),
            "a[0 … 1].b[1 … 2]",
        ),
        "names of indices with gaps": (lambda: join_names(["a[0]", "a[4]", "a[9]"]), "a[0, 4, 9]"),
        "one name": (lambda: join_names(["x"]), "x"),
        "a run, by the first index": (
            lambda: span(["x", "m[0].a[1].w"], ["x", "m[7].a[1].w"]),
            "m[0] … m[7]",
        ),
        "a run, by the second index": (
            lambda: span(["m[1].a[0].w"], ["m[1].a[5].w"]),
            "m[1].a[0] … m[1].a[5]",
        ),
        "a run without an index": (lambda: span(["x"], ["x"]), ""),
        "a run of nothing": (lambda: span([], []), ""),
    }
)


# ------------------------------------------------------------------------------------------------- the text


# ------------------------------------------------------------------------------------------------- the guards


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
        assert items[run.start : run.end] == items[run.start : run.start + run.length] * run.count


def test_a_long_graph_takes_no_time():
    items = [*map(str, range(300)), *[f"op{n % 17}" for n in range(120)] * 60, *map(str, range(300))]
    start = time.perf_counter()
    (run,) = find_runs(items)
    assert (run.length, run.count) == (120, 60)
    assert time.perf_counter() - start < 20  # seconds; a tenth of it on an idle machine
