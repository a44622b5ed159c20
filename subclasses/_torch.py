"""Every private torch name that ``subclasses`` uses, each with the reason.

No other module of ``subclasses`` imports a torch name that starts with an underscore, except the ``_torch_*.py`` of
this folder. ``tests/subclasses/test_torch_names.py`` checks each of them on a new release of PyTorch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._guards import (
    # The id of a compilation, which Dynamo sets before it inspects a frame, and the state of a trace without Dynamo.
    CompileContext as _CompileContext,
    TracingContext as _TracingContext,
)
from torch._higher_order_ops.flex_attention import (
    # flex_attention by plain ops, as in eager mode. The compiler's kernel for the CPU takes no computed mask.
    math_attention as math_attention,
)
from torch._ops import (
    # The type of torch.ops.higher_order.cond.
    HigherOrderOperator as HigherOrderOperator,
    # The types of torch.ops.aten.mul.Tensor and torch.ops.aten.mul. The objects are public, their types are not.
    OpOverload as OpOverload,
    OpOverloadPacket as OpOverloadPacket,
)
from torch._prims_common import canonicalize_dim as canonicalize_dim  # counted from the front
from torch._subclasses.functional_tensor import (
    # The class of tensors in AOTAutograd's traces, which functionalizes writes.
    FunctionalTensor as FunctionalTensor,
)
from torch.utils._python_dispatch import (
    # A mode that sees every op below autograd; the conformance kit records with it which rules were reached.
    TorchDispatchMode as TorchDispatchMode,
    # Whether a tensor is a wrapper that PyTorch can flatten with __tensor_flatten__.
    is_traceable_wrapper_subclass as is_traceable_wrapper_subclass,
    # The same test for a type.
    is_traceable_wrapper_subclass_type as is_traceable_wrapper_subclass_type,
    # Shares the base's storage with a view made below autograd, and returns the mutated argument of an in-place op.
    return_and_correct_aliasing as return_and_correct_aliasing,
)
from torch.utils._pytree import (
    # The registry that torch.export looks up, and its keys of leaves; the public register_dataclass has no context.
    SequenceKey as SequenceKey,
    # PyTorch's own implementations of higher-order ops flatten a branch's results with this module. So a branch may
    # return any container that is registered with it; optree has fewer.
    TreeSpec as TreeSpec,
    register_pytree_node as register_pytree_node,
    tree_flatten as tree_flatten,
    tree_flatten_with_path as tree_flatten_with_path,
    tree_leaves as tree_leaves,
    tree_map as tree_map,
    tree_unflatten as tree_unflatten,
)

# ---- making wrappers ---------------------------------------------------------------------------------------

# The only way to make a tensor without storage with a given Python class.
make_wrapper_subclass = torch.Tensor._make_wrapper_subclass

# The dispatch keys of a tensor: the C++ state of a wrapper besides its size and dtype.
dispatch_keys = torch._C._dispatch_keys  # type: ignore[attr-defined]

# Whether a torch function mode is active: construction must be visible to such modes.
in_function_mode = torch._C._is_torch_function_mode_enabled


def in_dispatch_mode() -> bool:
    """Whether a dispatch mode is active, such as a trace's mode: there is a private count of them."""
    return torch._C._len_torch_dispatch_stack() > 0  # type: ignore[attr-defined]


# The torch.func transform that is running, or None. Tensors wrapped by a transform must not be wrapped again.
current_transform = torch._C._functorch.peek_interpreter_stack  # type: ignore[attr-defined]

# Whether such a transform wrapped a tensor.
is_transformed = torch._C._functorch.is_functorch_wrapped_tensor  # type: ignore[attr-defined]


def is_differentiated_by_transform(t: torch.Tensor) -> bool:
    """Whether a transform of torch.func that is running differentiates by a tensor, also below a batch."""
    functorch: Any = torch._C._functorch  # type: ignore[attr-defined]
    stack = functorch.get_interpreter_stack() or []
    forward = {i.level() for i in stack if i.key() == functorch.TransformType.Jvp}
    while is_transformed(t):
        if functorch.is_gradtrackingtensor(t) and (
            t.requires_grad or functorch.maybe_get_level(t) in forward
        ):
            return True
        t = functorch.get_unwrapped(t)
    return False


# ---- Dynamo ------------------------------------------------------------------------------------------------

# Controls how Dynamo treats a code object that runs as a frame of its own (not inlined), without importing
# torch._dynamo. On a release without these names Dynamo traces such frames.
_frames = torch._C._dynamo.eval_frame  # type: ignore[attr-defined]


def skip_frames(function: Any) -> None:
    """Makes Dynamo skip the frames of a function and of everything it calls, at no cost per call.

    If a user's frame is not compiled (a graph break in a loop, an exception), its ops run in eager mode. Dynamo would
    then inspect every frame below it, including the frames below `__torch_dispatch__`.
    """
    if hasattr(_frames, "set_code_exec_strategy"):
        skip = _frames._FrameAction.SKIP
        _frames.set_code_exec_strategy(function.__code__, _frames._FrameExecStrategy(skip, skip))


# ---- printing ----------------------------------------------------------------------------------------------

# The options that torch.set_printoptions sets; they have no public reader.
print_options = torch._tensor_str.PRINT_OPTS  # type: ignore[attr-defined]

# A context with other print options. torch.set_printoptions cannot restore them: it does not keep ``sci_mode``.
printing_with = torch._tensor_str.printoptions  # type: ignore[attr-defined]

# A context without the active modes: PyTorch prints tensors in it, so that a mode does not see the ops of printing.
disable_current_modes = torch.utils._python_dispatch._disable_current_modes  # type: ignore[attr-defined]

# ---- dynamic ints ------------------------------------------------------------------------------------------

# The attribute with the dims that Dynamo makes symbolic at the first compilation. Dynamo reads it and does not guard
# on it. A release without the attribute compiles once more.
dynamic_dims_name = "_dynamo_propagated_dynamic_indices"

# The attribute that torch._dynamo.maybe_mark_dynamic sets. Dynamo and torch.export read it. Dynamo guards on it: a
# program for a tensor without marks takes none with marks.
marked_dims_name = "_dynamo_weak_dynamic_indices"


def mark_dim_dynamic(t: torch.Tensor, *dims: int) -> None:
    """Does what torch._dynamo.maybe_mark_dynamic(t, dims) does, without importing torch._dynamo."""
    setattr(t, marked_dims_name, {*dims_marked_dynamic(t), *dims})


def dims_marked_dynamic(t: torch.Tensor) -> list[int]:
    """Returns the dims that :func:`mark_dim_dynamic` marked, in order, from the same attribute."""
    return sorted(getattr(t, marked_dims_name, ()))


# ---- above autograd ----------------------------------------------------------------------------------------

# Disables __torch_function__ for a class without rules above autograd: implemented in C++ and known to Dynamo.
disabled_torch_function_impl = torch._C._disabled_torch_function_impl

# The TLS guard under which a function runs on a release that cannot skip a single __torch_function__ check.
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass

# The guard under which functions that a rule calls are intercepted again.
EnableTorchFunction = torch._C._EnableTorchFunction  # type: ignore[attr-defined]

# Calls a function and skips only that function's own __torch_function__ check, so functions with rules that it calls
# are still intercepted. Older releases lack it; there the whole call runs without interception.
_skip_one_hop = getattr(torch._C, "_skip_one_hop_torch_function", None)


def call_unruled(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Runs a function without a rule as if its arguments had no ``__torch_function__``."""
    func = torch.unflatten if func is torch.Tensor.unflatten else func  # it dispatches again, from C
    # Without that check, PyTorch would parse a list of wrappers in the second argument as a number.
    if _skip_one_hop is not None and not getattr(func, "__name__", "").startswith("_foreach_"):
        return _skip_one_hop(func, types, args, kwargs)
    with DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


# ---- below autograd ----------------------------------------------------------------------------------------

# These four read, change and restore the dispatch keys under which a dispatch mode or subclass is called.
_ForceDispatchKeyGuard = torch._C._ForceDispatchKeyGuard  # type: ignore[attr-defined]
_included_keys = torch._C._dispatch_tls_local_include_set  # type: ignore[attr-defined]
_excluded_keys = torch._C._dispatch_tls_local_exclude_set  # type: ignore[attr-defined]
_lazy_bits = torch._C.DispatchKeySet(torch._C.DispatchKey.Conjugate).add(torch._C.DispatchKey.Negative)  # type: ignore[attr-defined]


is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded  # type: ignore[attr-defined]
set_excluded = torch._C._dispatch_tls_set_dispatch_key_excluded  # type: ignore[attr-defined]
_conjugate, _negative = torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative  # type: ignore[attr-defined]


def with_lazy_bits(run: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function in which kernels see conjugate and negative bits again.

    PyTorch disables both keys before ``__torch_dispatch__`` (its issue 130646). A kernel composed of other ops that
    sets such a bit itself, such as ``linalg_pinv``, would be silently wrong without them. Setting the two keys takes a
    third of the time of a guard object.
    """

    def run_with_lazy_bits(*args: Any, **kwargs: Any) -> Any:
        if not is_excluded(_conjugate):
            return run(*args, **kwargs)
        set_excluded(_conjugate, False)
        set_excluded(_negative, False)
        try:
            return run(*args, **kwargs)
        finally:
            set_excluded(_conjugate, True)
            set_excluded(_negative, True)

    return run_with_lazy_bits


# The keys that are disabled below autograd: autograd itself, and the tracking of in-place ops and views, with which a
# view shares the version counter of its base.
VIEWS_KEY = torch._C.DispatchKey.ADInplaceOrView  # type: ignore[attr-defined]
# An op with an absent tensor in a list, such as `x[:, index]`, has a separate key.
_autograd_keys = torch._C.DispatchKeySet(VIEWS_KEY)  # type: ignore[attr-defined]
for _name in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor"):
    _autograd_keys = _autograd_keys.add(getattr(torch._C.DispatchKey, _name))  # type: ignore[attr-defined]
_enabled_keys = _autograd_keys | _lazy_bits


def autograd_enabled() -> Any:
    """Context below autograd in which ops are differentiable again, to compute a gradient inside.

    Formulas for complex numbers set conjugate bits, so kernels see those again, too.
    """
    return _ForceDispatchKeyGuard(_included_keys(), _excluded_keys() - _enabled_keys)


def autograd_excluded() -> Any:
    """Context above autograd in which ops are not recorded, and are dispatched to ``__torch_dispatch__`` directly."""
    return _ForceDispatchKeyGuard(_included_keys(), _excluded_keys() | _autograd_keys)


# Whether a tensor requires grad, without a call of its class's __torch_function__, which costs four times as much. The
# other one returns whether autograd records no op of this thread, as in ``__torch_dispatch__``.
any_requires_grad = torch._C._any_requires_grad  # type: ignore[attr-defined]
is_below_autograd = partial(is_excluded, torch._C.DispatchKey.AutogradFunctionality)  # type: ignore[attr-defined]


def is_recording(
    x: torch.Tensor,
    is_below_autograd: Any = is_below_autograd,
    is_grad_enabled: Any = torch.is_grad_enabled,
    any_requires_grad: Any = any_requires_grad,
) -> bool:
    """Whether autograd records ops on a tensor: it requires grad, in grad mode, and this thread is above autograd.

    Only the first parameter is for callers; the others are looked up faster than names of the module.
    """
    return any_requires_grad(x) and is_grad_enabled() and not is_below_autograd()


# Whether a transform of torch.func is active in this thread.
_are_transforms_active = torch._C._are_functorch_transforms_active  # type: ignore[attr-defined]


def apply_function(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Calls an autograd function with all its arguments, by position.

    If a function has a ``setup_context``, each call binds the defaults of its ``forward`` with :mod:`inspect`. That
    takes three times as long as the rest. PyTorch binds them in ``Function.apply``, and from 2.15 on below it. Only a
    transform of ``torch.func`` needs two separate methods.
    """
    if torch.compiler.is_dynamo_compiling() or _are_transforms_active():
        return function.apply(*args)
    return _apply_in_one(function)(*args)


@functools.cache
def _apply_in_one(function: Any) -> Any:
    """Returns the C++ method ``apply`` of a subclass whose ``forward`` also saves the tensors of its backward."""
    compute, save = function.forward, function.setup_context

    def forward(ctx: Any, *args: Any) -> Any:
        out = compute(*args)
        save(ctx, args, out)
        return out

    methods = {
        "__module__": function.__module__,
        "forward": staticmethod(forward),
        "setup_context": staticmethod(torch.autograd.Function.setup_context),  # PyTorch ignores this one
    }
    in_one = type(function.__name__, (function,), methods)
    return super(torch.autograd.Function, in_one).apply  # type: ignore[misc]


def is_tracing() -> bool:
    """Whether this thread is compiling something, with Dynamo or without."""
    # Dynamo has the latter before it inspects a frame; AOTAutograd makes the former if there is no Dynamo. No public
    # function has the answer: `is_compiling` is about the code that is traced.
    return _TracingContext.try_get() is not None or _CompileContext.current_compile_id() is not None


graph_task = (
    torch._C._current_graph_task_id
)  # the engine's number of the backward in this thread; -1 if none runs


def in_backward() -> bool:
    """Whether the autograd engine is running in this thread, so that ops compute a derivative."""
    return graph_task() != -1


def hooks_of(t: torch.Tensor) -> Any:
    """Returns the dict of the hooks that were registered with ``register_hook``, or None."""
    # The attribute that register_hook adds to. It has no public reader.
    return t._backward_hooks


def set_hooks(t: torch.Tensor, hooks: Any) -> None:
    """Replaces all hooks of a tensor by a dict of hooks, to which ``register_hook`` later adds."""
    # The setter passes the dict to the C++ tensor.
    t._backward_hooks = hooks


# ---- aliasing ----------------------------------------------------------------------------------------------

# Gives a wrapper made for a view op the storage of its base wrapper, as AOTAutograd expects.
set_storage_of = torch._functionalize_unsafe_set  # type: ignore[attr-defined]

# A context in which writes to a tensor do not bump its version counter; FSDP2 refills gathered tensors in it.
preserve_version_counter = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]

# ---- schemas -----------------------------------------------------------------------------------------------

# The module of functions such as F.linear; an op may be reachable through it and through torch.
nn_functions = torch._C._nn  # type: ignore[attr-defined]


# The dispatcher's own table. The method of an overload for one key raises if the overload has no kernel at all.
_has_kernel = torch._C._dispatch_has_kernel
_all_op_names = torch._C._dispatch_get_all_op_names
# The keys of ops whose kernel is composed of other ops: autograd differentiates through the first kind.
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_COMPOSED = torch._C.DispatchKey.CompositeExplicitAutograd


def is_dispatched(op: Any) -> bool:
    """Whether an overload has kernels; TorchScript's overloads on ints, lists and strings have none."""
    return _has_kernel(op.name())


def is_composite(op: Any) -> bool:
    """Whether PyTorch decomposes an op above dispatch, except in inference mode."""
    return is_dispatched(op) and op.has_kernel_for_dispatch_key(_COMPOSITE)


def is_composed(op: Any) -> bool:
    """Whether the kernel of an op calls other ops, below autograd."""
    return is_dispatched(op) and op.has_kernel_for_dispatch_key(_COMPOSED)


def resolve_overload(packet: Any, args: Any, kwargs: Any) -> Any:
    """Returns the overload of a packet that accepts these arguments, or None."""
    try:
        # The first step of calling the packet.
        name = torch._C._jit_resolve_packet(packet._qualified_op_name, *args, **kwargs)
    except RuntimeError:
        return None
    return getattr(packet, name)


def cpp_callable(op: Any) -> Any:
    """Returns the C++ function to which ``OpOverload.__call__`` forwards its arguments."""
    # Saves a Python frame for each inner tensor of each op.
    return getattr(op, "_op", op)


def schema_of(op: Any) -> Any:
    """Returns an op's schema: arguments and returns with their types and alias sets."""
    return op._schema


def aten_overload_names() -> dict[str, list[str]]:
    """Returns the names of the overloads with a kernel of every aten packet, by name of the packet, sorted."""
    overloads: dict[str, list[str]] = {}  # dir(torch.ops.aten) lists only the packets that were used
    for name in sorted(n for n in _all_op_names() if n[:6] == "aten::"):
        packet, _, overload = name[6:].partition(".")
        overloads.setdefault(packet, []).append(overload or "default")
    return overloads


def tags_of(packet: str, overload: str) -> Any:
    """Returns the tags of an overload of an aten packet."""
    find = torch._C._get_operation_overload  # the object of the op takes several times as long to make
    return find(f"aten::{packet}", overload.removeprefix("default"))[2]


def all_aten_ops() -> list[Any]:
    """Returns every overload with a kernel of every aten op, sorted by name."""
    packets = aten_overload_names().items()
    return [getattr(getattr(torch.ops.aten, packet), name) for packet, names in packets for name in names]


def python_decomposition(op: Any) -> Any:
    """Returns PyTorch's Python decomposition of an op, or None."""
    # The table behind the public torch.library and export functions. Slow to import, and few classes need it.
    from torch._decomp import decomposition_table

    # Read only.
    return decomposition_table.get(op)


# ---- kernels -----------------------------------------------------------------------------------------------

# Fused attention on the CPU and its backward. It returns the log-sum-exp, which the public function does not.
flash_attention_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_attention_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# The same on CUDA for packed rows of any lengths, as torch.nested calls them; differentiable.
flash_attention_rows = torch.ops.aten._flash_attention_forward
efficient_attention_rows = torch.ops.aten._efficient_attention_forward

# Whether the second op traces with its backward: up to 2.13 the meta kernel lacks an argument (2.14: not tried).
efficient_attention_traces = torch.__version__ >= "2.15"

# Whether F.grouped_mm traces operands of other dtypes than bfloat16: the meta kernel of 2.13 refuses them.
grouped_mm_traces = torch.__version__ >= "2.15"

# Asserts in a trace a condition on a size that data determines; documented despite its private name.
check_in_graph = torch._check

# ---- sparse tensors ----------------------------------------------------------------------------------------

# Optimizers read a sparse gradient with these; the public methods raise unless it is marked as coalesced.
sparse_indices = torch.Tensor._indices
sparse_values = torch.Tensor._values

# ---- norms -------------------------------------------------------------------------------------------------

# The norms of several tensors, with which torch.nn.utils.clip_grad_norm_ computes one of them all.
# Whether a gradient is a batch, as `torch.autograd.grad(..., is_grads_batched=True)` passes it; it has no other name.
is_legacy_batchedtensor = torch._C._functorch.is_legacy_batchedtensor  # type: ignore[attr-defined]

foreach_norm = torch._foreach_norm  # type: ignore[attr-defined]
# Ops on lists of tensors, which no public function runs.
foreach_functions = [getattr(torch, name) for name in dir(torch) if name.startswith("_foreach_")]


# ---- the conformance kit -----------------------------------------------------------------------------------


def fake_mode() -> Any:
    """Returns a fake mode such as the compiler traces with; its tensors have no data."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # slow to import, needed by the kit alone

    return FakeTensorMode()


def storage_key(x: torch.Tensor) -> int:
    """Returns a key that is equal for two tensors exactly if they share a storage, as AOTAutograd detects aliases."""
    return x.untyped_storage()._cdata


def op_infos() -> Any:
    """Returns PyTorch's own list of ops with sample inputs; its test helpers need numpy and expecttest."""
    # Slow to import, and only the kit needs it.
    from torch.testing._internal.common_methods_invocations import op_db

    return op_db
