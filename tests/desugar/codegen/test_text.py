"""Small pieces of generated text."""

import pytest

from desugar.codegen.text import negated, targets_of, tuple_of


@pytest.mark.parametrize(("items", "text"), [([], "()"), ([1], "(1,)"), (["a", 2], "(a, 2)")])
def test_tuple_of(items, text):
    assert tuple_of(items) == text


@pytest.mark.parametrize(("names", "text"), [(["a"], "(a,)"), (["a", "b"], "a, b")])
def test_targets_of(names, text):
    assert targets_of(names) == text


@pytest.mark.parametrize(
    ("condition", "opposite"),
    [
        ("a is None", "a is not None"),
        ("len(args) == 2", "len(args) != 2"),
        ("not kwargs", "kwargs"),
        ("check(a, b.c)", "not check(a, b.c)"),
        ("a == 1 and b", "not (a == 1 and b)"),
        ("not a and b", "not (not a and b)"),
        ("a is b is c", "not (a is b is c)"),
        ("not f(a) == 2", "not (not f(a) == 2)"),
    ],
)
def test_negated(condition, opposite):
    assert negated(condition) == opposite
    values = {
        "a": 1,
        "b": 0,
        "c": 1,
        "args": (1,),
        "kwargs": {},
        "f": len,
        "check": lambda *_: True,
        "len": len,
    }
    if "b.c" not in condition and "f(a)" not in condition:
        assert bool(eval(condition, dict(values))) is not bool(eval(opposite, dict(values)))
