"""The files of the store: whole or absent, and bounded."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys

import pytest

from desugar.store import files

KEY = "k" * 32


def test_a_file_is_read_as_it_was_written(folder):
    assert files.read(KEY, "a.program") is None and files.names(KEY) == []
    files.write(KEY, "a.program", b"content")
    assert files.read(KEY, "a.program") == b"content" and files.names(KEY) == ["a.program"]
    assert not list(folder.rglob(".*"))  # nothing is left beside it


def test_the_oldest_files_go_first(folder, monkeypatch):
    monkeypatch.setenv(files.LIMIT, "2500")
    for number, name in enumerate("abc"):
        files.write(KEY, name, bytes(1000))
        os.utime(folder / KEY[:2] / KEY / name, (number, number)) if name != "c" else None
    assert files.names(KEY) == ["b", "c"]
    assert files.read(KEY, "b") is not None  # it was used just now
    os.utime(folder / KEY[:2] / KEY / "c", (1, 1))
    files.write(KEY, "d", bytes(1000))
    assert files.names(KEY) == ["b", "d"]


def write_often(key, content):
    for _ in range(200):
        files.write(key, "same", content)


@pytest.mark.slow
def test_processes_that_write_the_same_file(folder):
    contents = [bytes([n]) * 100_000 for n in (1, 2)]
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_often, args=(KEY, content)) for content in contents]
    for writer in writers:
        writer.start()
    seen = set()
    while any(writer.is_alive() for writer in writers):
        content = files.read(KEY, "same")
        assert content is None or content in contents
        seen.add(content)
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert set(contents) & seen and files.names(KEY) == ["same"]


@pytest.mark.slow
def test_importing_the_package_makes_its_artifacts_known():
    code = "import desugar; from torch.compiler._cache import CacheArtifactFactory as f; print(*f._artifact_types)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "desugar_program" in done.stdout.split()
