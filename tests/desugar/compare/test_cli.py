"""The command in real processes: its output, its files, and its exit codes."""

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="needs typer")
from typer.testing import CliRunner

from desugar.cli import comparing
from desugar.cli.commands import app
from desugar.compare.records import Request
from desugar.compare.run import compare
from tests.desugar.compare.test_text import comparison

SUBJECTS = str(Path(__file__).parent / "subjects.py")
QUICK = ("--backend", "eager", "--rounds", "2", "--calls", "1")


@pytest.fixture
def run():
    return lambda *arguments: CliRunner().invoke(app, list(arguments))


def words(text):
    return " ".join(text.replace("│", " ").split())


# ----------------------------------------------------------------------------------------- with real processes


@pytest.mark.slow
def test_a_comparison_is_printed_and_written(run, tmp_path):
    data = tmp_path / "a.json"
    result = run("compare", f"{SUBJECTS}:pairs", *QUICK, "--json", str(data))
    assert result.exit_code == 0, result.output  # ours are right, stock is not
    found = json.loads(data.read_text())
    assert {way["name"]: way["verdict"]["state"] for way in found["ways"]} == {
        "eager": "judge",
        "torch.compile": "wrong",
        "stock, tuned": "wrong",
        'backend="desugar"': "right",
        "desugar.compile": "right",
    }
    for way in found["ways"]:
        assert way["first_call"] > 0 and way["call"]["median"] > 0 and way["ratio"]["median"] > 0
        assert way["programs"]["graphs"] == (way["name"] != "eager")
    assert "  wrong: call 1 of 1: result[0].first[0]: " in result.stdout


@pytest.mark.slow
def test_where_eager_mode_differs_from_itself_no_way_is_called_wrong(run):
    result = run("compare", f"{SUBJECTS}:of_the_process", *QUICK)
    assert result.exit_code == 1 and "wrong" not in result.stdout
    assert result.stdout.count("unknown: eager mode does not do the same twice: call 1 of 1: result") == 4


@pytest.mark.slow
def test_a_way_whose_process_ends_is_an_error_and_the_others_stay(run):
    result = run("compare", f"{SUBJECTS}:ends_when_compiled", *QUICK)
    assert result.exit_code == 1
    assert "error: the process ended with exit code 7; it last printed: last words" in result.stdout
    (eager,) = [line for line in result.stdout.splitlines() if line.startswith("eager  ")]
    assert "judge" in eager and "s" in eager


@pytest.mark.sweep(14)
@pytest.mark.parametrize(
    ("target", "options", "code", "says"),
    [
        ("raises", (), 1, "ValueError: odd"),
        ("hangs", ("--timeout", "3"), 1, "no answer within 3 s; --timeout waits longer"),
        ("no_such_name", (), 2, "has no 'no_such_name'"),
        (
            "Wide",
            (),
            2,
            "Wide is made with in_features, out_features: name a function that takes nothing and returns the module",
        ),
        ("double", ("--train",), 2, "leave --train out"),
        (
            "yields",
            (),
            2,
            "not compared: result is of type generator, whose code has not run",
        ),
        (
            "waits",
            (),
            2,
            "not compared: result[0] is of type coroutine, whose code has not run",
        ),
    ],
)
def test_where_eager_mode_fails_there_is_no_table(run, target, options, code, says):
    result = run("compare", f"{SUBJECTS}:{target}", *QUICK, *options)
    assert result.exit_code == code and says in words(result.output)
    assert "desugar.compile" not in result.stdout and "processes.py" not in result.output


@pytest.mark.slow
def test_with_inductor_a_training_step_is_right():
    found = compare(Request(f"{SUBJECTS}:Net", train=True), rounds=3)
    assert [way.verdict.state for way in found.ways[1:]] == ["right"] * 4
    assert found.rounds == 3 and all(way.first_call > way.call.median for way in found.ways[1:])


# ----------------------------------------------------------------------------------- before anything is run


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--backend", "fast"), "fast"),
        (("--train", "--no-grad"), "expected one of them"),
        (("--json", "none/a.json"), "there is no folder"),
        (("--json", SUBJECTS), "is not a .json file; expected another name"),
    ],
)
def test_a_wrong_option_is_a_usage_error(run, monkeypatch, options, says):
    monkeypatch.setattr(comparing, "compare", lambda *_, **options: pytest.fail("it was run"))
    result = run("compare", f"{SUBJECTS}:double", *options)
    assert result.exit_code == 2 and says in words(result.output)


# --------------------------------------------------------------------------------------------------- showing


def test_an_interruption_is_said_in_one_line(run, monkeypatch):
    def interrupt(*_, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(comparing, "compare", interrupt)
    result = run("compare", f"{SUBJECTS}:double")
    assert result.exit_code == 130 and "interrupted; the processes have been ended" in result.output


def test_a_file_that_refuses_is_said_after_the_table(run, monkeypatch):
    monkeypatch.setattr(comparing, "compare", lambda *_, **options: comparison())
    monkeypatch.setattr(comparing, "check_outputs", lambda *_: None)
    result = run("compare", f"{SUBJECTS}:double", "--json", "no_such_folder/a.json")
    assert result.exit_code == 1 and "result  1st call" in result.stdout
    assert "no_such_folder/a.json could not be written: No such file or directory" in words(result.output)


@pytest.mark.parametrize("width", [80, 120])
def test_a_terminal_has_a_table_that_fits(monkeypatch, capsys, width):
    pytest.importorskip("rich", reason="needs rich")
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    comparing.show(comparison())
    shown = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    assert max(map(len, shown.splitlines())) <= width
    assert "0.50 ± 0.01" in shown  # no cell is wrapped
    rows = [line for line in shown.splitlines() if line.strip().startswith("eager ")]
    assert len(rows) == 1 and "40 MiB" in rows[0]
