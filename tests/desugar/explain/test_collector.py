"""The collector of a running script: programs, names, reasons for compilations, and times of calls and guards."""

from __future__ import annotations

import contextlib
import json
import sys
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
from tests.doors import by_desugar, by_torch
from tests.tables import giving


def breaks(x):
    y = x * 2
    torch._dynamo.graph_break()
    return y + 1


@pytest.fixture
def collector():
    return Collector()


def collect(collector, *calls, way=None):
    """Programs that calls of `layer` make; a call is a tuple of arguments, or a function of the compiled layer."""
    compiled = way or desugar.compile(layer, backend="eager")
    with collector.collecting():
        for call in calls:
            call(compiled) if callable(call) else compiled(*call)
    return collector.report("test").programs


def in_threads(run):
    """Runs each function in a thread of its own."""
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, (lambda x: x * 2, lambda x: x - 1, lambda x: x.sin(), lambda x: x[0])))


def by_desugar_in_threads(collector):
    with collector.collecting():
        in_threads(lambda fn: by_desugar(fn)(torch.ones(2)))


def negated_in_a_pool(collector):
    with collector.collecting(), ThreadPoolExecutor(1) as pool:
        pool.submit(torch.neg, W).result()


def source_of(program):
    """The first line of a program's function, and whether its other lines are the lines of its ops."""
    (source,) = program.sources
    lines = {line.strip() for line in source.lines[1:]}
    return source.lines[0], {op.place.text for op in program.ops} == lines


W = make_weight()

# Each case: a function that runs calls, a function that reads the report, and the expected value.
COLLECTED = {
    "calls are counted and timed": (
        lambda collector: collect(collector, *[(make_x(), W)] * 4),
        lambda report: [(p.calls, p.cost.rounds, 0 < p.cost.graph <= p.cost.call) for p in report.programs],
        [(4, 3, True)],
    ),
    "fallbacks are counted by line, traced and eager": (
        lambda collector: collect(collector, (make_x(), W), *[lambda _: W + 1] * 3),
        lambda report: {(m.traced, m.op, m.count) for m in report.materialized},
        {(True, "aten.mul.Tensor", 1), (False, "aten.add.Tensor", 3)},
    ),
    "each graph of a function that breaks": (
        lambda collector: collect(collector, *[(torch.ones(2),)] * 3, way=by_desugar(breaks)),
        lambda report: [(p.name, p.calls, [op.place.text for op in p.ops]) for p in report.programs],
        [("breaks", 3, ["y = x * 2"]), ("breaks", 3, ["return y + 1"])],
    ),
    "programs behind Dynamo": (
        lambda collector: collect(
            collector, lambda f: f(make_x(), W).sum().backward(), (make_x(), W), way=by_torch(layer)
        ),
        lambda report: [(p.name, p.calls, p.reason, *source_of(p)) for p in report.programs],
        [("layer", 2, "a graph of torch.compile", "def layer(x, w):", True)],
    ),
    "fallbacks behind Dynamo": (
        lambda collector: collect(collector, (make_x(), W), way=by_torch(layer)),
        lambda report: [p.materialized[0].place.text for p in report.programs],
        ["z = w * 2  # materializes"],
    ),
    "other threads": (by_desugar_in_threads, lambda report: len(report.programs), 4),
    "a fallback in a pool of threads is on no line of the standard library's": (
        negated_in_a_pool,
        lambda report: [(found.op, found.place) for found in report.materialized],
        [("aten.neg.default", None)],
    ),
}


@pytest.mark.parametrize("name", COLLECTED)
def test_what_is_collected(collector, name):
    run, read, want = COLLECTED[name]
    run(collector)
    assert read(collector.report("test")) == want


METER = Meter(4, [9.0, 1.1, 1.1, 5.1, 5.1, 5.1], [1.0, 1.0, 1.0, 5.0, 1.0, 1.0])
MANY = tuple(Materialized("A", f"aten.op{n}.default", None, count=n) for n in range(1, 31))


def flooded():
    return render_report_text(Report("t", (), MANY))


test_records_made_by_hand = giving(
    {
        "the wrapper's part is that of each call": (  # the difference of the medians is 4.1
            lambda: (METER.cost.call, METER.cost.call - METER.cost.graph),
            (5.1, pytest.approx(0.1)),
        ),
        "a terminal is not flooded with fallbacks": (
            lambda: [flooded().count(part) for part in ("materialized: aten.", "materialized: 10 more")],
            [20, 1],
        ),
        "the most frequent fallbacks are shown": (
            lambda: [f"aten.op{n}.default" in flooded() for n in (30, 1)],
            [True, False],
        ),
    }
)


@pytest.mark.parametrize(
    ("text", "name", "expected", "got"),
    [
        ("x.size(0): expected 2, got 5", "x.size(0)", "2", "5"),
        ("mode: expected 'a, got b', got 'c'", "mode", "'a, got b'", "'c'"),
        ("x.size(0) <= 2; now: x.size(0) = 5", "", "", ""),
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


def test_what_fails_to_compile_is_told(collector):
    compiled = desugar.compile(lambda x: x * 2, backend="eager", strict=True)
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged)
    with collector.collecting(), pytest.raises(desugar.DesugarError):
        compiled(nested)
    (program,) = collector.report("test").programs
    assert "instead" in program.error and program.graphs == ()


def test_what_cannot_be_described_does_not_end_the_script(collector, monkeypatch):
    def fail(recording):
        raise KeyError("odd")

    monkeypatch.setattr(sys.modules[Collector.__module__], "collect_program", fail)
    (program,) = collect(collector, (make_x(), make_weight()))
    assert program.name == "layer" and "KeyError: 'odd'" in program.error and program.calls == 1


def test_nothing_is_left_behind(collector):
    watchers = len(strict_mode.watchers)
    collect(collector, (make_x(), make_weight()))
    assert len(strict_mode.watchers) == watchers
    torch.compiler.reset()  # functions of one code share their programs
    compiled = desugar.compile(layer, backend="eager")
    compiled(make_x(), make_weight())
    assert "left out" not in compiled.programs[0].source
    assert len(collector.report("test").programs) == 1


# ---- functions that are not compiled ---------------------------------------------------------------------------


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
        ["layer, with gradients", "layer, with no gradients"],
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
    "lines": (
        breaks,
        [lambda f: f(torch.ones(2))],
        [f"breaks, line {breaks.__code__.co_firstlineno + n}" for n in (1, 3)],
    ),
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
        ([program(failed=(f"n: expected 0, got {n % 3}",)) for n in range(7)], None),
    ],
)
def test_what_is_the_same_is_numbered(programs, labels):
    titles = [one.title for one in name_apart(programs)]
    assert titles == (labels or titles) and len(set(titles)) == len(titles)
