"""Resolves the `backend` argument of `desugar.compile`, and checks its other options.

`"inductor"` is PyTorch's compiler. `"eager"` runs the plain graphs op by op. A callable `(gm, inputs) -> callable` is
a backend of the user's own, as for `torch.compile`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from desugar import _torch as torch_private
from desugar.backends.base import Backend, CompiledGraph, GraphKind, run_eagerly
from desugar.backends.inductor_patches import (
    ATTRIBUTE,
    PendingKernels,
    postpone_kernels,
    recorded,
    tried_when_asked,
)
from desugar.ir.fx_utils import Results, clone_aliased_results, input_storage_offsets, output_nodes
from desugar.passes.partition import min_cut
from desugar.passes.verify import rechecks_enabled


def choose_backend(
    backend: str | Callable[..., Any], mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Backend:
    """Returns the backend for a name or callable.

    Raises:
        ValueError: The name is unknown, or `mode` or `options` is given with a backend other than Inductor.
    """
    if backend == "inductor":
        return inductor_backend(mode, options)
    if mode not in (None, "default") or options:
        raise ValueError(f'expected mode and options with backend="inductor" only, got backend={backend!r}')
    if backend == "eager":
        return Backend("eager", dict, min_cut, run_eagerly, reads_memory=False)
    if callable(backend):
        return Backend(getattr(backend, "__name__", "custom"), dict, min_cut, _adapt(backend))
    raise ValueError(
        f'expected backend "inductor", "eager" or a callable (gm, inputs) -> callable, got {backend!r}'
    )


def check_options(fullgraph: Any, dynamic: Any, options: Any, strict: Any) -> None:
    """Raises TypeError for an option of the wrong type, which Dynamo would accept as true, or fail at later."""
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(f"options: expected a mapping of Inductor's options or None, got {options!r}")
    given = {"fullgraph": fullgraph, "strict": strict, "dynamic": dynamic}
    if options and "strict" in options:
        given['options["strict"]'] = options["strict"]
    for name, value in given.items():
        if not (isinstance(value, bool) or (name == "dynamic" and value is None)):
            expected = "True, False or None" if name == "dynamic" else "a bool"
            raise TypeError(f"{name}: expected {expected}, got {value!r}")


def _adapt(backend: Callable[..., Any]) -> Callable[..., CompiledGraph]:
    """Returns `compile_graph` for a user's backend, whose compiled functions take the inputs one by one."""

    def compile_graph(graph: fx.GraphModule, inputs: list[Any], kind: GraphKind) -> CompiledGraph:
        torch_private.LazyGraphModule.force_recompile(graph)  # a backend may return `graph.forward`
        compiled = backend(graph, inputs)
        return lambda items: compiled(*items)

    return compile_graph


# ------------------------------------------------------------------------------------------------ Inductor


def inductor_backend(mode: str | None, options: Mapping[str, Any] | None) -> Backend:
    """Returns the Inductor backend with the config patches of a `torch.compile` mode and options."""
    patches: dict[str, Any] = {}
    if mode and mode != "default":
        patches |= torch_private.list_mode_options(mode, dynamic=None)
    patches |= {name.replace("-", "_"): value for name, value in (options or {}).items()}

    def decompositions() -> Mapping[Any, Any]:
        with _patched(patches):
            return torch_private.select_decomp_table()

    def partition_joint(graph: fx.GraphModule, joint_inputs: list[Any], **kwargs: Any) -> Any:
        with _patched(patches):
            return torch_private.partition_fn(graph, joint_inputs, **kwargs)

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
        partition_joint,
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


def _patched(patches: Mapping[str, Any]) -> contextlib.AbstractContextManager[Any]:
    return torch_private.inductor_config.patch(dict(patches)) if patches else contextlib.nullcontext()


@tried_when_asked()
def _compile_inductor(graph: fx.GraphModule, inputs: list[Any], kind: GraphKind) -> CompiledGraph:
    if all(node.op != "call_function" for node in graph.graph.nodes):
        return run_eagerly(graph, inputs, kind)  # nothing to compile; Inductor does not keep object identity
    starts = input_storage_offsets(graph)
    if any(not isinstance(start, int) or start != 0 for start in starts):
        return run_eagerly(graph, inputs, kind)
    if kind.role == "inference":
        before = Results.of(graph, kind.num_results)
        devices = torch_private.get_inputs_devices(inputs, graph)
        graph = torch_private.joint_graph_passes(graph, input_device=next(iter(devices)))
        clone_aliased_results(graph, before)
    (output,) = graph.graph.find_nodes(op="output")
    visible = 0 if kind.role == "backward" else kind.num_results
    output.meta["user_visible_output_idxs"] = [
        n for n, node in enumerate(output_nodes(graph)[:visible]) if isinstance(node, fx.Node)
    ]
    cudagraphs = torch_private.BoxedBool(torch_private.inductor_config.triton.cudagraphs)
    with _patched({"fx_graph_cache": False} if starts else {}), recorded() as kernels:
        compiled = torch_private.compile_fx_inner(
            graph,
            inputs,
            static_input_idxs=kind.static_slots,
            cudagraphs=cudagraphs,
            is_inference=kind.role == "inference",
            is_backward=kind.role == "backward",
        )
    setattr(compiled, ATTRIBUTE, kernels)
    return compiled
