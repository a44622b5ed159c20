"""Every patch of torch, Inductor and Triton for the fake device, with the reasons.

Without a CUDA driver, torch refuses to make a CUDA tensor, and Inductor refuses to lower a graph over one. Neither
needs the device: both read its properties alone. `patched` supplies the properties of a device that is not there.
`DESCRIPTION` lists the replaced attributes, so that a test can compare it with a release.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import unittest.mock
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

# ------------------------------------------------------------------------------------------------- patches

Answer = Callable[..., Any]

# The attributes that need a device although nothing runs, each with the name of its replacement in `_answers`.
DESCRIPTION = {
    # Whether there is a device, which one is current, and its properties.
    "torch.cuda:is_available": "available",
    "torch.cuda:device_count": "one",
    "torch.cuda:current_device": "index",
    "torch.cuda:get_device_properties": "properties",
    "torch.cuda:get_device_capability": "capability",
    "torch.cuda:get_device_name": "name",
    "torch.cuda:is_bf16_supported": "available",
    # Dynamo's and Inductor's references to the same functions.
    "torch._dynamo.device_interface:CudaInterface.current_device": "static index",
    "torch._dynamo.device_interface:CudaInterface.device_count": "static one",
    "torch._dynamo.device_interface:CudaInterface.get_device_properties": "static properties",
    # Start the driver.
    "torch.cuda:_lazy_init": "nothing",
    "torch.cuda:is_initialized": "not",
    "torch._subclasses.fake_tensor:init_gpu_context": "nothing",
    # `torch.tensor(..., device="cuda")` in fake mode would first make a real tensor.
    "torch._subclasses.fake_tensor:FakeTensorMode.avoid_device_init": "always",
    # Dynamo saves and restores the state of the generator around a trace.
    "torch.cuda:get_rng_state": "generator",
    "torch.cuda:set_rng_state": "nothing",
    # Dynamo and Inductor make the device of a graph the current one, and register the current stream.
    "torch.cuda:set_device": "nothing",
    "torch.cuda:_exchange_device": "index",
    "torch.cuda:_maybe_exchange_device": "index",
    "torch.cuda:is_current_stream_capturing": "not",
    "torch.accelerator:is_available": "not",
    "torch.accelerator:current_device_index": "index",
    # Generated code reads the stream, allocates results, and makes views of them, in C++ functions that
    # need storage. It binds them when it is imported.
    "torch._C:_cuda_getCurrentRawStream": "index",
    "torch._C._dynamo.guards:_empty_strided_cuda": "empty",
    "torch._C._dynamo.guards:_empty_strided_cpu": "empty on host",
    "torch._C._dynamo.guards:_empty_strided_cpu_pinned": "empty on host",
    "torch._C._dynamo.guards:_reinterpret_tensor": "reinterpret",
    "torch._C._dynamo.guards:copy_if_misaligned": "same",
    # Folding of constants computes with one-element tensors on the device of the graph.
    "torch._inductor.constant_folding:ConstantFolder._deduce_value": "on host",
    "torch._inductor.fx_passes.joint_graph:UniformValueConstantFolder._deduce_value": "on host",
    # The engine gets streams from the driver.
    "torch.autograd:grad": "grad",
    "torch.autograd.function:FunctionCtx.set_materialize_grads": "materialize",
    # Loads the driver's library.
    "torch._inductor.runtime.triton_helpers:set_driver_to_gpu": "nothing",
    # Loads compiled kernels onto the device; host kernels would read the memory of fake tensors.
    "torch._inductor.async_compile:AsyncCompile.triton": "triton",
    "torch._inductor.async_compile:AsyncCompile.cpp_pybinding": "host",
    # Has the nodes of the scheduler that a kernel fuses.
    "torch._inductor.codegen.triton:TritonScheduling.define_kernel": "define",
}

# Compiling runs nothing, so options that time kernels are off. Caches are off since they hold kernels of a device.
_INDUCTOR_OPTIONS = {
    "compile_threads": 1,
    "fx_graph_cache": False,
    "fx_graph_remote_cache": False,
    "use_static_triton_launcher": False,
    "max_autotune": False,
    "max_autotune_gemm": False,
    "max_autotune_pointwise": False,
    "coordinate_descent_tuning": False,
    "triton.cudagraphs": False,
    "triton.autotune_at_compile_time": False,
    "force_shape_pad": False,
    "shape_padding": False,  # pads operands of matrix products if a benchmark says so
    "pre_grad_custom_pass": None,
}

# Modules with functions that remember properties of the device.
_REMEMBERING = (
    "torch._inductor.utils",
    "torch.utils._triton",
    "torch._inductor.codegen.cuda.cuda_env",
    "torch._inductor.codegen.cutlass.cuda_env",
    "torch._inductor.fx_passes.fuse_attention",
)


def owner_of(key: str) -> tuple[Any, str]:
    """Returns the object and the attribute that a key of `DESCRIPTION` names.

    Raises:
        AttributeError: This release of PyTorch has no such attribute.
        ImportError: It has no such module.
    """
    module, _, path = key.partition(":")
    *parents, attribute = path.split(".")
    owner = functools.reduce(getattr, parents, importlib.import_module(module))
    getattr(owner, attribute)
    return owner, attribute


def patches_that_do_not_fit() -> list[str]:
    """Returns the keys of `DESCRIPTION`, and the options of Inductor, that this release of PyTorch lacks."""
    missing = []
    for key in DESCRIPTION:
        try:
            owner_of(key)
        except (AttributeError, ImportError):
            missing.append(key)
    options = importlib.import_module("torch._inductor").config
    return missing + [
        f"torch._inductor.config.{name}" for name in _INDUCTOR_OPTIONS if not _has_option(options, name)
    ]


def _has_option(options: Any, name: str) -> bool:
    try:
        functools.reduce(getattr, name.split("."), options)
    except AttributeError:
        return False
    return True


@contextlib.contextmanager
def patched(properties: SimpleNamespace, hooks: Any) -> Iterator[None]:
    """Answers for a device with the given properties, in the whole process.

    Args:
        properties: The result of `torch.cuda.get_device_properties`.
        hooks: The callbacks while Inductor compiles (`bench.prediction.fake.Hooks`).
    """
    answers = _answers(properties, hooks)
    with contextlib.ExitStack() as stack:
        stack.callback(_forget)
        _forget()
        for key, answer in DESCRIPTION.items():
            owner, attribute = owner_of(key)
            stack.enter_context(
                unittest.mock.patch.object(owner, attribute, answers[answer](owner, attribute))
            )
        stack.enter_context(_known_to_workers(properties))
        stack.enter_context(_as_triton_driver(properties))
        stack.enter_context(_own_cache_folder())
        stack.enter_context(_with_attention(hooks.attend))
        options = importlib.import_module("torch._inductor").config
        stack.enter_context(options.patch(_INDUCTOR_OPTIONS))
        # Sizes of an earlier call would make sizes of this one symbols.
        dynamo_options = importlib.import_module("torch._dynamo").config
        stack.enter_context(dynamo_options.patch(automatic_dynamic_shapes=False))
        yield


def _answers(properties: SimpleNamespace, hooks: Any) -> dict[str, Answer]:
    """Returns functions that make the replacement of an attribute, by the name in `DESCRIPTION`."""

    def always(value: Any) -> Answer:
        return lambda owner, attribute: lambda *args, **kwargs: value

    def static(value: Any) -> Answer:
        return lambda owner, attribute: staticmethod(lambda *args, **kwargs: value)

    return {
        "available": always(True),
        "not": always(False),
        "nothing": always(None),
        "one": always(1),
        "static one": static(1),
        "index": always(0),
        "static index": static(0),
        "properties": always(properties),
        "static properties": static(properties),
        "capability": always((properties.major, properties.minor)),
        "name": always(properties.name),
        "always": lambda owner, attribute: property(lambda self: True),
        "generator": lambda owner, attribute: lambda *args: torch.zeros(16, dtype=torch.uint8),
        "empty": lambda owner, attribute: functools.partial(_empty_strided, "cuda"),
        "empty on host": lambda owner, attribute: functools.partial(_empty_strided, "cpu"),
        "reinterpret": lambda owner, attribute: _reinterpret,
        "same": lambda owner, attribute: lambda x: x,
        "triton": lambda owner, attribute: functools.partialmethod(_compile_kernel, hooks),
        "grad": lambda owner, attribute: hooks.grad,
        "materialize": lambda owner, attribute: hooks.materialize,
        "host": lambda owner, attribute: lambda self, argtypes, source: hooks.host(source),
        "on host": _on_host,
        "define": functools.partial(_define_and_tell, hooks),
    }


def _empty_strided(device: str, size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def _reinterpret(x: Tensor, size: Any, stride: Any, offset: int = 0) -> Tensor:
    return torch.as_strided(x, size, stride, x.storage_offset() + offset)


def _compile_kernel(self: Any, hooks: Any, name: str, source: str, device_str: str = "cuda") -> Any:
    """Compiles a kernel for its first configuration, as `AsyncCompile.triton` does, and loads it nowhere."""
    load = importlib.import_module("torch._inductor.async_compile")._load_triton_kernel_from_source
    kernel = load(name, source)
    if kernel.configs is not None:  # otherwise it was compiled before
        kernel.num_configs = len(kernel.configs)
        kernel.configs = kernel.configs[:1]
    kernel.precompile(warm_cache_only=True)
    return hooks.triton(name, kernel)


def _define_and_tell(hooks: Any, owner: Any, attribute: str) -> Answer:
    define = getattr(owner, attribute)

    @functools.wraps(define)
    def define_kernel(self: Any, source: str, nodes: Any, kernel: Any) -> str:
        name = define(self, source, nodes, kernel)
        hooks.define(name, nodes, kernel)
        return name

    return define_kernel


def _on_host(owner: Any, attribute: str) -> Answer:
    """Wraps a method so that the tensors that it makes on the device are made on the CPU."""
    compute = getattr(owner, attribute)
    mode = importlib.import_module("torch.utils._python_dispatch").TorchDispatchMode

    class OnHost(mode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if torch.device(kwargs.get("device") or "cpu").type == "cuda":
                kwargs["device"] = torch.device("cpu")
            return func(*args, **kwargs)

    @functools.wraps(compute)
    def compute_on_host(self: Any, *args: Any, **kwargs: Any) -> Any:
        with OnHost():
            return compute(self, *args, **kwargs)

    return compute_on_host


@contextlib.contextmanager
def _with_attention(attend: Callable[..., Any]) -> Iterator[None]:
    """Calls `attend` for attention on CUDA in a trace, before PyTorch decomposes it."""
    op = torch.ops.aten.scaled_dot_product_attention.default
    # The keys under which the operator is reached with and without autograd.
    keys = [torch._C.DispatchKey.AutogradCUDA, torch._C.DispatchKey.CUDA]

    def attend_or_decompose(*args: Any, **kwargs: Any) -> Any:
        result = attend(*args, **kwargs)
        return op.decompose(*args, **kwargs) if result is NotImplemented else result

    for key in keys:  # the dispatch of the operator in Python, as in a trace
        op.py_impl(key)(attend_or_decompose)
    op._dispatch_cache.clear()
    try:
        yield
    finally:
        for key in keys:
            del op.py_kernels[key]
        op._dispatch_cache.clear()


@contextlib.contextmanager
def _known_to_workers(properties: SimpleNamespace) -> Iterator[None]:
    """Puts the properties where Inductor's processes that compile read the properties of real devices."""
    interface = importlib.import_module("torch._dynamo.device_interface")
    known = interface.caching_worker_device_properties
    before = known.pop("cuda", None)
    known["cuda"] = [properties]
    try:
        yield
    finally:
        known.pop("cuda", None)
        if before is not None:
            known["cuda"] = before


class _Driver:
    """The functions of a driver that Triton calls while it compiles."""

    def __init__(self, properties: SimpleNamespace) -> None:
        compiler = importlib.import_module("triton.backends.compiler")
        capability = properties.major * 10 + properties.minor
        self.target = compiler.GPUTarget("cuda", capability, properties.warp_size)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)


@contextlib.contextmanager
def _as_triton_driver(properties: SimpleNamespace) -> Iterator[None]:
    driver = importlib.import_module("triton.runtime.driver").driver
    before = driver._active
    driver.set_active(_Driver(properties))
    try:
        yield
    finally:
        driver._active = before


@contextlib.contextmanager
def _own_cache_folder() -> Iterator[None]:
    """Keeps generated modules, which bind the replaced functions, apart from modules for a real device."""
    folder = os.path.join(
        importlib.import_module("torch._inductor.runtime.cache_dir_utils").cache_dir(), "fake"
    )
    names = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": os.path.join(folder, "triton")}
    names["TRITON_DEFAULT_FP_FUSION"] = os.environ.get(
        "TRITON_DEFAULT_FP_FUSION", "1"
    )  # Triton warns without it
    with unittest.mock.patch.dict(os.environ, names):
        yield


def _forget() -> None:
    """Clears the caches of torch's functions that read a device."""
    for name in _REMEMBERING:
        if importlib.util.find_spec(name) is None:
            continue
        for value in vars(importlib.import_module(name)).values():
            if hasattr(value, "cache_clear") and getattr(value, "__module__", "") == name:
                value.cache_clear()
    importlib.import_module("torch._inductor.runtime.hints").DeviceProperties.create.cache_clear()
    importlib.import_module("torch._inductor.codecache").CacheBase.get_system.cache_clear()


@contextlib.contextmanager
def noting_host_kernels(define: Callable[[Any, Any], None]) -> Iterator[None]:
    """Calls `define` with the scheduler's nodes and Inductor's arguments of each C++ kernel, which is built as ever."""
    # Where the nodes of the scheduler that a C++ kernel fuses are known.
    scheduling = importlib.import_module("torch._inductor.codegen.cpp").CppScheduling
    define_kernel = scheduling.define_kernel

    @functools.wraps(define_kernel)
    def define_and_tell(self: Any, source: str, nodes: Any, args: Any = None) -> str:
        define(nodes, self.kernel_group.args if args is None else args)
        return define_kernel(self, source, nodes, args)

    with unittest.mock.patch.object(scheduling, "define_kernel", define_and_tell):
        yield
