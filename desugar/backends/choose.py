"""Backends: what compiles the plain forward and backward graphs.

A backend is a record of four functions. `"inductor"` is PyTorch's compiler with its decompositions and joint
graph passes; `"eager"` runs the graphs as they are; any callable `(gm, inputs) -> callable` may stand in, as
for `torch.compile`. A compiled graph is called with one list, which it may empty, and returns a sequence.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from desugar import _torch as private
from desugar.backends.parallel_build import Kernels, postponing
from desugar.frontend.fakes import same_ints
from desugar.frontend.storage_offsets import starts_of_windows
from desugar.ir.fx_utils import fake_inputs, keep_results_apart, output_nodes, result_names
from desugar.passes.partition import min_cut
from desugar.passes.verify import checks_everything

CompiledGraph = Callable[[list[Any]], Sequence[Any]]


@dataclass(frozen=True, slots=True)
class GraphKind:
    """Which graph is compiled.

    Attributes:
        role: "inference", "forward" or "backward".
        num_results: Leading outputs that the user sees.
        static_slots: Inputs whose address does not change between calls.
    """

    role: str
    num_results: int
    static_slots: tuple[int, ...] = ()


def _no_wait(graph: fx.GraphModule) -> contextlib.AbstractContextManager[Kernels]:
    return contextlib.nullcontext(Kernels())


@dataclass(frozen=True, slots=True)
class Backend:
    """How graphs are traced, split and compiled.

    Attributes:
        name: What the user calls it.
        decompositions: Into what ops are taken apart in a trace.
        split: Splits a joint graph.
        compile_graph: Compiles one graph.
        reads_memory: Whether compiled graphs read the memory of their inputs as it is, past PyTorch's own kernels,
            which know of lazy negation.
        postpone: Inside, a graph may be compiled without waiting for its kernels, which :meth:`Kernels.finish` does.
    """

    name: str
    decompositions: Callable[[], Mapping[Any, Any]]
    split: Callable[..., tuple[fx.GraphModule, fx.GraphModule]]
    compile_graph: Callable[[fx.GraphModule, list[Any], GraphKind], CompiledGraph]
    reads_memory: bool = True
    postpone: Callable[[fx.GraphModule], contextlib.AbstractContextManager[Kernels]] = _no_wait


# ------------------------------------------------------------------------------------------------ choosing


def choose_backend(
    backend: str | Callable[..., Any], mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Backend:
    """The backend that a user named.

    Raises:
        ValueError: For an unknown name, or `mode` or `options` with a backend that takes none.
    """
    if backend == "inductor":
        return inductor_backend(mode, options)
    if mode not in (None, "default") or options:
        raise ValueError(f'expected mode and options with backend="inductor" only, got backend={backend!r}')
    if backend == "eager":
        return Backend("eager", dict, min_cut, run_as_is, reads_memory=False)
    if callable(backend):
        return Backend(getattr(backend, "__name__", "custom"), dict, min_cut, _call_user(backend))
    raise ValueError(
        f'expected backend "inductor", "eager" or a callable (gm, inputs) -> callable, got {backend!r}'
    )


def run_as_is(
    graph: fx.GraphModule, inputs: list[Any] | None = None, kind: GraphKind | None = None
) -> CompiledGraph:
    """The graph itself, called with a list; autograd takes no note of it, as of any compiled graph."""
    private.LazyGraphModule.force_recompile(graph)
    forward, below = graph.forward, private.BelowADInplaceOrView

    def run(items: list[Any]) -> Sequence[Any]:
        if torch.compiler.is_compiling():  # compiled autograd takes the graph into its own
            return forward(*items)
        with below():
            return forward(*items)

    return run


def _call_user(backend: Callable[..., Any]) -> Callable[..., CompiledGraph]:
    def compile_graph(graph: fx.GraphModule, inputs: list[Any], kind: GraphKind) -> CompiledGraph:
        private.LazyGraphModule.force_recompile(graph)  # a backend may keep `graph.forward`
        compiled = backend(graph, inputs)
        return lambda items: compiled(*items)

    return compile_graph


# ------------------------------------------------------------------------------------------------ inductor


def inductor_backend(mode: str | None, options: Mapping[str, Any] | None) -> Backend:
    """Inductor, with the config patches of a `torch.compile` mode and options."""
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
        with _patched(_proved_sizes(graph, kind) | patches), torch.no_grad():
            return _compile_inductor(graph, inputs, kind)

    @contextlib.contextmanager
    def postpone(graph: fx.GraphModule) -> Iterator[Kernels]:
        with _patched(patches), postponing(graph) as kernels:
            yield kernels

    return Backend("inductor", decompositions, split, compile_graph, postpone=postpone)


def _proved_sizes(graph: fx.GraphModule, kind: GraphKind) -> dict[str, Any]:
    """Leaves out Inductor's checks of sizes and strides where the signature has made them.

    A backward keeps them, for what was saved may be something else by then: a hook unpacks it, or another inner tensor
    was assigned. So does a graph with an op that is not PyTorch's own, whose result they compare with what its fake
    implementation promised.
    """
    targets = (node.target for node in graph.graph.nodes if node.op == "call_function")
    foreign = any(getattr(target, "namespace", "aten") not in ("aten", "prims") for target in targets)
    return {} if kind.role == "backward" or foreign or checks_everything() else {"size_asserts": False}


@contextlib.contextmanager
def _patched(patches: Mapping[str, Any]) -> Iterator[None]:
    with private.inductor_config.patch(dict(patches)) if patches else contextlib.nullcontext():
        yield


def _compile_inductor(graph: fx.GraphModule, inputs: list[Any], kind: GraphKind) -> CompiledGraph:
    if all(node.op != "call_function" for node in graph.graph.nodes):
        return run_as_is(graph, inputs, kind)  # nothing to compile, and Inductor keeps identity of no output
    starts = starts_of_windows(graph)
    if any(not isinstance(start, int) or start != 0 for start in starts):
        return run_as_is(graph, inputs, kind)
    if kind.role == "inference":
        before = result_names(graph, kind.num_results)
        devices = private.get_inputs_devices(inputs, graph)
        graph = private.joint_graph_passes(graph, input_device=next(iter(devices)))
        keep_results_apart(graph, before)
    (output,) = graph.graph.find_nodes(op="output")
    visible = 0 if kind.role == "backward" else kind.num_results
    output.meta["user_visible_output_idxs"] = [
        n for n, node in enumerate(output_nodes(graph)[:visible]) if isinstance(node, fx.Node)
    ]
    cudagraphs = private.BoxedBool(private.inductor_config.triton.cudagraphs)
    with _patched({"fx_graph_cache": False} if starts else {}):
        return private.compile_fx_inner(
            graph,
            inputs,
            static_input_idxs=kind.static_slots,
            cudagraphs=cudagraphs,
            is_inference=kind.role == "inference",
            is_backward=kind.role == "backward",
        )


# -------------------------------------------------------------------------------- one graph after the other


@contextlib.contextmanager
def compiling(fake_mode: Any) -> Iterator[None]:
    """What compilation holds under: the trace's fake mode, no autocast, no compiled autograd."""
    with (
        private.V.set_fake_mode(fake_mode),
        private.compiled_autograd._disable(),
        private.DisableAutocast(),
        torch.no_grad(),
    ):
        yield


def compile_forward(
    backend: Backend, graph: fx.GraphModule, kind: GraphKind, fake_mode: Any
) -> tuple[CompiledGraph, list[Any] | None]:
    """Compiles an inference or forward graph; also gives the strides of its outputs where the backend set them."""
    context = private.TracingContext(fake_mode)
    # The strides are to come back as expressions over the trace's symbols, not as the first call's numbers.
    context.fakify_first_call = True
    with private.tracing(context), compiling(fake_mode), context.report_output_strides() as strides:
        compiled = backend.compile_graph(graph, fake_inputs(graph), kind)
    return compiled, strides or None


def compile_backward(
    backend: Backend, graph: fx.GraphModule, kind: GraphKind, fake_mode: Any
) -> CompiledGraph:
    """Compiles a backward graph."""
    context = private.TracingContext(fake_mode)
    with private.tracing(context), compiling(fake_mode):
        return backend.compile_graph(graph, fake_inputs(graph), kind)


def restride_saved(backward: fx.GraphModule, position: int, stride: Sequence[Any] | None) -> None:
    """Tells the backward that the compiled forward gave a saved tensor another stride than the trace had."""
    node = backward.graph.find_nodes(op="placeholder")[position]
    value = node.meta["val"]
    if isinstance(value, Tensor) and stride is not None and not same_ints(value.stride(), stride):
        node.meta["val"] = value.as_strided(value.size(), tuple(stride))
