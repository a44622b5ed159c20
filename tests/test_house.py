"""The rules of the house without a linter: one exec, private names in one place, small files."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("subclasses", "desugar")
WITH_PRIVATE_NAMES = (*PACKAGES, "bench/prediction")  # folders that import private names of torch
PRIVATE_NAMES = [path for folder in WITH_PRIVATE_NAMES for path in (ROOT / folder).glob("_torch*.py")]

# ---- reading the sources -----------------------------------------------------------------------------------


def sources(folders: tuple[str, ...] = PACKAGES) -> list[Path]:
    """Every Python file of the two packages, or of other folders."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a file, which several tests read."""
    return ast.parse(path.read_text())


def name_of(path: Path) -> str:
    """The path as the repository speaks of it."""
    return path.relative_to(ROOT).as_posix()


def dotted(node: ast.expr) -> list[str] | None:
    """``a.b.c`` as its parts; None for anything else."""
    match node:
        case ast.Name(id=name):
            return [name]
        case ast.Attribute(value=value, attr=attr):
            head = dotted(value)
            return head and [*head, attr]
    return None


def is_private(part: str) -> bool:
    """A single leading underscore; dunders are public protocol."""
    return part.startswith("_") and not (part.startswith("__") and part.endswith("__"))


def torch_aliases(tree: ast.Module) -> dict[str, str]:
    """Local name → dotted torch name, for everything imported from torch."""
    aliases = {}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                aliases |= {
                    name.asname or "torch": name.name if name.asname else "torch"
                    for name in names
                    if name.name.split(".")[0] == "torch"
                }
            case ast.ImportFrom(module=str(module), names=names, level=0) if module.split(".")[0] == "torch":
                aliases |= {name.asname or name.name: f"{module}.{name.name}" for name in names}
    return aliases


def torch_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and dotted name of each use of torch: imports and attribute chains on them."""
    aliases = torch_aliases(tree)
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, n.name) for n in names if n.name.split(".")[0] == "torch")
            case ast.ImportFrom(module=str(module), names=names, level=0) if module.split(".")[0] == "torch":
                yield from ((node.lineno, f"{module}.{n.name}") for n in names)
            case ast.Attribute():
                parts = dotted(node)
                if parts and parts[0] in aliases:
                    yield node.lineno, ".".join([aliases[parts[0]], *parts[1:]])


def private_torch_names(path: Path) -> list[tuple[int, str]]:
    """Uses of a private torch name; operators (``torch.ops``) have public names of their own."""
    tree = tree_of(path)
    return [
        (line, name)
        for line, name in torch_names(tree)
        if not name.startswith("torch.ops.") and any(map(is_private, name.split(".")))
    ]


# ---- the sources -------------------------------------------------------------------------------------------


def test_there_is_one_exec():
    calls = [
        name_of(path)
        for path in sources()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and dotted(node.func) in (["exec"], ["eval"], ["builtins", "exec"])
    ]
    assert calls == ["subclasses/source_text/build.py"]


def test_private_torch_names_are_imported_in_their_module_alone():
    found = [
        f"{name_of(path)}:{line}: {name}"
        for path in sources(WITH_PRIVATE_NAMES)
        if path not in PRIVATE_NAMES
        for line, name in private_torch_names(path)
    ]
    assert not found, f"import these through the _torch.py of their folder: {found}"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import torch\ntorch._C._x()", {"torch._C", "torch._C._x"}),
        ("from torch.utils._pytree import tree_map", {"torch.utils._pytree.tree_map"}),
        ("import torch.nn.functional as F\nF._threshold", {"torch.nn.functional._threshold"}),
        ("from torch import Tensor\nTensor._make_subclass", {"torch.Tensor._make_subclass"}),
        ("import torch\ntorch.ops.aten._to_copy\nx._base\ntorch.Tensor.__add__", set()),
    ],
)
def test_the_search_for_private_names_finds_them(tmp_path, text, found):
    (tmp_path / "a.py").write_text(text)
    assert {name for _, name in private_torch_names(tmp_path / "a.py")} == found


def test_every_private_name_has_its_reason_beside_it():
    bare = [
        f"{name_of(path)}:{line}: {name}"
        for path in PRIVATE_NAMES
        for line, name in private_torch_names(path)
        if not has_reason(path.read_text().splitlines(), line)
    ]
    assert not bare


def has_reason(lines: list[str], number: int) -> bool:
    """Is there a comment in the paragraph that holds this line (counted from 1)?"""
    first = last = number - 1
    while first > 0 and lines[first - 1].strip():
        first -= 1
    while last + 1 < len(lines) and lines[last + 1].strip():
        last += 1
    return any("#" in line and "noqa" not in line for line in lines[first : last + 1])


# ---- state and tests ---------------------------------------------------------------------------------------

MUTATORS = frozenset("append add remove discard pop popitem clear update setdefault extend insert".split())


def mutated(node: ast.AST) -> ast.expr | None:
    """The object that an expression changes: by a method, an item, an attribute, or ``next``."""
    match node:
        case ast.Call(func=ast.Attribute(value=value, attr=attr)) if attr in MUTATORS:
            return value
        case ast.Call(func=ast.Name(id="next"), args=[value, *_]):
            return value
        case ast.Subscript(value=value, ctx=ast.Store() | ast.Del()):
            return value
        case ast.Attribute(value=value, ctx=ast.Store() | ast.Del()):
            return value
    return None


def changing_state(tree: ast.Module) -> set[str]:
    """Module-level names that functions of a module change."""
    names: set[str] = set()
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    found: set[str] = set()
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        inside = [*ast.walk(function)]
        declared = {name for node in inside if isinstance(node, ast.Global) for name in node.names}
        local = {node.arg for node in inside if isinstance(node, ast.arg)}
        local |= {n.id for n in inside if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        changed = {t.id for node in inside if isinstance(t := mutated(node), ast.Name)}
        found |= (changed & names) - (local - declared) | declared
    return found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a = []\ndef f():\n    a.append(1)", {"a"}),
        ("a: dict = {}\ndef f(k):\n    a[k] = 1", {"a"}),
        ("a = count()\ndef f():\n    return next(a)", {"a"}),
        ("a = local()\ndef f():\n    a.b = 1", {"a"}),
        ("a = 1\ndef f():\n    global a\n    a = 2", {"a"}),
        ("a = []\ndef f(a):\n    a.append(1)", set()),
        ("a = []\na.append(1)\ndef f():\n    return a", set()),
    ],
)
def test_the_search_for_state_finds_it(text, found):
    assert changing_state(ast.parse(text)) == found


def listed_in(text):
    """The pairs of an owner and a name in tables of CONTRIBUTING.md."""
    rows = [row.split("|")[1:3] for row in text.split("\n") if row.startswith("| `")]
    return {
        (owner.strip(" `"), name)
        for owner, names in rows
        for name in names.strip().replace("`", "").split(", ")
    }


def test_state_that_outlives_a_call_is_listed():
    found = {(name_of(path), name) for path in sources() for name in changing_state(tree_of(path))}
    missing = sorted(found - listed_in((ROOT / "CONTRIBUTING.md").read_text()))
    assert not missing, f"list these in CONTRIBUTING.md, with their owner: {missing}"


_OF_FRAMES = {
    "_getframe",
    "currentframe",
    "f_back",
    "getrefcount",
    "tb_frame",
    "tb_next",
    "extract_tb",
    "walk_tb",
    "extract_stack",
    "walk_stack",
    "f_locals",
    "_use_count",
}
_TOOLS = ("subclasses/testing/", "desugar/compare/", "desugar/cli/")


def readers_of_frames(tree):
    """The innermost functions of a module that look at frames, tracebacks or reference counts."""
    found = set()

    def visit(node, function):
        if isinstance(node, ast.FunctionDef):
            function = node.name
        if isinstance(node, ast.Attribute | ast.Name) and getattr(node, "attr", "") in _OF_FRAMES:
            found.add(function)
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(tree, "")
    return found


def test_readers_of_frames_are_listed():
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("look at frames")[2].partition("\n## ")[0]
    found = {
        (name_of(path), name)
        for path in sources()
        if not name_of(path).startswith(_TOOLS)
        for name in readers_of_frames(tree_of(path))
    }
    assert found == listed_in(section)
    assert readers_of_frames(ast.parse("def f():\n    def g():\n        return sys._getframe(1)")) == {"g"}


def test_what_a_newcomer_reads_first_is_short():
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("### Read first")[2].partition("\n\n[")[0]
    files = [ROOT / row.split("`")[1] for row in section.split("\n") if row.startswith("| `")]
    assert len(files) > 8 and sum(path.read_text().count("\n") for path in files) <= 2500


def test_tests_lie_as_their_modules_do():
    folders = {path.parent.relative_to(ROOT) for path in sources()}
    tests = {path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")}
    of_packages = {folder for folder in tests if folder.parts and folder.parts[0] in PACKAGES}
    assert of_packages <= folders


# ---- installed packages ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_importing_the_packages_imports_torch_and_optree_alone():
    optional = "rich typer matplotlib hypothesis pytest expecttest pytest_benchmark sphinx".split()
    code = f"import sys, subclasses, desugar; print([m for m in {optional} if m in sys.modules])"
    out = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "[]"


def test_the_packages_are_typed():
    assert all((ROOT / package / "py.typed").is_file() for package in PACKAGES)
