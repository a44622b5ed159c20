"""What is collected while something runs: programs, their names, why each was compiled, what calls and guards take."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import desugar
from desugar.explain.collecting.cost import Meter
from desugar.explain.collecting.labels import name_apart
from desugar.explain.collector import Collector
from desugar.explain.records import FailedGuard, Materialized, Program, Report
from desugar.explain.text import render_report_text
from subclasses import strict_mode
from tests.desugar.explain.subjects import Net, layer, make_weight, make_x
from tests.doors import by_torch


def breaks(x):
    y = x * 2
    torch._dynamo.graph_break()
    return y + 1


@pytest.fixture
def collector():
    return Collector()


def collect(collector, *calls, way=None):
    """Programs that calls of `layer` make; a call is a tuple of arguments, or a function of what was compiled."""
    compiled = way or desugar.compile(layer, backend="eager")
    with collector.collecting():
        for call in calls:
            call(compiled) if callable(call) else compiled(*call)
    return collector.report("test").programs


def test_calls_are_counted_and_timed(collector):
    w = make_weight()
    (program,) = collect(collector, *[(make_x(), w)] * 4)
    assert program.calls == 4 and program.cost.rounds == 3
    assert 0 < program.cost.graph <= program.cost.call


def test_the_wrappers_part_is_that_of_each_call_whatever_the_calls_take():
    meter = Meter(4, [9.0, 1.1, 1.1, 5.1, 5.1, 5.1], [1.0, 1.0, 1.0, 5.0, 1.0, 1.0])
    assert meter.cost.call == 5.1
    assert meter.cost.call - meter.cost.graph == pytest.approx(0.1)  # the difference of the medians is 4.1


@pytest.mark.parametrize(
    ("text", "name", "expected", "got"),
    [
        ("x.size(0): expected 2, got 5", "x.size(0)", "2", "5"),
        ("mode: expected 'a, got b', got 'c'", "mode", "'a, got b'", "'c'"),
        ("expected x.size(0) <= 2, got x.size(0) = 5", "", "x.size(0) <= 2", "x.size(0) = 5"),
        ("n: expected 2.5", "n", "2.5", ""),
        ("metadata of a tensor subclass", "", "", ""),
    ],
)
def test_a_failed_guard_is_data(text, name, expected, got):
    assert FailedGuard.of(text) == FailedGuard(text, name, expected, got)


def test_results_are_those_of_an_unwatched_run(collector):
    w = make_weight()
    want, x = layer(make_x(), w), make_x()
    compiled = desugar.compile(layer, backend="eager")
    with collector.collecting():
        for _ in range(2):
            got = compiled(x, w)
            torch.testing.assert_close(got, want)
        got.sum().backward()
    layer(x2 := make_x(), w).sum().backward()
    torch.testing.assert_close(x.grad * 1, x2.grad)
    assert "def backward_1" in collector.report("test").programs[0].wrapper


def test_fallbacks_are_counted_by_line_traced_and_eager(collector):
    w = make_weight()
    collect(collector, (make_x(), w), *[lambda _: w + 1] * 3)
    found = {(m.traced, m.op, m.count) for m in collector.report("test").materialized}
    assert found == {(True, "aten.mul.Tensor", 1), (False, "aten.add.Tensor", 3)}


def test_what_fails_to_compile_is_told(collector):
    compiled = desugar.compile(lambda x: x * 2, backend="eager", strict=True)
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged)
    with collector.collecting(), pytest.raises(desugar.DesugarError):
        compiled(nested)
    (program,) = collector.report("test").programs
    assert "instead" in program.error and program.graphs == ()


def test_each_graph_of_a_function_that_breaks_is_told(collector):
    compiled = desugar.compile(breaks, backend="eager")
    with collector.collecting():
        for _ in range(3):
            assert compiled(torch.ones(2)).tolist() == [3, 3]
    programs = collector.report("test").programs
    assert [(program.name, program.calls) for program in programs] == [("breaks", 3), ("breaks", 3)]
    assert [op.place.text for program in programs for op in program.ops] == ["y = x * 2", "return y + 1"]


def test_what_cannot_be_described_does_not_end_the_script(collector, monkeypatch):
    def fail(recording):
        raise KeyError("odd")

    monkeypatch.setattr(sys.modules[Collector.__module__], "collect_program", fail)
    (program,) = collect(collector, (make_x(), make_weight()))
    assert program.name == "layer" and "KeyError: 'odd'" in program.error and program.calls == 1


def test_programs_behind_dynamo_are_collected(collector):
    args = make_x(), make_weight()
    (program,) = collect(collector, lambda f: f(*args).sum().backward(), args, way=by_torch(layer))
    assert program.name == "layer" and program.calls == 2 and program.reason == "a graph of torch.compile"
    (source,) = program.sources
    assert source.lines[0] == "def layer(x, w):"
    assert {op.place.text for op in program.ops} == {line.strip() for line in source.lines[1:]}
    assert program.materialized[0].place.text == "z = w * 2  # materializes"


def test_other_threads_are_heard(collector):
    fns = lambda x: x * 2, lambda x: x - 1, lambda x: x.sin(), lambda x: x[0]
    compiled = [desugar.compile(fn, backend="eager") for fn in fns]
    with collector.collecting():
        threads = [threading.Thread(target=fn, args=(torch.ones(2),)) for fn in compiled]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(collector.report("test").programs) == 4


def test_a_fallback_in_a_pool_of_threads_is_on_no_line_of_the_standard_librarys(collector):
    with collector.collecting(), ThreadPoolExecutor(1) as pool:
        pool.submit(torch.neg, make_weight()).result()
    (found,) = collector.report("").materialized
    assert found.op == "aten.neg.default" and found.place is None


def test_nothing_is_left_behind(collector):
    watchers = len(strict_mode.watchers)
    collect(collector, (make_x(), make_weight()))
    assert len(strict_mode.watchers) == watchers
    torch.compiler.reset()  # functions of one code share their programs
    compiled = desugar.compile(layer, backend="eager")
    compiled(make_x(), make_weight())
    assert "left out" not in compiled.programs[0].source
    assert len(collector.report("test").programs) == 1


def test_a_terminal_is_not_flooded_with_fallbacks():
    found = tuple(Materialized("A", f"aten.op{n}.default", None, count=n) for n in range(1, 31))
    text = render_report_text(Report("t", (), found))
    assert text.count("materialized: aten.") == 20 and "materialized: 10 more" in text
    assert "aten.op30.default" in text and "aten.op1.default" not in text


# ---- what was not compiled -------------------------------------------------------------------------------------


def breaks_in_a_loop(x):
    for _ in range(2):
        x = x * 2
        torch._dynamo.graph_break()
    return x


def scaled(x, factor: str):
    return x * len(factor)


@pytest.mark.slow
def test_graph_breaks_and_functions_that_ran_in_eager_mode_are_listed(collector):
    desugar.compile(breaks, backend="eager")(torch.ones(4))  # before it listens
    with collector.collecting():
        desugar.compile(breaks_in_a_loop, backend="eager")(torch.ones(2))
        during = collector.report("test")
        desugar.compile(breaks, backend="eager")(torch.ones(3))
        torch.compile(breaks_in_a_loop, backend="aot_eager")(torch.ones(3))
    desugar.compile(breaks_in_a_loop, backend="eager")(torch.ones(4))  # after it listened
    report = collector.report("test")
    assert len(during.not_compiled) == 1 and not during.breaks and not during.programs
    assert len(report.not_compiled) == 1 and report.not_compiled[0].startswith(
        "breaks_in_a_loop was not compiled: "
    )
    assert "test_collector.py:" in report.not_compiled[0] and "graph_break()" in report.not_compiled[0]
    (found,) = report.breaks
    assert "test_collector.py:" in found and "graph_break()" in found
    text = render_report_text(report)
    assert f"not compiled: {report.not_compiled[0]}\n" in text and f"graph break: {found}\n" in text
    assert json.loads(json.dumps(report.to_dict()))["breaks"] == [found]


def test_a_function_beyond_the_limit_of_recompilations_is_listed(collector):
    compiled = desugar.compile(scaled, backend="eager")
    with torch._dynamo.config.patch(recompile_limit=2), collector.collecting():
        for number in range(1, 5):
            compiled(torch.ones(2), "x" * number)
    report = collector.report("test")
    assert len(report.programs) == 2
    (found,) = report.not_compiled
    assert found.startswith("scaled was not compiled: ") and "limit" in found


# ---- names of programs ---------------------------------------------------------------------------------------


def titles(fn, *calls, **options):
    compiled, collector = desugar.compile(fn, **{"backend": "eager"} | options), Collector()
    with collector.collecting():
        for call in calls:
            call(compiled)
    return [program.title for program in collector.report("").programs]


def of_layer(x=make_x, w=make_weight, around=contextlib.nullcontext):
    return lambda f: around()(f)(x(), w()) if around is torch.no_grad else f(x(), w())


def in_a_range(x, k):
    return x * 2 if k <= 2 else x + k


LINE = breaks.__code__.co_firstlineno
TITLES = {
    "one program": (layer, [of_layer()], ["layer"]),
    "metadata": (
        layer,
        [of_layer(), of_layer(w=lambda: make_weight(axis=1))],
        ["layer, w.axis = 0", "layer, w.axis = 1"],
    ),
    "dtype": (
        layer,
        [of_layer(), of_layer(lambda: make_x().double())],
        ["layer, x.dtype = float32", "layer, x.dtype = float64"],
    ),
    "mode": (
        layer,
        [of_layer(), of_layer(around=torch.no_grad)],
        ["layer, with gradients", "layer, gradients = off"],
    ),
    "backward": (
        layer,
        [of_layer(), of_layer(lambda: make_x().detach())],
        ["layer, x.requires_grad = True", "layer, x.requires_grad = False"],
    ),
    "size": (
        nn.Linear(3, 3),
        [lambda f: f(torch.ones(2, 3)), lambda f: f(torch.ones(5, 3))],
        ["Linear, input.size(0) = 2", "Linear, input.size(0) = any"],
    ),
    "value": (
        Net(),
        [lambda f, n=n: f(torch.ones(2, 3), scale=n) for n in (2, 3)],
        ["Net, scale = 2", "Net, scale = 3"],
        {"dynamic": False},
    ),
    "range": (
        in_a_range,
        [lambda f, k=k: f(torch.ones(3), k) for k in range(5)],
        ["in_a_range, k = 0", "in_a_range, where k <= 2", "in_a_range, where 3 <= k"],
    ),
    "lines": (breaks, [lambda f: f(torch.ones(2))], [f"breaks, line {LINE + n}" for n in (1, 3)]),
}


@pytest.mark.parametrize("name", TITLES)
def test_programs_of_one_function_are_named_by_what_differs(name):
    fn, calls, want, *options = TITLES[name]
    assert titles(fn, *calls, **dict(*options)) == want


def program(name="f", **facts):
    return Program(name, "first call", "eager", 0.0, **facts)


@pytest.mark.parametrize(
    ("programs", "labels"),
    [
        *([[program()] * count, [f"f, {n} of {count}" for n in range(1, count + 1)]] for count in (2, 5)),
        ([program(error="it fails\nhere"), program("g")], ["f", "g"]),
        ([program(), program(error="it fails\nhere"), program("g")], ["f, 1 of 2", "f, error it fails", "g"]),
    ],
)
def test_what_is_the_same_is_numbered(programs, labels):
    assert [one.title for one in name_apart(programs)] == labels


def test_no_two_are_called_the_same():
    labels = [
        one.title for one in name_apart([program(failed=(f"n: expected 0, got {n % 3}",)) for n in range(7)])
    ]
    assert len(set(labels)) == len(labels)
