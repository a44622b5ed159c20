"""Entries: generated functions that check Dynamo's guards and call Dynamo's code without Dynamo's frame hook.

`torch.compile` sets a hook that inspects each frame. For the frame of the compiled function, the hook checks guards and
runs the code that Dynamo made. The hook takes most of the time of a small call. So `desugar.compile` generates an
*entry*: a function with the parameters of the user's function, which checks the same guards in C++ and calls the same
code as a function. For a large module it checks that the recorded state is unchanged, and the guards that this state
does not imply. If no guards match, the entry calls the callable of `torch.compile`, which may compile. Then the entry
is generated again, with the code in Dynamo's cache that covers a whole frame.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import logging
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from desugar import _torch as torch_private
from desugar.codegen.text import block
from desugar.dynamo.implied_guards import ModuleGuards, note_module_guards
from desugar.dynamo.profiling import call_named
from desugar.program import Program
from desugar.recording.graph_text import WRAPPER_FILE
from desugar.recording.listeners import CompilationOwner, compiling_for, note_skipped_check
from subclasses.source_text.build import build_functions
from subclasses.source_text.emitter import Emitter

log = logging.getLogger("desugar")

_ABSENT = type("absent", (), {"__repr__": lambda self: "..."})()  # marks an argument that was not passed
_NO_FRAME = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
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
    program = getattr(torch_private.undisabled(scope.get(graphs[0])), "program", None)
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


# ------------------------------------------------------------------------------------------------------ entries


def raise_own(error: Any) -> NoReturn:
    """Raises the original error of a `BackendCompilerFailed`, since the user chose no Dynamo backend.

    An `InductorError` is raised unchanged.
    """
    if isinstance(error, torch_private.InductorError):
        raise error
    raise error.inner_exception from error.inner_exception.__cause__


class CompiledCallable(CompilationOwner):
    """Calls of one function or module, through the callable of `torch.compile`.

    Attributes:
        compiled: The callable of `torch.compile`.
        backend: The backend object that Dynamo's cache entries name.
        programs: The programs compiled so far, the newest first.
        uncompiled: The function or module itself.
        function: The callable that the user's calls run.
    """

    def __init__(self, compiled: Callable[..., Any], backend: Any, what: Any) -> None:
        super().__init__(what, "first call")
        self.compiled, self.backend = compiled, backend
        self.name = getattr(what, "__qualname__", type(what).__name__)
        self.programs: list[Program] = []
        self._thread = threading.local()
        self.uncompiled: Callable[..., Any] = torch_private.undisabled(compiled)
        self.function: Any = self.compile_or_call
        self._self_argument: tuple[Any, ...] = ()  # passed to `function` before the user's arguments

    def add(self, program: Program, why: str) -> None:
        """Adds a program that was compiled for a call of this function."""
        self.programs.insert(0, program)
        log.info("%s program %d of %s: %s", program.origin, len(self.programs), self.name, why)

    def compile_or_call(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the callable of `torch.compile`, for a call whose guards match no code or that a mode observes.

        Under forward-mode differentiation it calls the function itself, and under a profiler it names the call.
        """
        # Dynamo does not guard the level of forward-mode differentiation, and a program ignores its tangents.
        if torch_private.forward_ad._current_level >= 0:
            return self.uncompiled(*args, **kwargs)
        if torch_private.profiler._is_profiler_enabled:
            return call_named(self._call_compiled, self.name, tuple(self.programs), args, kwargs)
        if self._waited_for_thread(args, kwargs):
            return self._retry(args, kwargs)
        return self._call_compiled(args, kwargs)

    def _waited_for_thread(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Waits while another thread compiles, and returns whether it waited.

        The other thread may compile code for this very call; Dynamo would compile it a second time.
        """
        lock = torch_private.compile_lock
        if getattr(self._thread, "has_waited", False):
            return False
        if lock.acquire(blocking=False):
            lock.release()
            return False
        with lock:
            pass
        self._refresh(args, kwargs)
        return True

    def _retry(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._thread.has_waited = True
        try:
            return self.function(*self._self_argument, *args, **kwargs)
        finally:
            self._thread.has_waited = False

    def arguments_in_progress(self) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Returns the arguments of the call in progress in this thread."""
        return getattr(self._thread, "call", None)

    def _call_compiled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        torch_private.register_backend(self.backend)
        torch_private.shared_nested_tensor()  # PyTorch makes it once; inside a trace it would be made of fake tensors
        outer, self._thread.call = getattr(self._thread, "call", None), (args, kwargs)
        try:
            with compiling_for(self):
                return self.compiled(*args, **kwargs)
        except torch_private.BackendCompilerFailed as error:
            raise_own(error)
        finally:
            self._thread.call = outer
            self._refresh(args, kwargs)

    def _refresh(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Runs after a call that may have compiled; a subclass updates its entry here."""


class EntryCallable(CompiledCallable):
    """Calls of a function that has a Python frame, through a generated entry.

    Attributes:
        fn: The user's function, whose frame Dynamo compiles.
        bound: The objects that its first parameters are bound to: the instance of a method.
        is_method: Whether the generated function has an additional first parameter, which it ignores.
    """

    def __init__(
        self,
        fn: types.FunctionType,
        compiled: Callable[..., Any],
        backend: Any,
        what: Any,
        *,
        bound: tuple[Any, ...] = (),
        is_method: bool = False,
    ) -> None:
        super().__init__(functools.partial(compiled, *bound) if bound else compiled, backend, what)
        self.fn, self.bound, self.is_method = fn, bound, is_method
        self._self_argument = (None,) if is_method else ()
        self.uncompiled = functools.partial(fn, *bound) if bound else fn
        self._forward = type(what).forward if is_method else None
        self._code, self._parameters = fn.__code__, Parameters.of(fn.__code__)
        self._accepted: list[FrameCode] = []
        self._stale: set[str] = set()  # globals of the generated function that its former code reads
        self._lock = threading.RLock()
        self.function = self._generate([])
        self._set_defaults()
        # The function that Dynamo traces in place of the entry.
        self.function._torchdynamo_inline = call_uncompiled if is_method else self.uncompiled  # type: ignore[attr-defined]
        weakref.finalize(self, _remove_names, fn.__globals__, self._accepted).atexit = False

    def _call_compiled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.is_method and type(self.what).forward is not self._forward:
            self._discard_code()
        return super()._call_compiled(args, kwargs)

    def _discard_code(self) -> None:
        """Drops all compiled code after `forward` of the module's class was replaced, which Dynamo does not guard.

        Dynamo caches by code object, so a copy of the code object makes Dynamo compile again.
        """
        with self._lock:
            self._forward = type(self.what).forward
            self._code = self.fn.__code__ = self.fn.__code__.replace()
            self._replace([])

    def variables(self, compile_id: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the initial local variables of the call in progress, and the globals of its function.

        Both are empty if the compile id belongs to another frame, which this frame calls.
        """
        if all(str(entry.compile_id) != compile_id for entry in torch_private.cache_entries(self._code)):
            return {}, {}
        call = self.arguments_in_progress()
        return ({}, {}) if call is None else (self._frame(*call), self.fn.__globals__)

    def _frame(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Returns the initial local variables of a call's frame: cells, then parameters."""
        bound = inspect.signature(self.fn, follow_wrapped=False).bind(*self.bound, *args, **kwargs)
        bound.apply_defaults()
        return {name: cell.cell_contents for name, cell in self._cells()} | bound.arguments

    def _cells(self) -> Iterator[tuple[str, Any]]:
        """Returns the name and cell of each variable that the function closes over."""
        return zip(self.fn.__code__.co_freevars, self.fn.__closure__ or (), strict=True)

    # ........................................................................................... Dynamo's cache

    def _refresh(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Generates the entry again if Dynamo has made code or invalidated code since the last time."""
        if torch_private.eval_frame._stance.stance != "default" or self.fn.__code__ is not self._code:
            return
        with self._lock:
            known = {id(code.manager): code for code in self._accepted}
            accepted = []
            for cache_entry in torch_private.cache_entries(self._code):
                manager = cache_entry.guard_manager
                if cache_entry.backend != self.backend or getattr(manager, "cache_entry", None) is None:
                    continue
                code = known.get(id(manager)) or self._accept(cache_entry)
                if code is not None:
                    accepted.append(self._with_module_guards(code, args, kwargs))
            if {id(code) for code in accepted} != set(map(id, self._accepted)):
                self._replace(accepted)

    def _accept(self, cache_entry: Any) -> FrameCode | None:
        """Makes the code of a cache entry callable; None if the entry cannot call it."""
        code = accept_code(cache_entry, self.fn, len(self._parameters.all))
        if code is not None and all(code.program is not program for program in self.programs):
            # Dynamo made it for another function that shares this code object.
            self.add(code.program, "compiled already, for another function with this code")
        return code

    def _with_module_guards(
        self, code: FrameCode, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> FrameCode:
        """Returns the code with :class:`ModuleGuards` for a large module, if Dynamo's guards hold in this call."""
        if code.module is None:
            is_settled = any(code is other for other in self._accepted)  # it has no large module
        else:
            is_settled = code.module.is_given_up or code.module.snapshot.still_holds()
        if is_settled:
            return code
        try:
            frame = self._frame(args, kwargs)
        except (TypeError, ValueError):  # the arguments do not match the parameters, or a cell is empty
            return code
        bound = self._parameters.positional[: len(self.bound)]
        shared = [*bound, *self.fn.__code__.co_freevars]  # by every call
        module = note_module_guards(code.manager.root, frame, shared, code.module)
        return dataclasses.replace(code, module=module)

    def _replace(self, accepted: list[FrameCode]) -> None:
        """Makes the entry call other code; a call in progress continues with the old code."""
        names = {code.graph_name for code in accepted}
        gone = [code for code in self._accepted if code.graph_name not in names]
        self._accepted[:] = accepted
        made = self._generate(accepted)
        scope = self.function.__globals__
        for name in self._stale - made.__globals__.keys():
            del scope[name]
        self._stale = scope.keys() - made.__globals__.keys()  # a call in progress may read these
        scope.update(made.__globals__)
        self.function.__code__, self.function.__source__ = made.__code__, made.__source__  # type: ignore[attr-defined]
        self.programs[:] = [p for p in self.programs if all(p is not code.program for code in gone)]
        _remove_names(self.fn.__globals__, gone)

    # ........................................................................................ the generated text

    def _set_defaults(self) -> None:
        """Sets a marker as every default of the generated function, which reads the real defaults at each call."""
        positional, keyword = self.fn.__defaults__ or (), self.fn.__kwdefaults__ or {}
        given = self._parameters.positional[len(self.bound) :]
        self.function.__defaults__ = (_ABSENT,) * min(len(positional), len(given)) or None
        self.function.__kwdefaults__ = dict.fromkeys(keyword, _ABSENT) or None

    def _generate(self, accepted: list[FrameCode]) -> types.FunctionType:
        """Generates and builds the entry function."""
        out, parameters, skip = Emitter(), self._parameters, len(self.bound)
        names = [*parameters.all, *self.fn.__code__.co_freevars]
        out.reserve("entry", *names)
        first = [out.fresh_name("self")] if self.is_method else []
        declared = ", ".join(filter(None, [*first, parameters.declaration(skip)]))
        with block(out, f"def entry({declared}):"):
            slow = (
                f"return {out.bind(self.compile_or_call, 'compile_or_call')}({parameters.forwarding(skip)})"
            )
            self._emit_defaults(out)
            if accepted:
                with block(out, f"if {self._unguarded_conditions(out)}:"):
                    self._emit_accepted(out, accepted, slow)
            out.writeline(slow)
        entry = build_functions(out.source, out.namespace, filename=WRAPPER_FILE, owner=self)["entry"]
        # Python's error for a wrong argument names the function.
        names = {"co_name": self.fn.__name__, "co_qualname": self.fn.__qualname__}
        entry.__code__ = entry.__code__.replace(**names)  # type: ignore[arg-type]
        entry.__name__, entry.__qualname__ = self.fn.__name__, self.fn.__qualname__
        return entry

    def _emit_defaults(self, out: Emitter) -> None:
        fn, absent = out.bind(self.fn, "fn"), out.bind(_ABSENT, "ABSENT")
        positional = self._parameters.positional
        defaults = self.fn.__defaults__ or ()
        values = {
            name: f"{fn}.__defaults__[{n}]"
            for n, name in enumerate(positional[len(positional) - len(defaults) :])
            if name in positional[len(self.bound) :]
        }
        values |= {name: f"{fn}.__kwdefaults__[{name!r}]" for name in self.fn.__kwdefaults__ or ()}
        for name, value in values.items():
            with block(out, f"if {name} is {absent}:"):
                out.writeline(f"{name} = {value}")

    def _unguarded_conditions(self, out: Emitter) -> str:
        """Returns the conditions that Dynamo's guards do not cover: the stance, observers of ops, the function's code.

        The observers are another compiler, dispatch modes, a profiler and forward-mode differentiation. For a module,
        the `forward` of its class is a condition, too.
        """
        conditions = [
            f"{out.bind(torch_private.eval_frame, 'eval_frame')}._stance.stance == 'default'",
            f"{out.bind(torch_private.frame_callback, 'frame_callback')}() is None",
            f"not {out.bind(torch_private.num_dispatch_modes, 'num_dispatch_modes')}()",
            f"not {out.bind(torch_private.profiler, 'profiler')}._is_profiler_enabled",
            f"{out.bind(torch_private.forward_ad, 'forward_ad')}._current_level < 0",
            f"{out.bind(self.fn, 'fn')}.__code__ is {out.bind(self._code, 'code')}",
        ]
        if self.is_method:
            forward = out.bind(self._forward, "forward")
            conditions.append(f"{out.bind(type(self.what), 'module_type')}.forward is {forward}")
        return " and ".join(conditions)

    def _emit_accepted(self, out: Emitter, accepted: list[FrameCode], slow: str) -> None:
        """Writes the calls of the accepted code under their guards, and `slow` for a frame with an empty cell."""
        bound = [out.bind(value, "bound") for value in self.bound]
        variables = dict(zip(self._parameters.positional, bound, strict=False))
        variables |= {name: name for name in self._parameters.all if name not in variables}
        contents = {name: f"{out.bind(cell, f'cell_{name}')}.cell_contents" for name, cell in self._cells()}
        frame = out.fresh_name("frame")
        display = ", ".join(f"{name!r}: {text}" for name, text in (variables | contents).items())
        if contents:
            with block(out, "try:"):
                out.writeline(f"{frame} = {{{display}}}")
            with block(out, "except ValueError:  # a cell is empty"):
                out.writeline(slow)
        else:
            out.writeline(f"{frame} = {{{display}}}")
        for code in accepted:
            number = code.graph_name.rpartition("_")[2]
            manager = out.bind(code.manager, f"guards_{number}")
            guards = self._guard_condition(out, code, frame, number)
            with block(out, f"if {manager}.cache_entry is not None and {guards}:"):
                call = out.bind(code.call, f"call_{number}")
                out.writeline(f"return {call}({', '.join(variables.values())})")

    def _guard_condition(self, out: Emitter, code: FrameCode, frame: str, number: str) -> str:
        """Returns the condition that the guards of a code hold."""
        if code.module is None or code.module.is_given_up:
            return f"{out.bind(code.check, f'fits_{number}')}({frame})"
        fits = out.bind(code.module.remaining.rest.check, f"fits_but_module_{number}")
        module = out.bind(code.module.module, f"module_{number}")
        snapshot_holds = out.bind(code.module.snapshot.still_holds, f"is_unchanged_{number}")
        note_skipped_check(
            out, f"guards of {code.module.name}, one by one: no dictionary that they read has changed"
        )
        return f"{frame}[{code.module.name!r}] is {module} and {fits}({frame}) and {snapshot_holds}()"


def call_uncompiled(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls the original module of a compiled module. Dynamo traces this function, so it closes over nothing."""
    return super(type(self), self).__call__(*args, **kwargs)  # type: ignore[misc]


def _remove_names(scope: dict[str, Any], codes: list[FrameCode]) -> None:
    """Removes the names of programs from the globals of the user's function."""
    for code in codes:
        scope.pop(code.graph_name, None)


def has_frame(fn: Any) -> bool:
    """Returns whether a call of the function runs its code at once; False for a generator or coroutine function."""
    return isinstance(fn, types.FunctionType) and not fn.__code__.co_flags & _NO_FRAME
