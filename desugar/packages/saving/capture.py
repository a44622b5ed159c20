"""Captures one call of a function as one program, and maps its arguments and results to the program's.

Dynamo produces a graph of the function, and bytecode that reads the arguments, calls the graph and builds the result. A
package cannot hold that bytecode, which refers to objects of this process. So `capture_call` runs it once on fake
tensors, with placeholders for the results of the graph. Their positions in the result give its structure.
Dynamo's sources give the origin of each graph input. A function that changes objects other than tensors raises
`PackageError`, since a graph does not hold these changes.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import SymInt, Tensor, fx, nn

from desugar import _torch as torch_private
from desugar.api import build_maker, find_target, with_own_code
from desugar.backends.base import Backend
from desugar.dynamo import backend as dynamo
from desugar.dynamo.entry import has_frame, raise_own
from desugar.dynamo.implied_guards import dynamo_context
from desugar.errors import PackageError
from desugar.ir.values import Constant
from desugar.packages.manifest.structure import Flattened, arrange, flatten_call, names_of
from desugar.program import Program
from desugar.recording.listeners import CompilationOwner, compiling_for
from desugar.store.programs import ProgramCache

_PATH = re.compile(r"(?:\.\w+)*")


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of a call, for :func:`desugar.save`; :func:`call` makes one."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def call(*args: Any, **kwargs: Any) -> Call:
    """Returns the arguments of a call, for :func:`desugar.save`."""
    return Call(args, kwargs)


class Placeholder(int):
    """The placeholder of a number that the graph returns."""


@dataclass(slots=True)
class Captured:
    """One captured call.

    Attributes:
        flattened: The arguments.
        program: The program.
        cache: The results of the stages.
        sources: Dynamo's source of each input of the graph.
        examples: The inputs of the graph in this call.
        fakes: Number of an argument leaf -> its fake tensor in Dynamo's fake mode, for leaves that Dynamo read.
        leaf_sources: Number of an argument leaf -> Dynamo's expression of the leaf.
        facts: Dynamo's expressions of the objects whose values it guards.
        duplicated: Expressions of parts of arguments that are the same object as something outside the arguments.
        standins: The placeholders of the program's results.
        result: The result of the call, made of placeholders and of fakes of the arguments.
    """

    flattened: Flattened
    program: Program = field(init=False)
    cache: ProgramCache = field(default_factory=ProgramCache)
    sources: list[Any] = field(default_factory=list)
    examples: list[Any] = field(default_factory=list)
    fakes: dict[int, Any] = field(default_factory=dict)
    leaf_sources: dict[int, str] = field(default_factory=dict)
    facts: list[str] = field(default_factory=list)
    duplicated: set[str] = field(default_factory=set)
    standins: list[Any] = field(default_factory=list)
    result: Any = None

    @property
    def fake_leaves(self) -> list[Any]:
        """The argument leaves, with the fakes of tensors and the symbols of ints that are graph inputs."""
        leaves = [self.fakes.get(n, leaf) for n, leaf in enumerate(self.flattened.leaves)]
        for source, example in zip(self.sources, self.examples, strict=True):
            number, path = self.locate(torch_private.source_name(source)) or (0, ("",))
            if isinstance(example, SymInt) and not path:
                leaves[number] = example
        return leaves

    def is_of_argument(self, source: Any) -> bool:
        """Whether the root of a Dynamo source is a parameter for which the call passes an argument."""
        name = getattr(torch_private.source_root(source), "local_name", None)
        return name in {parameter for parameter, _ in self.flattened.arguments}

    def locate(self, text: str) -> tuple[int, tuple[str, ...]] | None:
        """Returns the number of the argument leaf that a Dynamo expression names, and the attribute path from it.

        Returns None for an expression that names another object.
        """
        for number, name in enumerate(names_of(self.flattened.arguments)):
            if name == as_expression(text):
                return number, ()
        for number, known in self.leaf_sources.items():
            path = text.removeprefix(known)
            if text.startswith(known) and _PATH.fullmatch(path):
                return number, tuple(path.split(".")[1:])
        return None


def capture_call(fn: Any, given: Call, backend: Backend, dynamic: bool | None) -> Captured:
    """Captures a call of a function, without running it: no tensor and no object is changed.

    Raises:
        PackageError: The function depends on or changes state of this process that a package cannot hold.
        DesugarError: Desugaring does not support the function.
        torch._dynamo.exc.Unsupported: Dynamo cannot capture the function as one graph.
    """
    try:
        signature = inspect.signature(fn.forward if isinstance(fn, nn.Module) else fn)
    except ValueError as error:
        raise TypeError(
            f"Python does not know the parameters of {_name(fn)}: wrap it in a function, and save that"
        ) from error
    captured = Captured(flatten_call(signature, given.args, given.kwargs))
    target, bound = find_target(fn)
    # Dynamo skips the frame of a wrapper of a decorator, and of a function of torch.
    is_skipped = hasattr(target, "__wrapped__") or str(target.__module__).partition(".")[0] == "torch"
    if isinstance(fn, nn.Module) or not has_frame(target) or is_skipped:
        target, bound = _call_of(fn, captured.flattened), ()

    def compile_graph(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        captured.sources = torch_private.input_sources(graph)
        captured.examples = list(inputs)
        if any(source is None for source in captured.sources):
            raise PackageError(
                "an input of the graph has no name: pass the tensors that the function uses as arguments"
            )
        captured.program = dynamo.compile_graph(graph, inputs, backend, captured.cache)
        _note_fakes(captured)
        captured.standins = [_stand_in(value) for value in captured.program.outputs]
        return lambda *leaves: tuple(captured.standins)

    # Dynamo captures the graph as for any other program.
    compile_graph.__wrapped__ = dynamo.dynamo_backend  # type: ignore[attr-defined]
    function = with_own_code(target)
    # Dynamo raises for a function that changes Python objects; floats and ints of arguments are constants.
    options = torch_private.dynamo_config.patch(
        side_effect_replay_policy="error",
        replay_side_effects=False,
        specialize_float=True,
        automatic_dynamic_shapes=False,
    )
    try:
        with compiling_for(CompilationOwner(fn, "saved in a package")), options:
            dynamo_context(compile_graph, True, dynamic)(function)(*bound, *given.args, **given.kwargs)
    except torch_private.BackendCompilerFailed as error:
        raise_own(error)
    except RuntimeError as error:
        if "converted to Scalar" in str(error):
            raise PackageError(
                f"the result of {_name(fn)} holds a number that is computed from sizes or ints: return it as a tensor"
            ) from error
        if "side effects happened" not in str(error):
            raise
        raise PackageError(
            f"{_name(fn)} changes objects besides tensors ({str(error).partition('double check: ')[2][:300]}), and a "
            "package has no objects: return the results instead"
        ) from error
    if not captured.sources and not hasattr(captured, "program"):
        raise PackageError(f"{_name(fn)} computes nothing with tensors: there is no program to save")
    captured.result = _run_on_fakes(function, bound, captured)
    return captured


def _run_on_fakes(function: Callable[..., Any], bound: tuple[Any, ...], captured: Captured) -> Any:
    """Runs Dynamo's bytecode of a function on fakes of the arguments, and returns the result.

    A size in the result may be an output of the graph, a constant, or read from an argument by the bytecode. The sizes
    of the fakes are symbols. No guard is checked, and the graph is not run.

    Raises:
        PackageError: Dynamo produced more or fewer than one graph, or the bytecode does more than build the result.
    """
    made = [entry.code for entry in torch_private.cache_entries(function.__code__)]
    made = [code for code in made if any(name.startswith("__compiled_fn") for name in code.co_names)]
    if len(made) != 1:
        raise PackageError(f"expected one graph of the function, Dynamo made {len(made)}")
    code = types.FunctionType(
        made[0], function.__globals__, "traced", function.__defaults__, function.__closure__
    )
    code.__kwdefaults__ = function.__kwdefaults__
    flattened = captured.flattened
    given = arrange(flattened.signature, flattened.arguments, captured.fake_leaves)
    try:
        return code(*bound, *given.args, **given.kwargs)
    except AttributeError as error:
        raise PackageError(
            f"the result is built with .{error.name} of an argument, outside of the graph"
        ) from error
    except (TypeError, RuntimeError) as error:
        raise PackageError(f"the result is built by Python that a package cannot hold: {error}") from error


def _call_of(module: Any, flattened: Flattened) -> Callable[..., Any]:
    """Returns a function that calls a module or another object, with a parameter for each argument that was passed."""
    passed = [flattened.signature.parameters[name] for name, _ in flattened.arguments]
    empty = inspect.Parameter.empty
    parameters = inspect.Signature([one.replace(default=empty, annotation=empty) for one in passed])
    has_rest = any(one.kind is one.VAR_POSITIONAL for one in passed)
    arguments = []
    for one in passed:
        stars = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        by_name = one.kind is one.KEYWORD_ONLY or (one.kind is one.POSITIONAL_OR_KEYWORD and not has_rest)
        arguments.append(f"{one.name}={one.name}" if by_name else f"{stars}{one.name}")
    return build_maker(_name(module), str(parameters)[1:-1], ", ".join(arguments))(module)  # type: ignore[no-any-return]


def _note_fakes(captured: Captured) -> None:
    """Records the fakes and the sources of the argument leaves that Dynamo read."""
    context = torch_private.TracingContext.try_get()
    for pair in torch_private.duplicate_sources(context):
        own = [source for source in pair if captured.is_of_argument(source)]
        if len(own) == 1:  # a tensor of an argument is the same object as something outside
            captured.duplicated.add(as_expression(torch_private.source_name(own[0])))
    read = (source for source in torch_private.facts_read(context) if source is not None)
    captured.facts += map(torch_private.source_name, read)
    for number, leaf in enumerate(captured.flattened.leaves):
        if isinstance(leaf, Tensor) and leaf in context.tensor_to_context:
            known = context.tensor_to_context[leaf]
            captured.leaf_sources[number] = torch_private.source_name(known.tensor_source)
            captured.fakes[number] = context.fake_mode.from_tensor(
                leaf, symbolic_context=known, source=known.tensor_source
            )


def as_expression(name: str) -> str:
    """Returns a name of Dynamo's as an expression over parameters: `x[0]` for `L['x'][0]`."""
    return re.sub(r"^L\['(\w+)'\]", r"\1", name)


def _stand_in(value: Any) -> Any:
    if isinstance(value, Constant):
        return Placeholder(0) if value.index is not None else value.value
    with torch.inference_mode(False):
        return torch.empty(0)


def _name(fn: Any) -> str:
    return getattr(fn, "__qualname__", type(fn).__name__)
