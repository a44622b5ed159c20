"""Every private name of torch that the spec layer uses, and why.

Nothing else in `subclasses` imports a name that starts with an underscore from torch, so a new release of
PyTorch is read against this one file (and `desugar/_torch.py`, which holds what only the pass needs).
``tests/subclasses/test_torch_names.py`` names each of them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._ops import (
    # The type of torch.ops.higher_order.cond.
    HigherOrderOperator as HigherOrderOperator,
    # The types of torch.ops.aten.mul.Tensor and torch.ops.aten.mul: public objects whose types have no name.
    OpOverload as OpOverload,
    OpOverloadPacket as OpOverloadPacket,
)
from torch.utils._python_dispatch import (
    # A mode that sees every op below autograd; the conformance kit notes with it which rules were reached.
    TorchDispatchMode as TorchDispatchMode,
    # The modes in force, which a higher-order op asks before any subclass.
    _get_current_dispatch_mode_stack as _dispatch_modes,
    # Is a tensor of the kind that PyTorch can take apart with __tensor_flatten__?
    is_traceable_wrapper_subclass as is_traceable_wrapper_subclass,
    # The same question about a type.
    is_traceable_wrapper_subclass_type as is_traceable_wrapper_subclass_type,
    # Gives a view made below autograd its base's storage and returns the mutated argument of an in-place op.
    return_and_correct_aliasing as return_and_correct_aliasing,
)
from torch.utils._pytree import (
    # The containers in which a branch of a higher-order op may return its results are the ones that PyTorch's own
    # implementations of the op flatten; optree knows fewer.
    TreeSpec as TreeSpec,
    tree_flatten as tree_flatten,
    tree_map as tree_map,
    tree_unflatten as tree_unflatten,
)

from subclasses.after_import import after_import

# ---- making wrappers ---------------------------------------------------------------------------------------

# The only way to make a tensor without storage whose Python class is a given one.
make_wrapper_subclass = torch.Tensor._make_wrapper_subclass

# A construction is shown to the torch function modes in force; asks whether there is one.
in_function_mode = torch._C._is_torch_function_mode_enabled

# The transform of torch.func that runs, or None; its own wrappers around tensors are not to be wrapped again.
current_transform = torch._C._functorch.peek_interpreter_stack  # type: ignore[attr-defined]

# Whether a tensor belongs to such a transform.
is_transformed = torch._C._functorch.is_functorch_wrapped_tensor  # type: ignore[attr-defined]

# ---- Dynamo ------------------------------------------------------------------------------------------------

# How Dynamo treats a code object that Python runs as a frame of its own (not one that it inlines), without the
# import of torch._dynamo. A release without these names traces such frames.
_frames = torch._C._dynamo.eval_frame  # type: ignore[attr-defined]


def run_as_it_is(function: Any) -> None:
    """Keeps Dynamo's eyes off the frames of a function and what they call, at no price per call.

    Where a user's frame is not compiled (a graph break in a loop, an exception), its ops run in eager mode with
    Dynamo looking at each frame on the way, those below `__torch_dispatch__` included.
    """
    if hasattr(_frames, "set_code_exec_strategy"):
        skip = _frames._FrameAction.SKIP
        _frames.set_code_exec_strategy(function.__code__, _frames._FrameExecStrategy(skip, skip))


# ---- printing ----------------------------------------------------------------------------------------------

# What torch.set_printoptions sets, which has no public reader.
print_options = torch._tensor_str.PRINT_OPTS  # type: ignore[attr-defined]

# A context with other options, which torch.set_printoptions is not: it forgets ``sci_mode``.
printing_with = torch._tensor_str.printoptions  # type: ignore[attr-defined]

# A context without the modes in force: PyTorch prints tensors in one, so that a mode sees none of it.
disable_current_modes = torch.utils._python_dispatch._disable_current_modes  # type: ignore[attr-defined]

# ---- dynamic ints ------------------------------------------------------------------------------------------

# The dims of a tensor that Dynamo makes symbols of at the first compilation. Read, not guarded on; a release
# that does not know it compiles once more.
dynamic_dims_name = "_dynamo_propagated_dynamic_indices"


def mark_dim_dynamic(t: torch.Tensor, dim: int = 0) -> None:
    """What torch._dynamo.maybe_mark_dynamic(t, dim) does, without the import of torch._dynamo."""
    # A private attribute is what Dynamo reads.
    t._dynamo_weak_dynamic_indices = {*dims_marked_dynamic(t), dim}  # type: ignore[attr-defined]


def dims_marked_dynamic(t: torch.Tensor) -> list[int]:
    """The dims that :func:`mark_dim_dynamic` has marked."""
    # The same attribute.
    return sorted(getattr(t, "_dynamo_weak_dynamic_indices", ()))


# ---- above autograd ----------------------------------------------------------------------------------------

# Switches __torch_function__ off for a class with no rule above autograd, in C++ and known to Dynamo.
disabled_torch_function_impl = torch._C._disabled_torch_function_impl

# The TLS guard with which a function runs when its one hop cannot be skipped.
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass

# Calls a function past its own __torch_function__ check only, so that ruled functions which it calls in turn
# are still intercepted. Missing on older releases, where the whole call runs with interception off.
_skip_one_hop = getattr(torch._C, "_skip_one_hop_torch_function", None)


def call_unruled(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Runs a function that no rule is for as if its arguments had no ``__torch_function__``."""
    if _skip_one_hop is not None:
        return _skip_one_hop(func, types, args, kwargs)
    with DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


# ---- below autograd ----------------------------------------------------------------------------------------

# The keys under which a dispatch mode or subclass is called are read, changed and put back with these four.
_ForceDispatchKeyGuard = torch._C._ForceDispatchKeyGuard  # type: ignore[attr-defined]
_included_keys = torch._C._dispatch_tls_local_include_set  # type: ignore[attr-defined]
_excluded_keys = torch._C._dispatch_tls_local_exclude_set  # type: ignore[attr-defined]
_lazy_bits = torch._C.DispatchKeySet(torch._C.DispatchKey.Conjugate).add(torch._C.DispatchKey.Negative)  # type: ignore[attr-defined]


def seeing_lazy_bits() -> Any:
    """A context in which kernels see conjugate and negative bits again.

    PyTorch switches both keys off before ``__torch_dispatch__`` (its issue 130646), so that a kernel made of other
    ops which sets a bit itself, such as ``linalg_pinv``, would be silently wrong there.
    """
    return _ForceDispatchKeyGuard(_included_keys(), _excluded_keys() - _lazy_bits)


# What is switched off below autograd: the keys of autograd itself and of the bookkeeping of views beside it.
_autograd_keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradFunctionality).add(  # type: ignore[attr-defined]
    torch._C.DispatchKey.ADInplaceOrView  # type: ignore[attr-defined]
)


def recording_again() -> Any:
    """A context below autograd in which operations are differentiable again, for a gradient taken inside."""
    return _ForceDispatchKeyGuard(_included_keys(), _excluded_keys() - _autograd_keys)


def in_backward() -> bool:
    """Whether the autograd engine runs in this thread: what is computed then is a derivative."""
    # The engine's number for what it runs; -1 for nothing.
    return torch._C._current_graph_task_id() != -1


# ---- higher-order ops ---------------------------------------------------------------------------------------


def is_traced(op: Any, operands: Any) -> bool:
    """Whether a call of a higher-order op is recorded or transformed, or its operands have no data."""
    # Knows the fake mode of a compilation, of the modes in force, and of tensors.
    from torch._guards import detect_fake_mode

    # A mode counts that the op has an implementation for; any other one sees the ops of the branch instead. (One that
    # counts operations would choose the branch with more of them.) Before autograd there is a stack of its own.
    return (
        any(type(mode) in op.python_key_table for mode in _dispatch_modes())
        or torch._ops._len_torch_dispatch_stack_pre_dispatch() > 0
        or current_transform() is not None
        or detect_fake_mode(operands) is not None
    )


def loop_in_python(op: Any, *args: Any) -> Any:
    """``while_loop`` as a loop in Python, which is PyTorch's kernel for tensors with data; differentiable as it is."""
    # The key under which PyTorch keeps that kernel.
    return op.py_kernels[torch._C.DispatchKey.CompositeExplicitAutograd](*args)  # type: ignore[attr-defined]


def interpreted(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A graph run node by node where the nodes' metadata (the user's lines) is to be kept, any other function as is."""
    # What PyTorch's own implementations of the ops do with each branch.
    from torch._higher_order_ops.utils import _maybe_run_with_interpreter

    return _maybe_run_with_interpreter(fn)


def trace_graph(fn: Callable[..., Any], values: Sequence[Any], vary: bool) -> torch.fx.GraphModule:
    """The graph of a function, traced on fake tensors apart from what is being traced; ints may vary between calls."""
    # make_fx, within the trace that goes on if there is one.
    from torch._guards import detect_fake_mode
    from torch._higher_order_ops.utils import _maybe_reenter_make_fx

    with on_fakes(values) as fakes:
        env = detect_fake_mode(fakes).shape_env  # type: ignore[union-attr]
        if vary and env is not None:
            fakes = [env.create_unbacked_symint() if type(v) is int else v for v in fakes]
        return _maybe_reenter_make_fx(fn)(*fakes)


def is_recorded() -> bool:
    """Whether ops are written to a graph, as opposed to being run for the sizes of their results."""
    # Slow to import, needed by derivatives alone.
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return get_proxy_mode() is not None


@contextlib.contextmanager
def on_fakes(values: Sequence[Any]) -> Iterator[list[Any]]:
    """A context in which nothing is recorded, with fresh fake tensors like the given ones; ints stay."""
    # Functionalization below Python is no mode, and is switched off apart.
    from torch._dispatch.python import suspend_functionalization
    from torch._guards import detect_fake_mode

    mode = detect_fake_mode(values) or fake_mode()
    env = mode.shape_env
    # What a run here makes up is not missing from the graph of whoever traces.
    forgetting = contextlib.nullcontext() if env is None else env.ignore_fresh_unbacked_symbols()
    with suspend_functionalization(), disable_current_modes(), mode, torch.no_grad(), forgetting:
        with torch.inference_mode(False):
            fakes = [_fake_like(v) if isinstance(v, torch.Tensor) else v for v in values]
        yield fakes


def _fake_like(t: torch.Tensor) -> torch.Tensor:
    if is_traceable_wrapper_subclass(t):
        names, context = t.__tensor_flatten__()
        inners = {name: _fake_like(getattr(t, name)) for name in names}
        return type(t).__tensor_unflatten__(inners, context, t.size(), t.stride())
    return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=t.device)


def storage_below(t: torch.Tensor) -> int:
    """The storage of what a tensor stands for under functionalization, which gives each input one of its own."""
    # The tensors by which AOTAutograd functionalizes.
    from torch._subclasses.functional_tensor import FunctionalTensor

    # Writes to it that wait are carried out first.
    if isinstance(t, FunctionalTensor):
        torch._sync(t)  # type: ignore[attr-defined]
        return storage_key(torch._from_functional_tensor(t.elem))  # type: ignore[attr-defined]
    return storage_key(t)


def _answer_for_wrappers(home: Any, name: str, is_ours: Callable[[Any], bool], answer: Any) -> None:
    """Replaces a function of PyTorch by one that gives an answer of ours where the argument is ours."""
    ask = getattr(home, name, None)
    if ask is not None:
        ours = functools.wraps(ask)(lambda asked: answer(asked) if is_ours(asked) else ask(asked))
        setattr(home, name, ours)


def _outer_storage(t: torch.Tensor) -> set[Any]:
    from torch.multiprocessing.reductions import StorageWeakRef

    return {StorageWeakRef(t._typed_storage())}


def patch_aliasing_checks(is_ours: Callable[[Any], bool]) -> None:
    """Makes Dynamo compare wrappers for which a predicate holds as it compares plain tensors: by their own storage.

    It looks for aliases among the operands and results of a branch, and for operands that a loop writes to. Of a
    wrapper it takes the first inner tensor, fails where that is a wrapper too, and refuses wrappers in loops, whatever
    the body does. What inner tensors share is dealt with where wrappers are taken apart.
    """
    # The home of one of the two functions that Dynamo asks.
    import torch._higher_order_ops.utils as utils

    def example(nodes: Any) -> Any:
        node = nodes[0] if len(nodes) == 1 else None
        return getattr(getattr(node, "node", node), "meta", {}).get("example_value")

    _answer_for_wrappers(
        utils, "_collect_fake_inputs", lambda nodes: is_ours(example(nodes)), lambda nodes: [example(nodes)]
    )

    def patch(dynamo: Any) -> None:
        _answer_for_wrappers(dynamo, "get_tensor_storages", is_ours, _outer_storage)

    after_import("torch._dynamo.variables.higher_order_ops", patch)


def leave_in_graph(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Has Dynamo put calls of a function into its graph, where it would trace into it; it need not be imported yet."""
    after_import("torch._dynamo.decorators", lambda dynamo: dynamo.allow_in_graph(fn))
    return fn


# ---- aliasing ----------------------------------------------------------------------------------------------

# Gives a wrapper made for a view op the storage of the wrapper it is a view of, as AOTAutograd expects.
set_storage_of = torch._functionalize_unsafe_set  # type: ignore[attr-defined]

# A context in which writes to a tensor leave its version counter alone, as FSDP2 fills what it gathered before.
preserve_version_counter = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]

# ---- schemas -----------------------------------------------------------------------------------------------

# Functions such as F.linear live here; one operation may be reached through it and through torch.
nn_functions = torch._C._nn  # type: ignore[attr-defined]


def is_dispatched(op: Any) -> bool:
    """Whether an overload has kernels; those of TorchScript on ints, lists and strings have none."""
    # The table of the dispatcher itself; asking an overload for one key raises where there is none at all.
    return torch._C._dispatch_has_kernel(op.name())


def is_composite(op: Any) -> bool:
    """Whether PyTorch takes an op apart above dispatch, except in inference mode."""
    # The key of ops whose kernel is made of other ops and which autograd therefore sees through.
    return is_dispatched(op) and op.has_kernel_for_dispatch_key(
        torch._C.DispatchKey.CompositeImplicitAutograd
    )


def resolve_overload(packet: Any, args: Any, kwargs: Any) -> Any:
    """The overload of a packet that takes these arguments, or None."""
    try:
        # What calling the packet does first.
        name = torch._C._jit_resolve_packet(packet._qualified_op_name, *args, **kwargs)
    except RuntimeError:
        return None
    return getattr(packet, name)


def entry_of(op: Any) -> Any:
    """The C++ function behind an op, which ``OpOverload.__call__`` only passes its arguments on to."""
    # A Python frame less for each inner tensor of each op.
    return getattr(op, "_op", op)


def schema_of(op: Any) -> Any:
    """The schema of an op: arguments and returns with their types and alias sets."""
    return op._schema


def all_aten_ops() -> list[Any]:
    """Every overload of every aten op that has a kernel, by name."""
    # The dispatcher's own table; dir(torch.ops.aten) knows only the packets that were used.
    names = torch._C._dispatch_get_all_op_names()
    split = sorted(n.removeprefix("aten::").partition(".") for n in names if n.startswith("aten::"))
    return [getattr(getattr(torch.ops.aten, packet), overload or "default") for packet, _, overload in split]


def python_decomposition(op: Any) -> Any:
    """PyTorch's decomposition of an op that it does not take apart itself, or None."""
    # The table behind the public torch.library and export functions; slow to import and needed by few classes.
    from torch._decomp import decomposition_table

    # Looked up, never written.
    return decomposition_table.get(op)


# ---- kernels -----------------------------------------------------------------------------------------------

# Fused attention on the CPU with its log-sum-exp, which the public function keeps to itself; and its backward.
flash_attention_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_attention_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# The same on CUDA for rows of any lengths back to back, as torch.nested calls them; differentiable.
flash_attention_rows = torch.ops.aten._flash_attention_forward
efficient_attention_rows = torch.ops.aten._efficient_attention_forward

# Whether the second is traced with its backward: up to 2.13 the meta kernel lacks an argument (2.14: not tried).
efficient_attention_traces = torch.__version__ >= "2.15"


# ---- the conformance kit -----------------------------------------------------------------------------------


def fake_mode() -> Any:
    """A mode whose tensors have no data, as the compiler traces with."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # slow to import, needed by the kit alone

    return FakeTensorMode()


def storage_key(x: torch.Tensor) -> int:
    """What two tensors have in common exactly if they share a storage, as AOTAutograd tells aliases."""
    return x.untyped_storage()._cdata


def op_infos() -> Any:
    """PyTorch's own list of ops with sample inputs; its test helpers need numpy and expecttest."""
    # Slow to import, needed by the kit alone.
    from torch.testing._internal.common_methods_invocations import op_db

    return op_db
