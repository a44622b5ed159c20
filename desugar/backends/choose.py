"""Resolves the `backend` argument of `desugar.compile`, and checks its other options.

`"inductor"` is PyTorch's compiler. `"eager"` runs the plain graphs op by op. A callable `(gm, inputs) -> callable` is
a backend of the user's own, as for `torch.compile`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from desugar import _torch as private
from desugar.backends.base import Backend, CompiledGraph, GraphKind, run_eagerly
from desugar.backends.inductor import inductor_backend
from desugar.passes.partition import min_cut


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
        private.LazyGraphModule.force_recompile(graph)  # a backend may return `graph.forward`
        compiled = backend(graph, inputs)
        return lambda items: compiled(*items)

    return compile_graph
