"""The command line: its output, its files, and its exit codes."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="needs typer")
from typer.testing import CliRunner

from desugar import __main__ as command, _torch as torch_private
from desugar.cli.commands import app
from desugar.cli.progress import progress

HERE = Path(__file__).parent
SUBJECTS = str(HERE / "subjects.py")

TARGETS = """
import torch
from torch import nn
import desugar

def add(x, y):
    return x + y

def add_inputs():
    return torch.ones(2)

def nothing(x):
    return x

def nothing_inputs():
    return []

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        return self.linear(x)

def Net_inputs():
    return torch.ones(3, 2)

compiled = desugar.compile(add, backend="eager")

def compiled_inputs():
    return torch.ones(2), torch.ones(2)
"""


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Returns a function that runs a command; in it, names in capitals are files."""
    monkeypatch.syspath_prepend(str(HERE))
    files = {"SCRIPT": tmp_path / "script.py", "TARGETS": tmp_path / "targets_of_explain.py"}
    files["TARGETS"].write_text(TARGETS)
    files |= {"SUBJECTS": SUBJECTS, "FOLDER": tmp_path}

    def run(*arguments):
        for name, path in files.items():
            arguments = [argument.replace(name, str(path)) for argument in arguments]
        return CliRunner().invoke(app, arguments)

    return run


def words(result):
    return " ".join(result.output.replace("│", " ").split())


# -------------------------------------------------------------------------------------------------- mistakes

OVERWRITES = "so that it is not overwritten"
MISTAKES = [
    ("explain nothing", "expected MODULE:NAME"),
    ("explain no_such_module:f", "there is no module 'no_such_module'"),
    ("explain no_such_file.py:f", "there is no file"),
    ("explain SUBJECTS:no_such_name", "has no 'no_such_name'"),
    ("explain SUBJECTS:effects", "it takes x, y"),
    ("explain SUBJECTS:torch.pi", "expected a function or module, got float"),
    ("explain SUBJECTS:layer --backend fast", "fast"),
    (
        "explain SUBJECTS:twice --inputs torch.pi",
        "expected a function that makes a value, got torch.pi, a float",
    ),
    (
        "explain SUBJECTS:twice --inputs layer",
        "layer takes x, w; expected a function that takes nothing",
    ),
    ("explain SUBJECTS:twice --inputs no_such_name", "has no 'no_such_name'"),
    ("explain TARGETS:add", "add_inputs makes arguments that add("),
    ("explain TARGETS:add", "argument: 'y'"),
    ("explain TARGETS:nothing", "nothing_inputs makes arguments that nothing("),
    ("explain TARGETS:nothing", "argument: 'x'"),
    ("explain SUBJECTS:raises --html FOLDER/none/out.html", "folder"),
    ("explain SUBJECTS:raises --html FOLDER", "folder"),
    ("explain SCRIPT:f --html SCRIPT", OVERWRITES),
    ("report -o SCRIPT SCRIPT", OVERWRITES),
    ("report --json SCRIPT SCRIPT", OVERWRITES),
    ("report -o FOLDER/a.html --json FOLDER/a.html SCRIPT", "--report and --json both name"),
    ("report -o FOLDER/none/out.html SCRIPT", "no folder"),
    ("report FOLDER/none.py", ""),
    ("coverage SUBJECTS:layer", ""),
    ("check SUBJECTS:torch.pi", ""),
    ("check SUBJECTS:layer", ""),
    ("check SUBJECTS:no_such_name", ""),
    ("check SUBJECTS:no_inputs", "to make a tensor subclass"),
    ("bench SUBJECTS:no_inputs --backend fast", ""),
]


@pytest.mark.parametrize(("command", "says"), MISTAKES)
def test_a_mistake_on_the_command_line_is_exit_code_2(run, tmp_path, command, says):
    (tmp_path / "script.py").write_text("print('ran')")
    result = run(*command.split())
    assert result.exit_code == 2 and says in words(result)
    assert (tmp_path / "script.py").read_text() == "print('ran')" and "ran" not in result.stdout.split()


BRANCH = "import torch\ndef f(x): return x if x.sum() > 0 else -x\ndef f_inputs(): return torch.ones(2)\n"
NESTED = (
    "import torch\ndef f(x): return x * 2\n"
    "def f_inputs(): return torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)\n"
)
MISSING = "import module_that_is_not_there"
RAISES = "def f(x): return x\ndef f_inputs(): raise KeyError('gone')"
ERRORS = [
    (
        "explain",
        MISSING,
        ["ModuleNotFoundError: No module named 'module_that_is_not_there'", "script.py"],
    ),
    ("explain", "def f(:", ["SyntaxError", "script.py"]),
    ("explain", RAISES, ["KeyError: 'gone'", "script.py"]),
    (
        "explain",
        "import torch\ndef f(): return torch.ones(2) @ torch.ones(7)",
        ["RuntimeError", "script.py"],
    ),
    ("check", "def f():\n    raise ValueError('no data today')", ["no data today", "script.py"]),
    *(
        (command, "import sys\nsys.exit(0)", ["called sys.exit(0)"])
        for command in ("explain", "check", "coverage", "compare")
    ),
]


@pytest.mark.parametrize(("command", "text", "says"), ERRORS)
def test_an_error_of_the_users_own_code_is_shown_and_is_exit_code_1(run, tmp_path, command, text, says):
    (tmp_path / "script.py").write_text(text + "\n")
    result = run(command, "SCRIPT:f")
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit)
    assert [part for part in says if part not in result.output] == []
    assert not any(own in result.output for own in ("cli/commands.py", "typer"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (BRANCH, ['script.py", line 2, in f', "Hint: "]),
        (NESTED, ["cannot be desugared: ", "instead"]),
    ],
)
def test_what_cannot_be_desugared_is_exit_code_1(run, tmp_path, text, says):
    (tmp_path / "script.py").write_text(text)
    result = run("explain", "SCRIPT:f")
    assert result.exit_code == 1 and [part for part in says if part not in result.output] == []


# ------------------------------------------------------------------------------------------------- explain


@pytest.mark.slow
def test_explain_prints_each_repeated_layer_if_asked_to(run, tmp_path):
    path = tmp_path / "deep.py"
    path.write_text(
        "import torch\nnet = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(9)))\n"
        "def make(): return torch.ones(1, 2)\n"
    )
    short, whole = (run("explain", f"{path}:net", "--inputs", "make", *more) for more in ((), ("--whole",)))
    assert "x 9, self[0] … self[8]; the first of them:" in short.output
    assert "\nself[8].bias: Tensor" in whole.output and "\nself[8].bias: Tensor" not in short.output


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        slow("explain SUBJECTS:layer", "== Line by line =="),
        ("explain TARGETS:Net", "aten"),
        ("explain TARGETS:compiled", "aten"),
        slow("coverage SUBJECTS:Int8Weight", "ops of aten"),
        slow("doctor", "a training step gives eager mode's gradients"),
    ],
)
def test_what_a_command_prints(run, command, says):
    result = run(*command.split())
    assert result.exit_code == 0 and says in result.output and "broken" not in result.output


def of_other_ways(data):
    names, seconds = zip(*data["worth"]["ways"], strict=True)
    return names, min(seconds) > 0, data["worth"]["verdict"].partition("; desugar")[0]


WAYS = ("eager", "torch.compile", "stock, tuned", "desugar.compile")


@pytest.mark.parametrize(
    ("command", "read", "want"),
    [
        ("explain SUBJECTS:twice --inputs make_x", lambda data: data["inputs"][0]["name"], "x"),
        slow("explain SUBJECTS:layer", lambda data: data["worth"], None),
        slow(
            "explain SUBJECTS:layer --compare",
            of_other_ways,
            (WAYS, True, "results of 3 calls compared; torch.compile: right; stock, tuned: right"),
        ),
        slow("coverage SUBJECTS:Int8Weight", lambda steps: steps["aten.mul.Tensor"], "materialize"),
    ],
)
def test_what_a_command_writes_as_json(run, command, read, want):
    assert read(json.loads(run(*command.split(), "--json").stdout)) == want


def test_explain_writes_a_page(run, tmp_path):
    assert run("explain", "SUBJECTS:no_inputs", "--html", "FOLDER/page.html").exit_code == 0
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")


# -------------------------------------------------------------------------------------------------- report

SCRIPT = """
import sys, torch, desugar
f = desugar.compile(lambda x: x * 2, backend="eager")
f(torch.ones(2)); f(torch.ones(3)); f(torch.ones(3))
print(sys.argv[1:], __name__, __file__)
"""


TOTAL = """
total = torch.zeros(2)
g = desugar.compile(lambda t: t.add_(1), backend='eager')
g(total)
print('total', total.tolist())
import atexit
atexit.register(lambda: print('at the end', total.tolist()))
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def report(script, *arguments, options=(), code=0):
    """Runs the command in a new process, since a script may change the process that runs it."""
    command = [sys.executable, "-m", "desugar", "report", *options, str(script), *arguments]
    done = subprocess.run(
        command,
        cwd=script.parent,
        env={"PYTHONPATH": str(Path(__file__).parents[3]), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done


def test_report_runs_a_script_with_its_arguments(script, tmp_path):
    done = report(script, "--steps", "3", "one", options=("-o", "out.html", "--json", "out.json"))
    assert done.stdout.split("\n")[0] == f"['--steps', '3', 'one'] __main__ {script}"
    assert "script.py: 2 programs" in done.stderr and "wrote out.html" in done.stderr
    data = json.loads((tmp_path / "out.json").read_text())
    assert [program["calls"] for program in data["programs"]] == [1, 2]
    assert data["programs"][1]["failed"] == ["x.size(0): expected 2, got 3"]
    assert (tmp_path / "out.html").read_text().startswith("<!doctype html>")


@pytest.mark.slow
def test_what_stands_after_the_script_is_the_scripts(script, tmp_path):
    own = ["-o", "own.html", "--json", "own.json", "--device", "mine", "--report", "--", "-o", "x"]
    done = report(script, *own, options=("--json", "ours.json", "--"))
    assert done.stdout.split("\n")[0] == f"{own} __main__ {script}"
    assert {path.name for path in tmp_path.iterdir()} == {"script.py", "report.html", "ours.json"}


@pytest.mark.slow
def test_report_times_calls_in_other_ways_if_asked_to(script, tmp_path):
    script.write_text(SCRIPT + TOTAL)
    done = report(script, options=("--compare", "--json", "out.json"))
    assert "total [1.0, 1.0]" in done.stdout and "at the end [1.0, 1.0]" in done.stdout
    programs = json.loads((tmp_path / "out.json").read_text())["programs"]
    assert [program["calls"] for program in programs] == [1, 2, 1], "calls that are made again do not count"
    for program in programs:
        assert tuple(name for name, _ in program["worth"]["ways"]) == WAYS
        assert program["worth"]["verdict"] == "results of 2 calls compared; " + "; ".join(
            f"{way}: right" for way in WAYS[1:]
        )
        assert f"was it worth it: {program['worth']['answer']}; eager " in done.stderr
        assert tuple(name for name, nbytes in program["worth"]["memory"] if nbytes) == WAYS
    assert "worth it" not in report(script, options=("--json", "out.json")).stderr
    assert json.loads((tmp_path / "out.json").read_text())["programs"][0]["worth"] is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ending", "code", "says"),
    [
        ("raise SystemExit(3)", 3, ""),
        ("raise ValueError('odd')", 1, "ValueError: odd"),
        ("sys.exit('stop')", 1, "stop"),
    ],
)
def test_a_script_that_fails_gets_its_report_and_its_exit_code(script, tmp_path, ending, code, says):
    script.write_text(SCRIPT + ending + "\n")
    done = report(script, code=code)
    assert says in done.stderr and "explain/script.py" not in done.stderr
    assert (tmp_path / "report.html").is_file()


@pytest.mark.slow
def test_a_script_that_goes_elsewhere_has_its_report_where_it_was_asked_for(script, tmp_path):
    (tmp_path / "below").mkdir()
    script.write_text("import os\n" + SCRIPT + "os.chdir('below')\n")
    report(script, options=("-o", "out.html", "--json", "out.json"))
    assert {path.name for path in tmp_path.iterdir()} >= {"out.html", "out.json"}


# ---------------------------------------------------------------------------------------------------- diff


# ------------------------------------------------------------------------------------------------ the others


OF_CHECK = "check SUBJECTS:make_weight --level smoke --json FOLDER/a.json --junit FOLDER/a.xml"


@pytest.mark.parametrize(("options", "code"), [("--only views", 0), ("--only values --reference twice", 1)])
def test_check_tells_by_its_exit_code_and_writes_files(run, tmp_path, options, code):
    result = run(*f"{OF_CHECK} {options}".split())
    assert result.exit_code == code, result.output
    assert f"keeps {2 - code} promises" in result.output and "in " in result.output
    found = json.loads((tmp_path / "a.json").read_text())
    assert [o["promise"] for o in found["outcomes"]] == ["readable", options.split()[1]]
    assert f'failures="{code}"' in (tmp_path / "a.xml").read_text()


def test_long_work_says_on_a_terminal_what_it_is_at(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with progress() as tell:
        tell("promise 1 of 2: views")
        tell("promise 2 of 2: copies")
    shown = capsys.readouterr().err
    assert "promise 1 of 2: views ..." in shown and shown.endswith("\r\x1b[2K")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    with progress() as tell:
        tell("promise 1 of 2: views")
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_doctor_tells_of_a_release_that_lacks_a_name(run, monkeypatch):
    monkeypatch.setitem(torch_private._LAZY, "no_such_name", "torch")
    monkeypatch.setattr(torch_private, "NAMES", (*torch_private.NAMES, "no_such_name"))
    result = run("doctor")
    assert result.exit_code == 1 and "no_such_name" in result.output


def test_without_typer_it_says_what_to_install(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "typer" else find(name))
    with pytest.raises(SystemExit, match=r"pip install 'torch-desugar\[cli\]'"):
        command.main()


def test_help_is_printed_whole(run):
    result = run("--help")
    assert result.exit_code == 0 and "..." not in result.output.replace("[ARGS]...", "")
    assert all(
        name in result.output for name in ("explain", "report", "coverage", "check", "compare", "doctor")
    )
