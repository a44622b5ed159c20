"""Every private name of torch that the pass uses, and why. Imported on first use.

They pull in torch.fx, sympy, Dynamo or Inductor, which `import desugar` has no need of. `subclasses/_torch.py`
holds the names that the spec layer needs at import.
"""

from __future__ import annotations

import importlib
from typing import Any

_LAZY = {
    # ---- tracing -------------------------------------------------------------------------------------------
    # Traces a function over fake and functional tensors into an fx graph.
    "make_fx": "torch.fx.experimental.proxy_tensor",
    # Keeps dispatch keys and Python decompositions consistent while symbolic shapes are traced.
    "enable_python_dispatcher": "torch._dispatch.python",
    # Fake tensors carry sizes, strides, dtypes and symbols but no data.
    "FakeTensorMode": "torch._subclasses.fake_tensor",
    "FakeTensor": "torch._subclasses.fake_tensor",
    # Removes mutation and views from what is traced.
    "FunctionalTensor": "torch._subclasses.functional_tensor",
    "FunctionalTensorMode": "torch._subclasses.functional_tensor",
    # Ops that take functions (cond, while_loop) are called in a way of their own.
    "HigherOrderOperator": "torch._ops",
    # The functionalization mode in force.
    "detect_infra_mode": "torch.utils._python_dispatch:_detect_infra_mode",
    "ModeKey": "torch._C:_TorchDispatchModeKey",
    # Views are taken again past __torch_function__.
    "DisableTorchFunctionSubclass": "torch._C",
    # The state of the random number generator is read past every mode.
    "DisableTorchFunction": "torch._C",
    # A graph that runs as it is makes no autograd views, as one that Inductor compiled makes none.
    "BelowADInplaceOrView": "torch._C:_AutoDispatchBelowADInplaceOrView",
    # A version counter is set to what eager mode would have made it.
    "set_version_counters": "torch._C._autograd:_unsafe_set_version_counter",
    # Functional tensors to plain ones, and pending writes carried out.
    "from_functional_tensor": "torch:_from_functional_tensor",
    "sync_functional_tensor": "torch:_sync",
    # The C++ half of a functional tensor, which its Python half delegates attributes to.
    "is_functional_tensor": "torch:_is_functional_tensor",
    # Tensors of vmap, grad and jvp, around a traced one where they are met in a trace.
    "is_functorch_wrapped_tensor": "torch._C._functorch",
    # A tensor of theirs that was kept when the transform had ended; its storage cannot be read.
    "is_dead_tensor_wrapper": "torch._C._functorch",
    # Batches that vmap goes through: functorch's, and the older one of `is_grads_batched=True`.
    "is_batchedtensor": "torch._C._functorch",
    "is_legacy_batchedtensor": "torch._C._functorch",
    # Whether a functional tensor was written to.
    "has_data_mutation": "torch._functorch._aot_autograd.functional_utils",
    # Whether an op has a kernel for a dispatch key: without one for views and writes, nobody counts its writes.
    "has_kernel": "torch._C:_dispatch_has_kernel_for_dispatch_key",
    # Whether a functional tensor got another storage (`set_`, an assignment to `.data`).
    "was_storage_changed": "torch:_functionalize_was_storage_changed",
    # The views that lie between a functional tensor and its storage.
    "get_view_meta_sequence": "torch._C._functionalization",
    # A real tensor met in the middle of a trace is looked at outside the trace's modes.
    "disable_current_modes": "torch.utils._python_dispatch:_disable_current_modes",
    # The caller's saved-tensor hooks, which are taken off while fakes are traced.
    "top_saved_tensors_hooks": "torch._C._autograd:_top_saved_tensors_default_hooks",
    "pop_saved_tensors_hooks": "torch._C._autograd:_pop_saved_tensors_default_hooks",
    "push_saved_tensors_hooks": "torch._C._autograd:_push_saved_tensors_default_hooks",
    # Checkpointing's hooks rest in a trace; the graph under construction tells which nodes a region has.
    "rest_saved_tensors_hooks": "torch._C._autograd:_saved_tensors_hooks_set_tracing",
    "get_proxy_mode": "torch.fx.experimental.proxy_tensor",
    # Nodes keep what a policy of selective checkpointing says of them.
    "preserve_node_meta": "torch.fx.traceback",
    # A nested tensor that PyTorch shares among all of them; one made during a trace would be a traced one for ever.
    "shared_nested_tensor": "torch.nested._internal.nested_tensor:_nt_view_dummy",
    # ---- symbols -------------------------------------------------------------------------------------------
    # Symbols for sizes, and how each dimension is to be treated.
    "ShapeEnv": "torch.fx.experimental.symbolic_shapes",
    "StatelessSymbolicContext": "torch.fx.experimental.symbolic_shapes",
    "DimDynamic": "torch.fx.experimental.symbolic_shapes",
    # What a trace raises when only data can say: a branch, an op whose result is no tensor or has any size.
    "GuardOnDataDependentSymNode": "torch.fx.experimental.symbolic_shapes",
    "DataDependentOutputException": "torch._subclasses.fake_tensor",
    "DynamicOutputShapeException": "torch._subclasses.fake_tensor",
    # Names an input in the guards that the shape environment prints.
    "LocalSource": "torch._dynamo.source",
    # ---- compiling -----------------------------------------------------------------------------------------
    # The fake mode and sources of a Dynamo graph, so that guards reach Dynamo; read by Inductor too.
    "TracingContext": "torch._guards",
    "tracing": "torch._guards",
    "detect_fake_mode": "torch._guards",
    # Splits the joint graph where the fewest bytes have to be saved.
    "min_cut_rematerialization_partition": "torch._functorch.partitioners",
    # Inductor: graph passes before the partition, its decompositions, and compilation of one graph.
    "partition_fn": "torch._inductor.compile_fx",
    "compile_fx_inner": "torch._inductor.compile_fx",
    "joint_graph_passes": "torch._inductor.compile_fx:_recursive_joint_graph_passes",
    "get_inputs_devices": "torch._inductor.compile_fx",
    "select_decomp_table": "torch._inductor.decomposition",
    "BoxedBool": "torch._inductor.utils",
    "inductor_config": "torch._inductor:config",
    "list_mode_options": "torch._inductor",
    # Hands kernels to the C++ compiler and waits for them, the libraries loaded so far, and what they raise.
    "AsyncCompile": "torch._inductor.async_compile",
    "CppPythonBindingsCodeCache": "torch._inductor.codecache",
    "CppCompileError": "torch._inductor.exc",
    "InductorError": "torch._inductor.exc",
    # What Inductor's compilation of a graph gives, and the code inside it.
    "CompiledFxGraph": "torch._inductor.output_code",
    # The fake mode and the like that Inductor reads while it compiles.
    "V": "torch._inductor.virtualized",
    # Autocast was applied while tracing; it must not be applied again while compiling or running.
    "DisableAutocast": "torch._C:_DisableAutocast",
    # Compiled autograd must not see the autograd nodes of a trace.
    "compiled_autograd": "torch._dynamo:compiled_autograd",
    # The dispatch keys of a tensor: what C++ knows of a wrapper besides its size and dtype.
    "dispatch_keys": "torch._C:_dispatch_keys",
    # What Dynamo raises for code that it cannot capture.
    "TorchDynamoException": "torch._dynamo.exc",
    # PyTorch's own backends, for graphs that the pass does not take.
    "lookup_backend": "torch._dynamo",
    "aot_autograd": "torch._dynamo.backends.common",
    # How Dynamo reads an attribute of a tensor that is no inner tensor of it, and what it names what it reads by.
    "TensorVariable": "torch._dynamo.variables.tensor",
    "VariableTracker": "torch._dynamo.variables.base",
    "AttrSource": "torch._dynamo.source",
    "TypeSource": "torch._dynamo.source",
    # What Dynamo notes of assignments to attributes, and how it ends a graph.
    "SideEffects": "torch._dynamo.side_effects",
    "unimplemented": "torch._dynamo.exc",
    # Graphs whose text is written and compiled when it is first asked for, as Dynamo has them.
    "use_lazy_graph_module": "torch.fx._lazy_graph_module:_use_lazy_graph_module",
    "make_graph_module": "torch.fx._lazy_graph_module:_make_graph_module",
    "LazyGraphModule": "torch.fx._lazy_graph_module:_LazyGraphModule",
    # Keeps the text of every graph ever made, for tracebacks.
    "graph_text_loader": "torch.fx.graph_module:_loader",
    # ---- the way in ----------------------------------------------------------------------------------------
    # Makes a function's frames go to Dynamo; its stance, its cache of code and its list of backends.
    "optimize": "torch._dynamo",
    "eval_frame": "torch._dynamo:eval_frame",
    # What `torch.compile` gives to Dynamo as a backend: it compares by value, so that functions share code.
    "TorchCompileWrapper": "torch:_TorchCompileWrapper",
    "TorchCompileInductorWrapper": "torch:_TorchCompileInductorWrapper",
    # What Dynamo makes of an error in a backend.
    "BackendCompilerFailed": "torch._dynamo.exc",
    # Dynamo's hook in this thread, if it is set: its frames are being looked at.
    "frame_callback": "torch._C._dynamo.eval_frame:get_eval_frame_callback",
    "dynamo_config": "torch._dynamo:config",
    # Dynamo, which higher-order ops run, is not to look at how a trace sees them.
    "disable_dynamo": "torch._compile:_disable_dynamo",
    # Tracing patches torch.fx for the whole process; Dynamo's own lock keeps compilations of any kind apart.
    "compile_lock": "torch._dynamo.convert_frame",
    # ---- looking on ----------------------------------------------------------------------------------------
    # Sees ops on their way to a subclass; rests with torch itself, so that naming it imports nothing.
    "TorchDispatchMode": "torch.utils._python_dispatch",
    # The number that autograd gives to its next node, in the order of their making.
    "sequence_number": "torch.autograd:_get_sequence_nr",
    # Writes what TORCH_TRACE collects and `tlparse` shows; the logger tells whether anything collects.
    "trace_structured": "torch._logging",
    "trace_log": "torch._logging._internal",
    # Which of Dynamo's compilations is in progress, and the conditions on sizes that become guards of it.
    "CompileContext": "torch._guards",
    # Says whether a profiler runs.
    "profiler": "torch.autograd:profiler",
    # ---- running -------------------------------------------------------------------------------------------
    # C++ check of type, dtype, device, sizes, strides, requires_grad and identity of many tensors in one call.
    "TensorGuards": "torch._C._dynamo.guards",
    # C++ check of grad mode, autocast, deterministic algorithms and default dtype in one call.
    "GlobalStateGuard": "torch._C._dynamo.guards",
    # The level of forward-mode differentiation in force, if any.
    "forward_ad": "torch.autograd:forward_ad",
    # A parameter that is first met inside vmap or grad becomes an input outside of it.
    "without_functorch": "torch._functorch.pyfunctorch:temporarily_clear_interpreter_stack",
    # The functorch transform in force, if any, and how many modes look at every op.
    "peek_interpreter_stack": "torch._C._functorch",
    "num_dispatch_modes": "torch._C:_len_torch_dispatch_stack",
    # The torch function modes in force.
    "num_function_modes": "torch._C:_len_torch_function_stack",
}

NAMES = tuple(_LAZY)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _LAZY[name].partition(":")
    value = getattr(importlib.import_module(module), attribute or name)
    globals()[name] = value
    return value


# -------------------------------------------------------------------------------------- what Dynamo has compiled


def cache_entries(code: Any) -> list[Any]:
    """The code that Dynamo has made of a code object, with its guards, the most recently used first."""
    return importlib.import_module("torch._dynamo.eval_frame")._debug_get_cache_entry_list(code)


def register_backend(backend: Any) -> None:
    """Has `torch._dynamo.reset` reset a backend: it forgets those that it knew, whose functions live on."""
    importlib.import_module("torch._dynamo.eval_frame").cached_backends.setdefault(id(backend), backend)


def undisabled(function: Any) -> Any:
    """What Dynamo calls for a graph, without the wrapper that keeps Dynamo out of it."""
    return getattr(function, "_torchdynamo_orig_callable", function)


def source_names(graph: Any) -> list[str]:
    """How Dynamo names each input of a graph, as an expression (`L['x'].values`); empty where it does not say."""
    names = []
    for node in graph.graph.find_nodes(op="placeholder"):
        source = getattr(node, "_dynamo_source", None) or getattr(node.meta.get("grapharg"), "source", None)
        name = getattr(source, "name", "")
        names.append(name() if callable(name) else name)  # a method before 2.12
    return names


def is_argument(placeholder: Any) -> bool:
    """Whether an input of a graph of Dynamo's comes from a parameter of the frame, not from a closure or a global."""
    source = getattr(placeholder, "_dynamo_source", None) or getattr(
        placeholder.meta.get("grapharg"), "source", None
    )
    while (base := getattr(source, "base", None)) is not None:
        source = base
    return source is None or getattr(source, "is_input", False)


def recompile_reason() -> str | None:
    """Why Dynamo compiles what it compiles at the moment, as it tells its own tools; None for a frame's first time."""
    context = importlib.import_module("torch._dynamo.utils").get_metrics_context()
    return context._metrics.get("recompile_reason") if context.in_progress() else None


def ends_in_graph_break(graph: Any) -> bool:
    """Whether a graph that Dynamo hands over is only a part of its frame; False for one that somebody else made."""
    reason = getattr(graph, "compile_subgraph_reason", None)
    return reason is not None and reason.graph_break


def dict_version_guards(dicts: Any) -> Any:
    """A C++ check, called with a tuple of these dictionaries, that none has changed since."""
    guards = importlib.import_module("torch._C._dynamo.guards")
    plain = importlib.import_module("torch._dynamo.guards").GuardManagerType.GUARD_MANAGER
    root = guards.RootGuardManager()
    for number, found in enumerate(dicts):
        child = root.tuple_getitem_manager(number, f"dicts[{number}]", found, plain)
        child.add_dict_version_guard(found, [f"version of dicts[{number}]"], None)
    return root
