"""What guards take: measured for each name, on guards that really differ in what they take."""

from __future__ import annotations

import logging
import sys

import pytest
import torch
from torch import nn

import desugar
from desugar import _torch_guards as private
from desugar.explain.collecting.guard_times import Budget, time_guards
from desugar.explain.collector import Collector
from desugar.explain.fold import fold_program
from desugar.explain.text import render_text

LAYERS = 12


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(LAYERS)))
        self.scale = {"a": 2}

    def forward(self, x):
        return self.layers(x) * self.scale["a"]


@pytest.fixture(scope="module")
def explained():
    return desugar.explain(Deep(), torch.ones(2, 4)).program


@pytest.mark.slow
def test_every_name_is_timed_and_many_layers_take_more_than_one_value(explained):
    times = dict(explained.guard_times.parts)
    assert {group.key for group in fold_program(explained).guards if group.name} == times.keys() - {
        name for name in times if "builtins" in name
    }
    assert times[f"self.layers[0 … {LAYERS - 1}].weight"] > 3 * times["x"] > 0
    assert times["x"] > times["self.scale['a']"]
    assert 0 < explained.guard_times.modes < explained.guard_times.whole


def test_the_slowest_name_comes_first_and_has_its_time(explained):
    folds = fold_program(explained)
    named = [group.seconds for group in folds.guards if group.name]
    assert named == sorted(named, reverse=True) and named[0] > named[-1]
    text = render_text(explained).partition("== A call runs this program if ==\n")[2].splitlines()
    assert " in a warm loop, " in text[0] and "the slowest names first" in text[0]
    assert text[1].startswith(folds.guards[0].texts[0]) and text[1].endswith(" µs]")


def collected(*calls, budget=None):
    """The programs of a report, and the result of the last call."""
    collector, compiled = Collector(), desugar.compile(Deep(), backend="eager")
    collector._budget.left = collector._budget.left if budget is None else budget
    with collector.collecting():
        results = [compiled(x) for x in calls]
    return collector.report("test").programs, results[-1]


@pytest.mark.slow
def test_a_report_has_the_times_of_each_program_and_leaves_the_hook_as_it_was():
    hook = sys.modules["torch._dynamo.guards"].guard_manager_testing_hook_fn
    programs, _ = collected(torch.ones(2, 4), torch.ones(2, 4, requires_grad=True))
    assert len(programs) == 2 and all(len(program.guard_times.parts) > 4 for program in programs)
    assert programs[0].to_dict()["guard_times"]["parts"][0][1] >= 0
    assert sys.modules["torch._dynamo.guards"].guard_manager_testing_hook_fn is hook


@pytest.mark.slow
def test_timing_ends_with_its_budget():
    ((program,), _) = collected(torch.ones(2, 4), budget=0.0)
    assert program.guard_times is None
    assert "not timed; names with the most of them first" in render_text(program)


@pytest.mark.slow
def test_an_error_while_timing_does_not_end_the_users_call(monkeypatch, caplog):
    def fails(*args):
        raise ValueError("no clock")

    monkeypatch.setattr(sys.modules["desugar.explain.collector"], "time_taken_guards", fails)
    caplog.set_level(logging.WARNING, "desugar")
    assert collected(torch.ones(2, 4))[1].shape == (2, 4)
    assert "the guards of Deep were not timed: ValueError: no clock" in caplog.text


def test_values_of_dictionaries_are_found_and_time_is_that_of_the_named_values_alone():
    found = []

    def check(root, frame):
        names = [f"L['d']['{n}']" for n in range(20)]
        groups = {"all": set(names), "one": {names[3]}, "absent": {"L['nothing']"}}
        found.append(dict(time_guards(root, frame, groups, Budget(5.0)).parts))

    def total(d):
        return sum(d.values())

    with private.watch_guards(check):
        torch.compile(total, backend="eager")({str(n): torch.ones(2) for n in range(20)})
    assert found[0].keys() == {"all", "one"}
    assert found[0]["all"] > 5 * found[0]["one"] > 0
