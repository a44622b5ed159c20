"""The Inductor backend: PyTorch's compiler with its decompositions and joint graph passes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from desugar import _torch as private
from desugar.backends.base import Backend, CompiledGraph, GraphKind, run_eagerly
from desugar.backends.inductor_patches import (
    ATTRIBUTE,
    PendingKernels,
    postpone_kernels,
    recorded,
    tried_when_asked,
)
from desugar.flatten.storage_offsets import input_storage_offsets
from desugar.ir.fx_utils import Results, clone_aliased_results, output_nodes
from desugar.passes.verify import rechecks_enabled


def inductor_backend(mode: str | None, options: Mapping[str, Any] | None) -> Backend:
    """Returns the Inductor backend with the config patches of a `torch.compile` mode and options."""
    patches: dict[str, Any] = {}
    if mode and mode != "default":
        patches |= private.list_mode_options(mode, dynamic=None)
    patches |= {name.replace("-", "_"): value for name, value in (options or {}).items()}

    def decompositions() -> Mapping[Any, Any]:
        with _patched(patches):
            return private.select_decomp_table()

    def split(graph: fx.GraphModule, joint_inputs: list[Any], **kwargs: Any) -> Any:
        with _patched(patches):
            return private.partition_fn(graph, joint_inputs, **kwargs)

    def compile_graph(graph: fx.GraphModule, inputs: list[Any], kind: GraphKind) -> CompiledGraph:
        with _patched(_size_assert_patches(graph, kind) | patches), torch.no_grad():
            return _compile_inductor(graph, inputs, kind)

    @contextlib.contextmanager
    def postpone(graph: fx.GraphModule) -> Iterator[PendingKernels]:
        with _patched(patches), postpone_kernels(graph) as kernels:
            yield kernels

    return Backend(
        "inductor",
        decompositions,
        split,
        compile_graph,
        settings=lambda: _patched(patches),
        postpone=postpone,
    )


def _size_assert_patches(graph: fx.GraphModule, kind: GraphKind) -> dict[str, Any]:
    """Returns config patches that turn off Inductor's size and stride asserts where guards prove sizes and strides.

    Two kinds of graph keep the asserts:

    - A backward. A saved tensor may have changed since: a hook unpacks it, or another inner tensor was assigned.
    - A graph with a custom op. The asserts compare its result with the result of its fake implementation.

    `DESUGAR_RECHECK` keeps the asserts in every graph.
    """
    targets = (node.target for node in graph.graph.nodes if node.op == "call_function")
    has_custom_op = any(getattr(target, "namespace", "aten") not in ("aten", "prims") for target in targets)
    keeps_asserts = kind.role == "backward" or has_custom_op or rechecks_enabled()
    return {} if keeps_asserts else {"size_asserts": False}


@contextlib.contextmanager
def _patched(patches: Mapping[str, Any]) -> Iterator[None]:
    with private.inductor_config.patch(dict(patches)) if patches else contextlib.nullcontext():
        yield


@tried_when_asked()
def _compile_inductor(graph: fx.GraphModule, inputs: list[Any], kind: GraphKind) -> CompiledGraph:
    if all(node.op != "call_function" for node in graph.graph.nodes):
        return run_eagerly(graph, inputs, kind)  # nothing to compile; Inductor does not keep object identity
    starts = input_storage_offsets(graph)
    if any(not isinstance(start, int) or start != 0 for start in starts):
        return run_eagerly(graph, inputs, kind)
    if kind.role == "inference":
        before = Results.of(graph, kind.num_results)
        devices = private.get_inputs_devices(inputs, graph)
        graph = private.joint_graph_passes(graph, input_device=next(iter(devices)))
        clone_aliased_results(graph, before)
    (output,) = graph.graph.find_nodes(op="output")
    visible = 0 if kind.role == "backward" else kind.num_results
    output.meta["user_visible_output_idxs"] = [
        n for n, node in enumerate(output_nodes(graph)[:visible]) if isinstance(node, fx.Node)
    ]
    cudagraphs = private.BoxedBool(private.inductor_config.triton.cudagraphs)
    with _patched({"fx_graph_cache": False} if starts else {}), recorded() as kernels:
        compiled = private.compile_fx_inner(
            graph,
            inputs,
            static_input_idxs=kind.static_slots,
            cudagraphs=cudagraphs,
            is_inference=kind.role == "inference",
            is_backward=kind.role == "backward",
        )
    setattr(compiled, ATTRIBUTE, kernels)
    return compiled
