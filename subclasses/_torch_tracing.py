"""Private torch names for tracing: higher-order ops, and the state of traces, transforms and backwards.

:mod:`subclasses._torch` describes the rules for this module and its tests.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._guards import (
    # Finds the fake mode of the compilation, of the active modes, or of given tensors.
    detect_fake_mode as _detect_fake_mode,
)
from torch.autograd.forward_ad import (
    # Generated code reads the level of forward mode at each op. Where a release lacks it, this import fails.
    _current_level as _current_level,
)
from torch.utils._python_dispatch import (
    # The active dispatch modes, which a higher-order op calls before any subclass.
    _get_current_dispatch_mode_stack as _dispatch_modes,
)

from subclasses._torch import (
    FunctionalTensor,
    any_requires_grad,
    current_transform,
    disable_current_modes,
    fake_mode,
    in_dispatch_mode,
    is_traceable_wrapper_subclass,
    is_tracing,
    storage_key,
)
from subclasses.after_import import after_import

# ---- higher-order ops --------------------------------------------------------------------------------------


def is_traced(op: Any, operands: Any) -> bool:
    """Whether a higher-order op is being traced or transformed, or its operands have no data."""
    # Only modes for which the op has an implementation count; any other mode receives the ops of the branch. (A mode
    # that counts FLOPs would otherwise choose the branch with more FLOPs.) Pre-dispatch modes have a separate stack.
    return (
        any(type(mode) in op.python_key_table for mode in _dispatch_modes())
        or torch._ops._len_torch_dispatch_stack_pre_dispatch() > 0
        or current_transform() is not None
        or _detect_fake_mode(operands) is not None
    )


def eager_while_loop(op: Any, *args: Any) -> Any:
    """Runs ``while_loop`` as a Python loop: PyTorch's kernel for tensors with data, which autograd differentiates."""
    # The dispatch key under which PyTorch registers that kernel.
    return op.py_kernels[torch._C.DispatchKey.CompositeExplicitAutograd](*args)  # type: ignore[attr-defined]


def run_with_interpreter(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a graph to run node by node if node metadata (the user's lines) must be kept; else returns it unchanged."""
    # PyTorch's own implementations of the ops do the same with each branch.
    from torch._higher_order_ops.utils import _maybe_run_with_interpreter

    return _maybe_run_with_interpreter(fn)


def trace_graph(fn: Callable[..., Any], values: Sequence[Any], dynamic_ints: bool) -> torch.fx.GraphModule:
    """Traces a function to a graph of its own on fresh fake tensors; with ``dynamic_ints``, ints become symbols."""
    # make_fx, nested in the active trace if there is one.
    from torch._higher_order_ops.utils import _maybe_reenter_make_fx

    with fresh_fakes(values) as fakes:
        env = _detect_fake_mode(fakes).shape_env  # type: ignore[union-attr]
        if dynamic_ints and env is not None:
            fakes = [env.create_unbacked_symint() if type(v) is int else v for v in fakes]
        return _maybe_reenter_make_fx(fn)(*fakes)


def is_recorded() -> bool:
    """Whether ops are being recorded in a graph, and not merely run to infer the sizes of their results."""
    # Slow to import, and only derivatives need it.
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return get_proxy_mode() is not None


@contextlib.contextmanager
def fresh_fakes(values: Sequence[Any]) -> Iterator[list[Any]]:
    """Context without recording; yields fresh fake tensors like the given ones, and passes ints through."""
    # C++ functionalization is not a mode, so it is suspended separately.
    from torch._dispatch.python import suspend_functionalization

    mode = _detect_fake_mode(values) or fake_mode()
    env = mode.shape_env
    # Unbacked symbols created here never appear in the outer trace's graph, so it must not look for them.
    ignore_symbols = contextlib.nullcontext() if env is None else env.ignore_fresh_unbacked_symbols()
    with suspend_functionalization(), disable_current_modes(), mode, torch.no_grad(), ignore_symbols:
        with torch.inference_mode(False):
            fakes = [_fake_like(v) if isinstance(v, torch.Tensor) else v for v in values]
        yield fakes


def _fake_like(t: torch.Tensor) -> torch.Tensor:
    if is_traceable_wrapper_subclass(t):
        names, context = t.__tensor_flatten__()
        inners = {name: _fake_like(getattr(t, name)) for name in names}
        return type(t).__tensor_unflatten__(inners, context, t.size(), t.stride())
    return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=t.device)


def functional_storage_key(t: torch.Tensor) -> int:
    """Returns the key of a tensor's storage below functionalization, which gives each input a storage of its own."""
    # Pending writes are applied first.
    if isinstance(t, FunctionalTensor):
        torch._sync(t)  # type: ignore[attr-defined]
        return storage_key(torch._from_functional_tensor(t.elem))  # type: ignore[attr-defined]
    return storage_key(t)


# ---- the state of a thread -----------------------------------------------------------------------------------


def leave_in_graph(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Makes Dynamo record calls of a function in its graph instead of tracing into it; does not import Dynamo."""
    ref = weakref.ref(fn)

    def allow(dynamo: Any) -> None:
        function = ref()
        if function is not None:
            dynamo.allow_in_graph(function)

    after_import("torch._dynamo.decorators", allow)
    return fn


def backend_of(graph: Any) -> Any:
    """Returns the backend function that compiles a graph which Dynamo is capturing."""
    compiler = inspect.unwrap(graph.compiler_fn) if graph is not None else None
    return getattr(compiler, "compiler_fn", compiler)


def is_compiling_here() -> bool:
    """Whether this thread compiles, or runs code that is traced; torch's function answers for the whole process."""
    compiler = torch.compiler
    return compiler.is_compiling() and (compiler.is_dynamo_compiling() or in_dispatch_mode() or is_tracing())


def is_transient_here() -> bool:
    """Whether a tensor that is made now belongs to a trace or a transform, so that no value may keep it."""
    return is_compiling_here() or in_dispatch_mode() or current_transform() is not None


def in_dual_level(forward_ad: str) -> str:
    """Returns an expression for whether ``dual_level()`` is active, in which tensors may have tangents.

    Args:
        forward_ad: the name of the module ``torch.autograd.forward_ad`` in generated code.
    """
    # Every level sets it; there is no public function.
    return f"{forward_ad}._current_level >= 0"


def is_differentiated(*arguments: Any) -> bool:
    """Whether ops on tensors may be differentiated now: by gradients, tangents or transforms."""
    has_gradient = torch.is_grad_enabled() and any_requires_grad(*arguments)
    # Every level of tangents sets the number; there is no public function.
    return has_gradient or torch.autograd.forward_ad._current_level >= 0 or current_transform() is not None


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Context for ops that no mode receives, on tensors whose sizes may be symbols of the running trace."""
    mode = _detect_fake_mode()
    # Function modes are disabled too; the context DisableTorchFunctionSubclass would not disable them.
    with disable_current_modes(), torch._C.DisableTorchFunction(), mode or contextlib.nullcontext():
        yield


# ---- the backward ------------------------------------------------------------------------------------------

# Sets version counters: a node that replaces another one changes no value.
set_version_counters = torch._C._autograd._unsafe_set_version_counter  # type: ignore[attr-defined]


def has_no_memory(t: torch.Tensor) -> bool:
    """Whether a tensor is a zero gradient of PyTorch, which is zeros by its dispatch key alone."""
    return t._is_zerotensor()


def is_bare(t: torch.Tensor) -> bool:
    """Whether a tensor may be an inner tensor as it is: it is plain, without lazy bits, and no transform runs."""
    is_solid = t.__class__ is torch.Tensor and not (t.is_conj() or t.is_neg() or t._is_zerotensor())
    return is_solid and current_transform() is None


def without_lazy_bits(t: torch.Tensor) -> torch.Tensor:
    """Returns a tensor whose memory holds its entries, as ops on inner tensors read them.

    It has no conjugate or negative bit, and is not zeros without memory. PyTorch's derivatives of ``sgn`` and other
    step functions are such zeros, on which kernels crash.
    """
    if has_no_memory(t):
        # PyTorch makes them outside of all modes; a trace must record them, since they fix a size.
        if in_dispatch_mode():
            t = torch._efficientzerotensor(t.shape, dtype=t.dtype, device=t.device)  # type: ignore[attr-defined]
        return torch.zeros_like(t)
    return t.resolve_conj().resolve_neg() if t.is_conj() or t.is_neg() else t


def is_graph_argument(t: torch.Tensor) -> bool:
    """Whether a tensor is an argument of a graph that AOTAutograd traces.

    Such a tensor is never a leaf: AOTAutograd gives it a placeholder node, also where the argument is a leaf.
    """
    return type(t.grad_fn) is torch._C._functions.Error  # type: ignore[attr-defined]


def backward_node() -> str:
    """Returns the name of the autograd node that runs, such as "AsStridedBackward0"; "" if none does."""
    node = torch._C._current_autograd_node()  # the public way to it is a hook
    return "" if node is None else node.name()


# ---- torch.export ------------------------------------------------------------------------------------------


class _MadeInside:
    """Replaces the node of a value that has none: the function made it of tensors that have nodes."""

    @property
    def proxy(self) -> _MadeInside:
        return self


def reads_of_values_made_inside(trace: Any, module: Any, is_ours: Callable[[Any], bool]) -> dict[Any, Any]:
    """Returns replacements for functions of ``torch.export`` and its tracer, as owner and name -> function.

    Export calls these in order if code reads a field of a value that has the class of an argument. It expects a node
    for the value; only the result of the read has one.

    Args:
        trace: the module ``torch.export._trace``.
        module: the module ``torch.fx.experimental.proxy_tensor``.
        is_ours: whether an object is a value of a declared class.
    """
    tracer = module.PythonKeyTracer
    return {
        (trace, "get_proxy_slot"): _marking_made_inside(trace.get_proxy_slot, module, is_ours),
        (tracer, "create_proxy"): _keeping_marks(tracer.create_proxy),
        (trace, "track_tensor_tree"): _without_marked(trace.track_tensor_tree),
    }


def _marking_made_inside(get_proxy_slot: Any, module: Any, is_ours: Callable[[Any], bool]) -> Any:
    @functools.wraps(get_proxy_slot)
    def get(obj: Any, tracer: Any, *args: Any, **kwargs: Any) -> Any:
        if is_ours(obj) and not module.has_proxy_slot(obj, tracer):
            return _MadeInside()
        return get_proxy_slot(obj, tracer, *args, **kwargs)

    return get


def _keeping_marks(create_proxy: Any) -> Any:
    @functools.wraps(create_proxy)
    def create(tracer: Any, kind: str, target: Any, args: Any, *rest: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], _MadeInside):
            return args[0]
        return create_proxy(tracer, kind, target, args, *rest, **kwargs)

    return create


def _without_marked(track_tensor_tree: Any) -> Any:
    @functools.wraps(track_tensor_tree)
    def track(tree: Any, proxy: Any, **kwargs: Any) -> Any:
        return tree if isinstance(proxy, _MadeInside) else track_tensor_tree(tree, proxy, **kwargs)

    return track


def build_library(source: str, folder: str, name: str, flags: list[str]) -> None:
    """Builds ``folder/name.so`` from a C++ file, for this processor and with the OpenMP that torch uses.

    Raises:
        RuntimeError: No compiler was found, or it failed.
    """
    # Inductor's own way to its compiler: cpp_extension needs ninja, and compiles all of PyTorch's headers.
    from torch._inductor.cpp_builder import CppBuilder, CppTorchOptions
    from torch._inductor.cpu_vec_isa import invalid_vec_isa  # -march=native has the flags for vectors

    options = CppTorchOptions(vec_isa=invalid_vec_isa, include_pytorch=False, extra_flags=flags)
    CppBuilder(name, source, options, folder).build()
