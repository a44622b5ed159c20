"""Every private name of torch that the fake device uses, with the reason. Each is imported on first use.

The patches of torch are in `_torch_patches.py`.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from desugar._torch import load_lazily

_LAZY = {
    # Fake tensors carry sizes, strides, dtypes and a device that need not exist.
    "FakeTensorMode": "torch._subclasses.fake_tensor",
    "FakeTensor": "torch._subclasses.fake_tensor",
    # Errors of an op whose result, or whose size, depends on data.
    "DataDependentOutputException": "torch._subclasses.fake_tensor",
    "DynamicOutputShapeException": "torch._subclasses.fake_tensor",
    "UnsupportedOperatorException": "torch._subclasses.fake_tensor",
    # Sees every op that the generated code calls.
    "TorchDispatchMode": "torch.utils._python_dispatch",
    # Formulas for the floating point operations of an op.
    "flop_registry": "torch.utils.flop_counter",
    # Stock `torch.compile`: the whole compiler, and the compilation of one graph.
    "compile_fx": "torch._inductor.compile_fx",
    "compile_fx_inner": "torch._inductor.compile_fx",
    "InductorError": "torch._inductor.exc",
    "optimize": "torch._dynamo",
    "TorchDynamoException": "torch._dynamo.exc",
    "BackendCompilerFailed": "torch._dynamo.exc",
    # Options of Inductor and of AOTAutograd.
    "inductor_config": "torch._inductor:config",
    "functorch_config": "torch._functorch:config",
    "cache_dir": "torch._inductor.runtime.cache_dir_utils",
    # The first node that cannot be part of a CUDA graph.
    "first_node_against_cuda_graphs": "torch._inductor.utils:get_first_incompatible_cudagraph_node",
    # Which arguments a user's Triton kernel reads and writes, by its intermediate code.
    "identify_accessed_tensors": "torch._higher_order_ops.triton_kernel_wrap",
    # The function behind an op that was written in Python, which may wait for the device where no op of torch's does.
    "OPDEFS": "torch._library.custom_ops",
    # The kernels of an op that Inductor decomposes; a call of one in a graph is a higher-order op.
    "triton_ops_to_kernels": "torch._library.triton",
    "kernel_side_table": "torch._higher_order_ops.triton_kernel_wrap",
    # The state that Inductor reads while it compiles: the graph, its sizes and buffers.
    "V": "torch._inductor.virtualized",
    # How a node of Inductor's scheduler accesses a buffer: at an index, or as a whole.
    "MemoryDep": "torch._inductor.dependencies",
    "RemovedArg": "torch._inductor.codegen.common",
    "SchedulerNode": "torch._inductor.scheduler",
}

NAMES = tuple(_LAZY)


def __getattr__(name: str) -> Any:
    return load_lazily(_LAZY, name, globals())


def missing_parts() -> list[str]:
    """Returns the parts that this PyTorch lacks for a fake device; empty if nothing is missing."""
    missing = [] if torch.version.cuda else ["a CUDA build of PyTorch"]
    return missing + ([] if importlib.util.find_spec("triton") else ["Triton"])
