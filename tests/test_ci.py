"""CI on a public runner runs what `.ci/run` does, on the releases that CONTRIBUTING.md and constraints.txt name."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORKFLOW = (ROOT / ".github" / "workflows" / "ci.yml").read_text()


def targets(text):
    """The make targets that a script or workflow runs, without their variables."""
    return set(re.findall(r"^(?: +- run: )?make ([a-z-]+)", text, re.MULTILINE))


def test_both_run_the_same_targets():
    script = targets((ROOT / ".ci" / "run").read_text())
    assert script == {"lint", "docs", "test"}
    assert targets(WORKFLOW) == script | {"test-gpu-kernels"}  # which takes Triton
    assert script <= {*re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)}


def test_the_releases_are_those_that_are_pinned_and_documented():
    (listed,) = re.findall(r"torch: \[(.*)\]", WORKFLOW)
    (pinned,) = re.findall(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    (newer,) = set(re.findall(r"TORCH=([\d.]+)", (ROOT / "CONTRIBUTING.md").read_text()))
    assert re.findall(r'"(.*?)"', listed) == [pinned, newer]


def test_the_python_is_the_oldest_that_is_allowed():
    (oldest,) = re.findall(r'requires-python = ">=(.*)"', (ROOT / "pyproject.toml").read_text())
    assert {*re.findall(r'python-version: "(.*)"', WORKFLOW)} == {oldest}
