"""`desugar.compile` and `desugar.trace`: one program per signature, compiled when it is first met."""

from __future__ import annotations

import copy
import functools
import logging
import operator
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from desugar import _torch as private
from desugar.artifacts import recorded
from desugar.compilers import Backend, choose_backend
from desugar.dynamic import History
from desugar.errors import StateKept
from desugar.files import forget_texts, forget_with, graph_texts
from desugar.inputs import DynamicPolicy
from desugar.misses import find_miss
from desugar.modes import is_traced_by_others
from desugar.profiling import call_named, is_to_be_named
from desugar.program import Program, Request, build_program
from desugar.signature import MISS
from desugar.state import find_state

log = logging.getLogger("desugar")
MAX_PROGRAMS = 64

# Each call asks these; a name of this module is found faster than one of another.
num_dispatch_modes, peek_interpreter_stack = private.num_dispatch_modes, private.peek_interpreter_stack
forward_ad, profiler = private.forward_ad, private.profiler

# -------------------------------------------------------------------------------------------- the public API


def trace(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Program:
    """Desugars one call of a function, without running it and without a compiler.

    Args:
        fn: A function or module over tensors and tensor subclasses.
        *args: The call's arguments; they are not changed.
        **kwargs: Those by name.

    Returns:
        The program: `.forward`, `.backward`, `.joint` are graphs over plain tensors.

    Raises:
        DesugarError: The function cannot be desugared.
    """
    state = functools.partial(find_state, fn)
    backend = choose_backend("eager")
    again = functools.partial(compile_again, backend=backend)
    with recorded(fn, "traced", args, kwargs):
        return build_forgetting(Request(fn, args, kwargs, backend, DynamicPolicy(), state, again))


def compile(
    fn: Any = None,
    *,
    backend: str | Callable[..., Any] = "inductor",
    dynamic: bool | None = None,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Compiles a function over tensor subclasses down to plain tensors.

    Args:
        fn: A function, or an `nn.Module`, which gives a module that shares its parameters and state. Left out, the
            result is a decorator.
        backend: "inductor", "eager" (runs the plain graphs as they are) or `(gm, inputs) -> callable`.
        dynamic: True: every size of the arguments is symbolic; False: none is; None: those that changed.
        mode: As for `torch.compile`, with Inductor.
        options: As for `torch.compile`, with Inductor.

    Returns:
        A callable like `fn` with `.programs`, one `Program` per signature met so far.

    Raises:
        ValueError: For an unknown backend, or `mode` or `options` with a backend that takes none.
        TypeError: If `fn` cannot be called.
    """
    choice = {"backend": backend, "dynamic": dynamic, "mode": mode, "options": options}
    compile_with = _Compile(choose_backend(backend, mode, options), dynamic, choice)
    return compile_with if fn is None else compile_with(fn)


@dataclass(frozen=True, slots=True)
class _Compile:
    """`compile` with its options, `choice` as the user wrote them."""

    backend: Backend
    dynamic: bool | None
    choice: dict[str, Any]

    def __reduce__(self) -> Any:
        return functools.partial(compile, **self.choice), ()

    def __call__(self, fn: Any) -> Any:
        if not callable(fn):
            raise TypeError(
                f"expected a function or nn.Module, got {type(fn).__name__}; pass what is to be called"
            )
        programs = ProgramCache(fn, self.backend, self.dynamic)
        programs.compile_with = self
        return compiled_module(fn, programs) if isinstance(fn, nn.Module) else CompiledFunction(fn, programs)


class CompiledFunction:
    """A function whose calls run compiled programs."""

    def __init__(self, fn: Callable[..., Any], cache: ProgramCache) -> None:
        functools.update_wrapper(self, fn)
        self._cache = cache

    @property
    def programs(self) -> list[Program]:
        """The programs compiled so far, the most recently used first."""
        return list(self._cache.programs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function: runs the program for this signature, compiled now if there is none yet."""
        # `ProgramCache.call` with the calls inside written out: what they cost is a tenth of a small program.
        if (
            is_dynamo_compiling()
            or num_dispatch_modes()
            or forward_ad._current_level >= 0
            or peek_interpreter_stack() is not None
            or profiler._is_profiler_enabled
        ):
            return self._cache.call(args, kwargs)
        programs = self._cache.programs
        result = programs[0].run(args, kwargs) if programs else MISS
        return result if result is not MISS else self._cache.run(args, kwargs, tried=1)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledFunction:
        """A compiled function without programs, of a copy of the function (itself, unless it is bound to an object)."""
        return self._cache.compile_with(copy.deepcopy(self._cache.fn, memo))

    def __reduce__(self) -> str | tuple[Any, ...]:
        """By name where the name leads here, as for any function; else the function and how it is compiled."""
        if _found_by_name(self):
            return self.__qualname__  # type: ignore[attr-defined]
        return self._cache.compile_with, (self._cache.fn,)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __repr__(self) -> str:
        return (
            f"desugar.compile({getattr(self, '__qualname__', self._cache.fn)}, programs={len(self.programs)})"
        )


def _found_by_name(compiled: CompiledFunction) -> bool:
    names = getattr(compiled, "__module__", None), getattr(compiled, "__qualname__", None)
    if not all(isinstance(name, str) for name in names):
        return False
    try:
        return operator.attrgetter(names[1])(sys.modules[names[0]]) is compiled  # type: ignore[index]
    except (AttributeError, KeyError):
        return False


def compiled_module(module: nn.Module, cache: ProgramCache) -> nn.Module:
    """A module with the state of `module` (the same `__dict__`) whose calls run compiled programs."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return cache.call(args, kwargs)

    def copied(self: nn.Module, memo: dict[int, Any]) -> Any:
        return cache.compile_with(copy.deepcopy(module, memo))

    def rebuild(self: nn.Module, protocol: Any) -> Any:
        return cache.compile_with, (module,)

    body = {
        "__call__": call,
        "__deepcopy__": copied,
        "__reduce_ex__": rebuild,
        "programs": property(lambda self: list(cache.programs)),
        "_desugar_cache": cache,
        "__module__": type(module).__module__,
        "__doc__": type(module).__doc__,
    }
    cls = type(f"Compiled{type(module).__name__}", (type(module),), body)
    compiled = object.__new__(cls)
    object.__setattr__(compiled, "__dict__", module.__dict__)
    return compiled


def compiled_from(fn: Any) -> ProgramCache | None:
    """The programs of what `compile` returned; None for anything else."""
    found = fn._cache if isinstance(fn, CompiledFunction) else getattr(type(fn), "_desugar_cache", None)
    return found if isinstance(found, ProgramCache) else None


def compile_again(fn: Callable[..., Any], *, backend: Backend) -> CompiledFunction:
    """Compiles a function that computes gradients, with the backend of the function it differentiates."""
    return CompiledFunction(fn, ProgramCache(fn, backend, None))


# ---------------------------------------------------------------------------------------------- the programs


@private.disable_dynamo  # a frame of Dynamo's may be running, which would trace the compiler
def build_forgetting(request: Request) -> Program:
    """A program, with which the text of its graphs leaves linecache."""
    known = graph_texts()
    try:
        with private.compile_lock, private.use_lazy_graph_module(True):
            program = build_program(request)
    except BaseException:
        forget_texts(graph_texts() - known)
        raise
    forget_with(program, graph_texts() - known)
    return program


class ProgramCache:
    """The programs of one function, tried in order of recent use."""

    def __init__(self, fn: Callable[..., Any], backend: Backend, dynamic: bool | None) -> None:
        self.fn, self.backend = fn, backend
        self.name = getattr(fn, "__qualname__", type(fn).__name__)
        self.programs: tuple[Program, ...] = ()
        self.history = History(dynamic)
        self._lock = threading.RLock()
        self.compile_with: Callable[[Any], Any] = functools.partial(compile_again, backend=backend)
        self._warned = self._state_was_kept = False

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the program that fits the call, or the function itself where others look at what it does."""
        if is_traced_by_others():
            return self.fn(*args, **kwargs)
        if profiler._is_profiler_enabled and is_to_be_named():
            return call_named(self.call, self.name, self.programs, args, kwargs)
        return self.run(args, kwargs)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], tried: int = 0) -> Any:
        """Runs the first program that fits the call; compiles one if none does. The first `tried` ones do not."""
        for program in self.programs[tried:]:
            result = program.run(args, kwargs)
            if result is not MISS:
                if program is not self.programs[0]:
                    self._move_to_front(program)
                return result
        return self._compile_and_run(args, kwargs)

    def _move_to_front(self, program: Program) -> None:
        with self._lock:
            self.programs = (program, *(other for other in self.programs if other is not program))

    def _compile_and_run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._lock:
            for program in self.programs:  # another thread may have compiled it meanwhile
                result = program.run(args, kwargs)
                if result is not MISS:
                    return result
            if len(self.programs) >= MAX_PROGRAMS:
                return self._run_eager(args, kwargs)
            try:
                program = self._compile(args, kwargs)
            except StateKept as error:
                if self._state_was_kept:
                    raise
                self._state_was_kept = True
                log.info("this call runs in eager mode: %s", error)
                return self.fn(*args, **kwargs)
            self._state_was_kept = False
        result = program.run(args, kwargs)
        if result is MISS:
            raise AssertionError(f"a fresh program does not fit its own call:\n{program.source}")
        return result

    def _compile(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
        policy, reason = self.history.observe(args, kwargs)
        if reason == "new signature" and self.programs:
            reason = f"new signature: {find_miss(self.programs[0], args, kwargs)}"
        log.info("compiling program %d of %s: %s", len(self.programs) + 1, self.name, reason)
        state = functools.partial(find_state, self.fn)
        again = functools.partial(compile_again, backend=self.backend)
        request = Request(self.fn, args, kwargs, self.backend, policy, state, again)
        with recorded(self.fn, reason, args, kwargs):
            program = build_forgetting(request)
        self.programs = (program, *self.programs)
        return program

    def _run_eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{self.fn!r} has {MAX_PROGRAMS} compiled programs; calls with new signatures run in eager mode. "
                'See the reasons with logging.getLogger("desugar").setLevel("INFO").',
                stacklevel=5,
            )
        return self.fn(*args, **kwargs)


__all__ = ["CompiledFunction", "ProgramCache", "compile", "torch", "trace"]
