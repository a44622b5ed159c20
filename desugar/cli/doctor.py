"""Examines the installation: versions, compiler, GPU, caches, and a trial of a training step."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from desugar import _torch as torch_private
from desugar.api import compile as desugar_compile

_LEAST = (2, 13)  # as in pyproject.toml


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of the examination: `state` is "ok", "missing" (a part is unavailable) or "broken"."""

    state: str
    what: str
    detail: str


def examine(*, inductor: bool = False) -> Iterator[Finding]:
    """Yields all findings, in order; `inductor` compiles a small function with Inductor, which takes a while."""
    yield from _versions()
    yield _private_names()
    yield _cxx()
    yield _gpu()
    yield _cache()
    yield _trial("eager")
    if inductor:
        yield _trial("inductor")


def _versions() -> Iterator[Finding]:
    yield Finding("ok", "Python", f"{platform.python_version()} at {sys.executable}")
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    wanted = ".".join(map(str, _LEAST))
    yield Finding(
        "ok" if release >= _LEAST else "broken",
        "PyTorch",
        f"{torch.__version__}; {wanted} or newer is needed",
    )
    for name, use in (
        ("optree", None),
        ("rich", "coloured explanations in a terminal"),
        ("typer", "this command line"),
        ("triton", "Inductor's kernels for GPUs"),
    ):
        try:
            yield Finding("ok", name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(
                "broken" if use is None else "missing",
                name,
                f"not installed; it is for {use or 'everything'}",
            )


def _private_names() -> Finding:
    """Examines the names of torch that `desugar` imports on first use."""
    absent = []
    for name in torch_private.NAMES:
        try:
            getattr(torch_private, name)
        except (ImportError, AttributeError) as error:
            absent.append(f"{name} ({error})")
    if absent:
        return Finding(
            "broken", "names of torch", f"{', '.join(absent)}: this release of PyTorch is not supported"
        )
    return Finding("ok", "names of torch", f"all {len(torch_private.NAMES)} that desugar uses are there")


def _cxx() -> Finding:
    named = os.environ.get("CXX")
    compiler = next(
        (path for name in [named, "g++", "clang++"] if name and (path := shutil.which(name))), None
    )
    if compiler is None:
        return Finding(
            "missing", "C++ compiler", 'none found: backend="inductor" needs one on the CPU; install g++'
        )
    return Finding("ok", "C++ compiler", compiler)


def _gpu() -> Finding:
    if not torch.cuda.is_available():
        return Finding(
            "missing", "GPU", "none that this build of PyTorch can use; everything runs on the CPU"
        )
    names = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    return Finding("ok", "GPU", ", ".join(names))


def _cache() -> Finding:
    folder = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or _default_cache())
    if not folder.is_dir():
        return Finding("ok", "Inductor's cache", f"{folder} (empty)")
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return Finding("ok", "Inductor's cache", f"{folder} ({size / 2**20:.0f} MiB)")


def _default_cache() -> Path:
    """Returns Inductor's default cache folder: the user's folder in the folder of temporary files."""
    user = os.environ.get("USER") or os.environ.get("LOGNAME") or "root"
    return Path(tempfile.gettempdir()) / f"torchinductor_{user}"


def _trial(backend: str) -> Finding:
    """Runs a small training step, and compares it with eager mode."""
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    step: Callable[..., torch.Tensor] = desugar_compile(lambda x: model(x).relu().sum(), backend=backend)
    what = f'backend="{backend}"'
    try:
        step(x).backward()
        weight = model.weight.grad
        model.weight.grad = None
        model(x).relu().sum().backward()
        torch.testing.assert_close(weight, model.weight.grad)
    except Exception as error:  # noqa: BLE001 - any error is a finding
        return Finding(
            "broken", what, f"a training step fails: {type(error).__name__}: {str(error).splitlines()[0]}"
        )
    return Finding("ok", what, "a training step gives eager mode's gradients")
