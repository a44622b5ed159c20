"""Stored programs: the results of the stages for a graph, for a process that compiles the same graph again.

A program's file holds three things. *Guards*: the conditions on sizes that the compilation assumed. A file fits a call
if they hold, and they become guards of the new compilation. *Records*: the descriptions from which the runtime wrapper
is generated. *Graphs*: the compiled forward, and the plain graphs, which are loaded on first use. Each compiled
backward is a file of its own, since it is compiled when its gradients first arrive.
"""

from __future__ import annotations

import copy
import functools
import logging
import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from desugar import _torch as torch_private
from desugar.backends import inductor_patches
from desugar.backends.base import Backend, CompiledGraph, run_eagerly
from desugar.flatten.inputs import Inputs
from desugar.flatten.rule_state import StateRead
from desugar.ir.stages import CompiledGraphs, PlainGraphs, ProgramSpec, autocast_state, presence_bits
from desugar.recording.listeners import has_listeners
from desugar.store import files
from desugar.store.keys import check_ops, key_of
from desugar.store.pickling import DAMAGED, CannotStore, dump, known_values, load
from subclasses import strict_mode
from subclasses.errors import one_of

log = logging.getLogger("desugar")

_PROGRAM = ".program"  # how the name of a program's file ends

# ------------------------------------------------------------------------------------------------ one graph


def dump_graph(compiled: CompiledGraph) -> bytes:
    """Pickles a compiled graph of Inductor, or None for a graph that runs op by op.

    Raises:
        CannotStore: The graph is of another kind, or holds something that cannot be pickled.
    """
    if getattr(compiled, "runs_eagerly", False):
        return pickle.dumps(None)
    if not isinstance(compiled, torch_private.CompiledFxGraph):
        raise CannotStore(f"a graph was compiled to {one_of(type(compiled))}")
    stored = copy.copy(compiled)
    kernels = stored.__dict__.pop(inductor_patches.ATTRIBUTE, {})
    stored.prepare_for_serialization()
    try:
        return pickle.dumps((pickle.dumps(stored), inductor_patches.libraries_of(kernels)))
    except DAMAGED as error:
        raise CannotStore(f"{type(error).__name__}: {error}") from error


def load_graph(
    data: bytes, graph: Callable[[], fx.GraphModule], *, is_backward: bool
) -> CompiledGraph | None:
    """Loads the result of `dump_graph`.

    Args:
        data: The pickle.
        graph: Returns the plain graph, which is needed if it runs op by op.
        is_backward: Whether it computes gradients.

    Returns:
        The compiled graph; None if a file that Inductor needs is gone.
    """
    content = pickle.loads(data)
    if content is None:
        return run_eagerly(graph())
    compiled, libraries = pickle.loads(content[0]), content[1]
    constants = torch_private.CompiledFxGraphConstants()
    with inductor_patches.load_kernels_from(libraries):
        compiled, _ = torch_private.FxGraphCache.cache_hit_post_compile(compiled, {}, constants)
    if compiled is None:
        return None
    compiled.post_compile(
        [], constants, {"cudagraphs": torch_private.BoxedBool(False), "is_backward": is_backward}
    )
    return compiled  # type: ignore[no-any-return]


# ---------------------------------------------------------------------------------------------- one program


def pack(program: CompiledGraphs, inputs: Inputs) -> dict[str, Any]:
    """Returns the content of a program's file.

    Raises:
        CannotStore: Another process could not read a part of it, or would need more than its arguments.
    """
    if inputs.captured or inputs.generators:
        raise CannotStore("it uses tensors or generators besides its arguments")
    env = inputs.mode.shape_env
    guards = [guard.expr for guard in env.guards]
    if env.deferred_runtime_asserts or not _hold(guards, env):
        raise CannotStore("a size depends on data")
    graphs = program.graphs()
    check_ops(graphs.joint)
    return {
        "guards": pickle.dumps(guards),
        "records": dump((program.spec.interface, program.spec.split)),
        "forward": dump_graph(program.forward),
        "graphs": dump(tuple(graphs)),
    }


def unpack(content: dict[str, Any], inputs: Inputs) -> CompiledGraphs | None:
    """Returns the program of a file; None if it does not fit, or a file that Inductor needs is gone.

    Args:
        content: The result of `pack`.
        inputs: The flattened arguments of the call. The program's guards are added to their shape environment.
    """
    mode, guards = inputs.mode, pickle.loads(content["guards"])
    if not _hold(guards, mode.shape_env):
        return None
    graphs = functools.cache(lambda: _load_graphs(content["graphs"], mode))
    interface, split = load(content["records"], mode)
    forward = load_graph(content["forward"], lambda: graphs().forward, is_backward=False)
    if forward is None:
        return None
    for guard in guards:
        mode.shape_env.evaluate_expr(guard)
    return CompiledGraphs(ProgramSpec(inputs.spec(), interface, split, autocast_state()), graphs, forward)


@dataclass(eq=False)
class ProgramCache:
    """Keeps a program in this process; subclasses write it to files that another process reads.

    Attributes:
        stored: The program without its runtime wrapper.
        inputs: Its flattened arguments.
        backwards: Which gradients arrive -> the compiled backward.
    """

    stored: CompiledGraphs | None = None
    inputs: Inputs | None = None
    backwards: dict[tuple[bool, ...], CompiledGraph] = field(default_factory=dict)

    def load(self, inputs: Inputs) -> CompiledGraphs | None:
        """Returns the program that fits a call; None if there is none."""
        return None

    def load_backward(
        self, present: tuple[bool, ...], graph: Callable[[], fx.GraphModule]
    ) -> CompiledGraph | None:
        """Returns the compiled backward for the gradients that arrive; None if there is none."""
        return None

    def save(self, program: CompiledGraphs, inputs: Inputs) -> None:
        """Keeps a program."""
        self.stored, self.inputs = program, inputs

    def save_backward(self, present: tuple[bool, ...], compiled: CompiledGraph) -> None:
        """Keeps a compiled backward."""
        self.backwards[present] = compiled


class StoreCache(ProgramCache):
    """Loads and saves the program of one graph in the store.

    Attributes:
        key: The key of the graph.
        digest: A digest of the program's file; None before the file is read or written. The file names of backwards
            begin with it, since two processes that compile one graph may save different values for the backward.
    """

    def __init__(self, key: str) -> None:
        super().__init__()
        self.key = key
        self.digest: str | None = None

    # .............................................................................................. reading

    def load(self, inputs: Inputs) -> CompiledGraphs | None:
        """Returns the program whose guards hold for a call, and adds them to the call's; None if there is none."""
        for name in files.names(self.key):
            if not name.endswith(_PROGRAM) or (content := files.read(self.key, name)) is None:
                continue
            try:
                program = unpack(pickle.loads(content), inputs)
            except (*DAMAGED, OSError, AssertionError) as error:
                log.warning(
                    "ignored a program of the store that cannot be read: %s: %s", type(error).__name__, error
                )
                continue
            if program is not None:
                self.digest = files.digest(content)
                return program
        return None

    def load_backward(
        self, present: tuple[bool, ...], graph: Callable[[], fx.GraphModule]
    ) -> CompiledGraph | None:
        """Returns the compiled backward for the gradients that arrive; None if it is not stored."""
        content = None if self.digest is None else files.read(self.key, self._backward_name(present))
        if content is None:
            return None
        try:
            return load_graph(content, graph, is_backward=True)
        except (*DAMAGED, OSError, AssertionError) as error:
            log.warning(
                "ignored a backward of the store that cannot be read: %s: %s", type(error).__name__, error
            )
            return None

    def _backward_name(self, present: tuple[bool, ...]) -> str:
        return f"{self.digest}.{presence_bits(present)}"

    # .............................................................................................. writing

    def save(self, program: CompiledGraphs, inputs: Inputs) -> None:
        """Writes a program; logs the reason if it cannot be stored."""
        try:
            content = pack(program, inputs)
        except CannotStore as reason:
            log.info("a program is not stored: %s", reason)
            return
        whole = pickle.dumps(content)
        self.digest = files.digest(whole)
        files.write(self.key, files.digest(content["guards"]) + _PROGRAM, whole)

    def save_backward(self, present: tuple[bool, ...], compiled: CompiledGraph) -> None:
        """Writes a compiled backward of a stored program; logs the reason if it cannot be stored."""
        if self.digest is None:
            return
        try:
            files.write(self.key, self._backward_name(present), dump_graph(compiled))
        except CannotStore as reason:
            log.info("a backward is not stored: %s", reason)


def find_store_cache(
    graph: fx.GraphModule, inputs: Inputs, backend: Backend, read: Iterable[StateRead]
) -> ProgramCache | None:
    """Returns the cache of a Dynamo graph's program; None, with the reason logged, if it is not to be stored."""
    is_watched = has_listeners() or strict_mode.watchers  # they are notified of ops, which only a trace runs
    if backend.settings is None or is_watched or not files.is_switched_on():
        return None
    try:
        with backend.settings():
            return StoreCache(key_of(graph, inputs, backend, read))
    except CannotStore as reason:
        log.info("a program is not stored: %s", reason)
        return None


def _load_graphs(data: bytes, mode: Any) -> PlainGraphs:
    graphs = load(data, mode)
    for graph in graphs:
        for module in graph.modules() if graph is not None else ():
            if isinstance(module, fx.GraphModule):
                module.recompile()
    return PlainGraphs(*graphs)


def _hold(guards: Iterable[Any], env: Any) -> bool:
    """Whether conditions on sizes hold for the present call."""
    values = known_values(env)
    return all(guard.free_symbols <= values.keys() and bool(guard.xreplace(values)) for guard in guards)
