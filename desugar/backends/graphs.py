"""Runs a backend on one plain graph, in the context that Inductor expects."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from desugar import _torch as private
from desugar.backends.base import Backend, CompiledGraph, GraphKind
from desugar.flatten.fakes import same_ints
from desugar.ir.fx_utils import fake_inputs


@contextlib.contextmanager
def compiling(fake_mode: Any) -> Iterator[None]:
    """Sets up a compilation: the trace's fake mode is active; autocast, gradients and compiled autograd are off."""
    with (
        private.V.set_fake_mode(fake_mode),
        private.compiled_autograd._disable(),
        private.DisableAutocast(),
        torch.no_grad(),
    ):
        yield


def compile_graph(
    backend: Backend, graph: fx.GraphModule, kind: GraphKind, fake_mode: Any
) -> tuple[CompiledGraph, list[Any] | None]:
    """Compiles a plain graph.

    Returns:
        The compiled graph, and the strides of its outputs; None if the backend reports no strides.
    """
    context = private.TracingContext(fake_mode)
    # Makes Inductor report strides as expressions over the trace's symbols, not as the first call's numbers.
    context.fakify_first_call = True
    with private.tracing(context), compiling(fake_mode), context.report_output_strides() as strides:
        compiled = backend.compile_graph(graph, fake_inputs(graph), kind)
    return compiled, strides or None


def restride_saved(backward: fx.GraphModule, position: int, stride: Sequence[Any] | None) -> None:
    """Sets the stride of a saved tensor in the backward graph to the stride that the compiled forward reports.

    Args:
        backward: The backward graph; the metadata of its placeholder is changed in place.
        position: The position of the placeholder.
        stride: The reported stride; None changes nothing.
    """
    node = backward.graph.find_nodes(op="placeholder")[position]
    value = node.meta["val"]
    if isinstance(value, Tensor) and stride is not None and not same_ints(value.stride(), stride):
        node.meta["val"] = value.as_strided(value.size(), tuple(stride))
