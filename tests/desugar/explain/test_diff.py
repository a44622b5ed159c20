"""What two reports differ in, and files that are no report."""

from __future__ import annotations

import json

import pytest
import torch

import desugar
from desugar.explain.collector import Collector
from desugar.explain.diff import compare_reports
from desugar.explain.diff_text import render_diff
from desugar.explain.read import ReportError, read_report
from tests.desugar.explain.subjects import layer, make_weight, make_x


def written(path, *calls, fn=layer, **options):
    """The file of a report about the calls of one function."""
    torch.compiler.reset()  # functions of one code share their programs
    collector, compiled = Collector(), desugar.compile(fn, **{"backend": "eager"} | options)
    with collector.collecting():
        for args in calls:
            compiled(*args)
    path.write_text(json.dumps(collector.report(path.stem).to_dict()))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("reports")


@pytest.fixture(scope="module")
def before(folder):
    return written(folder / "before.json", (make_x(), make_weight()), (make_x(5), make_weight()))


def compared(one, other):
    return compare_reports(read_report(one), read_report(other))


# -------------------------------------------------------------------------------------------- what differs


def changed(path, target, change):
    """Writes a report anew, with a change of its data."""
    data = json.loads(path.read_text())
    change(data["programs"])
    target.write_text(json.dumps(data))
    return target


def test_addresses_in_dynamos_names_do_not_count(folder, before):
    def with_guard(kept):
        def change(programs):
            programs[0]["guards"].append(programs[0]["guards"][0] | {"text": f"a.Tensor is {kept}"})

        return changed(before, folder / f"{kept}.json", change)

    names = "_139918512325792_c4.Tensor", "_139643903919024_c5.Tensor", "_kept_by_me.Tensor"
    paths = [with_guard(name) for name in names]
    assert not compared(*paths[:2]).differs
    assert compared(*paths[1:]).differs


def test_programs_come_and_go(folder, before):
    other = written(folder / "other.json", (make_x(), make_weight()), (make_x(), make_weight(axis=1)))
    found = compared(before, other)
    assert found.differs and len(found.programs) == 2
    one = written(folder / "one.json", (make_x(), make_weight()))
    assert compared(before, one).removed == ("layer, x.size(0) = any",)
    assert compared(one, before).added == ("layer, x.size(0) = any",)
    assert "\n- layer, x.size(0) = any\n" in render_diff(compared(before, one))


def test_ops_guards_fallbacks_and_calls_of_a_program(folder):
    def first(x, w, scale):
        return x @ w.qdata.float().T * scale

    def second(x, w, scale):
        return (x @ w.qdata.float().T).relu() * scale + (w * 2).sum()

    second.__qualname__ = first.__qualname__
    x, w = make_x().detach(), make_weight()
    one = written(folder / "first.json", (x, w, 2), fn=first)
    other = written(folder / "second.json", (x, w, 3), (x, w, 3), fn=second)
    (program,) = compared(one, other).programs
    changes = {change.what: change for change in program.changes}
    assert ("torch.Tensor.relu(Tensor[2, 4])", 1) in changes["ops"].added
    assert ("forward: aten.relu.default", 1) in changes["graph ops"].added
    assert ("scale == 2", 1) in changes["guards"].removed
    assert ("scale == 3", 1) in changes["guards"].added
    assert changes["materializing fallbacks"].removed == ()
    assert ("calls", "1", "2") in program.values
    text = render_diff(compared(one, other))
    assert "      - scale == 2\n" in text and "calls: 1 -> 2" in text


@pytest.mark.slow
def test_many_lines_of_repeated_layers_are_one(folder):
    layers = [torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(n))) for n in (4, 10)]
    one, other = (
        written(folder / f"layers{n}.json", (torch.ones(1, 4),), fn=net) for n, net in enumerate(layers)
    )
    text = render_diff(compared(one, other))
    assert "+ self[4 … 9].weight: Tensor float32[4, 4] on cpu requires_grad  x 6" in text


def test_an_explanation_is_a_report_of_one_program(folder):
    path = folder / "explanation.json"
    path.write_text(desugar.explain(layer, make_x(), make_weight()).to_json())
    found = compared(path, path)
    assert not found.differs and [program.label for program in found.programs] == ["layer"]


def test_times_say_by_how_much(folder, before):
    def slower(programs):
        for program in programs:
            program["cost"]["call"] *= 3
            program["worth"] = {
                "ways": [["eager", 1.0], ["torch.compile", None]],
                "verdict": "3 calls: right",
            }

    path = changed(before, folder / "slower.json", slower)
    text = render_diff(compared(before, path))
    assert "3 times slower" in text and "a call made again, eager: not measured -> 1 s" in text
    assert "3 times faster" in render_diff(compared(path, before))


def test_what_other_ways_do_is_told_without_figures(folder, before):
    said = [
        "2 calls compared; torch.compile: right; desugar.compile: rounding (call 1 of 2: x[0]: 1, expected 2 (off))",
        "2 calls compared; torch.compile: right; desugar.compile: rounding (call 2 of 2: x[3]: 3, expected 2 (off))",
        "2 calls compared; torch.compile: error (ValueError: no); desugar.compile: right; 2 programs together",
    ]
    paths = [
        changed(
            before,
            folder / f"said-{number}.json",
            lambda programs, text=text: programs[0].update(worth={"ways": [["eager", 1.0]], "verdict": text}),
        )
        for number, text in enumerate(said)
    ]
    assert not compared(*paths[:2]).differs and not compared(before, paths[0]).differs
    text = render_diff(compared(*paths[1:]))
    assert (
        "in other ways: 2 calls compared; torch.compile: right; desugar.compile: rounding -> "
        "2 calls compared; torch.compile: error; desugar.compile: right; 2 programs together"
    ) in text


# ------------------------------------------------------------------------------------------- what is no report


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "it cannot be read: No such file or directory"),
        ("<!doctype html>", "got a file that is no JSON"),
        ("[]", "got a list"),
        ('{"a": 1, "b": 2}', "got a dictionary without programs; its keys: a, b"),
        ('{"title": "t", "programs": [{"name": "f"}]}', "another release of desugar"),
        ('{"title": "t", "programs": [3]}', "another release of desugar"),
    ],
)
def test_a_file_that_is_no_report(tmp_path, text, says):
    path = tmp_path / "file.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ReportError, match=r"expected .*file\.json to be the JSON that") as raised:
        read_report(path)
    assert says in str(raised.value)
