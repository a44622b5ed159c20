"""Calls that fit go straight to their program: Dynamo's guards, then Dynamo's code, without its frame hook.

`torch.compile` sets a hook that looks at each frame, finds the function's own, checks guards and runs the code that
Dynamo made of it. What that costs besides guards and code is most of a small call. So `desugar.compile` generates an
*entry*: a function with the parameters of the user's function, which checks the same guards in C++ and calls the same
code as a function. Whatever does not fit goes to the callable of `torch.compile`, which compiles if need be; then the
entry looks which code has been made, and takes what is the whole of its frame.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from desugar import _torch as private
from desugar.dynamo.frame_code import Admitted, Parameters, admit
from desugar.dynamo.module_guards import note_module_guards
from desugar.dynamo.profiling import call_named, is_to_be_named
from desugar.program import Program
from desugar.recording.graph_text import WRAPPER_FILE
from desugar.recording.listeners import Caller, called_by, note_left_out
from subclasses.codegen.build import build_functions
from subclasses.codegen.emitter import Emitter

log = logging.getLogger("desugar")

_ABSENT = type("absent", (), {"__repr__": lambda self: "..."})()  # an argument that was not given
_NO_FRAME = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR

# ------------------------------------------------------------------------------------------------------ entries


def raise_own(error: Any) -> NoReturn:
    """Raises what the pass raised, of what Dynamo made of it, for the user asked no backend; Inductor's errors stay."""
    if isinstance(error, private.InductorError):
        raise error
    raise error.inner_exception from error.inner_exception.__cause__


class Calls(Caller):
    """Calls of one function, which go to what `torch.compile` made of it.

    Attributes:
        compiled: What `torch.compile` made.
        backend: Dynamo's name for what compiles its graphs.
        programs: The programs met so far, the newest first.
        function: What is called.
    """

    def __init__(self, compiled: Callable[..., Any], backend: Any, what: Any) -> None:
        super().__init__(what, "first call")
        self.compiled, self.backend = compiled, backend
        self.name = getattr(what, "__qualname__", type(what).__name__)
        self.programs: list[Program] = []
        self._here = threading.local()
        self.as_it_is: Callable[..., Any] = private.undisabled(compiled)
        self.function: Any = self.compile_or_call
        self._owner: tuple[Any, ...] = ()  # what `function` takes besides the arguments

    def add(self, program: Program, why: str) -> None:
        """Notes a program that was compiled for a call of this function."""
        self.programs.insert(0, program)
        log.info("compiled program %d of %s: %s", len(self.programs), self.name, why)

    def compile_or_call(self, *args: Any, **kwargs: Any) -> Any:
        """A call that fits no code so far, or is made where others look at it: what `torch.compile` does with it."""
        if (
            private.forward_ad._current_level >= 0
        ):  # which Dynamo does not guard; a program knows of no tangents
            return self.as_it_is(*args, **kwargs)
        if private.profiler._is_profiler_enabled and is_to_be_named():
            return call_named(self._call_compiled, self.name, tuple(self.programs), args, kwargs)
        if self._has_waited(args, kwargs):
            return self._call_again(args, kwargs)
        return self._call_compiled(args, kwargs)

    def _has_waited(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Waits while another thread compiles, perhaps for such a call: Dynamo itself would compile again."""
        lock = private.compile_lock
        if getattr(self._here, "has_waited", False):
            return False
        if lock.acquire(blocking=False):
            lock.release()
            return False
        with lock:
            pass
        self._look_again(args, kwargs)
        return True

    def _call_again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._here.has_waited = True
        try:
            return self.function(*self._owner, *args, **kwargs)
        finally:
            self._here.has_waited = False

    def _call_compiled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        private.register_backend(self.backend)
        private.shared_nested_tensor()  # which PyTorch makes once: not of the fake tensors of a trace
        outer, self._here.call = getattr(self._here, "call", None), (args, kwargs)
        try:
            with called_by(self):
                return self.compiled(*args, **kwargs)
        except private.BackendCompilerFailed as error:
            raise_own(error)
        finally:
            self._here.call = outer
            self._look_again(args, kwargs)

    def _look_again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """After a call that may have compiled."""


class Entry(Calls):
    """Calls of a function that has a frame, by a generated entry.

    Attributes:
        fn: The user's function; its frame is what Dynamo compiles.
        bound: What its first parameters are bound to: the object of a method.
        is_method: The generated function has a first parameter more, which it does not look at.
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
        self._owner = (None,) if is_method else ()
        self.as_it_is = functools.partial(fn, *bound) if bound else fn
        self._forward = type(what).forward if is_method else None
        self._code, self._parameters = fn.__code__, Parameters.of(fn.__code__)
        self._admitted: list[Admitted] = []
        self._refused: list[Any] = []
        self._lock = threading.RLock()
        self.function = self._generate([])
        self._set_defaults()
        self.function._torchdynamo_inline = self._inlined()  # type: ignore[attr-defined]
        weakref.finalize(self, _forget_names, fn.__globals__, self._admitted).atexit = False

    def _call_compiled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.is_method and type(self.what).forward is not self._forward:
            self._forget_code()
        return super()._call_compiled(args, kwargs)

    def _forget_code(self) -> None:
        """The class of the module has another `forward`, which Dynamo does not guard: it is to compile other code."""
        with self._lock:
            self._forward = type(self.what).forward
            self._code = self.fn.__code__ = self.fn.__code__.replace()
            self._replace([])

    def _inlined(self) -> Callable[..., Any]:
        """What runs in place of the entry where Dynamo traces a call of it."""
        if not self.is_method:
            return functools.partial(self.fn, *self.bound) if self.bound else self.fn
        return call_as_it_is

    def variables(self, compile_id: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """The variables with which the frame of the call in progress begins; none of a frame that it calls."""
        if all(str(entry.compile_id) != compile_id for entry in private.cache_entries(self._code)):
            return {}, {}
        return self._frame(*self._here.call), self.fn.__globals__

    def _frame(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The variables with which the frame of a call begins."""
        bound = inspect.signature(self.fn, follow_wrapped=False).bind(*self.bound, *args, **kwargs)
        bound.apply_defaults()
        return {name: cell.cell_contents for name, cell in self._cells()} | bound.arguments

    def _cells(self) -> Iterator[tuple[str, Any]]:
        """The variables of functions around this one that it uses."""
        return zip(self.fn.__code__.co_freevars, self.fn.__closure__ or (), strict=True)

    # ........................................................................................ what was compiled

    def _look_again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Takes code that Dynamo has made meanwhile, and drops what is no longer valid."""
        if private.eval_frame._stance.stance != "default" or self.fn.__code__ is not self._code:
            return
        with self._lock:
            known = {id(one.manager): one for one in self._admitted}
            found = []
            for cache_entry in private.cache_entries(self._code):
                manager = cache_entry.guard_manager
                if cache_entry.backend != self.backend or getattr(manager, "cache_entry", None) is None:
                    continue
                one = known.get(id(manager)) or self._admit(cache_entry)
                if one is not None:
                    found.append(self._with_module_guards(one, args, kwargs))
            if {id(one) for one in found} != set(map(id, self._admitted)):
                self._replace(found)

    def _admit(self, cache_entry: Any) -> Admitted | None:
        manager = cache_entry.guard_manager
        if any(manager is refused for refused in self._refused):
            return None
        one = admit(cache_entry, self.fn, len(self._parameters.all))
        if one is None:
            self._refused.append(manager)
        elif all(
            one.program is not program for program in self.programs
        ):  # for another function of this code
            self.add(one.program, "compiled already, for another function with this code")
        return one

    def _with_module_guards(self, one: Admitted, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Admitted:
        """The same code, with the guards of a large module noted by what they read, if Dynamo's guards hold now."""
        if one.module is not None and (one.module.is_given_up or one.module.hold()):
            return one
        known = self._admitted if one.module is None else ()
        if any(one is other for other in known):  # it has no large module
            return one
        try:
            frame = self._frame(args, kwargs)
        except (TypeError, ValueError):  # the call does not fit the parameters; a cell is empty
            return one
        return dataclasses.replace(
            one, module=note_module_guards(one.manager.root, frame, self._stays(), one.module)
        )

    def _stays(self) -> list[str]:
        """The variables of a frame that are the same in every call, as far as nobody assigns them."""
        return [*self._parameters.positional[: len(self.bound)], *self.fn.__code__.co_freevars]

    def _replace(self, found: list[Admitted]) -> None:
        """Gives the entry other code; a call in progress goes on with what it has."""
        kept = {one.graph_name for one in found}
        gone = [one for one in self._admitted if one.graph_name not in kept]
        self._admitted[:] = found
        made = self._generate(found)
        scope = self.function.__globals__
        stale = scope.keys() - made.__globals__.keys()
        scope.update(made.__globals__)
        self.function.__code__, self.function.__source__ = made.__code__, made.__source__  # type: ignore[attr-defined]
        for name in stale:
            del scope[name]
        self.programs[:] = [p for p in self.programs if all(p is not one.program for one in gone)]
        _forget_names(self.fn.__globals__, gone)

    # ........................................................................................ the generated text

    def _set_defaults(self) -> None:
        """Has the generated function tell which arguments were not given; their values are read at each call."""
        positional, keyword = self.fn.__defaults__ or (), self.fn.__kwdefaults__ or {}
        given = self._parameters.positional[len(self.bound) :]
        self.function.__defaults__ = (_ABSENT,) * min(len(positional), len(given)) or None
        self.function.__kwdefaults__ = dict.fromkeys(keyword, _ABSENT) or None

    def _generate(self, admitted: list[Admitted]) -> types.FunctionType:
        """The entry as text, built."""
        out, parameters, skip = Emitter(), self._parameters, len(self.bound)
        names = [*parameters.all, *self.fn.__code__.co_freevars]
        out.reserve("entry", *names)
        first = [out.fresh_name("self")] if self.is_method else []
        declared = ", ".join(filter(None, [*first, parameters.declaration(skip)]))
        out.writeline(f"def entry({declared}):")
        with out.indent():
            slow = (
                f"return {out.bind(self.compile_or_call, 'compile_or_call')}({parameters.forwarding(skip)})"
            )
            self._emit_defaults(out)
            if admitted:
                out.writeline(f"if {self._ordinary(out)}:")
                with out.indent():
                    self._emit_admitted(out, admitted, slow)
            out.writeline(slow)
        return build_functions(out.source, out.namespace, filename=WRAPPER_FILE, owner=self)["entry"]

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
            out.writeline(f"if {name} is {absent}:")
            with out.indent():
                out.writeline(f"{name} = {value}")

    def _ordinary(self, out: Emitter) -> str:
        """That nobody looks on, and nothing holds that Dynamo's guards do not look at."""
        conditions = [
            f"{out.bind(private.eval_frame, 'eval_frame')}._stance.stance == 'default'",
            f"{out.bind(private.frame_callback, 'frame_callback')}() is None",
            f"not {out.bind(private.num_dispatch_modes, 'num_dispatch_modes')}()",
            f"not {out.bind(private.profiler, 'profiler')}._is_profiler_enabled",
            f"{out.bind(private.forward_ad, 'forward_ad')}._current_level < 0",
            f"{out.bind(self.fn, 'fn')}.__code__ is {out.bind(self._code, 'code')}",
        ]
        if self.is_method:
            forward = out.bind(self._forward, "forward")
            conditions.append(f"{out.bind(type(self.what), 'module_type')}.forward is {forward}")
        return " and ".join(conditions)

    def _emit_admitted(self, out: Emitter, admitted: list[Admitted], slow: str) -> None:
        variables = dict(zip(self._parameters.positional, self._bound_names(out), strict=False))
        variables |= {name: name for name in self._parameters.all if name not in variables}
        contents = {name: f"{out.bind(cell, f'cell_{name}')}.cell_contents" for name, cell in self._cells()}
        frame = out.fresh_name("frame")
        display = ", ".join(f"{name!r}: {text}" for name, text in (variables | contents).items())
        if contents:
            out.writeline("try:")
            with out.indent():
                out.writeline(f"{frame} = {{{display}}}")
            out.writeline("except ValueError:  # a cell is empty")
            with out.indent():
                out.writeline(slow)
        else:
            out.writeline(f"{frame} = {{{display}}}")
        for one in admitted:
            number = one.graph_name.rpartition("_")[2]
            manager = out.bind(one.manager, f"guards_{number}")
            out.writeline(f"if {manager}.cache_entry is not None and {self._fits(out, one, frame, number)}:")
            with out.indent():
                call = out.bind(one.call, f"call_{number}")
                out.writeline(f"return {call}({', '.join(variables.values())})")

    def _fits(self, out: Emitter, one: Admitted, frame: str, number: str) -> str:
        """That the guards hold."""
        if one.module is None or one.module.is_given_up:
            return f"{out.bind(one.check, f'fits_{number}')}({frame})"
        fits = out.bind(one.module.rest.check, f"fits_but_module_{number}")
        module = out.bind(one.module.module, f"module_{number}")
        unchanged = out.bind(one.module.unchanged.holds, f"is_unchanged_{number}")
        note_left_out(
            out, f"guards of {one.module.name}, one by one: no dictionary that they read has changed"
        )
        return f"{frame}[{one.module.name!r}] is {module} and {fits}({frame}) and {unchanged}()"

    def _bound_names(self, out: Emitter) -> list[str]:
        return [out.bind(value, "bound") for value in self.bound]


def call_as_it_is(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A call of a compiled module as the module it was made of; it closes over nothing, for Dynamo traces it."""
    return super(type(self), self).__call__(*args, **kwargs)  # type: ignore[misc]


def _forget_names(scope: dict[str, Any], admitted: list[Admitted]) -> None:
    """Takes the names of programs out of a user's globals."""
    for one in admitted:
        scope.pop(one.graph_name, None)


def has_frame(fn: Any) -> bool:
    """Whether calling a function runs its code at once, as a generator or coroutine does not."""
    return isinstance(fn, types.FunctionType) and not fn.__code__.co_flags & _NO_FRAME
