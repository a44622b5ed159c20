"""What every test gets: one seed, a fresh Dynamo, one thread, and no GPU test without a GPU."""

from __future__ import annotations

import gc
import os
import sys

# Two workers on two cores: a thread each. Read once by torch, so set before it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Inductor builds kernels in threads, as it does for users; only Triton needs its worker processes.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
os.environ.setdefault("TORCH_WARM_POOL", "0")

# Every test traces anew; those of the store switch it on.
os.environ.setdefault("DESUGAR_STORE", "0")

import pytest
import torch
import torch._dynamo.guards
from hypothesis import HealthCheck, settings

# What only measures or logs a compilation, and takes more than half of its time. Dynamo writes to more memory than the
# processor caches before it times its guards; and pytest's handlers, on a logger that does not propagate, make torch
# write out every graph.
torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
torch._logging._internal.trace_log.propagate = True

settings.register_profile(
    "desugar",
    deadline=None,  # the first example of a property may compile
    derandomize=bool(os.environ.get("CI")),  # a red CI is reproducible
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("desugar")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs a GPU where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Takes the tests and what they imported, millions of objects, out of what each collection of garbage looks at."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _same_start():
    """Seeds torch, and drops what Dynamo compiled for another test."""
    torch.manual_seed(0)
    yield
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
