"""Private torch names of the captures of a graph of ops on wrappers: Dynamo, and the trace of ``torch.export``.

:mod:`subclasses._torch` describes the rules for this module and its tests.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, get_args

import torch
from torch._guards import detect_fake_mode as _detect_fake_mode  # finds the fake mode of an inner tensor
from torch.utils import _pytree as pytree  # the pytrees of torch.export, which has no public name for them

from subclasses._torch import is_traceable_wrapper_subclass
from subclasses._torch_tracing import backend_of, reads_of_values_made_inside
from subclasses.after_import import after_import
from subclasses.errors import DispatchError, one_of

# ---- Dynamo ------------------------------------------------------------------------------------------------


# The attributes of a tensor that are views of it.
VIEWS = frozenset({"T", "mT", "H", "mH", "real", "imag"})


def record_readings(names: str) -> None:
    """Makes Dynamo record the reading of some attributes of wrappers as a node of its graph.

    Dynamo reads other attributes of an argument before its graph runs, and makes each an input of its own. It reads a
    view that it returns, such as ``x.mT``, once more after the graph has run. If a class materializes, that is another
    tensor. So the views are recorded, and the attributes that a node has assigned.

    Args:
        names: the attribute of a class that holds the names of the attributes to record.
    """

    def patch(module: Any) -> None:
        # PyTorch 2.15 renamed the method.
        kind = module.TensorVariable
        method = "var_getattr" if hasattr(kind, "var_getattr") else "tp_getattro_impl"
        read = getattr(kind, method)

        @functools.wraps(read)
        def read_or_record(self: Any, tx: Any, name: str) -> Any:
            value = self.proxy.node.meta.get("example_value")
            if not _is_recorded(value, name, names, tx.output):
                return read(self, tx, name)
            # Adds a node to the graph, with an example of its value.
            from torch._dynamo.variables.builder import wrap_fx_proxy

            inner = getattr(value, name)
            if (
                inner is None
            ):  # the metadata of the value is guarded, and determines the inner tensors that are present
                return module.VariableTracker.build(tx, None)
            # In the graph that is being traced now: a branch's graph, if the value comes from outside of the branch.
            proxy = tx.output.create_proxy("call_function", getattr, (self.as_proxy(), name), {})
            return wrap_fx_proxy(tx=tx, proxy=proxy, example_value=None if name in VIEWS else inner)

        setattr(kind, method, read_or_record)

    after_import("torch._dynamo.variables.tensor", patch)


def _is_recorded(value: Any, name: str, names: str, graph: Any) -> bool:
    if (
        name in VIEWS
        and isinstance(value, torch.Tensor)
        and getattr(backend_of(graph), MAKES_ASSIGNMENTS, False)
    ):
        return is_traceable_wrapper_subclass(value)
    is_assigned = any(value is x and name == n for x, n in vars(graph).get(_ASSIGNED, ()))
    return is_assigned or name in getattr(type(value), names, ())


def _example(proxy: Any) -> Any:
    """Returns the example of the value of a node of a graph, or of a proxy for it; None if it has none."""
    return getattr(getattr(proxy, "node", proxy), "meta", {}).get("example_value")


_METHODS = types.FunctionType, classmethod, staticmethod


def find_methods(names: str) -> None:
    """Makes ``hasattr`` under Dynamo find the methods of wrappers, and plain attributes of their classes.

    Dynamo evaluates ``hasattr`` by reading the attribute. It returns False for an attribute that it cannot read before
    a call, such as a method. The class of a value is guarded, and so is the result.

    Args:
        names: an attribute that the classes have to which this applies.
    """

    def patch(module: Any) -> None:
        look = module.TensorVariable.call_obj_hasattr

        @functools.wraps(look)
        def call_obj_hasattr(self: Any, tx: Any, name: str) -> Any:
            cls = type(self.proxy.node.meta.get("example_value"))
            attribute = inspect.getattr_static(cls, name, property()) if hasattr(cls, names) else property()
            # A property or another descriptor may raise AttributeError, so the class does not decide.
            if isinstance(attribute, _METHODS) or not hasattr(type(attribute), "__get__"):
                return module.VariableTracker.build(tx, True)
            return look(self, tx, name)

        module.TensorVariable.call_obj_hasattr = call_obj_hasattr

    after_import("torch._dynamo.variables.tensor", patch)


# The attribute by which `isinstance` finds a value of such a class.
_FLAGS = {torch.nn.Parameter: "_is_param", torch.nn.Buffer: "_is_buffer"}


def guard_flags(names: str) -> None:
    """Makes Dynamo guard whether a tensor is a Parameter or a buffer, where a function calls ``isinstance`` for it.

    The class of a wrapper, and of a buffer, is the same with and without the flag. So Dynamo's guard on the class would
    let a call reuse the other program. Dynamo also evaluates that no wrapper is a buffer.

    Args:
        names: an attribute that the classes have to which this applies.
    """

    def patch(module: Any) -> None:
        look = module.BuiltinVariable.call_isinstance

        @functools.wraps(look)
        def call_isinstance(self: Any, tx: Any, arg: Any, kinds: Any) -> Any:
            answer = look(self, tx, arg, kinds)
            value = _example(getattr(arg, "proxy", None))
            if not isinstance(value, torch.Tensor) or not _is_ours(value, names, tx.output):
                return answer
            classes = kinds.as_python_constant()
            classes = classes if isinstance(classes, tuple) else get_args(classes) or (classes,)
            flags = [flag for kind, flag in _FLAGS.items() if kind in classes]
            for flag in flags if arg.source else ():
                # Adds a guard to the frame that is being captured: whether the tensor has the flag.
                from torch._dynamo.guards import GuardBuilder, install_guard

                # The name of the attribute belongs to the guard.
                guard = functools.partial(GuardBuilder.HASATTR, attr=flag)
                install_guard(arg.source.make_guard(guard))
            is_flagged = any(getattr(value, flag, False) for flag in flags)
            return module.VariableTracker.build(tx, answer.as_python_constant() or is_flagged)

        module.BuiltinVariable.call_isinstance = call_isinstance

    after_import("torch._dynamo.variables.builtin", patch)


def guard_identities(names: str) -> None:
    """Makes Dynamo guard that a local object and a global one are the same object, where they are at the capture.

    A graph has one input for both. Dynamo guards that two locals, or two globals, stay one object, and omits the guard
    between a local and a global. A later call with another argument would read it in place of the global.

    Args:
        names: an attribute that the classes have to which this applies.
    """

    def patch(module: Any) -> None:
        build = module.VariableBuilder.__call__

        @functools.wraps(build)
        def build_guarded(self: Any, value: Any) -> Any:
            known = self.tx.output.side_effects
            source = known[value].source if value in known else None
            if source not in (None, self.source) and _is_ours(value, names, self.tx.output):
                # The guard takes the other source as its argument.
                from torch._dynamo.guards import GuardBuilder

                # Dynamo skips a guard that it already has.
                self.install_guards(functools.partial(GuardBuilder.DUPLICATE_INPUT, source_b=source))
            return build(self, value)

        module.VariableBuilder.__call__ = build_guarded

    after_import("torch._dynamo.variables.builder", patch)


def _is_ours(value: Any, names: str, graph: Any) -> bool:
    """Whether a value is of a class with an attribute, or the graph is for a backend of this project."""
    return hasattr(type(value), names) or getattr(backend_of(graph), MAKES_ASSIGNMENTS, False)


def choose_paths_as_eager(is_ours: Callable[[Any], bool]) -> None:
    """Makes Dynamo evaluate ``has_torch_function`` as eager mode does, for values for which a predicate holds.

    Dynamo evaluates it to False for a wrapper, and in evaluation ``torch.nn`` then runs one op for a whole layer. A
    function that calls ``handle_torch_function`` is traced as before: the ops in its body dispatch to the class.
    """

    def patch(module: Any) -> None:
        collect, has_torch_function = (
            module.TorchInGraphFunctionVariable._get_handlers,
            torch.overrides.has_torch_function,
        )

        def answer(self: Any, tx: Any, *args: Any) -> Any:
            items = () if "handle_torch_function" in tx.f_code.co_names else getattr(args[0], "items", ())
            if any(
                is_ours(x := _example(getattr(t, "proxy", None))) and has_torch_function((x,)) for t in items
            ):
                return module.VariableTracker.build(tx, True)
            return collect()[has_torch_function](self, tx, *args)

        handlers = functools.cache(lambda: {**collect(), has_torch_function: answer})
        module.TorchInGraphFunctionVariable._get_handlers = staticmethod(handlers)

    after_import("torch._dynamo.variables.torch", patch)


def break_at_assignments(is_part: Callable[[Any, str, Any], bool]) -> None:
    """Makes Dynamo break the graph at an assignment to a part of a wrapper.

    No node of a graph represents an assignment: Dynamo makes it after the graph has run, in which later ops use the old
    inner tensor.

    Args:
        is_part: whether an attribute of a value is such a part, in the graph that is given last.
    """

    def patch(module: Any) -> None:
        store = module.SideEffects.store_attr

        @functools.wraps(store)
        def store_attr(self: Any, item: Any, name: str, *args: Any, **kwargs: Any) -> None:
            value = _example(getattr(item, "proxy", None))
            if is_part(value, name, self.output_graph_weakref()):
                _end_graph(value, name)
            store(self, item, name, *args, **kwargs)

        module.SideEffects.store_attr = store_attr

    after_import("torch._dynamo.side_effects", patch)


def _end_graph(value: Any, name: str) -> None:
    from torch._dynamo.exc import unimplemented  # ends the graph

    kind = type(value).__name__
    unimplemented(
        gb_type="assigning to a part of a tensor subclass",
        context=f"{kind}.{name} = ...",
        explanation=f"A graph does not record that {name} of a {kind} is replaced, so later ops would use the old "
        f"{name}.",
        hints=[
            f"Without fullgraph=True the graph ends here, and the next one sees the new {name}.",
            f"Write into the inner tensor, {name}.copy_(...), which a graph records.",
        ],
    )


# An attribute of a backend whose programs make assignments to plain inner tensors of arguments that need no gradient.
MAKES_ASSIGNMENTS = "makes_assignments"
# An attribute of a graph under construction: the examples of arguments, and the names, that such a node assigns.
_ASSIGNED = "_desugar_assigned"


def check_assignable(x: Any, name: str) -> None:
    """Makes sure that an assignment by a rule or method, which is a node of a graph, is not lost.

    A compiler that traces the node traces the assignment to a fake argument, and the argument keeps its inner tensor.
    Dynamo calls the rule or method with the example of the argument before, and ends the graph there.

    Raises:
        DispatchError: ``torch.export`` records ops on ``x`` as a whole; there is no later graph.
    """
    dynamo = sys.modules.get("torch._dynamo.symbolic_convert")
    tx = getattr(dynamo.tls, "current_tx", None) if dynamo is not None else None
    if tx is not None:
        inner = getattr(x, name)
        nodes = tx.output.graph.find_nodes(op="placeholder")
        inputs = [(n.meta.get("example_value"), n.users) for n in nodes]
        # Before the assignment, as an input of its own.
        is_read = any(example is inner and users for example, users in inputs)
        is_simple = not (x.requires_grad or is_traceable_wrapper_subclass(inner) or is_read)
        makes = is_simple and getattr(backend_of(tx.output), MAKES_ASSIGNMENTS, False)
        for example, _ in inputs:
            if makes and x is example:
                vars(tx.output).setdefault(_ASSIGNED, []).append((x, name))
            elif any(x is part for part in _wrappers_in(example)):
                _end_graph(x, name)
    if is_exporting() and _is_tracked(x):
        raise DispatchError(
            f"torch.export records no assignment: {name} of {one_of(type(x))} would be the old one in the program",
            code="graph-refused",
            hint=f"write into the inner tensor, {name}.copy_(...), or construct a new {type(x).__name__}",
        )


def _wrappers_in(x: Any) -> Iterator[Any]:
    if is_traceable_wrapper_subclass(x):
        yield x
        for name in x.__tensor_flatten__()[0]:
            yield from _wrappers_in(getattr(x, name))


def _is_tracked(x: Any) -> bool:
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode = get_proxy_mode()
    return mode is not None and x in mode.tracer.tensor_tracker


def _override_for(module: Any, name: str, is_ours: Callable[[Any], bool], override: Any) -> None:
    """Replaces a PyTorch function by one that calls ``override`` if ``is_ours`` holds for the argument."""
    original = getattr(module, name, None)
    if original is not None:
        wrap = functools.wraps(original)
        setattr(module, name, wrap(lambda arg: override(arg) if is_ours(arg) else original(arg)))


def _outer_storage(t: torch.Tensor) -> set[Any]:
    from torch.multiprocessing.reductions import StorageWeakRef

    return {StorageWeakRef(t._typed_storage())}


def patch_aliasing_checks(is_ours: Callable[[Any], bool], refuse: Callable[[Any], Any]) -> None:
    """Makes Dynamo compare wrappers for which a predicate holds by their own storage, as it does plain tensors.

    Dynamo searches for aliases among the operands and results of a branch, and for operands that a loop mutates. For a
    wrapper it compares the first inner tensor, and fails if that is a wrapper too. In a loop it refuses every wrapper,
    for every body. The code that flattens wrappers handles aliasing of inner tensors. For any other wrapper, `refuse`
    raises the error.
    """
    # The module of one of the two functions that Dynamo calls.
    import torch._higher_order_ops.utils as utils

    def example(nodes: Any) -> Any:
        return _example(nodes[0] if len(nodes) == 1 else None)

    _override_for(
        utils, "_collect_fake_inputs", lambda nodes: is_ours(example(nodes)), lambda nodes: [example(nodes)]
    )

    def patch(dynamo: Any) -> None:
        _override_for(dynamo, "get_tensor_storages", is_traceable_wrapper_subclass, refuse)
        _override_for(dynamo, "get_tensor_storages", is_ours, _outer_storage)

    after_import("torch._dynamo.variables.higher_order_ops", patch)


# ---- torch.export ------------------------------------------------------------------------------------------


# The prefix of the names by which its graphs read inner tensors, as differentiable functions of a Parameter.
LIVE = "_live_"


def is_exporting() -> bool:
    """Whether the trace above autograd of ``torch.export`` is running."""
    if torch.compiler.is_dynamo_compiling():
        return False  # with strict=True, Dynamo captures a graph first
    return _modes_above_autograd() > 0


# The number of modes that receive ops before autograd does, which no public function returns.
_modes_above_autograd = torch._ops._len_torch_dispatch_stack_pre_dispatch


def desugar_exported(is_ours: Callable[[Any], bool]) -> None:
    """Makes ``torch.export`` record ops on values of some classes as ops on their inner tensors.

    Export traces above autograd. The mode that records there declines a wrapper that was made inside the function.
    Unlike below autograd, the dispatcher does not call the wrapper's class next. The mode has no nodes for the inner
    tensors of an argument, and treats a result that is a wrapper as a constant.

    Args:
        is_ours: whether an object is a value of one of the classes.
    """

    def patch(trace: Any) -> None:
        from torch.fx.experimental import proxy_tensor  # it records ops; torch.export has imported it

        hooks, exporting = _Hooks(proxy_tensor, trace, is_ours), trace._compiling_state_context

        @contextlib.contextmanager
        def recording() -> Iterator[None]:
            with exporting(), hooks.installed():
                yield

        trace._compiling_state_context = recording

    after_import("torch.export._trace", patch)


class _Hooks:
    """Replacements for functions of the module that records ops, while an export is in progress in some thread."""

    def __init__(self, module: Any, trace: Any, is_ours: Callable[[Any], bool]) -> None:
        tracer = module.PythonKeyTracer
        self.replaced = {
            (module, "proxy_call"): _asking_classes(module.proxy_call, is_ours),
            (module, "set_proxy_slot"): _tracking_inners(module, is_ours),
            (tracer, "create_arg"): _refusing_results(tracer.create_arg, is_ours),
            **reads_of_values_made_inside(trace, module, is_ours),
        }
        self.originals = {(owner, name): getattr(owner, name) for owner, name in self.replaced}
        self.lock, self.exports = threading.Lock(), 0

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Installs the hooks for the duration of a context; contexts may be nested, and overlap in threads."""
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
    # The op by which export itself reads an attribute of a wrapper.
    op = torch.ops.export.access_subclass_inner_tensor.default

    @functools.wraps(set_proxy_slot)
    def track(obj: Any, tracer: Any, proxy: Any) -> None:
        set_proxy_slot(obj, tracer, proxy)
        if not torch.compiler.is_exporting():
            return
        wrappers = vars(tracer).setdefault("_desugar_wrappers", {})
        node: Any = getattr(getattr(proxy, "proxy", None), "node", None)
        if getattr(node, "target", None) is op and node.args[1] in wrappers.get(node.args[0], ()):
            node.args = (node.args[0], LIVE + node.args[1])
        if is_ours(obj):
            wrappers[node] = obj.__spec__.attributes
            for name in obj.__tensor_flatten__()[0]:
                if not module.has_proxy_slot(inner := obj.__dict__[name], tracer):
                    read = tracer.create_proxy("call_function", op, (proxy.proxy, name), {})
                    module.track_tensor_tree(inner, read, constant=None, tracer=tracer)

    return track


def _refusing_results(create_arg: Any, is_ours: Callable[[Any], bool]) -> Any:
    """Wraps the method that treats a tensor without a node as a constant, to refuse wrappers of fake tensors."""

    @functools.wraps(create_arg)
    def create(tracer: Any, a: Any) -> Any:
        if torch.compiler.is_exporting() and is_ours(a) and _is_fake(a):
            raise DispatchError(
                f"torch.export: expected a function that returns plain tensors, got {one_of(type(a))}",
                code="graph-refused",
                hint="return its inner tensors, or export subclasses.export.Flattened(fn), whose results are flattened",
            )
        return create_arg(tracer, a)

    return create


def _is_fake(x: Any) -> bool:
    return any(_detect_fake_mode([x.__dict__[name]]) is not None for name in x.__tensor_flatten__()[0])
