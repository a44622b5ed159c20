"""The programs of one function have names of their own."""

from __future__ import annotations

import pytest
import torch

import desugar
from desugar.explain.collecting.labels import name_apart
from desugar.explain.collector import Collector
from desugar.explain.records import Program
from tests.desugar.explain.subjects import Net, layer, make_weight, make_x


def titles(fn, *calls, **options):
    compiled, collector = desugar.compile(fn, **{"backend": "eager"} | options), Collector()
    with collector.collecting():
        for call in calls:
            call(compiled)
    return [program.title for program in collector.report("").programs]


def breaks(x):
    y = x * 2
    torch._dynamo.graph_break()
    return y + 1


def test_one_program_needs_no_more_than_its_name():
    assert titles(layer, lambda f: f(make_x(), make_weight())) == ["layer"]


@pytest.mark.slow
def test_by_size_dtype_metadata_and_mode():
    def without_gradients(f):
        with torch.no_grad():
            f(make_x(), make_weight())

    found = titles(
        layer,
        lambda f: f(make_x(), make_weight()),
        lambda f: f(make_x(), make_weight(axis=1)),
        lambda f: f(make_x().double(), make_weight()),
        without_gradients,
        dynamic=False,
    )
    assert found[1:] == ["layer, w.axis = 1", "layer, x.dtype = float64", "layer, gradients = off"]
    assert len(set(found)) == 4 and found[0].startswith("layer, ")


@pytest.mark.slow
def test_a_program_with_a_backward_differs_from_one_without():
    x, w = make_x(), make_weight()
    both = [lambda f: f(x, w), lambda f: f(x.detach(), w)]
    assert titles(layer, *both) == ["layer, x.requires_grad = True", "layer, x.requires_grad = False"]


@pytest.mark.slow
def test_by_the_guard_that_failed():
    compiled = [lambda f: f(torch.ones(2, 3)), lambda f: f(torch.ones(5, 3))]
    assert titles(torch.nn.Linear(3, 3), *compiled) == [
        "Linear, input.size(0) = 2",
        "Linear, input.size(0) = any",
    ]
    scales = [lambda f, scale=scale: f(torch.ones(2, 3), scale=scale) for scale in (2, 3)]
    assert titles(Net(), *scales, dynamic=False) == ["Net, scale = 2", "Net, scale = 3"]


def test_the_parts_of_a_function_that_breaks_have_their_lines():
    first, second = titles(breaks, lambda f: f(torch.ones(2)))
    line = breaks.__code__.co_firstlineno
    assert (first, second) == (f"breaks, line {line + 1}", f"breaks, line {line + 3}")


@pytest.mark.parametrize("number", [2, 5])
def test_what_is_the_same_is_numbered(number):
    programs = name_apart([Program("f", "first call", "eager", 0.0)] * number)
    assert [program.label for program in programs] == [f"f, {n} of {number}" for n in range(1, number + 1)]


def test_no_two_are_called_the_same():
    programs = [Program("f", "", "eager", 0.0, failed=(f"n: expected 0, got {n % 3}",)) for n in range(7)]
    programs.append(Program("f", "", "eager", 0.0, error="it fails\nhere"))
    programs.append(Program("g", "", "eager", 0.0))
    labels = [program.title for program in name_apart(programs)]
    assert len(set(labels)) == len(labels)
    assert labels[-2:] == ["f, error it fails", "g"]


def test_a_program_for_a_range_of_ints_has_the_range():
    def fn(x, k):
        return x * 2 if k <= 2 else x + k

    found = titles(fn, *[lambda f, k=k: f(torch.ones(3), k) for k in range(5)])
    assert [title.partition(", ")[2] for title in found] == ["k = 0", "where k <= 2", "where 3 <= k"]
