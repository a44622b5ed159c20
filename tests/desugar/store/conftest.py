"""A store of its own for each test, in which plain graphs run op by op, so that no test waits for a compiler."""

import contextlib

import pytest

import desugar.backends.choose
import desugar.pipeline
from desugar.backends.base import Backend


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The cache folder of one test; the store is on."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("DESUGAR_STORE", "1")
    return tmp_path / "cache" / "desugar"


@pytest.fixture
def traced(folder, monkeypatch):
    """Makes the store keep programs of `backend="eager"`, too; returns a list that grows with each trace."""

    def storable(name, *args, **kwargs):
        return Backend(name, *args, **{"settings": contextlib.nullcontext} | kwargs)

    compile_stages, seen = desugar.pipeline._compile, []

    def counted(function, inputs, backend):
        seen.append(function)
        return compile_stages(function, inputs, backend)

    monkeypatch.setattr(desugar.backends.choose, "Backend", storable)
    monkeypatch.setattr(desugar.pipeline, "_compile", counted)
    return seen
