"""The files of the store: whole or absent, bounded, and found by a second process."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

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


# ---- a second process ----------------------------------------------------------------------------------------

SCRIPT = """
import json, sys, torch
from subclasses.ragged import JaggedTensor
import desugar, desugar.pipeline
from torch._inductor.codecache import CppPythonBindingsCodeCache

counts = {"traced": 0, "asked the compiler": 0}
compile_stages, load = desugar.pipeline._compile, CppPythonBindingsCodeCache.load_async.__func__

def traced(*args):
    counts["traced"] += 1
    return compile_stages(*args)

def asked(cls, *args, **kwargs):
    counts["asked the compiler"] += 1
    return load(cls, *args, **kwargs)

desugar.pipeline._compile = traced
CppPythonBindingsCodeCache.load_async = classmethod(asked)

def fn(x, w):
    return (torch.nn.functional.gelu(x) @ w).sin()

torch.manual_seed(0)
values = torch.randn(7, 4, requires_grad=True)
x = JaggedTensor(values, torch.tensor([0, 3, 3, 7]))
w = torch.randn(4, 4, requires_grad=True)
compiled = {"desugar": desugar.compile, "backend": lambda fn: torch.compile(fn, backend="desugar")}[sys.argv[1]](fn)
got, expected = [], []
for function, grads in ((compiled, got), (fn, expected)):
    y = function(x, w)
    grads += [y.values.detach(), *torch.autograd.grad(y.values.square().sum(), (values, w), retain_graph=True)]
assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, expected, strict=True))
print(json.dumps(counts))
"""


def start(folder: Path, way: str = "desugar", **environment: str) -> dict[str, int]:
    """Runs the script in a new process; returns how often it traced and asked for the compiler's command line."""
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(folder), "DESUGAR_STORE": "1"} | environment
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, way],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """A cache folder that one process has filled."""
    folder = tmp_path_factory.mktemp("cache")
    assert start(folder)["traced"] == 1
    return folder


@pytest.mark.slow
def test_a_second_process_traces_nothing_and_asks_no_compiler(warm):
    assert start(warm) == {"traced": 0, "asked the compiler": 0}
    assert start(warm, "backend") == {"traced": 0, "asked the compiler": 0}


@pytest.mark.slow  # each process compiles
def test_another_number_of_threads_is_another_program(warm):
    assert start(warm, OMP_NUM_THREADS="2")["traced"] == 1


@pytest.mark.slow
def test_a_kernel_that_is_gone_or_damaged_is_compiled_again(warm):
    libraries = list(warm.glob("*/*.main.so"))
    assert libraries
    for library in libraries:
        library.write_bytes(b"no library")
    assert start(warm) == {"traced": 0, "asked the compiler": len(libraries)}
    for library in libraries:
        library.unlink()
    assert start(warm) == {"traced": 0, "asked the compiler": len(libraries)}
    assert start(warm) == {"traced": 0, "asked the compiler": 0}
