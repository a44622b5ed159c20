"""A function runs on a module once somebody imports it, or at once."""

import importlib
import sys

import pytest

from subclasses.after_import import after_import


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "slow_to_import.py").write_text("value = 1")
    monkeypatch.syspath_prepend(tmp_path)
    yield "slow_to_import"
    sys.modules.pop("slow_to_import", None)


def test_at_the_end_of_the_import_and_once(module):
    finders, seen = list(sys.meta_path), []
    after_import(module, lambda found: seen.append((found.__name__, found.value)))
    importlib.import_module("json")  # another module
    assert seen == []
    imported = importlib.import_module(module)
    importlib.reload(imported)
    assert seen == [(module, 1)] and sys.meta_path == finders


def test_at_once_where_it_is_imported(module):
    imported, finders, seen = importlib.import_module(module), list(sys.meta_path), []
    after_import(module, seen.append)
    assert seen == [imported] and sys.meta_path == finders


def test_a_module_that_is_not_there(module):
    after_import("no_such_module", lambda found: pytest.fail("nothing was imported"))
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_module")
