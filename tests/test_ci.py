"""CI on a public runner runs what `.ci/run` does, on releases that CONTRIBUTING.md and pyproject.toml name.

The workflow `release` publishes what a test has tried.
"""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from tests import test_packaging
from tests.tables import giving

ROOT = Path(__file__).parents[1]
PAGE, MAKEFILE = (ROOT / "CONTRIBUTING.md").read_text(), (ROOT / "Makefile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CI, NIGHTLY = (
    yaml.safe_load((ROOT / ".github" / "workflows" / f"{n}.yml").read_text()) for n in ("ci", "nightly")
)
PYTHONS = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
(PINNED,) = re.findall(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


def commands(workflow):
    """The lines that the jobs of a workflow run, each job with its own."""
    return {
        name: "\n".join(step["run"] for step in job["steps"] if "run" in step)
        for name, job in workflow["jobs"].items()
    }


def targets(text):
    """The make targets that a script runs, without their variables."""
    return set(re.findall(r"^make ([a-z-]+)", text, re.MULTILINE))


def pairs():
    """(Python, PyTorch) of the tests, in order."""
    return [(pair["python"], pair["torch"]) for pair in CI["jobs"]["tests"]["strategy"]["matrix"]["include"]]


def release(version):
    return tuple(map(int, version.split(".")))


def dry_run(folder, *variables):
    """Returns the commands of `make test`, without the variables of a `make` that runs this test."""
    env = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    return subprocess.run(
        ["make", "-n", "test", *variables], cwd=folder, env=env, capture_output=True, text=True
    )


SCRIPT = targets((ROOT / ".ci" / "run").read_text())


def may_fail():
    return {name for name, job in NIGHTLY["jobs"].items() if job.get("continue-on-error")}


def releases(side):
    return [release(pair[side]) for pair in pairs()]


def minors():
    return sorted({minor for _, minor, *_ in releases(1)})


DOCUMENTED = re.search(r"runs the tests on\s(.*?)\. At night", PAGE, re.DOTALL)[1]
OLDEST = re.findall(r"torch>=([^\s'\"]+)", str(PROJECT["dependencies"]))

# A value that is read from the workflows or the project, and the expected value.
test_the_workflows = giving(
    {
        "targets of the script": (lambda: SCRIPT, {"lint", "docs", "test"}),
        "targets of CI, with one that takes Triton": (
            lambda: targets("\n".join(commands(CI).values())),
            SCRIPT | {"test-gpu-kernels"},
        ),
        "targets at night": (
            lambda: targets("\n".join(commands(NIGHTLY).values())),
            {"test-all", "test"},
        ),
        "pairs are those that are documented": (
            lambda: re.findall(r"(3\.\d+)\s+with\s+(?:PyTorch\s+)?(\d+\.\d+\.\d+)", DOCUMENTED),
            pairs(),
        ),
        "the newest release is the one of the examples": (
            lambda: [*map(release, {*re.findall(r"TORCH=([\d.]+)", PAGE)})],
            [max(releases(1))],
        ),
        "every Python has a torch, in order": (lambda: releases(0), sorted(map(release, PYTHONS))),
        "classifiers are in order": (lambda: [*map(release, PYTHONS)], sorted(map(release, PYTHONS))),
        "releases of torch are in order": (lambda: releases(1), sorted(releases(1))),
        "the oldest Python": (lambda: PROJECT["requires-python"], f">={PYTHONS[0]}"),
        "the oldest pair": (lambda: pairs()[0], (PYTHONS[0], PINNED)),
        "the oldest torch": (lambda: [release(oldest) for oldest in OLDEST], [releases(1)[0][:2]]),
        "the three newest releases": (minors, [*range(minors()[0], minors()[0] + 3)]),
        "the nightly torch may fail": (
            may_fail,
            {name for name, text in commands(NIGHTLY).items() if "TORCH=nightly" in text},
        ),
        "one job may fail at least": (lambda: bool(may_fail()), True),
    }
)


@pytest.mark.parametrize("workflow", [CI, NIGHTLY], ids=["ci", "nightly"])
def test_what_a_workflow_names_exists(workflow):
    made = {*re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE)}
    variables = {*re.findall(r"^([A-Z]+) \?=", MAKEFILE, re.MULTILINE)}
    for text in commands(workflow).values():
        assert targets(text) <= made
        for line in re.findall(r"^make .*", text, re.MULTILINE):
            assert {*re.findall(r"(\w+)=", line)} <= variables
            for torch in re.findall(r"TORCH=(\S+)", line.replace("${{ matrix.torch }}", "matrix")):
                assert torch in {"matrix", "nightly", *(torch for _, torch in pairs())}
    for job in workflow["jobs"].values():
        for step in job["steps"]:
            python = step.get("with", {}).get("python-version", PYTHONS[0])
            assert python in {"${{ matrix.python }}", *PYTHONS}


def test_a_release_is_tried_in_fresh_environments_before_it_is_published():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    build, publish = workflow["jobs"]["build"], workflow["jobs"]["publish"]
    (setup,) = [step["with"] for step in build["steps"] if "setup-python" in step.get("uses", "")]
    assert tuple(setup["python-version"].split()) == test_packaging.PYTHONS
    assert f"make test-dist PYTHON=python{test_packaging.PYTHONS[0]}" in [
        step.get("run") for step in build["steps"]
    ]
    assert re.search(
        r"^test-dist: dist .*\n\tDIST=dist .* --no-skips tests/test_packaging.py", MAKEFILE, re.MULTILINE
    )
    assert publish["needs"] == "build" and all("run" not in step for step in publish["steps"])
    rights = [workflow["permissions"], build.get("permissions"), publish["permissions"]]
    assert rights == [{"contents": "read"}, None, {"id-token": "write"}]  # only what publishes can


@pytest.mark.parametrize(
    ("variables", "name", "pin"),
    [
        ([], ".venv", PINNED),
        (["PYTHON=python3"], ".venv", PINNED),
        ([f"TORCH={PINNED}"], ".venv", PINNED),
        (["TORCH=2.99.0"], ".venv-torch-2.99.0", "2.99.0"),
        (["PYTHON=./python3.99"], ".venv-py3.99", PINNED),
        (["PYTHON=./python3.99", "TORCH=2.99.0"], ".venv-py3.99-torch-2.99.0", "2.99.0"),
        (["TORCH=nightly"], ".venv-torch-nightly", None),
    ],
)
def test_an_environment_is_named_by_both_releases(variables, name, pin, tmp_path):
    for file in ("Makefile", "constraints.txt", "pyproject.toml"):
        (tmp_path / file).write_text((ROOT / file).read_text())
    other = tmp_path / "python3.99"
    other.write_text('#!/bin/sh\n[ "$1" = -c ] && echo 3.99\n')
    other.chmod(0o755)
    made = dry_run(tmp_path, *variables).stdout
    assert re.search(r"-m venv (\S+)", made)[1] == name
    pinned = re.search(r"sed 's/\^torch==\.\*/torch(?:==)?(.*?)/'", made)
    assert (PINNED if pinned is None else pinned[1] or None) == pin


def test_an_interpreter_that_is_not_there_is_an_error():
    made = dry_run(ROOT, "PYTHON=no-such-python")
    assert (
        made.returncode
        and "expected an interpreter: PYTHON=python3.13, got PYTHON=no-such-python" in made.stderr
    )
