"""Every Python block of the README and of the docs runs, and prints what the page shows."""

import builtins
import importlib
import importlib.util
import inspect
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import pytest

import subclasses
from bench import starts
from bench.report import save_rows
from desugar.compare import judge
from docs import code_prose, gains, prose, subject, wrap
from docs.blocks import collect_blocks, compare_outputs, emit_program, refresh_page
from subclasses.ragged import JaggedTensor
from tests.tables import giving

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.slow  # `make docs` runs it, too
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_prints_what_it_shows(page, tmp_path):
    for shown in compare_outputs(page, tmp_path):
        assert shown.agrees(), (
            f"{page.name}:{shown.block.first} shows\n{shown.want}\nbut this is printed:\n{shown.got}\n"
            "If the new output is right, `make readme` puts it there."
        )


# A library that the page's own test lacks, and a word of the one block that needs it. Then a word of the last block,
# and the part of the page that has the blocks.
BLOCKS = {
    "migration.md": (
        "torchao.quantization",
        "torchao",
        "assert_close",
        lambda page: (
            page.partition("## From padded")[0] + page.partition("## From torchao")[2].partition("\n## ")[0]
        ),
    ),
    "hugging-face.md": ("transformers", "transformers.Trainer(", "except ValueError", str),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    ["migration.md", pytest.param("hugging-face.md", marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
)
def test_the_blocks_that_need_a_library_run_in_order(name, tmp_path, monkeypatch):
    library, word, last, part_of = BLOCKS[name]
    pytest.importorskip(library, reason=f"needs {library}")
    blocks = re.findall(
        r"^```py(?:thon)?\n(.*?)^```", part_of((ROOT / "docs" / name).read_text()), re.MULTILINE | re.DOTALL
    )
    assert sum(word in block for block in blocks) == 1 and last in blocks[-1]
    (tmp_path / "blocks.py").write_text("\n".join(blocks))
    monkeypatch.chdir(tmp_path)
    runpy.run_path("blocks.py")


# ---- the reference ----------------------------------------------------------------------------------------------

API = (ROOT / "docs" / "api.md").read_text()
MODULES = ["subclasses", "desugar", "subclasses.testing"]
WHOLE_MODULES = [
    "subclasses.ragged",
    "subclasses.ragged.hugging_face",
    "subclasses.int8",
    "subclasses.keyed",
    "subclasses.keyed.sharded",
    "subclasses.export",
    "subclasses.files",
]


def test_the_reference_lists_all_that_is_public():
    listed = re.findall(r"(?:auto\w+|py:data):: ([\w.]+)$", API, re.MULTILINE)
    assert sorted(WHOLE_MODULES) == sorted(set(listed) & {*WHOLE_MODULES})
    public = [name for module in MODULES for name in importlib.import_module(module).__all__]
    names = [name.rpartition(".")[2] for name in listed if name not in WHOLE_MODULES]
    assert sorted(names) == sorted([*public, "Collector", "RaggedCache"])


def undocumented(module):
    found = importlib.import_module(module)
    return [name for name in found.__all__ if not (getattr(found, name).__doc__ or "").strip()]


KEYWORDS = [
    name
    for name in inspect.signature(subclasses.TensorSubclass.__init_subclass__).parameters
    if name != "kwargs"
]
METHODS = re.findall(r"^def (?!_wrap\b)(\w+)", JaggedTensor.__source__, re.MULTILINE)
HOOKS, COMMANDS = API.partition("### Hooks")[2], API.partition("## Command line")[2]
CLI = (ROOT / "desugar" / "cli" / "commands.py").read_text()


def variables():
    """The environment variables that the sources name."""
    sources = "".join(path.read_text() for path in (ROOT / "desugar").rglob("*.py"))
    return {*re.findall(r'"(DESUGAR_\w+)"', sources)}


# A value that is read from the reference, and the expected value.
test_the_reference = giving(
    {
        **{f"docstrings of {m}": (lambda m=m: undocumented(m), []) for m in (*MODULES, *WHOLE_MODULES)},
        "it lists keywords": (lambda: [name for name in KEYWORDS if f"| `{name}` |" not in API], []),
        "the docstring lists keywords": (
            lambda: [name for name in KEYWORDS if f"{name}:" not in subclasses.TensorSubclass.__doc__],
            [],
        ),
        "many methods are generated": (lambda: len(METHODS) > 15, True),
        "it lists hooks": (lambda: [name for name in METHODS if f"`{name}`" not in HOOKS], []),
        "it lists methods": (
            lambda: [
                name
                for name in ("materialize", "outer", "wrap_cotangent", "check_loaded")
                if f"| `{name}(" not in API
            ],
            [],
        ),
        "it lists commands": (
            lambda: re.findall(r"^\| `(\w+)` \|", COMMANDS.partition("## Env")[0], re.MULTILINE),
            re.findall(r"^@app.command.*\n(?:@.*\n)*def (\w+)\(", CLI, re.MULTILINE),
        ),
        "it lists variables": (
            lambda: variables() - {*re.findall(r"DESUGAR_\w+", API.partition("## Env")[2])},
            set(),
        ),
        "bounds in prose are those of the code": (
            lambda: (
                f"at most {judge._ROUNDINGS} rounding errors (and at most {judge._MOST:.0%}".replace(
                    "%", " %"
                )
                in " ".join((ROOT / "docs" / "compare.md").read_text().split())
            ),
            True,
        ),
    }
)


def test_errors_have_the_base_classes_that_are_promised():
    page = (ROOT / "docs" / "promises.md").read_text()
    rows = re.findall(r"^\| `(\w+)\.(\w+Error)` \| `(\w+)` \|", page, re.MULTILINE)
    assert len(rows) == 5
    for module, name, base in rows:
        error = getattr(importlib.import_module(module), name)
        builtin = next(kind for kind in error.__mro__ if kind.__module__ == "builtins")
        assert builtin is getattr(builtins, base), name


# ---- figures ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page", "emit"), [(gains.README, gains.emit_first), (gains.PERFORMANCE, gains.emit_table)]
)
def test_pages_show_the_figures_of_the_files(page, emit):
    found = gains.find_gains()
    assert [table for _, table, _ in gains.TABLE.findall(page.read_text())] == [emit(found)], "run docs.gains"
    assert gains.PICTURE.read_text() == gains.emit_picture(found), "run docs.gains"


def test_each_figure_has_a_command_that_is_there():
    for gain in gains.find_gains():
        match shlex.split(gain.command):
            case ["make", target]:
                assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
            case ["python", "-m", module, *_]:
                assert importlib.util.find_spec(module), module
            case ["python", script, "--compile", *_]:
                assert (ROOT / script).is_file()
            case _:
                pytest.fail(gain.command)


def test_warm_starts_are_shown_once_they_are_measured(tmp_path, monkeypatch):
    before = gains.find_gains()
    for path in gains.RESULTS.glob("*.json"):
        shutil.copy(path, tmp_path)
    way, case = [starts.Way(gains.DIRECT), starts.Way(gains.STOCK)], "int8 MLP of 12 layers, inference"
    samples = {
        (start, case, w.name, clock): [1.0, 1.0]
        for start in starts.STARTS
        for w in way
        for clock in starts.CLOCKS
    }
    save_rows(starts.rows_of(samples, [case], way), {"cpu": "", "torch": ""}, tmp_path / "starts.json")
    monkeypatch.setattr(gains, "RESULTS", tmp_path)
    after = gains.find_gains()
    assert ["bench.starts" in gain.command for gain in after if gain not in before] == [True] * 3


def test_the_picture_has_a_pair_of_bars_for_each_drawn_gain():
    found = [gain for gain in gains.find_gains() if gain.drawn]
    assert {gain.shows for gain in found} == {gains.CLASS, gains.ROWS, gains.CALLS}
    picture = ElementTree.fromstring(gains.emit_picture(found))
    ground, *bars = picture.findall("{*}rect")
    assert ground.get("class") == "ground"
    assert [bar.get("class") for bar in bars] == ["other", "ours"] * len(found)
    for gain, other, ours in zip(found, bars[::2], bars[1::2], strict=True):
        assert float(ours.get("width")) / float(other.get("width")) == pytest.approx(
            gain.ours / min(gain.rivals.values()), rel=0.01
        )


def test_prose_names_no_time():
    """Times are in files that a command writes, which pages include."""
    pattern = re.compile(r"(?<![\w.])\d[\d,.]* ?(?:µs|ms|MiB/s|GB/s|tokens/s|times (?:faster|slower))(?!\w)")
    assert pattern.search("some 10 µs, 3.5 times faster")
    pages = {page.name: page.read_text().splitlines() for page in PAGES}
    kept = [(name, n + 1, lines[n]) for name, lines in pages.items() for n in wrap.prose(lines)]
    assert [found for found in kept if pattern.search(found[2])] == []


# ---- lines of prose ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", wrap.PAGES, ids=lambda page: page.name)
def test_no_line_of_prose_is_longer_than_120_columns(page):
    long = [number + 1 for number in wrap.too_long(page.read_text().splitlines())]
    assert not long, f"{page.name}: lines {long}; `make format` wraps them"


LONG = "word " * 30 + "`a code span` - [a link](to/a/page.md)"
KEPT = [
    "| a table | " + "x " * 80,
    "```text",
    LONG,
    "```",
    "<!-- " + LONG + " -->",
    "## " + LONG,
    "short",
    "lines",
]


def test_prose_is_wrapped_and_nothing_else_is():
    wrapped = wrap.wrap("\n".join([*KEPT, "", f"- {LONG}", f"- {LONG}", "", f"1. `{LONG.replace('`', '')}`"]))
    lines = wrapped.splitlines()
    assert lines[: len(KEPT)] == KEPT
    assert wrap.too_long(lines) == []
    assert [line[:2] for line in lines[len(KEPT) + 1 :]] == ["- ", "  ", "- ", "  ", "", "1.", "  "]
    assert (
        wrapped.split() == " ".join([*KEPT, "-", LONG, "-", LONG, "1.", f"`{LONG.replace('`', '')}`"]).split()
    )
    assert wrap.wrap(wrapped) == wrapped


PROSE = """# It is no heading

The text is no field of
`code is no`, and very stand-ins `a
b` for ever.

```text
is no
```
"""

CODE = f'''"""What a rule reads, and `that
of` it::

    text that stands for code

Not that of it.

    python -m rules        # those of it
"""

x = "the one that asks"
# It knows :func:`that of`
# of{" word" * 22}.


class A:
    """Reads.

    Args:
        x: the one
            that stands for y. They are told apart.
    """

    raise ValueError(f"{{x}} is {{y}} " "of, x is what it is")
    run(f"w = 'that of'; x, y, z = {{w}}, {{w}}, w")
    log.info(
        "the cause and the mend of it, %s", "that of " "y", "that of a b c".split()
    )
'''
SUBJECTS = {
    "Add a rule for sums of rows": [],
    "Pass keywords on": [],
    "Focus the bias, embed a string": [],
    "add a rule": ["begin with a capital letter"],
    "Adds a rule": ["write the imperative: Add, not Adds"],
    "Added a rule": ["write the imperative: Add, not Added"],
    "Adding rules": ["write the imperative: Add, not Adding"],
    "Rule: add one.": ["name no area before the verb", "leave out the full stop"],
    "Add a rule, and drop another": ["make a commit of each change"],
    f"Add {'a' * 69}": ["write at most 72 characters"],
}


test_what_is_found_in_prose = giving(
    {
        "a line that is too long": (lambda: wrap.too_long(["short", "", LONG, "", "x" * 200]), [2]),
        "words": (
            lambda: [*prose.by_our_words("page.md", prose.prose_of(PROSE))],
            [
                "page.md:3: 'is no ': is not a, has no",
                "page.md:4: 'stand-ins': a placeholder, a fake tensor",
            ],
        ),
        "each kind of finding in docstrings and comments": (
            lambda: [*code_prose.by_rules("of.py", CODE)],
            [
                "of.py:1: 'What': name the subject",
                "of.py:6: 'that of': repeat the noun, or write its genitive",
                "of.py:20: 'the one that': repeat the noun",
                "of.py:21: 'stands for': represents, is",
                "of.py:21: 'told apart': distinguishes",
                "of.py:12: 'It knows code of': 26 words in a sentence, at most 25",
                "of.py:12: 'knows': calls, dispatches, reads, has",
                "of.py:24: 'is what': name the subject",
                "of.py:27: 'mend': fix, subclass, function, caller",
            ],
        ),
        "each kind of finding in subjects of commits": (
            lambda: {text: [*subject.by_rules(text)] for text in SUBJECTS},
            SUBJECTS,
        ),
        "subjects that git writes": (lambda: [*subject.by_rules("Merge branch 'x': a; b.")], []),
    }
)


def test_proselint_reads_prose_alone():
    pytest.importorskip("proselint")
    (found,) = prose.by_proselint({"docs/page.md": prose.prose_of(PROSE)})
    assert found.startswith("docs/page.md:5:") and "for ever" in found


# ---- type checker ---------------------------------------------------------------------------------------------


def test_pyright_accepts_the_code_of_the_first_pages(tmp_path):
    pytest.importorskip("pyright")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]
    settings |= {"include": ["."], "extraPaths": [str(ROOT)]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    for name in ("README.md", "docs/authors-guide.md", "docs/first-steps.md"):
        lines = (ROOT / name).read_text().splitlines()
        path = tmp_path / f"{Path(name).stem}.py"  # of the same line numbers
        path.write_text(emit_program(lines, collect_blocks(lines)))
    (tmp_path / "wrong.py").write_text("import subclasses\n\nsubclasses.inner(dtype='int8')\n")
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    errors = [d for d in json.loads(done.stdout)["generalDiagnostics"] if d["severity"] == "error"]
    shown = [f"{Path(d['file']).stem}:{d['range']['start']['line'] + 1} {d['message']}" for d in errors]
    assert [line for line in shown if not line.startswith("wrong:")] == []
    assert len(shown) == 1, "the library was not found, or its types were not read"


# ---- shell blocks ---------------------------------------------------------------------------------------------

SHELL = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)


def commands(page):
    """The lines of a page's shell blocks, without comments."""
    lines = "".join(SHELL.findall(page.read_text())).splitlines()
    return [shlex.split(line, comments=True) for line in lines]


@pytest.mark.slow
def test_the_commands_of_the_first_page_run(tmp_path):
    page = ROOT / "docs" / "first-steps.md"
    before, _, _ = page.read_text().partition("In Python (leave this out")
    blocks = re.findall(r"(?<!<!-- output -->\n)^```python\n(.*?)^```", before, re.MULTILINE | re.DOTALL)
    (tmp_path / "lowrank.py").write_text("\n".join(blocks))
    codes = {}
    for _python, _m, _desugar, name, *rest in [
        c for c in commands(page) if c[:3] == ["python", "-m", "desugar"]
    ]:
        command = [sys.executable, "-m", "desugar", name, *rest]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        codes[name] = done.returncode
        assert "Traceback" not in done.stderr, done.stderr
    assert codes == {"doctor": 0, "explain": 0, "report": 0, "check": 1}
    assert "LowRank" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_that_a_page_shows_exist(page):
    makefile, project = ((ROOT / name).read_text() for name in ("Makefile", "pyproject.toml"))
    words = (ROOT / "desugar" / "cli" / "commands.py").read_text()
    for command in commands(page):
        match command:
            case ["make", target, *_]:
                assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
            case ["python", "-m", "desugar", name, *_]:
                assert f"def {name}(" in words, name
            case [pip, "install", torch, "--index-url", index] if pip.endswith("pip"):
                assert f"{torch}\n" in (ROOT / "constraints.txt").read_text()
                assert index == "https://download.pytorch.org/whl/cpu"  # no test downloads PyTorch
            case [pip, "install", *_, extra] if pip.endswith("pip"):
                assert f"\n{extra.split('[')[1].rstrip(']')} = [" in project, extra
            case ["python", script, *options]:
                assert all(o in (ROOT / script).read_text() for o in options if o.startswith("--")), command
            case ["python3", "-m", "venv", _] | [".", ".venv/bin/activate"]:
                pass
            case _:
                pytest.fail(f"nothing tries {command}")


# ---- the runner itself -------------------------------------------------------------------------------------

PAGE = """A page.

```python
x = 2
print(x, "and more")
```

<!-- output -->
```text
2 ...
```

```sh
not Python
```

```python
print(x + 1)
```

<!-- output -->
```text
4
```
"""


OPEN = """```python
print('took 3 ms', 'new', sep='\\n')
```

<!-- output -->
```text
took ... ms
old
```
"""
# A page, which of its outputs agree, and the page after it was refreshed.
REFRESHED = {
    "of two outputs the stale one": (PAGE, [True, False], PAGE.replace("4\n", "3\n")),
    "but not what the page leaves open": (OPEN, [False], OPEN.replace("old\n", "new\n")),
}


@pytest.mark.parametrize("case", REFRESHED)
def test_stale_output_is_found_and_refreshed(case, tmp_path):
    before, agrees, after = REFRESHED[case]
    page = tmp_path / "page.md"
    page.write_text(before)
    assert [shown.agrees() for shown in compare_outputs(page, tmp_path)] == agrees
    assert refresh_page(page, tmp_path) == 1 and page.read_text() == after


def test_an_error_names_the_line_of_the_page(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("A page.\n\n```python\nraise ValueError('here')\n```\n")
    with pytest.raises(ValueError, match="here") as caught:
        compare_outputs(page, tmp_path)
    assert caught.traceback[-1].lineno + 1 == 4
