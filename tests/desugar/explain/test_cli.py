"""The command line: what it prints, where, and the exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="needs typer")
from typer.testing import CliRunner

from desugar.cli.commands import app

HERE = Path(__file__).parent
SUBJECTS = str(HERE / "subjects.py")


@pytest.fixture
def run(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))

    def run(*arguments):
        return CliRunner().invoke(app, list(arguments))

    return run


# ------------------------------------------------------------------------------------------------- explain


@pytest.mark.slow
def test_explain_finds_inputs_beside_the_function(run):
    result = run("explain", f"{SUBJECTS}:layer")
    assert result.exit_code == 0 and "== Line by line ==" in result.output


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


def test_explain_takes_inputs_by_name_and_writes_json_or_a_page(run, tmp_path):
    result = run("explain", f"{SUBJECTS}:twice", "--inputs", "make_x", "--json")
    assert json.loads(result.stdout)["inputs"][0]["name"] == "x"
    page = tmp_path / "page.html"
    assert run("explain", f"{SUBJECTS}:no_inputs", "--html", str(page)).exit_code == 0
    assert page.read_text().startswith("<!doctype html>")


@pytest.mark.slow
def test_explain_runs_the_call_in_other_ways_if_asked_to(run):
    result = run("explain", f"{SUBJECTS}:layer", "--compare", "--json")
    worth = json.loads(result.stdout)["worth"]
    assert [name for name, seconds in worth["ways"]] == ["eager", "torch.compile", "desugar.compile"]
    assert all(seconds > 0 for _, seconds in worth["ways"])
    assert worth["verdict"].startswith("3 calls compared; torch.compile: right")
    assert "worth" not in run("explain", f"{SUBJECTS}:layer").stdout


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("nothing", "expected MODULE:NAME"),
        ("no_such_module:f", "there is no module 'no_such_module'"),
        ("no_such_file.py:f", "there is no file"),
        (f"{SUBJECTS}:no_such_name", "has no 'no_such_name'"),
        (f"{SUBJECTS}:effects", "it takes x, y"),
        (f"{SUBJECTS}:torch.pi", "expected a function or module, got float"),
    ],
)
def test_a_wrong_target_is_a_usage_error(run, target, says):
    result = run("explain", target)
    assert result.exit_code == 2
    assert says in " ".join(result.output.split())


def test_an_unknown_backend_is_a_usage_error(run):
    result = run("explain", f"{SUBJECTS}:layer", "--backend", "fast")
    assert result.exit_code == 2 and "fast" in result.output


def test_what_cannot_be_desugared_is_exit_code_1(run, tmp_path):
    path = tmp_path / "bad.py"
    path.write_text(
        "import torch\ndef f(x): return x if x.sum() > 0 else -x\ndef f_inputs(): return torch.ones(2)\n"
    )
    result = run("explain", f"{path}:f")
    assert result.exit_code == 1
    assert f'File "{path}", line 2, in f' in result.output and "Hint: " in result.output
    path.write_text(
        "import torch\ndef f(x): return x * 2\n"
        "def f_inputs(): return torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)\n"
    )
    result = run("explain", f"{path}:f")
    assert result.exit_code == 1
    assert "cannot be desugared: " in result.output and "instead" in result.output


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "import module_that_is_not_there",
            "ModuleNotFoundError: No module named 'module_that_is_not_there'",
        ),
        ("def f(:", "SyntaxError"),
        ("def f(x): return x\ndef f_inputs(): raise KeyError('gone')", "KeyError: 'gone'"),
        ("import torch\ndef f(): return torch.ones(2) @ torch.ones(7)", "RuntimeError"),
    ],
)
def test_an_error_of_the_users_own_code_is_shown_from_its_first_line(run, tmp_path, text, says):
    path = tmp_path / "broken.py"
    path.write_text(text + "\n")
    result = run("explain", f"{path}:f")
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit)
    assert says in result.output and str(path) in result.output
    assert "cli/commands.py" not in result.output and "typer" not in result.output


@pytest.mark.parametrize("command", ["explain", "check", "coverage", "bench", "compare"])
def test_code_that_exits_does_not_end_the_command_in_silence(run, tmp_path, command):
    path = tmp_path / "exits.py"
    path.write_text("import sys\nsys.exit(0)\n")
    result = run(command, f"{path}:f")
    assert result.exit_code == 1 and "called sys.exit(0)" in result.output


@pytest.mark.parametrize(
    ("factory", "says"),
    [
        ("torch.pi", "expected a function that makes a value, got torch.pi, a float"),
        ("layer", "layer takes x, w; expected a function that takes nothing"),
        ("no_such_name", "has no 'no_such_name'"),
    ],
)
def test_inputs_come_from_a_function_that_takes_nothing(run, factory, says):
    result = run("explain", f"{SUBJECTS}:twice", "--inputs", factory)
    assert result.exit_code == 2
    assert says in " ".join(result.output.split())
    assert run("check", f"{SUBJECTS}:{factory}").exit_code == 2


@pytest.mark.parametrize("name", ["none/out.html", "."])
def test_a_page_that_cannot_be_written_is_said_before_anything_runs(run, tmp_path, name):
    result = run("explain", f"{SUBJECTS}:raises", "--html", str(tmp_path / name))
    assert result.exit_code == 2 and "folder" in result.output


# -------------------------------------------------------------------------------------------------- report

SCRIPT = """
import sys, torch, desugar
f = desugar.compile(lambda x: x * 2, backend="eager")
f(torch.ones(2)); f(torch.ones(3)); f(torch.ones(3))
print(sys.argv[1:], __name__, __file__)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def report(script, *arguments, cwd, options=()):
    """In a process of its own: a script may do as it likes with the one it runs in."""
    command = [sys.executable, "-m", "desugar", "report", *options, str(script), *arguments]
    environment = {"PYTHONPATH": str(Path(__file__).parents[3]), "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def test_report_runs_a_script_with_its_arguments(script, tmp_path):
    options = ("-o", "out.html", "--json", "out.json")
    done = report(script, "--steps", "3", "one", cwd=tmp_path, options=options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == f"['--steps', '3', 'one'] __main__ {script}"
    assert "script.py: 2 programs" in done.stderr and "wrote out.html" in done.stderr
    data = json.loads((tmp_path / "out.json").read_text())
    assert [program["calls"] for program in data["programs"]] == [1, 2]
    assert data["programs"][1]["failed"] == ["x.size(0): expected 2, got 3"]
    assert (tmp_path / "out.html").read_text().startswith("<!doctype html>")


@pytest.mark.slow
def test_what_stands_after_the_script_is_the_scripts(script, tmp_path):
    own = ["-o", "own.html", "--json", "own.json", "--device", "mine", "--report", "--", "-o", "x"]
    done = report(script, *own, cwd=tmp_path, options=("--json", "ours.json", "--"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == f"{own} __main__ {script}"
    assert {path.name for path in tmp_path.iterdir()} == {"script.py", "report.html", "ours.json"}


@pytest.mark.slow
def test_report_times_calls_in_other_ways_if_asked_to(script, tmp_path):
    script.write_text(
        SCRIPT + "total = torch.zeros(2)\ng = desugar.compile(lambda t: t.add_(1), backend='eager')\n"
    )
    with script.open("a") as file:
        file.write("g(total)\nprint('total', total.tolist())\nimport atexit\n")
        file.write("atexit.register(lambda: print('at the end', total.tolist()))\n")
    done = report(script, cwd=tmp_path, options=("--compare", "--json", "out.json"))
    assert done.returncode == 0, done.stderr
    assert "total [1.0, 1.0]" in done.stdout and "at the end [1.0, 1.0]" in done.stdout
    programs = json.loads((tmp_path / "out.json").read_text())["programs"]
    assert [program["calls"] for program in programs] == [1, 2, 1], "calls that are made again do not count"
    for program in programs:
        assert [name for name, _ in program["worth"]["ways"]] == ["eager", "torch.compile", "desugar.compile"]
        assert program["worth"]["verdict"] == "2 calls compared; torch.compile: right; desugar.compile: right"
        assert f"was it worth it: {program['worth']['answer']}; eager " in done.stderr
    plain = report(script, cwd=tmp_path, options=("--json", "out.json"))
    assert "worth it" not in plain.stderr
    assert json.loads((tmp_path / "out.json").read_text())["programs"][0]["worth"] is None


@pytest.mark.slow
def test_two_programs_of_one_function_have_lines_of_their_own(script, tmp_path):
    done = report(script, cwd=tmp_path)
    assert "1 <lambda>, x.size(0) = 2:" in done.stderr and "2 <lambda>, x.size(0) = any:" in done.stderr


@pytest.mark.sweep(3)
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
    done = report(script, cwd=tmp_path)
    assert done.returncode == code and says in done.stderr
    assert "explain/script.py" not in done.stderr
    assert (tmp_path / "report.html").is_file()


@pytest.mark.slow
def test_a_script_that_goes_elsewhere_has_its_report_where_it_was_asked_for(script, tmp_path):
    (tmp_path / "below").mkdir()
    script.write_text("import os\n" + SCRIPT + "os.chdir('below')\n")
    done = report(script, cwd=tmp_path, options=("-o", "out.html", "--json", "out.json"))
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} >= {"out.html", "out.json"}


def test_report_needs_a_script_and_a_folder(run, script, tmp_path):
    assert run("report", str(tmp_path / "none.py")).exit_code == 2
    result = run("report", "-o", str(tmp_path / "none" / "out.html"), str(script))
    assert result.exit_code == 2 and "no folder" in " ".join(result.output.split())


# ---------------------------------------------------------------------------------------------------- diff


@pytest.mark.slow
def test_diff_tells_by_its_exit_code(run, tmp_path):
    paths = []
    for name in ("layer", "twice", "layer"):
        result = run(
            "explain",
            f"{SUBJECTS}:{name}",
            "--json",
            "--inputs",
            "make_x" if name == "twice" else "layer_inputs",
        )
        paths.append(tmp_path / f"{len(paths)}.json")
        paths[-1].write_text(result.stdout)
    first, other, same = map(str, paths)
    result = run("diff", first, same)
    assert result.exit_code == 0 and "1 of 1 programs in both are the same" in result.output
    result = run("diff", first, other)
    assert result.exit_code == 1 and "\n- layer\n+ twice\n" in result.output


def test_diff_of_what_is_no_report_is_a_usage_error(run):
    result = run("diff", SUBJECTS, SUBJECTS)
    assert result.exit_code == 2 and "to be the JSON that" in " ".join(result.output.split())


# ------------------------------------------------------------------------------------------------ the others


@pytest.mark.slow
def test_coverage_is_printed(run):
    assert "ops of aten" in run("coverage", f"{SUBJECTS}:Int8Weight").output
    steps = json.loads(run("coverage", f"{SUBJECTS}:Int8Weight", "--json").stdout)
    assert steps["aten.mul.Tensor"] == "materialize"


def test_coverage_of_something_else_is_a_usage_error(run):
    assert run("coverage", f"{SUBJECTS}:layer").exit_code == 2


@pytest.mark.parametrize(("broken", "code"), [((), 0), (("views",), 1)])
def test_check_tells_by_its_exit_code(run, monkeypatch, broken, code):
    from subclasses import testing

    seen = []

    class Found:
        def __init__(self, factory, tell):
            seen.append(factory().shape)
            self.broken = list(broken)

        def __str__(self):
            return "what the kit says"

    monkeypatch.setattr(testing, "examine", Found)
    result = run("check", f"{SUBJECTS}:make_weight")
    assert result.exit_code == code and "what the kit says" in result.output
    assert seen == [(4, 8)]


def test_check_of_what_makes_no_subclass_is_a_usage_error(run):
    result = run("check", f"{SUBJECTS}:no_inputs")
    assert result.exit_code == 2 and "to make a tensor subclass" in " ".join(result.output.split())


def test_check_of_a_factory_that_raises_shows_its_error(run, tmp_path):
    path = tmp_path / "makes.py"
    path.write_text("def make():\n    raise ValueError('no data today')\n")
    result = run("check", f"{path}:make")
    assert result.exit_code == 1 and "no data today" in result.output
    assert "cli/commands.py" not in result.output


def test_long_work_says_on_a_terminal_what_it_is_at(monkeypatch, capsys):
    from desugar.cli.progress import progress

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


def test_bench_with_an_unknown_backend_is_a_usage_error(run):
    assert run("bench", f"{SUBJECTS}:no_inputs", "--backend", "fast").exit_code == 2


@pytest.mark.slow
def test_bench_has_a_line_for_each_way(run):
    result = run("bench", f"{SUBJECTS}:no_inputs", "--backend", "eager", "--rounds", "3")
    assert result.exit_code == 0, result.output
    header, *lines = result.stdout.splitlines()[:5]
    assert header.split()[:2] == ["result", "1st"]
    assert [line.split("  ")[0] for line in lines] == [
        "eager",
        "torch.compile",
        'backend="desugar"',
        "desugar.compile",
    ]
    assert all(" ± " in line for line in lines[1:])


@pytest.mark.slow
def test_doctor_is_well(run):
    result = run("doctor")
    assert result.exit_code == 0
    assert "a training step gives eager mode's gradients" in result.output
    assert "broken" not in result.output


@pytest.mark.slow
def test_doctor_tells_of_a_release_that_lacks_a_name(run, monkeypatch):
    from desugar import _torch as private

    monkeypatch.setitem(private._LAZY, "no_such_name", "torch")
    monkeypatch.setattr(private, "NAMES", (*private.NAMES, "no_such_name"))
    result = run("doctor")
    assert result.exit_code == 1 and "no_such_name" in result.output


def test_without_typer_it_says_what_to_install(monkeypatch):
    import importlib.util

    from desugar import __main__ as command

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "typer" else find(name))
    with pytest.raises(SystemExit, match=r"pip install 'torch-desugar\[cli\]'"):
        command.main()


def test_help_is_printed_whole(run):
    result = run("--help")
    assert result.exit_code == 0 and "..." not in result.output.replace("[ARGS]...", "")
    assert all(
        name in result.output
        for name in ("explain", "report", "coverage", "check", "compare", "bench", "doctor")
    )


@pytest.mark.slow
def test_the_report_of_the_demo_answers_a_readers_questions(tmp_path):
    demo = Path(__file__).parents[3] / "examples" / "train_ragged_lm.py"
    options = ("-o", "demo.html", "--json", "demo.json")
    done = report(demo, "--steps", "2", "--out", "demo.png", cwd=tmp_path, options=options)
    assert done.returncode == 0, done.stderr
    programs = json.loads((tmp_path / "demo.json").read_text())["programs"]
    (model,) = [program for program in programs if program["name"] == "LanguageModel"]
    assert model["calls"] > 2 and model["cost"]["graph"] > 0
    assert "JaggedTensor" in {leaf["kind"] for leaf in model["inputs"]}
    assert any("JaggedTensor" in op["how"] and op["forward"] for op in model["ops"])
    assert all(program["failed"] for program in programs if program["reason"] == "a guard failed")


# ----------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize(
    "command",
    [
        ("report", "-o", "SCRIPT", "SCRIPT"),
        ("report", "--json", "SCRIPT", "SCRIPT"),
        ("explain", "SCRIPT:f", "--html", "SCRIPT"),
    ],
)
def test_a_script_is_not_overwritten(run, tmp_path, command):
    script = tmp_path / "script.py"
    script.write_text("print('ran')")
    result = run(*[part.replace("SCRIPT", str(script)) for part in command])
    assert result.exit_code == 2 and "so that it is not overwritten" in " ".join(result.output.split())
    assert script.read_text() == "print('ran')" and "ran" not in result.stdout


def test_a_page_and_its_data_are_two_files(run, tmp_path):
    script, page = tmp_path / "script.py", str(tmp_path / "page.html")
    script.write_text("")
    result = run("report", "-o", page, "--json", page, str(script))
    assert result.exit_code == 2 and "--report and --json both name" in " ".join(result.output.split())


# --------------------------------------------------------------------------------------------------- targets

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
def targets(tmp_path):
    path = tmp_path / "targets_of_explain.py"
    path.write_text(TARGETS)
    return path


@pytest.mark.parametrize(("name", "missing"), [("add", "y"), ("nothing", "x")])
def test_arguments_that_do_not_fit_are_a_mistake_on_the_command_line(run, targets, name, missing):
    result = run("explain", f"{targets}:{name}")
    said = " ".join(result.output.replace("│", " ").split())
    assert result.exit_code == 2
    assert f"{name}_inputs makes arguments that {name}(" in said and f"argument: '{missing}'" in said


@pytest.mark.parametrize("name", ["Net", "compiled"])
def test_a_class_and_a_compiled_function_are_explained(run, targets, name):
    result = run("explain", f"{targets}:{name}")
    assert result.exit_code == 0 and "aten" in result.stdout
