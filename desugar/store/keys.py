"""The key of a program: everything that it depends on besides the guards on sizes, which its file holds.

Like PyTorch's AOTAutograd cache, the store is keyed on Dynamo's graph. PyTorch's own code describes the graph and the
settings of Inductor, and refuses graphs that cannot be cached. The key also has the code of the classes and of the
functions that their rules call. It also has the values that the rules read, and the code of this project.

A source file of this project that changed after the process began may differ from the code that runs here. Then no
program is stored. The code of users' classes is described as it is in memory.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import sys
import time
import types
from collections.abc import Iterable, Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

import subclasses
from desugar import _torch as torch_private
from desugar.flatten.inputs import Inputs
from desugar.flatten.rule_state import StateRead
from desugar.ir.stages import autocast_state
from desugar.ir.values import Same, Value, View, Wrapper, describe, is_wrapper
from desugar.passes.verify import rechecks_enabled
from desugar.store.code import describe_code, root_of
from desugar.store.pickling import DAMAGED, CannotStore
from subclasses._torch import OpOverload, OpOverloadPacket
from subclasses.errors import full_name
from subclasses.handwritten import DTensorContext, OpaqueContext
from subclasses.methods.compile_cache import describe_value, fingerprint

_STARTED = time.time()

# Namespaces of PyTorch's own ops and of this project's ops.
_NAMESPACES = (
    "aten", "prims", "higher_order", "subclasses", "desugar", "mkldnn", "mkl", "onednn", "mkldnn_prepacked",
    "quantized", "_quantized", "quantized_decomposed", "inductor", "inductor_prims", "rngprims", "_c10d_functional",
    "c10d_functional", "c10d", "fsdp", "profiler", "prim", "debugprims",
)  # fmt: skip

# Settings of Inductor that hold functions, which have no key.
_PASSES = (
    "pre_grad_custom_pass", "joint_custom_pre_pass", "joint_custom_post_pass", "post_grad_custom_pre_pass",
    "post_grad_custom_post_pass", "_pre_fusion_custom_pass", "_post_fusion_custom_pass", "custom_partitioner_fn",
    "cudagraph_policy",
)  # fmt: skip


def key_of(graph: fx.GraphModule, inputs: Inputs, backend: Any, read: Iterable[StateRead]) -> str:
    """Returns the key of a graph that is about to be compiled.

    Args:
        graph: Dynamo's graph.
        inputs: Its flattened arguments.
        backend: The compiler of the plain graphs; its settings are in force.
        read: The state that the rules of its classes read.

    Raises:
        CannotStore: PyTorch does not cache such a graph, or a part of it has no key that is the same in every process.
    """
    spec = inputs.spec()
    try:
        _check_cacheable(graph)
        wrappers = [wrapper for value in spec.values for wrapper in _wrappers_in(value)]
        classes = sorted({wrapper.cls for wrapper in wrappers} | _made_in(graph), key=full_name)
        _check_classes(classes, wrappers)
        contexts = [wrapper.context for wrapper in wrappers]
        statics = [static for context in contexts for static in getattr(context, "statics", (context,))]
        details = (
            _release(),
            graph,
            list(spec.items),
            [str(spec.items[slot].storage_offset()) for slot in spec.tensor_slots],
            [(type(value).__name__, describe(value), _flags(value)) for value in spec.values],
            [astuple(origin) for origin in spec.origins],
            sorted(spec.parameters),
            spec.static,
            [(full_name(cls), fingerprint(cls)) for cls in classes],
            describe_code(classes, statics),
            [(one.name, describe_value(one.value)) for one in read],
            _ranges(inputs),
            _settings(backend),
        )
        with torch_private.sanitize_gm_for_cache(graph):
            return str(torch_private.AOTAutogradCachePickler(graph).get_hash(details))
    except (
        torch_private.BypassAOTAutogradCache,
        torch_private.BypassFxGraphCache,
        torch_private.ObjNotFoundError,
        *DAMAGED,
    ) as error:
        raise CannotStore(str(error)) from error


# ------------------------------------------------------------------------------------------------- the graph


def _check_cacheable(graph: fx.GraphModule) -> None:
    """Raises `CannotStore` for a graph that PyTorch would not cache; the key has the functions of declared classes."""
    if torch_private.inductor_config.freezing or torch_private.inductor_config.triton.cudagraphs:
        raise CannotStore("freezing or CUDA graphs are switched on")
    passes = [getattr(torch_private.inductor_config, name, None) for name in _PASSES]
    if any([*passes, *torch_private.custom_backend_passes.values()]):
        raise CannotStore("a custom pass is set")
    for module in graph_modules(graph):
        if "_checkpoint_context_fn" in module.meta:
            raise CannotStore("a function chooses what checkpointing saves")
        for node in module.graph.nodes:
            if not _is_ours(node.target):
                _check_node(node)
    check_ops(graph)


def graph_modules(graph: fx.GraphModule) -> list[fx.GraphModule]:
    """Returns a graph, and the graphs that its higher-order ops run."""
    return [module for module in graph.modules() if isinstance(module, fx.GraphModule)]


def check_ops(graph: fx.GraphModule) -> None:
    """Raises `CannotStore` for a graph that calls a user's op or Triton kernel, whose Python code cannot be found."""
    for module in graph_modules(graph):
        for node in module.graph.nodes:
            if "triton_kernel_wrapper" in getattr(node.target, "__name__", ""):
                raise CannotStore("it calls a Triton kernel of the user's")
            for op in (node.target, *node.args, *node.kwargs.values()):
                name = _name_of_op(op)
                if "::" in name and name.partition("::")[0] not in _NAMESPACES:
                    raise CannotStore(f"it calls the op {name}")


def _name_of_op(op: Any) -> str:
    if isinstance(op, OpOverloadPacket):
        return str(op._qualified_op_name)
    return str(op._schema.name) if isinstance(op, OpOverload) else ""


def _check_node(node: fx.Node) -> None:
    try:
        torch_private.check_node_safe(node)
    except AttributeError as error:  # of a function without a name
        raise CannotStore(f"PyTorch cannot tell what {node.target} is: {error}") from error


def _is_ours(target: Any) -> bool:
    is_class = isinstance(target, type) and issubclass(target, Tensor)
    return is_class or (isinstance(target, types.FunctionType) and root_of(target.__module__) == "subclasses")


def _made_in(graph: fx.GraphModule) -> set[type]:
    """Returns the classes of the wrappers that a graph makes, and of the wrappers inside them."""
    classes: set[type] = set()
    for node in (node for module in graph_modules(graph) for node in module.graph.nodes):
        if isinstance(node.target, type) and issubclass(node.target, Tensor):
            classes.add(node.target)
        pending = [node.meta.get("example_value")]
        while pending:
            value = pending.pop()
            if isinstance(value, tuple | list):
                pending += value
            elif is_wrapper(value):
                classes.add(type(value))
                pending += [getattr(value, name) for name in value.__tensor_flatten__()[0]]
    return classes


def _wrappers_in(value: Value) -> Iterator[Wrapper]:
    """Yields a wrapper and the wrappers inside it."""
    if isinstance(value, Wrapper):
        yield value
        for _, part in value.inner:
            yield from _wrappers_in(part)


def _flags(value: Value) -> Any:
    """Returns the parts of a value that `describe` leaves out."""
    match value:
        case Wrapper():
            inner = [_flags(part) for _, part in value.inner]
            return describe_value(getattr(value.context, "statics", value.context)), value.is_leaf, inner
        case View() | Same():
            return repr(value)
        case _:
            return getattr(value, "is_leaf", None)


def _ranges(inputs: Inputs) -> list[str]:
    """Returns the range of each symbol before the trace."""
    env = inputs.mode.shape_env
    return sorted(f"{symbol}: {env.var_to_range.get(symbol)}" for symbol in env.backed_var_to_val)


# ---------------------------------------------------------------------------------------------- their files


def _check_unchanged(path: str) -> None:
    try:
        changed = os.stat(path).st_mtime
    except OSError:  # typed at a prompt, generated, or in an archive
        return
    if changed > _STARTED:
        raise CannotStore(f"{path} was changed after this process began")


def _check_classes(classes: Iterable[type], wrappers: Iterable[Wrapper]) -> None:
    """Raises `CannotStore` if another process could not find the same class by its name, or lacks a process group."""
    for wrapper in wrappers:
        if isinstance(wrapper.context, DTensorContext | OpaqueContext):
            raise CannotStore(f"a {wrapper.cls.__name__} belongs to a process group")
    for cls in classes:
        resolved: Any = sys.modules.get(cls.__module__)
        for part in cls.__qualname__.split("."):
            resolved = getattr(resolved, part, None)
        if resolved is not cls:
            raise CannotStore(f"{full_name(cls)} is not found by its name")


# --------------------------------------------------------------------------------- releases and settings


@functools.cache
def _release() -> tuple[str, ...]:
    """Returns the releases of torch, Python and this project, the platform, and the processor."""
    torch_release = f"{torch.__version__} {torch.version.git_version}"
    if (Path(torch.__file__).parents[1] / ".git").exists():  # a checkout that somebody works on
        torch_release += torch_private.torch_key().hex()
    own = [Path(module.__file__).parent for module in (subclasses, sys.modules["desugar"])]  # type: ignore[arg-type]
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(path for package in own for path in package.rglob("*.py")):
        _check_unchanged(str(path))
        digest.update(path.read_bytes())
    return torch_release, sys.version, digest.hexdigest(), platform.platform(), _processor()


def _processor() -> str:
    """Returns the processor's instruction sets for compiled kernels, and the instruction sets that oneDNN may use."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:  # not Linux
        flags = platform.processor()
    told = [os.environ.get(name, "") for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")]
    return f"{torch.backends.cpu.get_cpu_capability()} {told} {flags}"


def _settings(backend: Any) -> tuple[Any, ...]:
    cuda = torch.backends.cuda
    return (
        backend.name,
        rechecks_enabled(),
        torch_private.inductor_config.save_config_portable(ignore_private_configs=False),
        torch_private.functorch_config.save_config(),
        torch_private.symbols_config.save_config(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        repr(autocast_state()),
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled,  # type: ignore[attr-defined]
        (
            cuda.flash_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
            cuda.math_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
        ),
        cuda.matmul.allow_fp16_reduced_precision_reduction,
        cuda.matmul.allow_bf16_reduced_precision_reduction,
        [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())],
    )
