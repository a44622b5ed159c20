"""Small pieces of generated text."""

import pytest

from desugar.codegen.text import targets_of, tuple_of


@pytest.mark.parametrize(("items", "text"), [([], "()"), ([1], "(1,)"), (["a", 2], "(a, 2)")])
def test_tuple_of(items, text):
    assert tuple_of(items) == text


@pytest.mark.parametrize(("names", "text"), [(["a"], "(a,)"), (["a", "b"], "a, b")])
def test_targets_of(names, text):
    assert targets_of(names) == text
