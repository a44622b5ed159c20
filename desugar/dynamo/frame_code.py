"""Makes the code that Dynamo compiled of a whole frame callable as a function of the frame's parameters."""

from __future__ import annotations

import inspect
import itertools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from desugar import _torch as private
from desugar.dynamo.implied_guards import ModuleGuards
from desugar.program import Program

_VARIADIC = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_FORWARDED = {
    inspect.Parameter.VAR_POSITIONAL: "*{0}",
    inspect.Parameter.KEYWORD_ONLY: "{0}={0}",
    inspect.Parameter.VAR_KEYWORD: "**{0}",
}
_numbers = itertools.count()

# -------------------------------------------------------------------------------------------------- parameters


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters of a function.

    Attributes:
        declared: The parameters without defaults, in the order of a declaration.
        all: All names, in the order of the code's local variables.
    """

    declared: tuple[inspect.Parameter, ...]
    all: tuple[str, ...]

    @staticmethod
    def of(code: types.CodeType) -> Parameters:
        """Returns the parameters of a code object."""
        bare = types.FunctionType(code, {}, closure=tuple(types.CellType() for _ in code.co_freevars))
        declared = tuple(inspect.signature(bare).parameters.values())
        return Parameters(declared, code.co_varnames[: len(declared)])

    @property
    def positional(self) -> tuple[str, ...]:
        """Names of the parameters that may be passed by position."""
        return tuple(one.name for one in self.declared if one.kind in _POSITIONAL)

    def declaration(self, skip: int) -> str:
        """Returns the text of a parameter list, without the first `skip` parameters and without defaults."""
        return str(inspect.Signature(self._without(skip)))[1:-1]

    def forwarding(self, skip: int) -> str:
        """Returns the text of the arguments of a call that forwards the parameters, without the first `skip`."""
        return ", ".join(_FORWARDED.get(one.kind, "{0}").format(one.name) for one in self._without(skip))

    def _without(self, skip: int) -> list[inspect.Parameter]:
        skipped = self.positional[:skip]
        return [one for one in self.declared if one.name not in skipped]


# ------------------------------------------------------------------------------------------------ Dynamo's code


@dataclass(frozen=True, slots=True, eq=False)
class FrameCode:
    """Code that Dynamo made of a whole frame, and its guards.

    Attributes:
        manager: Dynamo's guard manager; its `cache_entry` is None after Dynamo has invalidated the code.
        check: Takes the frame's variables by name; returns whether the guards hold.
        call: The code as a function of all parameters by position.
        program: The program compiled from its graph.
        graph_name: The global name by which the code calls the program.
        code: Dynamo's own code object, which keeps the globals that the code uses alive.
        module: The guards of a large module; None where the entry checks all guards with `check`.
    """

    manager: Any
    check: Callable[[dict[str, Any]], bool]
    call: Callable[..., Any]
    program: Program
    graph_name: str
    code: types.CodeType
    module: ModuleGuards | None = None


def accept_code(cache_entry: Any, fn: types.FunctionType, count: int) -> FrameCode | None:
    """Makes the code of a Dynamo cache entry callable; None unless it covers the whole frame and calls one program.

    Args:
        cache_entry: An entry of Dynamo's cache for the code object of `fn`.
        fn: The function.
        count: The number of its parameters, `*args` and `**kwargs` included.
    """
    code, scope = cache_entry.code, fn.__globals__
    graphs = [name for name in code.co_names if name.startswith("__compiled_fn")]
    if len(graphs) != 1 or any(name.startswith("__resume_at") for name in code.co_names):
        return None
    program = getattr(private.undisabled(scope.get(graphs[0])), "program", None)
    if program is None or not program.is_whole:
        return None
    program.call_directly()
    name = f"__desugar_{next(_numbers)}"
    scope[name] = program.run
    positional = code.replace(
        co_names=tuple(name if other == graphs[0] else other for other in code.co_names),
        co_argcount=count,
        co_posonlyargcount=0,
        co_kwonlyargcount=0,
        co_flags=code.co_flags & ~_VARIADIC,
    )
    call = types.FunctionType(positional, scope, fn.__name__, None, fn.__closure__)
    manager = cache_entry.guard_manager
    return FrameCode(manager, manager.root.check, call, program, name, code)
