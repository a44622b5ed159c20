"""The emitter."""

import doctest

from subclasses.source_text import emitter
from subclasses.source_text.emitter import Emitter


def test_the_example_of_the_docstring():
    assert doctest.testmod(emitter).attempted > 0
    assert doctest.testmod(emitter).failed == 0


def test_fresh_names_are_identifiers_and_unique():
    e = Emitter()
    e.reserve("self")
    assert e.bind(object(), "self") == "self_1"
    names = [e.fresh_name(hint) for hint in ("x", "x", "class", "len", "3d", "aten::mm", "")]
    assert names[:2] == ["x", "x_1"]
    assert all(name.isidentifier() for name in names)
    assert len(set(names)) == len(names)
    assert "class" not in names and "len" not in names


def test_bind_gives_the_same_object_the_same_name():
    e = Emitter()
    first, second = [1], [1]
    assert e.bind(first, "data") == e.bind(first, "other") == "data"
    assert e.bind(second, "data") == "data_1"
    assert e.namespace["data"] is first and e.namespace["data_1"] is second
