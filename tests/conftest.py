"""The setup of every test: one seed, a fresh Dynamo, one thread; tests of a GPU are skipped without one."""

from __future__ import annotations

import gc
import linecache
import logging
import math
import os
import re
import sys
import tempfile
import zlib
from collections import defaultdict
from importlib.metadata import version
from typing import Any

# Two workers on two cores: a thread each. Read once by torch, so set before it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Inductor builds kernels in threads, as it does for users; only Triton needs its worker processes.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
os.environ.setdefault("TORCH_WARM_POOL", "0")

# AOTAutograd finds what another release of PyTorch has stored, and fails with it.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor-{version('torch')}")

# Dynamo collects garbage after each compilation: all objects of a worker, for the few that a test makes.
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")

# Every test traces anew; the tests of the store switch it on.
os.environ.setdefault("DESUGAR_STORE", "0")

import pytest
import torch
from hypothesis import HealthCheck, settings

from subclasses.slow_paths import forget_said

# pytest puts handlers on a logger that does not propagate, and with one PyTorch writes out every graph.
logging.getLogger("torch.__trace").propagate = True

settings.register_profile(
    "desugar",
    deadline=None,  # the first example of a property may compile
    derandomize=bool(os.environ.get("CI")),  # a red CI is reproducible
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("desugar")


_COMPILED = ("test_compiled_", "test_dynamic_sh", "test_metadata_guard")
# Where the kit tries every promise of a class that ships, or of an example.
_IS_OF_A_SHIPPED_CLASS = re.compile(
    r"tests/(examples/|subclasses/ragged/test_padded_conformance|subclasses/keyed/).*::Test"
).match


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="a skipped test fails")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Under `--no-skips`, a test that is skipped fails."""
    report = yield
    if report.skipped and item.config.getoption("--no-skips") and not hasattr(report, "wasxfail"):
        report.outcome, report.longrepr = "failed", f"skipped under --no-skips: {report.longrepr}"
    return report


@pytest.hookimpl(tryfirst=True)  # before `-m "not slow"` is applied
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the cases of a sweep that a normal run leaves out, and skips what needs a GPU where there is none."""
    sweeps: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sweep"):
            sweeps[item.nodeid.partition("[")[0]].append(item)
        elif _IS_OF_A_SHIPPED_CLASS(item.nodeid):
            # A normal run tries each promise of an eighth of the classes; under the compilers, of one in 24.
            item.add_marker(pytest.mark.sweep(24 if item.name.startswith(_COMPILED) else 8))
            sweeps[item.name].append(item)
    for cases in sweeps.values():
        (each,) = cases[0].get_closest_marker("sweep").args  # type: ignore[union-attr]
        # In an order without regard to how the parameters vary, and the same in every run.
        cases.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))
        for item in cases[math.ceil(len(cases) / each) :]:
            item.add_marker(pytest.mark.slow)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Freezes the tests and their imports, so that the garbage collector does not scan these millions of objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)  # a compilation makes as many objects in a moment, and most of them stay


@pytest.fixture(autouse=True)
def _same_start():
    """Seeds torch, and drops what Dynamo compiled for another test."""
    torch.default_generator.manual_seed(
        0
    )  # torch.manual_seed keeps a stack of the caller for each kind of device
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)
    forget_said()
    yield
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    for name in [name for name in linecache.cache if name.startswith("<eval_with_key>")]:
        del linecache.cache[
            name
        ]  # torch.fx keeps the text of each graph, and a compilation looks for new ones


@pytest.fixture
def without_garbage_collection():
    """Collects no garbage in a test that runs to Python's recursion limit.

    A finalizer of another test's garbage would fail there, and pytest reports that as an error of this test.
    """
    gc.disable()
    yield
    gc.enable()
