"""A stage that fails costs itself alone; a second run goes on where the first one stopped; a device gets wheels."""

import importlib.metadata
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.gpu import __main__ as command, wheels
from bench.gpu.driver import Driver
from bench.gpu.lines import Line, parse_line, read_lines
from bench.gpu.table import BY_NAME, STAGES, Stage
from tests.tables import giving

ROOT = Path(__file__).parents[2]
# A fake stage: `say` writes a line, and `failed` is true if an earlier attempt failed at a subject.
PRELUDE = """
import json, os, pathlib, signal, subprocess, sys, time
pipe, name, path = int(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3])

def say(**line):
    os.write(pipe, (json.dumps({"stage": name, "machine": "m", **line}) + "\\n").encode())

def failed(subject):
    lines = [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []
    return any(line.get("subject") == subject and line.get("error") for line in lines)
"""
MEASURE = "say(group='g', subject='a', figure='time', value=1.0)"
BEHAVIOUR = {
    "works": MEASURE + "; say(state='done')",
    "aborts": "say(group='g', subject='bad', state='begun')\nif not failed('bad'): os.abort()\n" + MEASURE,
    "segfaults": MEASURE + "; os.kill(os.getpid(), signal.SIGSEGV)",
    "hangs": MEASURE
    + "; say(group='g', subject='bad', state='begun'); subprocess.Popen(['sleep', '61']); time.sleep(60)",
    "says half": MEASURE + """; os.write(pipe, b'{"stage": "says half", "value": 1')""",
    "talks": "print('noise'); sys.stderr.write('more noise'); os.write(pipe, b'no line\\n'); " + MEASURE,
    "exits": "raise ValueError('something is wrong')",
    "hangs at its end": MEASURE + "; say(state='done'); time.sleep(60)",
}


@pytest.fixture
def run(tmp_path):
    """Runs fake stages by name, and returns the lines of the file."""

    def run(*names, seconds=2.0, budget=60.0, **options):
        def command(stage, pipe):
            text = PRELUDE + BEHAVIOUR[stage.name]
            return [sys.executable, "-c", text, str(pipe), stage.name, str(driver.path)]

        driver = Driver(tmp_path, budget, command, **options)
        driver.run([Stage(name, seconds, "", "") for name in names])
        return read_lines(driver.path)

    return run


def states(lines):
    return {line.stage: line.state for line in lines if line.state and not line.subject}


def figures(lines):
    return [line.stage for line in lines if line.figure]


NAMES = ["segfaults", "hangs", "says half", "talks", "exits", "hangs at its end", "works"]
# The stages, options of the driver, the states and errors of stages, and which of them have figures.
RUNS = {
    "every kind of failure costs its stage alone": (
        NAMES,
        {},
        dict(zip(NAMES, "crashed hung done done crashed done done".split(), strict=True)),
        {
            "segfaults": "ended by SIGSEGV",
            "hangs": "ended after 2 s, the limit",
            "exits": "ValueError: something is wrong",
        },
        [name for name in NAMES if name != "exits"],
    ),
    "a crash costs the subject that made it": (
        ["aborts"],
        {"seconds": 20.0},
        {"aborts": "done"},
        {"aborts": "ended by SIGABRT"},
        ["aborts"],
    ),
    "without time stages say so": (
        ["works", "talks"],
        {"budget": 0.0},
        {"works": "not run", "talks": "not run"},
        {"works": "no time was left", "talks": "no time was left"},
        [],
    ),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if case.startswith("every") else ()) for case in RUNS]
)
def test_what_a_run_writes(run, case):
    names, options, wanted, errors, measured = RUNS[case]
    lines = run(*names, **options)
    assert states(lines) == wanted and figures(lines) == measured
    assert {line.stage: line.error for line in lines if line.error} == errors
    assert all(line.subject == "bad" for line in lines if line.error == "ended by SIGABRT")


def test_a_rehearsal_marks_its_lines_and_keeps_them_apart(run, tmp_path):
    assert all(line.rehearsal for line in run("works", rehearsal=True))
    assert {path.name for path in tmp_path.glob("*.jsonl")} == {"rehearsal.jsonl"}


def test_children_of_a_stage_end_with_it(run):
    run("hangs", seconds=1.0)
    time.sleep(0.2)
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert "sleep 61" not in listed


def test_a_second_run_goes_on_where_the_first_one_stopped(run, tmp_path):
    assert states(run("works", "talks")) == {"works": "done", "talks": "done"}
    path = tmp_path / "lines.jsonl"
    path.write_text(path.read_text() + '{"stage": "talks", "gro')  # the first run was killed while it wrote
    lines = run("works", "talks", "says half")
    assert figures(lines) == ["works", "talks", "works", "says half"]  # the first stage names the machine
    assert all(parse_line(text) for text in path.read_text().splitlines() if '"gro' not in text)


def test_another_machine_starts_anew(run, tmp_path):
    (tmp_path / "lines.jsonl").write_text(Line("talks", state="done", machine="another").as_json() + "\n")
    assert figures(run("works", "talks")) == ["works", "talks"]


# ---------------------------------------------------------------------------------------------------------
# the command
# ---------------------------------------------------------------------------------------------------------


WITH_ZEROS = Line("s", "g", "a", figure="waits", value=0.0, low=0.0)
NO_TORCH = "import sys, bench.gpu.__main__; raise SystemExit('torch' in sys.modules)"

test_lines_and_imports = giving(
    {
        "each package has a version": (
            lambda: [pin for pin in wheels.pins() if not pin.partition("==")[2]],
            [],
        ),
        "a line keeps a zero": (lambda: parse_line(WITH_ZEROS.as_json()), WITH_ZEROS),
        "a line of a stage alone": (lambda: json.loads(Line("s").as_json()), {"stage": "s"}),
        "what is no line": (
            lambda: [parse_line(text) for text in ('{"stage": "s", "valu', "3", '{"stage": "s", "x": 1}')],
            [None] * 3,
        ),
        "the driver imports no torch": (
            lambda: subprocess.run([sys.executable, "-c", NO_TORCH], cwd=ROOT, check=False).returncode,
            0,
        ),
    }
)


def test_without_a_gpu_the_command_ends_with_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "has_cuda", lambda: False)
    assert command.main(["--folder", str(tmp_path / "new"), "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == command.NO_CUDA + "\n"
    assert not list(tmp_path.iterdir())


def test_the_table_is_whole():
    assert len(BY_NAME) == len(STAGES)
    for stage in STAGES:
        module, _, function = stage.function.partition(":")
        path = ROOT / (module.replace(".", "/") + ".py")
        assert f"def {function}(run: Run" in path.read_text() and stage.question.endswith((".", "?"))


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    arguments = ["--only", "basics", "--folder", str(tmp_path), "--out", str(tmp_path)]
    assert command.main(arguments) == 0
    assert (tmp_path / "gpu-basics.md").exists()


# ---- wheels for a device without a network --------------------------------------------------------------------------


@pytest.fixture
def environment(monkeypatch):
    for name in (*wheels.CACHES, "PYTHONPATH"):
        monkeypatch.setenv(name, "")


@pytest.mark.parametrize("part", [300, 10_000])
def test_caches_go_there_and_back_in_parts(tmp_path, monkeypatch, environment, part):
    monkeypatch.setattr(wheels, "PART", part)
    before, back, after = (tmp_path / name for name in ("before", "back", "after"))
    kept = before / "cache" / "triton" / "kernel"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(os.urandom(1000))
    back.mkdir()
    wheels.pack(before, back)
    assert (len(list(back.iterdir())) > 1) == (part == 300)
    back.rename(after)
    wheels.prepare(after)
    assert (after / "cache" / "triton" / "kernel").read_bytes() == kept.read_bytes()
    assert os.environ["TRITON_CACHE_DIR"] == str(after / "cache" / "triton")


def test_a_process_of_sources_alone_finds_the_backend(tmp_path, environment):
    wheels.prepare(tmp_path)
    assert str(tmp_path / "site") in os.environ["PYTHONPATH"]
    (found,) = importlib.metadata.distributions(path=[str(tmp_path / "site")])
    assert [(point.group, point.name) for point in found.entry_points] == [
        ("torch_dynamo_backends", "desugar")
    ]


def test_what_the_machine_has_is_not_installed(tmp_path):
    assert wheels._is_there(tmp_path / "optree-0.1-cp312.whl", tmp_path)
    assert not wheels._is_there(tmp_path / "no_such_package-0.1-cp312.whl", tmp_path)
    (tmp_path / "no_such_package-0.1.dist-info").mkdir()
    assert wheels._is_there(tmp_path / "no_such_package-0.1-cp312.whl", tmp_path)
