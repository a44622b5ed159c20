"""A device without a network gets wheels, entry points and the caches of an earlier run along with the sources."""

from __future__ import annotations

import importlib.metadata
import os

import pytest

from bench.gpu import wheels


@pytest.fixture
def environment(monkeypatch):
    for name in (*wheels.CACHES, "PYTHONPATH"):
        monkeypatch.setenv(name, "")


def test_each_package_has_a_version():
    assert all(pin.partition("==")[2] for pin in wheels.pins())


@pytest.mark.parametrize("part", [300, 10_000])
def test_caches_go_there_and_back_in_parts(tmp_path, monkeypatch, environment, part):
    monkeypatch.setattr(wheels, "PART", part)
    before, back, after = (tmp_path / name for name in ("before", "back", "after"))
    kept = before / "cache" / "triton" / "kernel"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(os.urandom(1000))
    back.mkdir()
    wheels.pack(before, back)
    assert (len(list(back.iterdir())) > 1) == (part == 300)
    back.rename(after)
    wheels.prepare(after)
    assert (after / "cache" / "triton" / "kernel").read_bytes() == kept.read_bytes()
    assert os.environ["TRITON_CACHE_DIR"] == str(after / "cache" / "triton")


def test_a_process_of_sources_alone_finds_the_backend(tmp_path, environment):
    wheels.prepare(tmp_path)
    assert str(tmp_path / "site") in os.environ["PYTHONPATH"]
    (found,) = importlib.metadata.distributions(path=[str(tmp_path / "site")])
    assert [(point.group, point.name) for point in found.entry_points] == [
        ("torch_dynamo_backends", "desugar")
    ]


def test_what_the_machine_has_is_not_installed(tmp_path):
    assert wheels._is_there(tmp_path / "optree-0.1-cp312.whl", tmp_path)
    assert not wheels._is_there(tmp_path / "no_such_package-0.1-cp312.whl", tmp_path)
    (tmp_path / "no_such_package-0.1.dist-info").mkdir()
    assert wheels._is_there(tmp_path / "no_such_package-0.1-cp312.whl", tmp_path)
