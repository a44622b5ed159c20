"""A second process finds the programs and the kernels of the first one, compiled by Inductor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
