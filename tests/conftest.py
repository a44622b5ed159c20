"""What every test gets: one seed, a fresh Dynamo, one thread, and no GPU test without a GPU."""

from __future__ import annotations

import functools
import gc
import linecache
import math
import os
import re
import sys
import weakref
import zlib
from collections import defaultdict
from collections.abc import Callable
from typing import Any

# Two workers on two cores: a thread each. Read once by torch, so set before it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Inductor builds kernels in threads, as it does for users; only Triton needs its worker processes.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
os.environ.setdefault("TORCH_WARM_POOL", "0")

# Dynamo collects garbage after each compilation: all objects of a worker, for the few that a test makes.
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")

# Every test traces anew; those of the store switch it on.
os.environ.setdefault("DESUGAR_STORE", "0")

import pytest
import torch
import torch._dynamo.guards
from hypothesis import HealthCheck, settings
from torch.fx._symbolic_trace import _Patcher
from torch.fx.experimental.proxy_tensor import PythonKeyTracer
from torch.fx.experimental.symbolic_shapes import ShapeEnv

# What only measures or logs a compilation, and takes more than half of its time. Dynamo writes to more memory than the
# processor caches before it times its guards; and pytest's handlers, on a logger that does not propagate, make torch
# write out every graph.
torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
torch._logging._internal.trace_log.propagate = True


def _patch_method(self: Any, cls: type, *args: Any, **kwargs: Any) -> None:
    """Leaves `nn.Module` as it is for a tracer that calls modules as they are and asks nothing of their attributes.

    A patch of it makes Python look up anew what it knows of all modules' classes, of which there are thousands.
    """
    if type(sys._getframe(1).f_locals["self"]) is not PythonKeyTracer:
        _patch(self, cls, *args, **kwargs)


_patch, _Patcher.patch_method = _Patcher.patch_method, _patch_method

settings.register_profile(
    "desugar",
    deadline=None,  # the first example of a property may compile
    derandomize=bool(os.environ.get("CI")),  # a red CI is reproducible
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("desugar")


# Promises of the kit, and where it is run.
_COMPILED = ("test_compiled_", "test_dynamic_sh")
_IS_OF_A_SHIPPED_CLASS = re.compile(
    r"tests/(examples/|subclasses/ragged/test_padded_conformance).*::Test"
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
        elif _IS_OF_A_SHIPPED_CLASS(item.nodeid) and item.name.startswith(_COMPILED):
            # What compilers do is tried of each class by the kit, in a normal run of a third of the classes.
            item.add_marker(pytest.mark.sweep(3))
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
    """Takes the tests and what they imported, millions of objects, out of what each collection of garbage looks at."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)  # a compilation makes as many objects in a moment, and most of them stay


def _keep_record(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def recorded(self: ShapeEnv, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        _shape_envs.add(self)

    return recorded


_shape_envs: weakref.WeakSet[ShapeEnv] = weakref.WeakSet()
_cached_methods = [method for method in vars(ShapeEnv).values() if hasattr(method, "cache_clear")]
ShapeEnv.__init__ = _keep_record(ShapeEnv.__init__)


def _drop_symbols() -> None:
    """Lets go of the symbols of a compilation, of which PyTorch keeps all: thousands of objects for each test.

    A fake tensor with symbolic sizes refers to its ShapeEnv from C++, where the garbage collector does not look, and
    the ShapeEnv to the fake tensor. The caches of its methods hold it, too.
    """
    for cached in _cached_methods:
        cached.cache_clear()
    for env in list(_shape_envs):
        env.fake_tensor_cache.clear()
        if env.tracked_fakes is not None:
            env.tracked_fakes.clear()


@pytest.fixture(autouse=True)
def _same_start():
    """Seeds torch, and drops what Dynamo compiled for another test."""
    torch.default_generator.manual_seed(
        0
    )  # torch.manual_seed keeps a stack of the caller for each kind of device
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)
    yield
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    _drop_symbols()
    for name in [name for name in linecache.cache if name.startswith("<eval_with_key>")]:
        del linecache.cache[
            name
        ]  # torch.fx keeps the text of each graph, and a compilation looks for new ones
