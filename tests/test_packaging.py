"""What users install: the sdist, the wheel built from it, and a fresh environment that has nothing else of ours."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import desugar
import subclasses
from desugar.cli import doctor

ROOT = Path(__file__).parents[1]
PACKAGES = ("subclasses", "desugar")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ASSETS = {f"desugar/explain/assets/{name}" for name in ("cards.js", "page.css", "page.html", "page.js")}
ASSETS |= {"subclasses/int8/matmul/cpu_kernels.cpp"}
LEFT_BEHIND = (".*", "__pycache__", "*.egg-info", "build", "dist", "_build", "demo-out", "results")

# ---- building and installing -------------------------------------------------------------------------------


def run(*command, cwd, **environment):
    """Standard output of a command that has to succeed; it sees no path and no bytecode of this process."""
    outer = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=outer | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist of a copy of this tree, and the wheel of what the sdist holds."""
    base = tmp_path_factory.mktemp("packaging")
    shutil.copytree(ROOT, base / "tree", ignore=shutil.ignore_patterns(*LEFT_BEHIND))
    hook = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", hook, base, cwd=base / "tree")
    (sdist,) = base.glob("*.tar.gz")
    options = ("--no-build-isolation", "--no-deps", "--no-index", "--quiet")
    run(sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", base, sdist, cwd=base)
    (wheel,) = base.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """Python of a new environment that has the wheel, and finds what it needs where this process does."""
    place = tmp_path_factory.mktemp("environment") / "venv"
    venv.create(place, with_pip=False)
    python = place / "bin" / "python"
    options = ("--no-deps", "--no-index", "--quiet")
    run(sys.executable, "-m", "pip", "--python", python, "install", *options, built[1], cwd=place)
    folder = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=place).strip()
    (Path(folder) / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def expected_files():
    """The files of both packages, by their path in the repository."""
    found = {p.relative_to(ROOT).as_posix() for name in PACKAGES for p in (ROOT / name).rglob("*.py")}
    return found | ASSETS | {f"{name}/py.typed" for name in PACKAGES}


# ---- what is in them ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_wheel_holds_both_packages_and_nothing_else(built):
    with zipfile.ZipFile(built[1]) as wheel:
        names = {*wheel.namelist()}
    described = {name for name in names if ".dist-info/" in name}
    assert names - described == expected_files()
    assert any(name.endswith("/licenses/LICENSE") for name in described)


@pytest.mark.slow
def test_the_sdist_holds_what_a_build_needs(built):
    with tarfile.open(built[0]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    files = expected_files() | {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml"}
    assert files <= names
    tops = {name.partition("/")[0] for name in names}
    assert tops & {"tests", "bench", "examples", "docs"} == set()


# ---- what is installed -------------------------------------------------------------------------------------

LOOK = """
import importlib.metadata, json, pathlib
import desugar, subclasses, torch
(entry,) = importlib.metadata.entry_points(group="torch_dynamo_backends", name="desugar")
print(json.dumps({
    "versions": [subclasses.__version__, desugar.__version__, importlib.metadata.version("desugar")],
    "files": [subclasses.__file__, desugar.__file__],
    "typed": [(pathlib.Path(m.__file__).parent / "py.typed").is_file() for m in (subclasses, desugar)],
    "listed": "desugar" in torch.compiler.list_backends(),
    "loaded": entry.load().__module__,
    "requires": importlib.metadata.requires("desugar"),
}))
"""


@pytest.mark.slow
def test_a_fresh_environment_has_both_packages_and_the_backend(installed, tmp_path):
    seen = json.loads(run(installed, "-W", "ignore", "-c", LOOK, cwd=tmp_path))
    assert seen["versions"] == [subclasses.__version__] * 3
    assert all(Path(file).is_relative_to(installed.parents[1]) for file in seen["files"])
    assert seen["typed"] == [True, True] and seen["listed"]
    assert seen["loaded"] == "desugar.dynamo.backend"
    assert {*PROJECT["project"]["dependencies"]} <= {*seen["requires"]}


@pytest.mark.slow
def test_the_command_line_of_a_fresh_environment_works(installed, tmp_path):
    pytest.importorskip("typer")
    out = run(installed, "-m", "desugar", "doctor", cwd=tmp_path, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    assert re.search(r'ok +backend="eager"', out), out
    assert "broken" not in out


# ---- one version, and bounds that are kept -----------------------------------------------------------------


def test_both_packages_have_one_version():
    assert subclasses.__version__ == desugar.__version__
    assert f"\nversion: {desugar.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {desugar.__version__} " in (ROOT / "CHANGELOG.md").read_text()


def test_the_oldest_torch_that_is_allowed_is_the_pinned_one():
    pins = (ROOT / "constraints.txt").read_text()
    (pinned,) = re.findall(r"^torch==(\d+\.\d+)\.", pins, re.MULTILINE)
    assert f"torch>={pinned}" in PROJECT["project"]["dependencies"]
    assert pinned == ".".join(map(str, doctor._LEAST))
