"""Every private name of torch that `desugar` uses, with the reason. Each is imported on first use.

The names import torch.fx, sympy, Dynamo or Inductor, which `import desugar` does not need. `subclasses/_torch.py`
has the names that the spec layer needs at import.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import operator
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from subclasses.after_import import after_import
from subclasses.releases import lacking

_LAZY = {
    # ---- tracing -------------------------------------------------------------------------------------------
    # Traces a function on fake and functional tensors into an fx graph.
    "make_fx": "torch.fx.experimental.proxy_tensor",
    # Keeps dispatch keys and Python decompositions consistent while symbolic shapes are traced.
    "enable_python_dispatcher": "torch._dispatch.python",
    # Fake tensors carry sizes, strides, dtypes and symbols but no data.
    "FakeTensorMode": "torch._subclasses.fake_tensor",
    "FakeTensor": "torch._subclasses.fake_tensor",
    # Removes mutations and views from a trace.
    "FunctionalTensor": "torch._subclasses.functional_tensor",
    "FunctionalTensorMode": "torch._subclasses.functional_tensor",
    # The type of ops that take functions (cond, while_loop), which a trace calls differently.
    "HigherOrderOperator": "torch._ops",
    # The rule of an op for functionalization: a `torch.library.triton_op` runs its kernels in one.
    "find_torch_dispatch_rule": "torch._library.simple_registry",
    # The active functionalization mode.
    "detect_infra_mode": "torch.utils._python_dispatch:_detect_infra_mode",
    "ModeKey": "torch._C:_TorchDispatchModeKey",
    # Views are replayed without `__torch_function__`.
    "DisableTorchFunctionSubclass": "torch._C",
    # The state of the random number generator is read without torch function modes.
    "DisableTorchFunction": "torch._C",
    # A graph that runs without a compiler makes no autograd views, like a graph that Inductor compiled.
    "BelowADInplaceOrView": "torch._C:_AutoDispatchBelowADInplaceOrView",
    # How a view was made: by ops, or by an autograd function, whose gradient the view's base does not pass on.
    "get_creation_meta": "torch._C._autograd:_get_creation_meta",
    "CreationMeta": "torch._C._autograd",
    # Sets a version counter to the value that it has in eager mode.
    "set_version_counters": "torch._C._autograd:_unsafe_set_version_counter",
    # Unwraps a functional tensor; applies its pending mutations.
    "from_functional_tensor": "torch:_from_functional_tensor",
    "sync_functional_tensor": "torch:_sync",
    # Whether a tensor is the C++ half of a functional tensor, to which the Python half delegates attributes.
    "is_functional_tensor": "torch:_is_functional_tensor",
    # Whether a tensor is a wrapper of vmap, grad or jvp; in a trace, such a wrapper holds a traced tensor.
    "is_functorch_wrapped_tensor": "torch._C._functorch",
    # Whether a tensor is a wrapper of a functorch transform that has ended; its storage cannot be read.
    "is_dead_tensor_wrapper": "torch._C._functorch",
    # Whether a tensor is a batch of vmap: functorch's, and the older one of `is_grads_batched=True`.
    "is_batchedtensor": "torch._C._functorch",
    "is_legacy_batchedtensor": "torch._C._functorch",
    # Whether a functional tensor was mutated.
    "has_data_mutation": "torch._functorch._aot_autograd.functional_utils",
    # Whether an op has a kernel for a dispatch key. Without a kernel for ADInplaceOrView, no version counter rises.
    "has_kernel": "torch._C:_dispatch_has_kernel_for_dispatch_key",
    # Whether a functional tensor has another storage now (`set_`, an assignment to `.data`).
    "was_storage_changed": "torch:_functionalize_was_storage_changed",
    # The views between a functional tensor and its storage.
    "get_view_meta_sequence": "torch._C._functionalization",
    # A real tensor that a trace meets is inspected outside the trace's modes.
    "disable_current_modes": "torch.utils._python_dispatch:_disable_current_modes",
    # The caller's saved-tensor hooks, which a trace removes and restores.
    "top_saved_tensors_hooks": "torch._C._autograd:_top_saved_tensors_default_hooks",
    "pop_saved_tensors_hooks": "torch._C._autograd:_pop_saved_tensors_default_hooks",
    "push_saved_tensors_hooks": "torch._C._autograd:_push_saved_tensors_default_hooks",
    # Disables the saved-tensor hooks of checkpointing in a trace; the proxy mode's graph shows a region's nodes.
    "rest_saved_tensors_hooks": "torch._C._autograd:_saved_tensors_hooks_set_tracing",
    "get_proxy_mode": "torch.fx.experimental.proxy_tensor",
    # Turns arithmetic with floats that change from call to call into arithmetic with tensors.
    "tensorify_python_scalars": "torch.fx.passes._tensorify_python_scalars",
    # A nested tensor that PyTorch makes once and shares; made in a trace, it would keep fake tensors forever.
    "shared_nested_tensor": "torch.nested._internal.nested_tensor:_nt_view_dummy",
    # ---- symbols -------------------------------------------------------------------------------------------
    # Makes symbols for sizes; marks dimensions as symbols or constants.
    "ShapeEnv": "torch.fx.experimental.symbolic_shapes",
    "DimDynamic": "torch.fx.experimental.symbolic_shapes",
    # Errors of a trace that depends on data: a branch; an op with a non-tensor result; an op of unknown output size.
    "GuardOnDataDependentSymNode": "torch.fx.experimental.symbolic_shapes",
    "DataDependentOutputException": "torch._subclasses.fake_tensor",
    "DynamicOutputShapeException": "torch._subclasses.fake_tensor",
    # Names an input in the guards that the shape environment prints.
    "LocalSource": "torch._dynamo.source",
    # ---- compiling -----------------------------------------------------------------------------------------
    # The fake mode and the sources of a Dynamo graph, so that guards reach Dynamo; Inductor reads them, too.
    "TracingContext": "torch._guards",
    "tracing": "torch._guards",
    "detect_fake_mode": "torch._guards",
    # Splits the joint graph where the fewest bytes have to be saved.
    "min_cut_rematerialization_partition": "torch._functorch.partitioners",
    # Inductor: graph passes before the partition, its decompositions, and compilation of one graph. One of the
    # decompositions reads `torch._inductor.lowering`, which its own module does not import, and `compile_fx` does.
    "partition_fn": "torch._inductor.compile_fx",
    "compile_fx_inner": "torch._inductor.compile_fx",
    "joint_graph_passes": "torch._inductor.compile_fx:_recursive_joint_graph_passes",
    "get_inputs_devices": "torch._inductor.compile_fx",
    "select_decomp_table": "torch._inductor.compile_fx",
    "BoxedBool": "torch._inductor.utils",
    "inductor_config": "torch._inductor:config",
    "list_mode_options": "torch._inductor",
    # Sends kernels to the C++ compiler and waits for them; the libraries loaded so far; vector instructions; errors.
    "AsyncCompile": "torch._inductor.async_compile",
    "CppPythonBindingsCodeCache": "torch._inductor.codecache",
    "cpu_vec_isa": "torch._inductor:cpu_vec_isa",
    "CppCompileError": "torch._inductor.exc",
    "InductorError": "torch._inductor.exc",
    # The result of Inductor's compilation of a graph, which holds the generated code.
    "CompiledFxGraph": "torch._inductor.output_code",
    # A library of AOTInductor in a package.
    "PackageLoader": "torch._C._aoti:AOTIModelPackageLoader",
    # Writes archives as `torch.save` does, entry by entry.
    "ArchiveWriter": "torch._C:PyTorchFileWriter",
    # sympy's functions for sizes, such as a floor division.
    "size_functions": "torch.utils._sympy:functions",
    # The state that Inductor reads while it compiles, such as the fake mode.
    "V": "torch._inductor.virtualized",
    # The trace has applied autocast; compiling and running must not apply it again.
    "DisableAutocast": "torch._C:_DisableAutocast",
    # Compiled autograd must not capture the autograd nodes of a trace.
    "compiled_autograd": "torch._dynamo:compiled_autograd",
    # ---- the store of programs ----------------------------------------------------------------------------------
    # The cache of AOTAutograd: its check of ops, its form of a graph in keys, and its errors.
    "check_node_safe": "torch._functorch._aot_autograd.autograd_cache",
    "sanitize_gm_for_cache": "torch._functorch._aot_autograd.autograd_cache",
    "AOTAutogradCachePickler": "torch._functorch._aot_autograd.autograd_cache",
    "BypassAOTAutogradCache": "torch._functorch._aot_autograd.autograd_cache",
    "BypassFxGraphCache": "torch._inductor.codecache",
    # A digest of torch's own sources, for a checkout that somebody works on.
    "torch_key": "torch._inductor.codecache",
    # Inductor's passes of other devices, which have no key.
    "custom_backend_passes": "torch._inductor.codegen.common",
    # Pickles graphs, and records with fake tensors.
    "GraphPickler": "torch.fx._graph_pickler",
    "GraphPicklerOptions": "torch.fx._graph_pickler:Options",
    # Loads a pickled graph of Inductor.
    "FxGraphCache": "torch._inductor.codecache",
    "CompiledFxGraphConstants": "torch._inductor.output_code",
    # The cache folder; the switches of the caches; the artifacts that `save_cache_artifacts` saves.
    "cache_dir": "torch._inductor.runtime.cache_dir_utils",
    "functorch_config": "torch._functorch:config",
    "compiler_config": "torch.compiler:config",
    "symbols_config": "torch.fx.experimental:_config",
    "CacheArtifact": "torch.compiler._cache",
    "CacheArtifactFactory": "torch.compiler._cache",
    "CacheArtifactRecorder": "torch.compiler._cache",
    # The error of the pickler of keys for a function that is not found by its name.
    "ObjNotFoundError": "torch.package.importer",
    # The error of Dynamo for code that it cannot capture.
    "TorchDynamoException": "torch._dynamo.exc",
    # PyTorch's own backends, for graphs that desugaring does not support.
    "lookup_backend": "torch._dynamo",
    "aot_autograd": "torch._dynamo.backends.common",
    # Dynamo's mark on parameters and buffers, which keep their addresses from call to call.
    "get_static_address_type": "torch._dynamo.utils",
    # How Dynamo reads an attribute of a tensor that is not an inner tensor; Dynamo's variables; its names of sources.
    "TensorVariable": "torch._dynamo.variables.tensor",
    "VariableTracker": "torch._dynamo.variables.base",
    "AttrSource": "torch._dynamo.source",
    "TypeSource": "torch._dynamo.source",
    # Dynamo's name for a size or stride of a tensor, among the inputs of a graph.
    "TensorPropertySource": "torch._dynamo.source",
    "TensorProperty": "torch._dynamo.source",
    # Graphs whose source text is written and compiled on first use, like Dynamo's graphs.
    "use_lazy_graph_module": "torch.fx._lazy_graph_module:_use_lazy_graph_module",
    "make_graph_module": "torch.fx._lazy_graph_module:_make_graph_module",
    "LazyGraphModule": "torch.fx._lazy_graph_module:_LazyGraphModule",
    # Keeps the source text of every graph for tracebacks.
    "graph_text_loader": "torch.fx.graph_module:_loader",
    # ---- Dynamo --------------------------------------------------------------------------------------------
    # Makes Dynamo compile a function's frames; Dynamo's stance, its cache of code and its list of backends.
    "optimize": "torch._dynamo",
    "eval_frame": "torch._dynamo:eval_frame",
    # The backend objects that `torch.compile` passes to Dynamo; they compare by value, so that functions share code.
    "TorchCompileWrapper": "torch:_TorchCompileWrapper",
    "TorchCompileInductorWrapper": "torch:_TorchCompileInductorWrapper",
    # Dynamo's wrapper around an error in a backend.
    "BackendCompilerFailed": "torch._dynamo.exc",
    # Dynamo's frame hook in this thread; not None while another compiler inspects frames.
    "frame_callback": "torch._C._dynamo.eval_frame:get_eval_frame_callback",
    "dynamo_config": "torch._dynamo:config",
    # Higher-order ops run Dynamo, which must not trace the trace's own handling of them.
    "disable_dynamo": "torch._compile:_disable_dynamo",
    # Tracing patches torch.fx for the whole process; Dynamo's lock serializes all compilations.
    "compile_lock": "torch._dynamo.convert_frame",
    # ---- many machines -------------------------------------------------------------------------------------
    # The result of an eager collective that may not have ended.
    "AsyncCollectiveTensor": "torch.distributed._functional_collectives",
    # ---- recording -----------------------------------------------------------------------------------------
    # The base class of the mode that records ops before a subclass handles them; torch has imported it already.
    "TorchDispatchMode": "torch.utils._python_dispatch",
    # The sequence number of autograd's next node; autograd numbers nodes in the order of their creation.
    "sequence_number": "torch.autograd:_get_sequence_nr",
    # Writes artifacts for TORCH_TRACE, which `tlparse` shows; the logger's handlers show whether TORCH_TRACE is set.
    "trace_structured": "torch._logging",
    "trace_log": "torch._logging._internal",
    # The compile id of Dynamo's compilation in progress, and its conditions on sizes, which become guards.
    "CompileContext": "torch._guards",
    # Dynamo's metrics of each compilation, with the guard that failed before it; its graph breaks, with user lines.
    "dynamo_utils": "torch._dynamo:utils",
    # Whether a profiler runs.
    "profiler": "torch.autograd:profiler",
    # ---- running -------------------------------------------------------------------------------------------
    # C++ check of type, dtype, device, sizes, strides, requires_grad and identity of many tensors in one call.
    "TensorGuards": "torch._C._dynamo.guards",
    # C++ check of grad mode, autocast, deterministic algorithms and default dtype in one call.
    "GlobalStateGuard": "torch._C._dynamo.guards",
    # Whether autocast is on. A package has the casts of the saved call.
    "is_any_autocast_enabled": "torch._C:_is_any_autocast_enabled",
    # The level of forward-mode differentiation.
    "forward_ad": "torch.autograd:forward_ad",
    # A parameter that a function first uses inside vmap or grad becomes an input outside of the transform.
    "without_functorch": "torch._functorch.pyfunctorch:temporarily_clear_interpreter_stack",
    # The active functorch transform; the number of active dispatch modes.
    "peek_interpreter_stack": "torch._C._functorch",
    "num_dispatch_modes": "torch._C:_len_torch_dispatch_stack",
    # The number of active torch function modes.
    "num_function_modes": "torch._C:_len_torch_function_stack",
}

NAMES = tuple(_LAZY)

# Modules that take long to import and that the first compilation needs; importing them starts and compiles nothing.
COMPILER_MODULES = ("networkx", "torch._dynamo", "torch._inductor.compile_fx", "torch._inductor.codegen.cpp")


def __getattr__(name: str) -> Any:
    return load_lazily(_LAZY, name, globals())


def load_lazily(table: Mapping[str, str], name: str, scope: dict[str, Any]) -> Any:
    """Imports a name that a table lists as "module" or "module:attribute", and keeps it in a module's globals.

    Raises:
        AttributeError: The table lacks the name.
        ImportError: PyTorch lacks it.
    """
    if name not in table:
        raise AttributeError(f"module {scope['__name__']!r} has no attribute {name!r}")
    module, _, attribute = table[name].partition(":")
    try:
        value = scope[name] = getattr(importlib.import_module(module), attribute or name)
    except (AttributeError, ImportError) as error:
        if (lacks := lacking(error)) is not None:
            raise lacks from error
        raise
    return value


# Names that the store of programs needs and some releases of PyTorch lack.
_OF_STORE = (
    "check_node_safe", "sanitize_gm_for_cache", "AOTAutogradCachePickler", "BypassAOTAutogradCache",
    "BypassFxGraphCache", "custom_backend_passes", "GraphPickler", "GraphPicklerOptions", "CompiledFxGraphConstants",
    "cache_dir", "symbols_config", "CacheArtifact", "CacheArtifactFactory", "CacheArtifactRecorder",
)  # fmt: skip


@functools.cache
def can_store() -> bool:
    """Returns whether this release of PyTorch has the names that the store of programs needs."""
    this = sys.modules[__name__]
    try:
        for name in _OF_STORE:
            getattr(this, name)
        needed = (this.FxGraphCache, "cache_hit_post_compile"), (this.ShapeEnv(), "backed_var_to_val")
        return all(hasattr(*pair) for pair in needed)
    except (ImportError, AttributeError):
        return False


def after_import_of(name: str, then: Callable[[Any], None], *, optional: bool = False) -> None:
    """Calls `then` with the object of a name in this module once its own module is imported, or immediately.

    Args:
        name: The name.
        then: The function.
        optional: Whether nothing is called where a release of PyTorch lacks the name.
    """
    module, _, attribute = _LAZY[name].partition(":")

    def call(imported: Any) -> None:
        if not optional or hasattr(imported, attribute or name):
            then(load_lazily(_LAZY, name, globals()))

    after_import(module, call)


# -------------------------------------------------------------------------------------------- Dynamo's internals


def cache_entries(code: Any) -> list[Any]:
    """Returns Dynamo's cache entries of a code object (compiled code and guards), the most recently used first."""
    return importlib.import_module("torch._dynamo.eval_frame")._debug_get_cache_entry_list(code)


@contextlib.contextmanager
def oblivious_sizes() -> Iterator[None]:
    """Captures a function without guards that a size is not 1, since a size may be 1 in other calls.

    PyTorch's option assumes that no size is 0 or 1, even if a size of the call is. Then a kernel compiled for an empty
    tensor runs on other tensors, and a slice reads beyond the end of its tensor. So a size that is 0 or 1 in the call
    is a constant here, and every other size is at least 1.
    """
    shapes = importlib.import_module("torch.fx.experimental.symbolic_shapes")
    create = shapes.ShapeEnv.create_symbol

    @functools.wraps(create)
    def create_symbol(self: Any, val: Any, *args: Any, positive: bool | None = True, **kwargs: Any) -> Any:
        if positive and val in (0, 1):
            kwargs["do_not_specialize_zero_one"] = False
        made = create(self, val, *args, positive=positive, **kwargs)
        if positive and made.is_symbol:
            self._update_var_to_range(made, shapes.ValueRanges(1, shapes.int_oo))
        return made

    options = importlib.import_module("torch.fx.experimental._config")
    with options.patch(backed_size_oblivious=True, use_duck_shape=False):
        shapes.ShapeEnv.create_symbol = create_symbol
        try:
            yield
        finally:
            shapes.ShapeEnv.create_symbol = create


@functools.cache
def build_powers() -> None:
    """Makes a trace accept sizes and strides in which a symbol occurs twice.

    A trace computes a new int from its symbols, by sums and products but not by powers. Dynamo has one symbol for equal
    sizes, so a stride of the argument may be `s0 ** 2`.
    """
    sympy, proxy_tensor = map(importlib.import_module, ("sympy", "torch.fx.experimental.proxy_tensor"))
    functions = importlib.import_module("torch.utils._sympy.functions")
    for kind in (sympy.Pow, functions.PowByNatural):
        proxy_tensor._sympy_handlers().setdefault(kind, power)


def power(base: Any, exponent: int) -> Any:
    """Returns the product of `exponent` factors `base`; a traced graph calls this function in a node."""
    return functools.reduce(operator.mul, [base] * exponent)


def symbol_between(env: Any, name: str, hint: int, low: int | None, high: int | None) -> Any:
    """Returns a new symbol of a shape environment, with its value in an example and its known range."""
    this, shapes = sys.modules[__name__], importlib.import_module("torch.fx.experimental.symbolic_shapes")
    source, dynamic = this.LocalSource(name), this.DimDynamic.DYNAMIC
    positive = True if low is not None and low > 0 else None
    made = env.create_symbol(hint, source, dynamic, positive=positive, do_not_specialize_zero_one=True)
    known = shapes.ValueRanges(
        *(end if n is None else n for n, end in ((low, -shapes.int_oo), (high, shapes.int_oo)))
    )
    env._update_var_to_range(made, known)
    return made


def register_backend(backend: Any) -> None:
    """Makes `torch._dynamo.reset` reset a backend.

    A reset also clears the list of backends, while functions that use a backend live on; so callers register again.
    """
    importlib.import_module("torch._dynamo.eval_frame").cached_backends.setdefault(id(backend), backend)


def announce_backend(name: str, value: str) -> None:
    """Makes `torch.compile` find a backend by name where its distribution is on the path and not installed.

    Args:
        name: The name of the backend.
        value: The backend as an entry point, `module:attribute`; imported when a function is compiled with it.
    """

    def announce(registry: Any) -> None:
        make = importlib.import_module("importlib.metadata").EntryPoint
        # The table that the entry points of installed distributions are added to.
        registry._BACKENDS.setdefault(name, make(name, value, "torch_dynamo_backends"))

    after_import("torch._dynamo.backends.registry", announce)


def undisabled(function: Any) -> Any:
    """Returns the function inside a wrapper that stops Dynamo from tracing it; any other function unchanged."""
    return getattr(function, "_torchdynamo_orig_callable", function)


def source_names(graph: Any) -> list[str]:
    """Returns Dynamo's name for each input of a graph, as an expression (`L['x'].values`); empty if it has none."""
    return ["" if source is None else source_name(source) for source in input_sources(graph)]


def input_sources(graph: Any) -> list[Any]:
    """Returns Dynamo's source of each input of a graph; None for an input without a source."""
    return [_source_of(node) for node in graph.graph.find_nodes(op="placeholder")]


def source_name(source: Any) -> str:
    """Returns the expression of a source."""
    return str(source.name)


def source_root(source: Any) -> Any:
    """Returns the source that a source is an attribute or item of, at any depth."""
    while (base := getattr(source, "base", None)) is not None:
        source = base
    return source


def duplicate_sources(context: Any) -> list[tuple[Any, Any]]:
    """Returns the pairs of sources that Dynamo found to be one object, in the compilation in progress."""
    return [
        (guard.originating_source, guard.create_fn.keywords.get("source_b", *guard.create_fn.args[:1]))
        for kind, guard in _guards_in_progress(context)
        if kind == "DUPLICATE_INPUT"
    ]


def facts_read(context: Any) -> list[Any]:
    """Returns the sources of the objects whose values Dynamo guards, in the compilation in progress."""
    return [
        guard.originating_source
        for kind, guard in _guards_in_progress(context)
        if kind.endswith("_MATCH") and not kind.startswith(("TENSOR_", "TYPE_", "CLASS_"))
    ]


def _guards_in_progress(context: Any) -> list[tuple[str, Any]]:
    """Returns (kind, guard) of Dynamo's guards in the compilation in progress."""
    guards = context.guards_context.dynamo_guards
    return [(getattr(getattr(g.create_fn, "func", g.create_fn), "__name__", ""), g) for g in guards]


def registered_container(cls: Any) -> Any:
    """Returns how PyTorch's pytrees flatten a class (`flatten_fn`, `unflatten_fn`); None if they do not."""
    return importlib.import_module("torch.utils._pytree").SUPPORTED_NODES.get(cls)


def is_argument(placeholder: Any) -> bool:
    """Returns whether an input of a Dynamo graph comes from a parameter of the frame, not from a closure or global."""
    source = source_root(_source_of(placeholder))
    return source is None or getattr(source, "is_input", False)


def _source_of(placeholder: Any) -> Any:
    """Returns Dynamo's source of a graph input; None if it has none."""
    return getattr(placeholder, "_dynamo_source", None) or getattr(
        placeholder.meta.get("grapharg"), "source", None
    )


def recompile_reason() -> str | None:
    """Returns Dynamo's reason for the recompilation in progress; None for the first compilation of a frame."""
    context = importlib.import_module("torch._dynamo.utils").get_metrics_context()
    return context._metrics.get("recompile_reason") if context.in_progress() else None


def ends_in_graph_break(graph: Any) -> bool:
    """Returns whether a graph break ended a Dynamo graph; False for a graph that Dynamo did not make."""
    reason = getattr(graph, "compile_subgraph_reason", None)
    return reason is not None and reason.graph_break


def guard_property(holder: Any, name: str, prefix: str) -> None:
    """Guards that a property of an object is True, in Dynamo's compilation in progress, if there is one.

    The guard finds the object by a global variable of the frame whose name begins with `prefix`.
    """
    tx = getattr(importlib.import_module("torch._dynamo.symbolic_convert").tls, "current_tx", None)
    if tx is None:
        return
    source, guards = (importlib.import_module(f"torch._dynamo.{part}") for part in ("source", "guards"))
    where = source.GlobalSource(tx.output.install_global_by_id(prefix, holder))
    guards.install_guard(source.AttrSource(where, name).make_guard(guards.GuardBuilder.CONSTANT_MATCH))


_UNTIMED = "_desugar_leaves_guards_untimed"


def leave_guards_untimed() -> None:
    """Skips Dynamo's measurement of the guards of the compilation in progress, which only a log shows.

    Dynamo empties the processor's caches before it, which takes 22 ms of each compilation.
    """
    context = sys.modules[__name__].CompileContext.try_get()  # of this thread
    if context is not None:
        setattr(context, _UNTIMED, True)


def _measure_the_rest(guards: Any) -> None:
    measure = getattr(guards, "profile_guard_manager", None)
    if measure is None:  # a release that measures otherwise, or not at all
        return

    @functools.wraps(measure)
    def profile_guard_manager(*args: Any) -> float:
        context = sys.modules[__name__].CompileContext.try_get()  # of this thread
        return 0.0 if getattr(context, _UNTIMED, False) else measure(*args)

    guards.profile_guard_manager = profile_guard_manager


after_import("torch._dynamo.guards", _measure_the_rest)


def share_module_state(module: Any, other: Any) -> None:
    """Makes FSDP2 and other composable APIs find the state that they keep for a module by another module, too."""
    states = sys.modules.get("torch.distributed._composable_state")  # imported with the first such API
    if states is not None and (state := states._get_module_state(module)) is not None:
        states._insert_module_state(other, state)


class _Watched:
    """Dictionaries in groups. A guard manager holds a weak reference to this object."""

    def __init__(self, groups: tuple[tuple[Any, ...], ...]) -> None:
        self.groups = groups


def unchanged_guards(
    dicts: Sequence[Any], objects: Sequence[Any], attributes: Sequence[Any]
) -> Callable[[], bool]:
    """Builds a C++ check that nothing has changed in dictionaries, objects and attributes.

    Dynamo's *tag-safe* guards compare the dictionaries: after the first check, which records them, one loop in C++
    compares all versions. Since Python 3.12, CPython reports each change instead, and the check reads one flag.

    Args:
        dicts: The dictionaries.
        objects: Objects that have the same type and the same `__dict__`, with the same entries.
        attributes: (owner, names) of attributes that are the same objects, and whose owners have the same type.

    The caller holds the types and these attributes, since the check has their ids.
    """
    root = importlib.import_module("torch._C._dynamo.guards").RootGuardManager()
    kind = importlib.import_module("torch._dynamo.guards").GuardManagerType.GUARD_MANAGER

    def members(parent: Any, groups: Any) -> Iterator[tuple[Any, Any]]:
        for n, group in enumerate(groups):
            of_group = parent.tuple_getitem_manager(n, f"[{n}]", group, kind)
            for m, value in enumerate(group):
                yield of_group.tuple_getitem_manager(m, f"[{m}]", value, kind), value

    def member(index: int, value: Any) -> Any:
        return root.tuple_getitem_manager(index, f"[{index}]", value, kind)

    watched = _Watched(_grouped([*dicts, *map(vars, objects)]))
    others, owners = _grouped(objects), _grouped([owner for owner, _ in attributes])
    top = member(0, watched)
    for manager, entries in members(
        top.getattr_manager("groups", "groups", watched.groups, kind), watched.groups
    ):
        manager.add_dict_version_guard(entries, ["version"], None)
        manager.mark_tag_safe()
    top.mark_tag_safe()
    top.mark_tag_safe_root()
    for manager, owner in members(member(1, others), others):
        manager.add_type_match_guard(id(type(owner)), ["type"], None)
        entries = vars(owner)
        manager.get_generic_dict_manager("__dict__", entries, kind).add_id_match_guard(
            id(entries), ["dict"], None
        )
    for (manager, owner), (_, names) in zip(members(member(2, owners), owners), attributes, strict=True):
        manager.add_type_match_guard(id(type(owner)), ["type"], None)
        for name in names:
            value = getattr(owner, name)
            manager.getattr_manager(name, name, value, kind).add_id_match_guard(id(value), [name], None)
    return functools.partial(root.check, (watched, others, owners))


def _grouped(values: Sequence[Any], size: int = 64) -> tuple[tuple[Any, ...], ...]:
    """Returns the values in groups, since a guard manager compares each new child with all its children."""
    return tuple(tuple(values[n : n + size]) for n in range(0, len(values), size))


# -------------------------------------------------------------------------------- the callables of `torch.compile`


class CompiledCall(NamedTuple):
    """A call in progress of a callable that `torch.compile` returned.

    Attributes:
        what: The function or module that was compiled.
        args: Its arguments.
        kwargs: Its keyword arguments.
        backend: The backend, with the options of `torch.compile`.
        context: PyTorch's object for this use of `torch.compile`.
        code: The code of the Python frame that runs the function.
    """

    what: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    backend: Any
    context: Any
    code: types.CodeType


def compiled_call() -> CompiledCall | None:
    """Returns the innermost call of a callable of `torch.compile` in this thread; None if there is none.

    PyTorch does not pass the call to a backend. So this function searches the stack for PyTorch's frame that calls the
    compiled function.
    """
    of_torch: Any = importlib.import_module("torch._dynamo.eval_frame")
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "compile_wrapper" and code.co_filename == of_torch.__file__:
            variables = frame.f_locals
            context, fn = variables["self"], variables["fn"]
            backend = of_torch.innermost_backend(context.callback)
            return CompiledCall(
                _module_or_function(fn), variables["args"], variables["kwargs"], backend, context, code
            )
        frame = frame.f_back
    return None


def _module_or_function(fn: Any) -> Any:
    """Returns the module if PyTorch compiles the call of a module, else the function itself."""
    wrapped, owner = getattr(fn, "__wrapped__", None), getattr(fn, "__self__", None)
    if isinstance(wrapped, nn.Module):
        return wrapped
    is_call = isinstance(owner, nn.Module) and getattr(fn, "__func__", None) is type(owner).__call__
    return owner if is_call else fn
