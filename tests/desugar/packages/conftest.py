"""Packages of plain graphs, which run op by op: the tests cover everything but the machine code."""

import pytest

import desugar
from desugar.packages.loading import recompile


@pytest.fixture
def pack(tmp_path, monkeypatch):
    """Returns a function that saves calls of a function, and loads the package."""
    monkeypatch.setattr(recompile, "BACKEND", "eager")
    place = tmp_path / "package.pt2"

    def save_and_load(fn, *calls, classes=(), state=None, **options):
        desugar.save(place, fn, *calls, native=False, **options)
        return desugar.load(place, classes=classes, state=state, native=False)

    save_and_load.path = place
    return save_and_load
