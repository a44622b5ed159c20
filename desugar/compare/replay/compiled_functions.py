"""The compiled functions of a script: which one is being called, and how it was compiled."""

from __future__ import annotations

import types
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import nn

from desugar._torch_compiled_calls import compiled_call
from desugar.api import call_of, with_own_code
from desugar.compare.import_names import Call
from desugar.compare.ways import BACKEND, DIRECT, EAGER, STOCK, TUNED, compile_way
from desugar.dynamo.entry import Calls
from desugar.recording.listeners import caller


@dataclass
class Owner:
    """What `desugar.compile` or `torch.compile(backend="desugar")` has compiled in a script.

    Calls in other ways keep the script's order, so that their sizes become symbolic as the script's do.

    Attributes:
        what: The function or module.
        ways: The ways in which its calls are made again, the script's own one last.
        given: What Dynamo was given as a backend, with the options.
        code: The code of the frame that runs the function: what lies below it on the stack is between its graphs.
    """

    what: Any
    ways: tuple[str, ...]
    given: Any
    code: types.CodeType

    def backend(self) -> Any:
        """Returns what compiles its graphs; the name of a compiler, or a function of the script's."""
        return self.given.kwargs.get("options", {}).get("backend", "inductor")

    @cached_property
    def compiled(self) -> dict[str, Any]:
        """The function compiled anew in all ways."""
        return self._compile()

    @cached_property
    def compiled_to_draw(self) -> dict[str, Any]:
        """The same once more, to draw random numbers as eager mode does."""
        return self._compile()

    def _compile(self) -> dict[str, Any]:
        """Compiles the function anew in all ways, with the script's options."""
        options = self.given.kwargs.get("options", {})
        options = {name: value for name, value in options.items() if name not in ("backend", "strict")}
        more = {"dynamic": self.given.dynamic, "mode": self.given.kwargs.get("mode"), "options": options}
        more = {name: value for name, value in more.items() if value not in (None, {})}
        return {way: compile_way(way, self._with_own_code(way), self.backend(), **more) for way in self.ways}

    def _with_own_code(self, way: str) -> Any:
        """Returns the function with code of its own: Dynamo would find what it has compiled of the same code."""
        fn = self.what
        if way == EAGER:
            return fn
        if isinstance(fn, nn.Module):
            return with_own_code(call_of(fn))
        if isinstance(fn, types.MethodType) and isinstance(fn.__func__, types.FunctionType):
            return types.MethodType(with_own_code(fn.__func__), fn.__self__)
        return with_own_code(fn) if isinstance(fn, types.FunctionType) else fn


@dataclass(slots=True)
class Owners:
    """The compiled functions that were met: one object for each."""

    _found: dict[Any, tuple[Owner, Any]] = field(
        default_factory=dict
    )  # with what must live on to keep its id

    def in_progress(self) -> tuple[Owner | None, Call]:
        """Returns the function that is being called in this thread, and its arguments; None if there is none."""
        calls = caller()
        call = calls.call() if isinstance(calls, Calls) else None
        if isinstance(calls, Calls) and call is not None:
            made = Owner(
                calls.what, (EAGER, STOCK, TUNED, DIRECT), calls.backend, Calls._call_compiled.__code__
            )
            return self._found.setdefault(id(calls), (made, calls))[0], call
        found = compiled_call()
        if found is None or getattr(found.backend, "compiler_name", None) != "desugar":
            return None, ((), {})
        made = Owner(found.what, (EAGER, STOCK, TUNED, BACKEND), found.backend, found.code)
        key = id(found.context), id(found.what)
        return self._found.setdefault(key, (made, found.context))[0], (found.args, found.kwargs)
