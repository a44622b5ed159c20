"""The public functions `desugar.compile` and `desugar.trace`."""

from __future__ import annotations

import copy
import functools
import inspect
import operator
import sys
import types
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

from torch import nn

from desugar import _torch as torch_private
from desugar.backends.base import Backend
from desugar.backends.choose import check_options, choose_backend
from desugar.codegen.text import block
from desugar.dynamo import backend as dynamo
from desugar.dynamo.entry import CompiledCallable, EntryCallable, has_frame, raise_own
from desugar.dynamo.implied_guards import dynamo_context
from desugar.errors import DesugarError
from desugar.program import Program
from desugar.recording.listeners import CompilationOwner, compiling_for
from desugar.recording.user_names import are_simple
from subclasses.source_text.build import build_functions
from subclasses.source_text.emitter import Emitter

P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M", bound=nn.Module)

# -------------------------------------------------------------------------------------------- the public API


@overload
def compile(
    fn: M,
    *,
    backend: str | Callable[..., Any] = ...,
    fullgraph: bool = ...,
    dynamic: bool | None = ...,
    mode: str | None = ...,
    options: Mapping[str, Any] | None = ...,
    strict: bool = ...,
) -> M: ...


@overload
def compile(
    fn: Callable[P, R],
    *,
    backend: str | Callable[..., Any] = ...,
    fullgraph: bool = ...,
    dynamic: bool | None = ...,
    mode: str | None = ...,
    options: Mapping[str, Any] | None = ...,
    strict: bool = ...,
) -> CompiledFunction[P, R]: ...


@overload
def compile(
    fn: None = None,
    *,
    backend: str | Callable[..., Any] = ...,
    fullgraph: bool = ...,
    dynamic: bool | None = ...,
    mode: str | None = ...,
    options: Mapping[str, Any] | None = ...,
    strict: bool = ...,
) -> Callable[[Callable[P, R]], CompiledFunction[P, R]]: ...


def compile(  # noqa: PLR0913 - the options of `torch.compile`
    fn: Any = None,
    *,
    backend: str | Callable[..., Any] = "inductor",
    fullgraph: bool = False,
    dynamic: bool | None = None,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    strict: bool = False,
) -> Any:
    """Compiles a function over tensor subclasses to programs over plain tensors, with the semantics of `torch.compile`.

    Dynamo captures the function and guards the values that it read. A call whose guards hold runs its program directly.

    Args:
        fn: A function, a method or an `nn.Module`. Without it, the result is a decorator.
        backend: "inductor", "eager" (runs the plain graphs without a compiler) or `(gm, inputs) -> callable`.
        fullgraph: Whether a graph break is an error.
        dynamic: Which sizes are symbolic: all, from the first call on (True), none (False), those that changed (None).
        mode: As for `torch.compile`, with Inductor.
        options: As for `torch.compile`, with Inductor.
        strict: Whether a graph that desugaring does not support raises a `DesugarError` instead of going to PyTorch's
            AOTAutograd. The environment variable `DESUGAR_STRICT=1` sets it for every call.

    Returns:
        A callable like `fn` with `.programs`, the list of the programs compiled so far, the newest first. For an
        `nn.Module`, the callable is a module that shares the parameters and the state of `fn`.

    Raises:
        ValueError: The backend is unknown, or it takes no `mode` or `options` and one is given.
        TypeError: `fn` is not callable, or an option has another type.
    """
    check_options(fullgraph, dynamic, options, strict)
    choose_backend(backend, mode, options)  # raises for a wrong backend, mode or options
    rest = {"backend": backend} if backend != "inductor" else {}
    rest |= {"strict": True} if strict else {}
    compile_with = _Compile(fullgraph, dynamic, mode, {**(options or {}), **rest})
    return compile_with if fn is None else compile_with(fn)


def trace(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Program:
    """Desugars one call of a function, without running it and without a compiler.

    Args:
        fn: A function or module over tensors and tensor subclasses.
        *args: The positional arguments of the call; they are not changed.
        **kwargs: The keyword arguments of the call; they are not changed.

    Returns:
        The program; its `.forward`, `.backward` and `.joint` are graphs over plain tensors.

    Raises:
        DesugarError: Desugaring does not support the function, or the function has no tensor ops.
        torch._dynamo.exc.Unsupported: Dynamo cannot capture the function as one graph.
    """
    return capture(fn, args, kwargs, choose_backend("eager"))


# -------------------------------------------------------------------------------------------------- capturing


class _Captured(Exception):
    """Ends a call after its graph has been compiled; the argument is the program."""


def capture(  # noqa: PLR0913
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    backend: Backend,
    *,
    reason: str = "traced",
    dynamic: bool | None = None,
    compile_graph: Callable[[Any, list[Any], Any], Any] = dynamo.compile_graph,
) -> Program:
    """Captures one call as a whole graph and compiles the graph, without running the call; raises as :func:`trace`."""

    def stop(graph: Any, inputs: list[Any]) -> Callable[..., Any]:
        program = compile_graph(graph, inputs, backend)

        def run(*leaves: Any) -> Any:
            raise _Captured(program)

        return run

    target, bound = find_target(fn)
    if has_frame(target):
        target = with_own_code(target)
    try:
        with compiling_for(CompilationOwner(uncompiled(fn), reason)):
            dynamo_context(stop, True, dynamic)(target)(*bound, *args, **kwargs)
    except _Captured as captured:
        return captured.args[0]
    except torch_private.BackendCompilerFailed as error:
        raise_own(error)
    raise DesugarError(
        f"{getattr(fn, '__qualname__', type(fn).__name__)} computes nothing with tensors, so there is no graph",
        instead="pass a call that runs ops on its tensors",
    )


def with_own_code(fn: types.FunctionType) -> types.FunctionType:
    """Copies a function and its code object: Dynamo caches by code object, so it compiles the copy."""
    copied = types.FunctionType(
        fn.__code__.replace(), fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__
    )
    copied.__kwdefaults__ = fn.__kwdefaults__
    return copied


# --------------------------------------------------------------------------------------------------- functions


@dataclass(frozen=True, slots=True)
class _Compile:
    """`compile` with its options; `options` go to the Dynamo backend."""

    fullgraph: bool
    dynamic: bool | None
    mode: str | None
    options: dict[str, Any]

    def __call__(self, fn: Any) -> Any:
        if not callable(fn):
            raise TypeError(
                f"expected a function or nn.Module, got {type(fn).__name__}; pass what is to be called"
            )
        return compiled_module(fn, self) if isinstance(fn, nn.Module) else CompiledFunction(fn, self)

    def calls(self, what: Any, *, is_method: bool = False) -> CompiledCallable:
        """Returns the object that handles the calls of a function, method or module."""
        target, bound = find_target(what)
        backend = torch_private.TorchCompileWrapper("desugar", self.mode, self.options, self.dynamic)
        compiled = dynamo_context(backend, self.fullgraph, self.dynamic)(target)
        if has_frame(target) and torch_private.undisabled(compiled) is target:
            return EntryCallable(target, compiled, backend, what, bound=bound, is_method=is_method)
        return CompiledCallable(functools.partial(compiled, *bound) if bound else compiled, backend, what)


class CompiledFunction(functools.partial, Generic[P, R]):
    """A function whose calls run compiled programs.

    It is a `functools.partial` of the generated entry, which Python calls faster than any other callable object.
    """

    __wrapped__: Callable[P, R]
    _calls: CompiledCallable
    _compile_with: _Compile

    def __new__(cls, fn: Callable[P, R], compile_with: _Compile) -> CompiledFunction[P, R]:
        """Makes the compiled function of `fn`."""
        calls = compile_with.calls(fn)
        compiled = super().__new__(cls, calls.function)
        functools.update_wrapper(compiled, fn)
        compiled._calls, compiled._compile_with = calls, compile_with
        return compiled

    if TYPE_CHECKING:

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
            """Calls the function: runs the program whose guards hold, and compiles one if there is none."""
            ...

    @property
    def programs(self) -> list[Program]:
        """The programs compiled so far, the newest first."""
        return list(self._calls.programs)

    def __copy__(self) -> CompiledFunction[P, R]:
        return self._compile_with(self.__wrapped__)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledFunction[P, R]:
        """Returns a compiled deep copy, without programs; a function that is not bound to an object is not copied."""
        return self._compile_with(copy.deepcopy(self.__wrapped__, memo))

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Pickles by name if the name refers to this object, as for any function; else the function and its options."""
        if _is_found_by_name(self):
            return self.__qualname__  # type: ignore[attr-defined]
        return self._compile_with, (self.__wrapped__,)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        name = getattr(self, "__qualname__", self.__wrapped__)
        return f"desugar.compile({name}, programs={len(self.programs)})"


def _is_found_by_name(compiled: CompiledFunction) -> bool:
    try:
        return operator.attrgetter(compiled.__qualname__)(sys.modules[compiled.__module__]) is compiled  # type: ignore[attr-defined]
    except (AttributeError, KeyError, TypeError):  # it lacks a name, or the name is not a string
        return False


# ------------------------------------------------------------------------------------------------------ modules


def compiled_module(module: nn.Module, compile_with: _Compile) -> nn.Module:
    """Returns a module with the state of `module` (the same `__dict__`) whose calls run compiled programs."""
    module = module_behind(module)
    calls = compile_with.calls(module, is_method=True)
    body = {
        "__call__": calls.function,
        "__deepcopy__": lambda self, memo: compile_with(copy.deepcopy(module, memo)),
        "__reduce_ex__": lambda self, protocol: (compile_with, (module,)),
        "programs": property(lambda self: list(calls.programs)),
        "_desugar_calls": calls,
        "_desugar_module": module,
        "__module__": type(module).__module__,
        "__doc__": type(module).__doc__,
    }
    # Libraries read the name of a class: transformers writes it to `config.json`, and decides by it to shift labels.
    cls = type(type(module).__name__, (type(module),), body)
    compiled = object.__new__(cls)
    object.__setattr__(compiled, "__dict__", module.__dict__)
    torch_private.share_module_state(module, compiled)
    return compiled


def module_behind(module: nn.Module) -> nn.Module:
    """Returns the original module of a compiled module; any other module unchanged."""
    return getattr(type(module), "_desugar_module", module)


_makers: weakref.WeakKeyDictionary[type, dict[str, Callable[..., Any]]] = weakref.WeakKeyDictionary()


def call_of(module: nn.Module) -> types.FunctionType:
    """Returns a function that calls the module.

    The functions for modules of one class share a code object, and so Dynamo's code.
    """
    parameters = _simple_parameters(module)
    makers = _makers.setdefault(type(module), {})
    if parameters not in makers:
        makers[parameters] = build_maker(type(module).__name__, parameters, parameters)
    call = makers[parameters](module)
    call.__qualname__ = type(module).forward.__qualname__  # Python's error for a wrong argument names it
    return call


def _simple_parameters(module: nn.Module) -> str:
    """Returns the text of the parameters of a module's forward if they are simple, else `*args, **kwargs`."""
    forward = type(module).forward
    variadic = "*args, **kwargs"
    if "forward" in vars(module) or not isinstance(forward, types.FunctionType):
        return variadic
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    return ", ".join(p.name for p in parameters) if are_simple(parameters) else variadic


def build_maker(name: str, parameters: str, arguments: str) -> Callable[..., Any]:
    """Returns a function that makes, for an object, a function with these parameters that calls it."""
    out = Emitter()
    out.reserve(*(text.strip(" *") for text in parameters.split(",")))
    module = out.fresh_name("module")
    with block(out, f"def make({module}):"):
        with block(out, f"def call({parameters}):"):
            out.writeline(f"return {module}({arguments})")
        out.writeline("return call")
    return build_functions(out.source, out.namespace, filename=f"<call of {name}>")["make"]


# ---------------------------------------------------------------------------------------------------- inspection


def find_target(fn: Any) -> tuple[Any, tuple[Any, ...]]:
    """Returns the function whose frame Dynamo compiles, and the objects that its first parameters are bound to."""
    if isinstance(fn, CompiledFunction):
        return find_target(fn.__wrapped__)
    if isinstance(fn, nn.Module):
        return call_of(module_behind(fn)), ()
    if isinstance(fn, types.MethodType) and has_frame(fn.__func__):
        return fn.__func__, (fn.__self__,)
    return fn, ()


def uncompiled(fn: Any) -> Any:
    """Returns the original function or module of a result of `compile`; any other object unchanged."""
    if isinstance(fn, CompiledFunction):
        return fn.__wrapped__
    return module_behind(fn) if isinstance(fn, nn.Module) else fn


def calls_of(fn: Any) -> CompiledCallable | None:
    """Returns the object that handles the calls of a result of `compile`; None for anything else."""
    return fn._calls if isinstance(fn, CompiledFunction) else getattr(type(fn), "_desugar_calls", None)
