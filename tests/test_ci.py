"""The workflows of a public runner: `ci` runs what `.ci/run` does, `release` publishes what a test has tried."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.test_packaging import PYTHONS

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text()
WORKFLOW = (ROOT / ".github" / "workflows" / "ci.yml").read_text()


def targets(text):
    """The make targets that a script or workflow runs, without their variables."""
    return set(re.findall(r"^(?: +- run: )?make ([a-z-]+)", text, re.MULTILINE))


def test_both_run_the_same_targets():
    script = targets((ROOT / ".ci" / "run").read_text())
    assert script == {"lint", "docs", "test"}
    assert targets(WORKFLOW) == script | {"test-gpu-kernels"}  # which takes Triton
    assert script <= {*re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE)}


def test_the_releases_are_those_that_are_pinned_and_documented():
    (listed,) = re.findall(r"torch: \[(.*)\]", WORKFLOW)
    (pinned,) = re.findall(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    (newer,) = set(re.findall(r"TORCH=([\d.]+)", (ROOT / "CONTRIBUTING.md").read_text()))
    assert re.findall(r'"(.*?)"', listed) == [pinned, newer]


def test_the_python_is_the_oldest_that_is_allowed():
    (oldest,) = re.findall(r'requires-python = ">=(.*)"', (ROOT / "pyproject.toml").read_text())
    assert {*re.findall(r'python-version: "(.*)"', WORKFLOW)} == {oldest}


def test_a_release_is_tried_in_fresh_environments_before_it_is_published():
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    build, publish = workflow["jobs"]["build"], workflow["jobs"]["publish"]
    (setup,) = [step["with"] for step in build["steps"] if "setup-python" in step.get("uses", "")]
    assert tuple(setup["python-version"].split()) == PYTHONS
    assert f"make test-dist PYTHON=python{PYTHONS[0]}" in [step.get("run") for step in build["steps"]]
    assert re.search(
        r"^test-dist: dist .*\n\tDIST=dist .* --no-skips tests/test_packaging.py", MAKEFILE, re.MULTILINE
    )
    assert publish["needs"] == "build" and all("run" not in step for step in publish["steps"])
    rights = [workflow["permissions"], build.get("permissions"), publish["permissions"]]
    assert rights == [{"contents": "read"}, None, {"id-token": "write"}]  # only what publishes can
