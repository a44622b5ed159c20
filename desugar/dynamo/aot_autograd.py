"""Gives a graph that desugaring does not support to PyTorch's AOTAutograd.

AOTAutograd does not compare the memory of inner tensors. Where two inner tensors share memory and the graph writes to
one, its program reads the old values from the other. A call with such arguments runs op by op.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from desugar import _torch as torch_private
from desugar.errors import DesugarError
from desugar.ir.fx_utils import copy_graph
from desugar.ir.storage import are_apart
from desugar.ir.values import is_wrapper, plain_parts
from desugar.tracing.unsupported import is_write
from subclasses.errors import DispatchError
from subclasses.slow_paths import say_once

log = logging.getLogger("desugar")


def compile_by_stock(
    gm: fx.GraphModule,
    example_inputs: list[Any],
    inner: Any,
    mode: str | None,
    options: Mapping[str, Any],
    reason: DesugarError,
) -> Callable[..., Any]:
    """Compiles a graph with PyTorch's backend. If a class raises a `DispatchError` there, the graph runs op by op.

    Args:
        gm: The graph, over outer tensors.
        example_inputs: Its arguments.
        inner: The compiler of plain graphs.
        mode: As for `torch.compile`.
        options: Options of Inductor.
        reason: Why desugaring does not support the graph.

    Raises:
        DesugarError: The graph writes to arguments and is compiled to be saved; a saved graph checks no calls.
    """
    if inner == "eager" and any(map(_is_plain_subclass, example_inputs)):
        # AOTAutograd runs the first call of a graph without a compiler in a mode that does not accept such a class.
        log.warning("this graph runs op by op instead: %s", reason)
        return gm.forward
    graphs = [module.graph for module in gm.modules() if isinstance(module, fx.GraphModule)]  # branches, too
    writes = any(is_write(node) for graph in graphs for node in graph.nodes) and any(
        map(is_wrapper, example_inputs)
    )
    if writes and is_saving():
        raise DesugarError(
            "the function writes to an argument, and a saved function checks no call for inner tensors that share "
            "memory",
            instead="return new values, or save the function with desugar.save",
            stock_is_wrong=True,
        )
    if writes and _shares_inner_memory(example_inputs):  # AOTAutograd may fail to compile it
        log.warning(
            "this graph runs op by op instead, since its arguments share the memory of inner tensors: %s",
            reason,
        )
        return gm.forward
    log.warning("AOTAutograd compiles this graph instead: %s", reason)
    eager = copy_graph(gm).forward if writes else None
    try:
        compiled = _stock_backend(inner, mode, options)(gm, example_inputs)
    except DispatchError as error:
        if is_saving():
            raise
        log.warning(
            "AOTAutograd cannot compile this graph either (%s): it runs op by op", type(error).__name__
        )
        return gm.forward
    return compiled if eager is None else _op_by_op_where_shared(compiled, eager)


def is_saving() -> bool:
    """Whether PyTorch compiles a function that it is going to save (`aot_compile`)."""
    names = (
        "bundled_autograd_cache",
        "bypass_autograd_cache_key",
    )  # a release without them saves no functions
    return all(getattr(torch_private.functorch_config, name, False) for name in names)


def _is_plain_subclass(x: Any) -> bool:
    """Returns whether a tensor's class is a subclass that is not a wrapper and inherits `__torch_function__`."""
    if not isinstance(x, Tensor) or type(x) is Tensor or is_wrapper(x):
        return False
    function = getattr(type(x).__torch_function__, "__func__", None)
    return function is Tensor.__torch_function__.__func__


def _stock_backend(inner: Any, mode: str | None, options: Mapping[str, Any]) -> Callable[..., Any]:
    """Returns PyTorch's own backend for the same compiler."""
    if inner == "inductor":
        return torch_private.TorchCompileInductorWrapper(mode or "default", dict(options), None)
    if inner == "eager":
        return torch_private.lookup_backend("aot_eager")
    return torch_private.aot_autograd(fw_compiler=inner)


# ---------------------------------------------------------------------------------------- memory that is shared


def _op_by_op_where_shared(compiled: Callable[..., Any], eager: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls the program, or runs the graph op by op where inner tensors share memory."""
    slow = run_op_by_op(eager, "a call whose arguments share the memory of inner tensors")

    @torch.compiler.disable
    def run(*args: Any) -> Any:
        return slow(*args) if _shares_inner_memory(args) else compiled(*args)

    return run


def run_op_by_op(graph: Callable[..., Any], what: str) -> Callable[..., Any]:
    """Returns a function that runs a Dynamo graph op by op, and warns when it is first called."""

    @torch.compiler.disable
    def run(*args: Any) -> Any:
        say_once(f"{what} runs op by op", "pass a clone() of such an argument", "desugar")
        return graph(*args)

    return run


def _shares_inner_memory(args: Sequence[Any]) -> bool:
    """Whether an inner tensor of a wrapper overlaps another plain tensor among the arguments."""
    tensors = {id(arg): arg for arg in args if isinstance(arg, Tensor)}.values()
    parts = [(part, is_wrapper(tensor)) for tensor in tensors for part in plain_parts(tensor)]
    strided = [(part, is_inner) for part, is_inner in parts if part.layout is torch.strided]
    inner, others = (tuple(part for part, is_one in strided if is_one is wanted) for wanted in (True, False))
    return not are_apart(inner, others)
