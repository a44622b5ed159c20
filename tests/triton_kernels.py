"""Triton without a GPU: its interpreter in a process of its own, and its compiler for Hopper (sm_90)."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
HAS_TRITON = importlib.util.find_spec("triton") is not None


def needs_triton(test: Any) -> Any:
    """Marks a test that `make test-gpu-kernels` runs, where a skip is a failure."""
    reason = "needs Triton: pip install '.[gpu-tests]', or PyTorch's CUDA build"
    return pytest.mark.triton(pytest.mark.skipif(not HAS_TRITON, reason=reason)(test))


def interpret(script: str) -> str:
    """Returns the output of a script whose kernels Triton's interpreter runs, on the CPU."""
    environment = {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@dataclass(frozen=True)
class Compiled:
    """A kernel that was compiled for Hopper.

    Attributes:
        ptx: The text of its PTX.
        shared: The bytes of shared memory.
        registers: The registers of a thread.
        spills: The bytes of a thread in local memory.
    """

    ptx: str
    shared: int
    registers: int
    spills: int

    def count(self, pattern: str) -> int:
        return len(re.findall(pattern, self.ptx))


def compile_for_hopper(
    kernel: Any, arguments: dict[str, str], constants: dict[str, Any], **options: int
) -> Compiled:
    """Compiles a kernel of Triton, without a driver.

    Args:
        kernel: The kernel.
        arguments: The type of each argument that is not a constant, such as `*bf16`; all are multiples of 16.
        constants: The value of each constant.
        options: `num_warps` and `num_stages`.
    """
    compiler, target = (
        importlib.import_module(f"triton.{name}") for name in ("compiler", "backends.compiler")
    )
    names = kernel.arg_names
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in arguments}
    values = {(names.index(name),): value for name, value in constants.items()}
    signature = arguments | dict.fromkeys(constants, "constexpr")
    source = compiler.ASTSource(kernel, signature, values, aligned)
    found = importlib.import_module("triton").compile(source, target.GPUTarget("cuda", 90, 32), options)
    registers, spills = _resources(found.asm["cubin"])
    return Compiled(found.asm["ptx"], found.metadata.shared, registers, spills)


def _resources(cubin: bytes) -> tuple[int, int]:
    """Returns the registers of a thread and its bytes of local memory, as cuobjdump reads them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [importlib.import_module("triton.knobs").nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return found["REG"], found["STACK"] + found["LOCAL"]


@pytest.fixture
def triton_cache(tmp_path, monkeypatch):
    """Compiles anew, and silences advice about fused multiplications."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
