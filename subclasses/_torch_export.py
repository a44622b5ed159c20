"""Private torch names for ``torch.export``: what its trace above autograd does with declared classes.

:mod:`subclasses._torch` says how this module and its tests are kept.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree  # the pytrees of torch.export, which has no public name for them

from subclasses._torch import is_traceable_wrapper_subclass
from subclasses.after_import import after_import
from subclasses.errors import DispatchError, one_of


def is_exporting() -> bool:
    """Whether the trace above autograd of ``torch.export`` is running."""
    if torch.compiler.is_dynamo_compiling():
        return False  # with strict=True, Dynamo captures a graph first
    # The stack of the modes that see ops before autograd does. The public is_exporting() is true below autograd, too.
    return torch._ops._len_torch_dispatch_stack_pre_dispatch() > 0


def desugar_exported(is_ours: Callable[[Any], bool]) -> None:
    """Makes ``torch.export`` record what values of some classes compute as ops on their inner tensors.

    Export traces above autograd. The mode that records there declines a wrapper that was made inside the function, and
    unlike below autograd the dispatcher does not ask the wrapper next. The mode has no nodes for the inner tensors of
    an argument, and takes a result that is a wrapper for a constant.

    Args:
        is_ours: whether an object is a value of one of the classes.
    """

    def patch(trace: Any) -> None:
        from torch.fx.experimental import proxy_tensor  # what records ops; torch.export has imported it

        hooks, exporting = _Hooks(proxy_tensor, is_ours), trace._compiling_state_context

        @contextlib.contextmanager
        def recording() -> Iterator[None]:
            with exporting(), hooks.installed():
                yield

        trace._compiling_state_context = recording

    after_import("torch.export._trace", patch)


class _Hooks:
    """What replaces functions of the module that records ops, while an export is in progress in some thread."""

    def __init__(self, module: Any, is_ours: Callable[[Any], bool]) -> None:
        tracer = module.PythonKeyTracer
        self.replaced = {
            (module, "proxy_call"): _asking_classes(module.proxy_call, is_ours),
            (module, "set_proxy_slot"): _tracking_inners(module, is_ours),
            (tracer, "create_arg"): _refusing_results(tracer.create_arg, is_ours),
        }
        self.originals = {(owner, name): getattr(owner, name) for owner, name in self.replaced}
        self.lock, self.exports = threading.Lock(), 0

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Installs the hooks for the time of a context; contexts may be nested, and overlap in threads."""
        self._count(1, self.replaced)
        try:
            yield
        finally:
            self._count(-1, self.originals)

    def _count(self, change: int, functions: dict[tuple[Any, str], Any]) -> None:
        with self.lock:
            self.exports += change
            if self.exports == max(change, 0):  # the first one in, or the last one out
                for (owner, name), function in functions.items():
                    setattr(owner, name, function)


def _asking_classes(proxy_call: Any, is_ours: Callable[[Any], bool]) -> Any:
    """Wraps the function that records an op, to call the class of a wrapper that it declines."""

    @functools.wraps(proxy_call)
    def record(mode: Any, func: Any, pre_dispatch: bool, args: Any, kwargs: Any) -> Any:
        out = proxy_call(mode, func, pre_dispatch, args, kwargs)
        if out is not NotImplemented or not pre_dispatch:
            return out
        # An op's arguments, with those in lists.
        tensors: list[Any] = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        types = tuple({type(t): None for t in tensors if is_traceable_wrapper_subclass(t)})
        for cls in {type(t): None for t in tensors if is_ours(t)}:
            with mode:  # the dispatcher has disabled it
                out = cls.__torch_dispatch__(func, types, args, kwargs)
            if out is not NotImplemented:
                break
        return out

    return record


def _tracking_inners(module: Any, is_ours: Callable[[Any], bool]) -> Any:
    """Wraps the function that gives a tensor its node, to add nodes for the inner tensors of a wrapper."""
    set_proxy_slot = module.set_proxy_slot

    @functools.wraps(set_proxy_slot)
    def track(obj: Any, tracer: Any, proxy: Any) -> None:
        set_proxy_slot(obj, tracer, proxy)
        if not torch.compiler.is_exporting() or not is_ours(obj):
            return
        for name in obj.__tensor_flatten__()[0]:
            inner = obj.__dict__[name]
            if not module.has_proxy_slot(inner, tracer):
                # The op by which export itself reads an attribute of a wrapper.
                op = torch.ops.export.access_subclass_inner_tensor.default
                node = tracer.create_proxy("call_function", op, (proxy.proxy, name), {})
                module.track_tensor_tree(inner, node, constant=None, tracer=tracer)

    return track


def _refusing_results(create_arg: Any, is_ours: Callable[[Any], bool]) -> Any:
    """Wraps the method that takes a tensor without a node for a constant, to refuse wrappers of fake tensors."""

    @functools.wraps(create_arg)
    def create(tracer: Any, a: Any) -> Any:
        if torch.compiler.is_exporting() and is_ours(a) and _is_fake(a):
            raise DispatchError(
                f"torch.export: expected a function that returns plain tensors, got {one_of(type(a))}; return its "
                f"inner tensors, or export subclasses.export.Flattened(fn), whose results are flattened"
            )
        return create_arg(tracer, a)

    return create


def _is_fake(x: Any) -> bool:
    from torch._guards import detect_fake_mode  # finds the fake mode of an inner tensor

    return any(detect_fake_mode([x.__dict__[name]]) is not None for name in x.__tensor_flatten__()[0])


def tree_map(
    change: Callable[[Any], Any], tree: Any, cls: Any, other: Callable[[Any], Any] = lambda x: x
) -> Any:
    """Returns a pytree with ``change(x)`` in place of each ``x`` of a class, and ``other(x)`` for all other leaves."""

    def change_leaf(x: Any) -> Any:
        return change(x) if isinstance(x, cls) else other(x)

    # Dynamo traces this function, and not the one of optree.
    return pytree.tree_map(change_leaf, tree, is_leaf=lambda x: isinstance(x, cls))


def register_node(
    cls: type,
    flatten: Callable[[Any], tuple[list[Any], Any]],
    unflatten: Callable[[Any, Any], Any],
    to_json: Callable[[Any], str],
    from_json: Callable[[str], Any],
) -> None:
    """Registers a class as a pytree node that ``torch.export`` can save; its leaves are numbered."""

    def with_keys(node: Any) -> tuple[list[Any], Any]:
        leaves, context = flatten(node)
        # From these keys come the names of leaves in errors, and the names of arguments in the graph.
        return [(pytree.SequenceKey(i), leaf) for i, leaf in enumerate(leaves)], context

    # The registry that torch.export looks up; the public register_dataclass has no context.
    pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
        to_dumpable_context=to_json,
        from_dumpable_context=from_json,
        flatten_with_keys_fn=with_keys,
    )
