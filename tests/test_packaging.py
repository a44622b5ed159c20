"""The files that users install: the sdist, the wheel built from it, and fresh environments with nothing else."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import tomllib
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest

import desugar
import subclasses
from desugar.cli import doctor
from docs.blocks import collect_blocks
from tests.tables import giving

ROOT = Path(__file__).parents[1]
PACKAGES = ("subclasses", "desugar")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ASSETS = {f"desugar/explain/assets/{name}" for name in ("cards.js", "page.css", "page.html", "page.js")}
ASSETS |= {"subclasses/int8/matmul/cpu_kernels.cpp"}
PYTHONS = ("3.11", "3.13")  # a fresh environment of each
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
    """The sdist of a copy of this tree, and the wheel built from the sdist; or both from the folder `DIST`."""
    if made := os.environ.get("DIST"):
        return *Path(made).resolve().glob("*.tar.gz"), *Path(made).resolve().glob("*.whl")
    base = tmp_path_factory.mktemp("packaging")
    shutil.copytree(ROOT, base / "tree", ignore=shutil.ignore_patterns(*LEFT_BEHIND))
    hook = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", hook, base, cwd=base / "tree")
    (sdist,) = base.glob("*.tar.gz")
    options = ("--no-build-isolation", "--no-deps", "--no-index", "--quiet")
    run(sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", base, sdist, cwd=base)
    (wheel,) = base.glob("*.whl")
    return sdist, wheel


def find_python(version):
    """The interpreter of this process, of the path, or of pyenv; skips where there is none."""
    if version == sysconfig.get_python_version():
        return sys.executable
    found = (shutil.which(f"python{version}"), *Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for python in filter(None, found):  # pyenv's on the path may refuse to start
        if subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0:
            return python
    pytest.skip(f"needs python{version}")


def find_requirements(python):
    """A folder that has what the wheel with its extra `cli` requires.

    For the Python of this process it is where this process finds them. For another one pip downloads them, PyTorch
    among them, in minutes, and the next run finds them in the folder for temporary files.
    """
    if python == sys.executable:
        return sysconfig.get_path("purelib")
    project, pins = PROJECT["project"], ROOT / "constraints.txt"
    wanted = [*project["dependencies"], *project["optional-dependencies"]["cli"]]
    key = hashlib.sha256(f"{python} {wanted} {pins.read_text()}".encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"torch-desugar-requires-{key}"
    if not folder.exists():
        made = tempfile.mkdtemp()
        options = ("--quiet", "--constraint", pins, "--target", made)
        run(python, "-m", "pip", "install", *options, *wanted, cwd=made)
        with suppress(OSError):  # another worker was faster
            Path(made).rename(folder)
        shutil.rmtree(made, ignore_errors=True)
    return folder


@pytest.fixture(scope="module", params=PYTHONS)
def installed(request, built, tmp_path_factory):
    """Python of a new environment that has the wheel, and its requirements from elsewhere."""
    outer = find_python(request.param)
    place = tmp_path_factory.mktemp("environment") / "venv"
    run(outer, "-m", "venv", "--without-pip", place, cwd=place.parent)
    python = place / "bin" / "python"
    options = ("--no-deps", "--no-index", "--quiet")
    run(sys.executable, "-m", "pip", "--python", python, "install", *options, built[1], cwd=place)
    folder = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=place).strip()
    (Path(folder) / "borrowed.pth").write_text(f"{find_requirements(outer)}\n")
    return python


def expected_files():
    """The files of both packages, by their path in the repository."""
    found = {p.relative_to(ROOT).as_posix() for name in PACKAGES for p in (ROOT / name).rglob("*.py")}
    return found | ASSETS | {f"{name}/py.typed" for name in PACKAGES}


# ---- contents of the packages ------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_wheel_holds_both_packages_and_nothing_else(built):
    with zipfile.ZipFile(built[1]) as wheel:
        names = {*wheel.namelist()}
    assert built[1].name == f"torch_desugar-{subclasses.__version__}-py3-none-any.whl"
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


# ---- installed packages ------------------------------------------------------------------------------------

LOOK = """
import importlib.metadata, json, pathlib
import desugar, subclasses, torch
ours = importlib.metadata.distribution("torch-desugar")
(entry,) = ours.entry_points.select(group="torch_dynamo_backends", name="desugar")
print(json.dumps({
    "versions": [subclasses.__version__, desugar.__version__, ours.version],
    "files": [subclasses.__file__, desugar.__file__],
    "typed": [(pathlib.Path(m.__file__).parent / "py.typed").is_file() for m in (subclasses, desugar)],
    "listed": "desugar" in torch.compiler.list_backends(),
    "loaded": entry.load().__module__,
    "requires": ours.requires,
}))
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)  # the first test of an environment may download PyTorch
def test_a_fresh_environment_has_both_packages_and_the_backend(installed, tmp_path):
    seen = json.loads(run(installed, "-W", "ignore", "-c", LOOK, cwd=tmp_path))
    assert seen["versions"] == [subclasses.__version__] * 3
    assert all(Path(file).is_relative_to(installed.parents[1]) for file in seen["files"])
    assert seen["typed"] == [True, True] and seen["listed"]
    assert seen["loaded"] == "desugar.dynamo.backend"
    assert {*PROJECT["project"]["dependencies"]} <= {*seen["requires"]}


@pytest.mark.slow
def test_the_command_line_of_a_fresh_environment_works(installed, tmp_path):
    out = run(installed, "-m", "desugar", "doctor", cwd=tmp_path, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    assert re.search(r'ok +backend="eager"', out), out
    assert "broken" not in out


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_first_page_works_in_a_fresh_environment(installed, tmp_path):
    page = ROOT / "README.md"
    lines = page.read_text().splitlines()
    program, output, *_ = (b for b in collect_blocks(lines) if b.is_program() or b.is_output)
    script, want = ("\n".join(lines[block.first : block.last]) for block in (program, output))
    (tmp_path / "script.py").write_text(f"{script}\n\n\ndef make():\n    return weight\n")
    for command in (
        ("script.py",),
        ("-m", "desugar", "report", "-o", "report.html", "script.py"),
        ("-m", "desugar", "check", "script.py:make"),
    ):
        out = run(installed, *command, cwd=tmp_path, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
        assert want in out, out
    assert "Int8Weight" in (tmp_path / "report.html").read_text()
    assert re.search(r"Int8Weight keeps \d+ promises, breaks 0", out), out


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_is_missing_is_installed_by_the_name_in_the_messages(installed, tmp_path):
    """The extras of the installed package are found without an index that has it, so the messages are always true."""
    messages = (ROOT / "desugar" / "__main__.py").read_text()
    (wanted,) = re.findall(r"pip install '(.*?)'", messages)
    command = ("pip", "--python", installed, "install", "--dry-run", "--no-index", wanted)
    out = run(sys.executable, "-m", *command, cwd=tmp_path)
    assert "Would install" not in out and f"already satisfied: {wanted} in" in out


# ---- one name, one version, and bounds that are kept -------------------------------------------------------


def test_messages_and_pages_install_the_project_by_its_name():
    """The name `desugar` on PyPI is another project."""
    name, extras = PROJECT["project"]["name"], PROJECT["project"]["optional-dependencies"]
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.ipynb")]
    sources = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    texts = [path.read_text() for path in (*pages, *sources)]
    found = {pair for text in texts for pair in re.findall(r"pip install [^`\n]*?([\w.-]+)\[(\w+)\]", text)}
    assert {name, "."} == {of for of, _ in found}
    assert {extra for _, extra in found} <= {*extras}
    assert not any(re.search(r"pip install '?desugar\b", text) for text in texts)


PINNED = re.findall(r"^torch==(\d+\.\d+)\.", (ROOT / "constraints.txt").read_text(), re.MULTILINE)

test_one_version_of_each = giving(
    {
        "both packages": (lambda: subclasses.__version__, desugar.__version__),
        **{
            name: (lambda name=name, line=line: line in (ROOT / name).read_text(), True)
            for name, line in {
                "CITATION.cff": f"\nversion: {desugar.__version__}\n",
                "CHANGELOG.md": f"\n## {desugar.__version__} ",
            }.items()
        },
        "the oldest torch that is allowed is pinned": (
            lambda: {f"torch>={pinned}" for pinned in PINNED} - set(PROJECT["project"]["dependencies"]),
            set(),
        ),
        "the doctor names the oldest torch": (lambda: [".".join(map(str, doctor._LEAST))], PINNED),
    }
)
