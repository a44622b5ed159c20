"""Rejects operations that desugaring does not support, before anything is changed.

The first run and the traced graph are checked. Each check raises `DesugarError` with the user's line, where one is
known, and with a remedy.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import SymInt, Tensor, fx

from desugar import _torch as torch_private
from desugar.errors import DesugarError, user_line
from desugar.flatten.inputs import Inputs, check_nested, is_traced
from desugar.ir.fx_utils import (
    autograd_nodes,
    find_random_op,
    tangent_dependencies,
    tangent_slots,
    tensor_leaves,
)
from desugar.ir.stages import Outputs
from desugar.ir.values import (
    Constant,
    Plain,
    View,
    Wrapper,
    is_wrapper,
    parts_of,
    paths_of,
    slots_of,
    wrap_value,
)
from desugar.tracing.run import (
    Run,
    assigned_inners,
    changed_slots,
    from_functional,
    has_other_storage,
    identity,
    storages_of,
)
from subclasses import TensorSubclass

_USE_EAGER = "run this part in eager mode, outside the compiled function"

# ------------------------------------------------------------------------------------------ during a run

_IN_PLACE = frozenset(
    "setitem iadd isub imul itruediv ifloordiv imod ipow iand ior ixor ilshift irshift".split()
)
# Methods that write no data, although their names end in an underscore.
_NO_WRITE = frozenset(
    "requires_grad_ detach_ t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_ as_strided_ share_memory_".split()
)


def refuse_data(func: Any, args: Any, kwargs: Any, inputs: Inputs) -> tuple[Any, Any]:
    """Raises for an assignment to `.data`, which a trace cannot follow."""
    raise DesugarError(
        ".data of a tensor is assigned inside the function",
        where=user_line(),
        instead="write tensor.copy_(...) under torch.no_grad(), or assign outside the compiled function",
        stock_is_wrong=True,
    )


def refuse_grad(func: Any, args: Any, kwargs: Any, inputs: Inputs) -> tuple[Any, Any]:
    """Raises for any access to `.grad`, which a trace cannot follow."""
    raise DesugarError(
        ".grad of a tensor is used inside the function; a trace does not know it",
        where=user_line(),
        instead="pass the gradient as an argument, or " + _USE_EAGER,
    )


def check_retain_grad(func: Any, args: Any, kwargs: Any, inputs: Inputs) -> tuple[Any, Any]:
    """Raises for `retain_grad` on a traced tensor: no backward sets its `.grad`."""
    if not args[0].is_leaf:
        raise DesugarError(
            "retain_grad() is called inside the function on a tensor that the function makes",
            where=user_line(),
            instead="use torch.autograd.grad inside and return the gradient, or " + _USE_EAGER,
        )
    return func, args


_LAYOUTS = ("csr", "csc", "bsr", "bsc")
_FROM_COMPRESSED_PARTS = frozenset(
    getattr(torch, f"sparse_{name}_tensor") for name in (*_LAYOUTS, "compressed")
)
SPARSE = frozenset(
    {
        torch.sparse_coo_tensor,
        Tensor.sparse_mask,
        Tensor.to_sparse,
        Tensor.to_dense,
        *_FROM_COMPRESSED_PARTS,
        *(getattr(Tensor, f"to_sparse_{name}") for name in _LAYOUTS),
    }
)


def check_sparse(func: Any, args: Any, kwargs: Any, inputs: Inputs) -> tuple[Any, Any]:
    """Raises for a call that makes or reads a sparse tensor where gradients are on: a trace may lose them."""
    is_dense = func is Tensor.to_dense and args[0].layout is torch.strided
    if (torch.is_grad_enabled() and not is_dense) or func in _FROM_COMPRESSED_PARTS:
        raise DesugarError(
            f"a sparse tensor is made or read inside the function ({func.__name__}), where gradients are on",
            where=user_line(),
            instead="make it of detached tensors outside, use dense ones with index_add or scatter_add, or "
            + _USE_EAGER,
            stock_is_wrong=torch.__version__ < "2.15",  # stock loses the gradient silently
        )
    return func, args


def is_write(node: fx.Node) -> bool:
    """Whether a node of Dynamo's graph calls a function or method that mutates an argument."""
    if node.op not in ("call_function", "call_method"):
        return False
    target: Any = node.target
    if getattr(getattr(target, "_schema", None), "is_mutable", False):
        return True
    name = target if isinstance(target, str) else str(getattr(target, "__name__", ""))
    return _is_in_place(name, node.kwargs) or "out" in node.kwargs


def _is_in_place(name: str, kwargs: Mapping[str, Any]) -> bool:
    name = name.partition(".")[0]
    is_named_so = name.endswith("_") and not name.endswith("__") and name not in _NO_WRITE
    return bool(is_named_so or name.strip("_") in _IN_PLACE or kwargs.get("inplace"))


def check_while_loop(func: Any, args: tuple[Any, ...]) -> None:
    """Raises for a `while_loop` that is differentiated over wrappers, or that carries wrappers of a handwritten class.

    A gradient would need the number of iterations, which PyTorch reads from data. For wrappers of handwritten classes,
    PyTorch has no rule for the op.
    """
    if func.name() != "while_loop":
        return
    carried = tensor_leaves(args)
    wrappers = list(filter(is_wrapper, carried))
    by_hand = [type(leaf).__name__ for leaf in wrappers if not isinstance(leaf, TensorSubclass)]
    if by_hand:
        raise DesugarError(
            f"a while_loop over a {by_hand[0]}, a class written by hand",
            where=user_line(),
            instead="declare the class with TensorSubclass, write the loop in Python, or carry the inner tensors",
        )
    if wrappers and torch.is_grad_enabled() and any(leaf.requires_grad for leaf in carried):
        raise DesugarError(
            "a while_loop over a tensor subclass, through which a gradient would have to flow",
            where=user_line(),
            instead="write the loop in Python, or carry the inner tensors",
        )


@contextlib.contextmanager
def restored_grad_mode() -> Iterator[None]:
    """Restores the grad mode that a run of the function changes: a program only calls ops, so it cannot change it.

    Raises:
        DesugarError: The function leaves another grad mode to its caller.
    """
    before = torch.is_grad_enabled()
    yield
    if torch.is_grad_enabled() is not before:
        torch.set_grad_enabled(before)
        raise DesugarError(
            f"the function leaves gradients turned {'off' if before else 'on'} for its caller",
            instead="use `with torch.no_grad():` inside, or set the mode outside the compiled function",
        )


# ------------------------------------------------------------------------------------------- after a run


def check_run(run: Run, inputs: Inputs) -> None:
    """Raises for unsupported operations that only a finished run shows.

    Raises:
        DesugarError: `.data` or the metadata of an input was changed, or the function called `backward()`. A class
            replaced an inner tensor that Dynamo has read. A `torch.autograd.Function` received a tensor from outside
            directly. A program cannot return one of the results.
    """
    _check_memory(run, inputs)
    _check_assigned(run, inputs)
    _check_metadata(run, inputs)
    _check_inner_backward(run)
    _check_bypass(run)
    _check_results(run)


def _check_memory(run: Run, inputs: Inputs) -> None:
    """Raises if a class assigned `.data` of an input below torch functions: functionalization does not record it."""
    for number, value in enumerate(inputs.values):
        for slot in slots_of(value):
            if storages_of(run.items[slot]).python_storage != run.storages[slot].python_storage:
                raise DesugarError(
                    f".data of {leaf_name(number, inputs)} is assigned by a rule or __torch_dispatch__",
                    instead="write tensor.copy_(...) there",
                    stock_is_wrong=True,
                )


def _check_assigned(run: Run, inputs: Inputs) -> None:
    """Raises if an argument's class replaces an inner tensor that the function reads: Dynamo reads it too early."""
    read = {value.index for value in inputs.values[: inputs.num_arguments] if isinstance(value, Plain)}
    for number, input_leaf in enumerate(run.input_leaves):
        for name in assigned_inners(input_leaf, run.items):
            if not read.isdisjoint(slots_of(dict(input_leaf.value.inner)[name])):  # type: ignore[union-attr]
                raise DesugarError(
                    f"the class of {leaf_name(number, inputs)} replaces its inner tensor .{name} in an op, and "
                    f"Dynamo reads .{name} before the graph runs",
                    instead=f"write to .{name} with copy_() in __torch_dispatch__, or pass a clone() of .{name}",
                    stock_is_wrong=True,
                )


def _check_metadata(run: Run, inputs: Inputs) -> None:
    for number, (value, leaf) in enumerate(zip(inputs.values, run.leaves, strict=True)):
        if not isinstance(value, Plain | Wrapper):
            continue
        if _has_new_metadata(number, value, leaf, run, inputs):
            raise DesugarError(
                f"{leaf_name(number, inputs)} gets another size, stride or inner tensor in place",
                instead="build a new tensor instead of resizing or assigning",
                stock_is_wrong=_is_assigned(value, leaf, run),
            )


def _is_assigned(value: Plain | Wrapper, leaf: Any, run: Run) -> bool:
    """Whether a wrapper, or a wrapper inside it, has another inner tensor, which AOTAutograd does not detect."""
    inners = [
        (run.items[slot], functools.reduce(getattr, path, leaf)) for slot, path in paths_of(value) if path
    ]
    return any(identity(item) != identity(inner) for inner, item in inners)


def _has_new_metadata(number: int, value: Plain | Wrapper, leaf: Any, run: Run, inputs: Inputs) -> bool:
    recorded = changed_slots(value, run.items) and leaf.grad_fn is not None
    if leaf.requires_grad != value.requires_grad and not recorded:
        return True
    assigned = assigned_inners(run.input_leaves[number], run.items)
    if assigned and leaf.requires_grad:
        return True
    for slot, path in paths_of(value):
        if len(path) == 1 and path[0] in assigned:
            continue
        item = functools.reduce(getattr, path, leaf)
        if identity(item) != identity(run.items[slot]) or has_other_storage(slot, run):
            return True
        fake = inputs.fake_items[slot]
        if _size_and_stride(item) != _size_and_stride(fake) or _is_resized(item, fake):
            return True
    if not isinstance(value, Wrapper):
        return False
    return _size_and_stride(leaf) != _size_and_stride(wrap_value(value, inputs.primals()))


def _is_resized(item: Any, fake: Tensor) -> bool:
    """Whether an op has resized its `out=` tensor; the functional tensor around it keeps the old size."""
    return torch_private.has_data_mutation(item) and tuple(from_functional(item).size()) != tuple(fake.size())


def _size_and_stride(tensor: Tensor) -> tuple[Any, Any]:
    return tuple(tensor.size()), tuple(tensor.stride())


def _check_results(run: Run) -> None:
    """Raises for results that a program cannot return.

    Raises:
        DesugarError: A result is a nested tensor of PyTorch, or requires grad although gradients are off.
    """
    inputs = {id(leaf) for leaf in run.leaves}
    for leaf in tensor_leaves(run.result):
        if id(leaf) in inputs:
            continue
        check_nested(leaf)
        # In eager mode too, `requires_grad` of a view of an argument is true with gradients off.
        if leaf.requires_grad and not torch.is_grad_enabled() and not leaf._is_view():
            raise DesugarError(
                f"a result of size {tuple(leaf.shape)} requires grad although gradients are off around the call",
                instead="call the compiled function with gradients on, and turn them off inside of it",
            )


def _check_inner_backward(run: Run) -> None:
    if any(isinstance(leaf, Tensor) and leaf.is_leaf and leaf.grad is not None for leaf in run.leaves):
        raise DesugarError(
            "backward() is called inside the function and would accumulate into .grad of its inputs",
            instead="return the loss and call backward() on it, or use torch.autograd.grad inside",
        )


def _check_bypass(run: Run) -> None:
    """Raises if an `autograd.Function` received a real tensor without a torch function: its gradient would be lost."""
    for node in autograd_nodes(tensor_leaves(run.result)):
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor) and not is_traced(variable):
            raise DesugarError(
                f"a tensor of size {tuple(variable.shape)} from outside the function reaches an "
                "autograd.Function directly, so its gradient would be lost",
                instead="pass that tensor to the function as an argument",
            )


def leaf_name(number: int, inputs: Inputs) -> str:
    """Returns the name of an input leaf for messages."""
    if number < inputs.num_arguments:
        return f"argument leaf {number}"
    tensor = inputs.captured[number - inputs.num_arguments]
    return f"a captured {type(tensor).__name__} of size {tuple(tensor.shape)}"


# ------------------------------------------------------------------------------------- after the traced run


def check_constants(graph: fx.GraphModule) -> None:
    """Raises if the graph holds a fake tensor that the function stored during an earlier run."""
    for node in graph.graph.find_nodes(op="get_attr"):
        constant = getattr(graph, node.target)
        if isinstance(constant, torch_private.FakeTensor):
            raise DesugarError(
                f"the function keeps a tensor of size {tuple(constant.shape)} for its next call, in an attribute or "
                "functools.lru_cache, which holds no data after a trace",
                instead="make that tensor before the first compiled call, and clear the cache that holds it now",
            )


def check_higher_order_randomness(graph: fx.GraphModule) -> None:
    """Raises if the backward of a higher-order op reruns a function that draws random numbers."""
    for node, tangents in tangent_dependencies(graph, tangent_slots(graph)).items():
        op: Any = node.target
        if not tangents or not isinstance(op, torch_private.HigherOrderOperator):
            continue
        names = [str(argument.target) for argument in node.all_input_nodes if argument.op == "get_attr"]
        for function in [part for name in names if isinstance(part := getattr(graph, name), fx.GraphModule)]:
            if draws := find_random_op(function):
                raise DesugarError(
                    f"a function given to {op.name()} draws random numbers ({draws}), and its backward would "
                    "draw others",
                    instead="draw them outside and pass them as operands",
                    stock_is_wrong=True,
                )


class OtherStructure(DesugarError):
    """Raised where a function returns another structure when it runs again."""


def check_same_structure(expected: Outputs, actual: Outputs) -> None:
    """Raises OtherStructure if the traced run returned another structure than the first, or mutated other inputs.

    A decomposition may change the strides of a result, and so the slots of symbolic strides and all later slots. Slots
    are equal if they are numbered by their first use in the values, without sizes and strides. A `View` of the first
    run names slots, so these are compared as they are.
    """
    exact = any(isinstance(value, View) for value in expected.values)
    if _summary_of(expected, exact) != _summary_of(actual, exact):
        raise OtherStructure(
            "the function returned results of another structure when it ran a second time",
            instead="make it depend on its arguments only (no counters, no random Python branches)",
        )


def _summary_of(outputs: Outputs, exact: bool) -> tuple[Any, ...]:
    parts = (part for value in outputs.values for part, _ in parts_of(value))
    used = dict.fromkeys(part.index for part in parts if isinstance(part, Plain | Constant))
    slots: Iterable[int | None] = range(len(outputs.items)) if exact else used
    numbers = {slot: number for number, slot in enumerate(slots)}
    return (
        [_structure_of(value, numbers) for value in outputs.values],
        outputs.num_visible,
        {numbers[slot]: of for slot, of in outputs.inputs.items() if slot in numbers},
        outputs.writes,
        [slot for slot, _ in outputs.stores],
        outputs.assigns,
    )


def _structure_of(value: Any, numbers: Mapping[int | None, int]) -> Any:
    match value:
        case Wrapper():
            inner = tuple((name, _structure_of(part, numbers)) for name, part in value.inner)
            return value.cls, inner, value.requires_grad
        case Plain(index, grad):
            return numbers[index], grad
        case Constant(constant, index):
            number = numbers.get(index)
            return (number, None) if isinstance(constant, SymInt) else (number, type(constant))
        case _:
            return value
