"""The function that is compared, the arguments of its calls, and the state that calls may change."""

from __future__ import annotations

import contextlib
import inspect
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from desugar import _torch as torch_private
from desugar.api import uncompiled
from desugar.compare.import_names import Call, TargetError, find_calls, find_target, inputs_beside, needed_by
from desugar.compare.meters import profile_call
from desugar.compare.outcome import Outcome, argument_names, copy_parts, leaves_of, record_outcome, tangent_of
from desugar.compare.records import Request
from desugar.user_code import is_library_file

SEED = 0
_RUN_LATER = ("generator", "coroutine", "async_generator")  # types of results whose code has not run


@dataclass(frozen=True)
class Subject:
    """A function to compare, with the arguments of its calls.

    Attributes:
        fn: The function or module.
        make_calls: Returns the arguments of all calls; each time, new tensors with the same values.
        train: Whether a call is a training step.
        no_grad: Whether calls run without gradients.
        modules: Modules that each call receives without a copy, by their names among the arguments.
    """

    fn: Any
    make_calls: Callable[[], list[Call]]
    train: bool = False
    no_grad: bool = False
    modules: Mapping[str, nn.Module] = field(default_factory=dict)

    def state(self) -> dict[str, Tensor]:
        """Returns the tensors besides arguments that a call may read or change, by their names in the user's code."""
        return dict([*_state_of(self.fn), *_tensors_of(self.modules)])

    def run(self, fn: Any, call: Call) -> Any:
        """Calls a compiled form of the function; in training the backward follows. Returns the result."""
        with torch.no_grad() if self.no_grad else contextlib.nullcontext():
            result = fn(*call[0], **call[1])
        if self.train:
            backward(result)
        return result

    def clear_gradients(self, call: Call) -> None:
        """Sets the gradients of earlier calls to None, as an optimizer does between steps."""
        for tensor in (*self.state().values(), *tensors_in(call)):
            if tensor.is_leaf:
                tensor.grad = None


def find_subject(request: Request) -> Subject:
    """Finds the function or module that a request names; calls a module class, or a function that makes a module.

    Raises:
        TargetError: The request names nothing that can be compared.
    """
    seed()
    module, target = find_target(request.target)
    name = request.target.rpartition(":")[2].rpartition(".")[2]
    made = make_module(target, has_inputs=bool(request.inputs or inputs_beside(module, name)))
    fn = _as_written(made, name)

    def make_calls() -> list[Call]:
        seed()
        return find_calls(module, fn, request.inputs, name)

    return Subject(fn, make_calls, request.train, request.no_grad)


def _as_written(target: Any, name: str) -> Any:
    """Returns the original of a compiled function or module, which eager mode runs."""
    target = uncompiled(target)
    if not isinstance(target, nn.Module):
        return torch_private.undisabled(target)
    target = getattr(target, "_orig_mod", target)
    if getattr(target, "_compiled_call_impl", None) is not None:
        raise TargetError(
            f"{name}.compile() was called in the file; leave that out, since eager mode is the judge"
        )
    return target


def make_module(target: Any, *, has_inputs: bool) -> Any:
    """Returns the module that a class or factory makes; any other object unchanged."""
    is_class = isinstance(target, type) and issubclass(target, nn.Module)
    takes_nothing = inspect.isfunction(target) and not inspect.signature(target).parameters
    if not is_class and not (takes_nothing and has_inputs):
        return target
    if needed := needed_by(target):
        raise TargetError(
            f"{target.__name__} is made with {', '.join(needed)}: name a function that takes nothing and returns "
            "the module, or a module that is there already"
        )
    return target()


def seed(number: int = SEED) -> None:
    """Seeds the generators of torch, Python and, where it is imported, numpy."""
    torch.manual_seed(number)
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)


# --------------------------------------------------------------------------------------------- running a call


def tensors_in(value: Any) -> list[Tensor]:
    """Returns the tensors in nested containers."""
    return [leaf for _, leaf in leaves_of(value, "") if isinstance(leaf, Tensor)]


def backward(result: Any) -> None:
    """Backpropagates the sum of all float results: each gets a gradient of ones.

    Raises:
        TargetError: No result requires grad.
    """
    results = [tensor for tensor in tensors_in(result) if tensor.requires_grad]
    if not results:
        raise TargetError(
            "no result requires grad, so there is nothing to train: leave --train out, or make an argument or a "
            "parameter require grad"
        )
    torch.autograd.backward(results, [tangent_of(tensor) for tensor in results])


def observe_calls(subject: Subject, compiled: Any, number: int) -> list[Outcome]:
    """Makes calls with new arguments, and records the outcome of each; the state carries over between calls."""
    state = subject.state()
    before = copy_parts(state)
    outcomes = []
    for n in range(number):
        calls = subject.make_calls()
        call = calls[n % len(calls)]
        subject.clear_gradients(call)
        seed(SEED + 1 + n)
        result = subject.run(compiled, call)
        names = argument_names(subject.fn, *call)
        outcomes.append(record_outcome(result, names, subject.state(), before))
    return outcomes


def check_has_run(outcomes: list[Outcome]) -> None:
    """Raises for calls whose code has not run when they return, since their results cannot be compared.

    Raises:
        TargetError: A result is a generator or a coroutine.
    """
    for outcome in outcomes:
        for path, entry in outcome["entries"].items():
            if entry["kind"] in _RUN_LATER:
                raise TargetError(
                    f"not compared: {path} is of type {entry['kind']}, whose code has not run when the call returns; "
                    "name a function that iterates or awaits, and returns the values"
                )


def make_step(subject: Subject, compiled: Any, call: Call) -> Callable[[], Any]:
    """Returns a function that makes a warm call; a training step first sets the gradients to None."""
    if not subject.train and not subject.no_grad:
        return partial(compiled, *call[0], **call[1])

    def step() -> Any:
        if subject.train:
            subject.clear_gradients(call)
        return subject.run(compiled, call)

    return step


def look(subject: Subject, compiled: Any, call: Call) -> tuple[int, float | None]:
    """Returns the peak of the memory that a warm call allocates, and the seconds in plain graphs of this library."""
    for _ in range(2):  # the first profile of a program gives its graphs names
        subject.clear_gradients(call)
        profiled = profile_call(partial(subject.run, compiled, call))
    return profiled


# ------------------------------------------------------------------------------------------------------ state


def _state_of(fn: Any) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a module, or of the closure, the globals and the bound object of a function."""
    if isinstance(fn, nn.Module):
        yield from _tensors_of({"self": fn})
        return
    if inspect.ismethod(fn):
        owner = fn.__self__
        parts = {f"self.{name}": part for name, part in getattr(owner, "__dict__", {}).items()}
        yield from _tensors_of({"self": owner} if isinstance(owner, nn.Module) else parts)
        fn = fn.__func__
    if inspect.isfunction(fn) and not is_library_file(fn.__code__.co_filename):
        with contextlib.suppress(ValueError):  # a variable that it closes over has no value yet
            closure_vars = inspect.getclosurevars(fn)
            yield from _tensors_of({**closure_vars.nonlocals, **closure_vars.globals})


def _tensors_of(named: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors among named objects, and the parameters and buffers of modules among them."""
    for name, part in named.items():
        if isinstance(part, Tensor):
            yield name, part
        elif isinstance(part, nn.Module):
            tensors = (*part.named_parameters(), *part.named_buffers())
            yield from ((f"{name}.{path}", tensor) for path, tensor in tensors)
