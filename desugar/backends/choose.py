"""The backend that a user named.

`"inductor"` is PyTorch's compiler; `"eager"` runs the graphs as they are; any callable `(gm, inputs) -> callable` may
stand in, as for `torch.compile`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from desugar import _torch as private
from desugar.backends.base import Backend, CompiledGraph, GraphKind, run_as_is
from desugar.backends.inductor import inductor_backend
from desugar.passes.partition import min_cut


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


def _call_user(backend: Callable[..., Any]) -> Callable[..., CompiledGraph]:
    def compile_graph(graph: fx.GraphModule, inputs: list[Any], kind: GraphKind) -> CompiledGraph:
        private.LazyGraphModule.force_recompile(graph)  # a backend may keep `graph.forward`
        compiled = backend(graph, inputs)
        return lambda items: compiled(*items)

    return compile_graph
