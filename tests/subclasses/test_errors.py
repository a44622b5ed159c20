"""The advice of errors: authors of a class add a rule, users of a class of the package do something else."""

from __future__ import annotations

import ast
import copy
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import subclasses
from subclasses import DispatchError, SpecError, inner
from subclasses.errors import coded
from subclasses.int8 import Int8Tensor
from subclasses.keyed import KeyedJaggedTensor
from subclasses.ragged import JaggedTensor
from subclasses.testing.errors import chain
from tests.subclasses.subjects import declare
from tests.tables import giving, raising


class Mine(JaggedTensor):
    """A class of an author, who inherits advice for users."""


Alone = declare(name="Alone", entries=inner())  # of an author, without advice


def rows() -> Any:
    """Jagged rows."""
    return JaggedTensor.from_tensors([torch.randn(2, 4), torch.randn(3, 4)])


VALUES = {
    "jagged": rows,
    "padded": lambda: rows().to_padded(),
    "time first": lambda: rows().transpose(0, 1),
    "keyed": lambda: KeyedJaggedTensor(["a"], torch.arange(3), torch.tensor([2, 1])),
}


test_what_an_error_advises = raising(
    {
        **{
            f"users of a class of the package, {name}": (
                lambda make=make: torch.bincount(make()),
                rf"(?s)^(?!.*implements).*{type(make()).__name__} has no rule for aten\.bincount.*"
                rf"; {re.escape(type(make())._instead)}$",
            )
            for name, make in VALUES.items()
        },
        "users of int8 weights": (
            lambda: Int8Tensor.from_float(torch.randn(4, 4)).cumsum_(0),
            r"(?s)^(?!.*implements).*compute with its inner tensors, "
            r"x\.unwrap\('qdata'\) and x\.unwrap\('scale'\), or x\.materialize\(\)",
        ),
        "authors, who inherit advice": (
            lambda: torch.bincount(Mine(rows().values, rows().offsets)),
            r"@Mine\.implements\(.*; or use x\.to_dense\(fill\)",
        ),
        "authors": (
            lambda: torch.exp(Alone(torch.ones(2))),
            r"@Alone\.implements\(torch\.ops\.aten\.exp\.default\)$",
        ),
    }
)


# ---- codes and hints, and the page that lists the codes ----------------------------------------------------

SOURCES = Path(subclasses.__file__).parent
PAGE = SOURCES.parent / "docs/api.md"
Cut = declare(
    entries=inner(), materialize=lambda self: self.entries[:1], keywords={"fallback": "materialize"}
)


def codes_in_sources():
    """Code -> the names of the errors that are made with it; also the places of errors without a code."""
    found, without = {}, []
    for path in sorted(SOURCES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            code = next((k.value for k in node.keywords if k.arg == "code"), None)
            if isinstance(code, ast.Constant):
                kind = node.args[0] if node.func.id == "coded" else node.func
                found.setdefault(code.value, set()).add(ast.unparse(kind))
            elif node.func.id in ("SpecError", "DispatchError"):
                without.append(f"{path.name}:{node.lineno}")
    return found, without


def test_the_page_lists_the_codes_of_the_sources():
    found, without = codes_in_sources()
    text = PAGE.read_text().split("### Codes of errors")[1].partition("\n## ")[0]
    rows = [
        [cell.strip() for cell in row.split("|")[1:-1]] for row in re.findall(r"^\| `.*", text, re.MULTILINE)
    ]
    listed = {code.strip("`"): set(re.findall(r"\w+Error", errors)) for code, errors, *_ in rows}
    assert not without, "errors without a code"
    assert len(listed) == len(rows)
    assert listed.keys() == found.keys()
    for code, kinds in found.items():
        named = {kind for kind in kinds if kind.endswith("Error")}
        assert named <= listed[code], code
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)+", code) for code in found)
    assert all(mistake and mend for _, _, mistake, mend in rows)


class Narrow(DispatchError):
    """An error of an author."""

    code = "narrow"


class WithLine(SpecError):
    """An error of an author with a constructor of its own."""

    def __init__(self, line):
        super().__init__(f"line {line}", code="with-line", hint="Mend it")
        self.args = (line,)


MADE = {
    "an op": lambda: DispatchError("no rule", code="no-rule", hint="add one"),
    "a declaration": lambda: SpecError("no inner tensor", code="inner-missing"),
    "without a code": lambda: DispatchError("refused"),
    "without a message": lambda: DispatchError(),
    "with several arguments": lambda: DispatchError("refused", 3),
    "a subclass": lambda: Narrow("too narrow", hint="Make it wide"),
    "a constructor of its own": lambda: WithLine(3),
    "a builtin type": lambda: coded(ValueError, "wrong", code="materialize-result", hint="correct it"),
}


def parts(error):
    return type(error), error.args, str(error), error.code, error.hint, getattr(error, "__notes__", None)


@pytest.mark.parametrize("case", MADE)
@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_a_copy_keeps_code_and_hint(case, again):
    error = MADE[case]()
    error.add_note("in the second layer")
    assert parts(again(error)) == parts(error)


test_the_hint_ends_the_message = giving(
    {
        case: (lambda case=case: parts(MADE[case]())[2:5], expected)
        for case, expected in {
            "an op": ("no rule; add one", "no-rule", "add one"),
            "a declaration": ("no inner tensor", "inner-missing", None),
            "without a code": ("refused", None, None),
            "without a message": ("", None, None),
            "a subclass": ("too narrow. Make it wide", "narrow", "Make it wide"),
            "a builtin type": ("wrong; correct it", "materialize-result", "correct it"),
        }.items()
    }
)


def test_a_composite_op_without_a_rule_for_its_part_has_the_code_of_the_op():
    with pytest.raises(DispatchError) as caught:
        declare(name="Parts", entries=inner(), keywords={"decompose": True})(torch.ones(2)).histc()
    assert caught.value.code == "no-rule"


@pytest.mark.parametrize("backend", ["eager", "desugar"])
def test_a_compiled_function_raises_with_the_code_in_its_chain(backend):
    for code, kind in {"no-rule": Alone, "materialize-result": Cut}.items():
        with pytest.raises(Exception, match=r"\w") as caught:
            torch.compile(torch.exp, backend=backend, fullgraph=True)(kind(torch.ones(2)))
        assert code in [getattr(error, "code", None) for error in chain(caught.value)]
