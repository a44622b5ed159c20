"""What a program depends on besides its arguments: modules, their slots, closure cells."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from desugar.modes import function_modes
from desugar.signature import State
from desugar.trees import flatten

_TABLES = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def find_state(fn: Callable[..., Any], leaves: list[Any], ran: list[nn.Module]) -> State:
    """The state that a call of `fn` depended on.

    Args:
        fn: The function.
        leaves: The argument leaves of the call.
        ran: Modules whose forward ran in the call, however the function reached them.
    """
    modules = {id(module): module for root in ran for module in root.modules()}
    modules |= {id(module): module for module in root_modules(fn, leaves)}
    slots, hooks = [], []
    for module in modules.values():
        is_script = isinstance(module, torch.jit.ScriptModule)  # which cannot be changed
        for kind in () if is_script else _TABLES:
            slots += [(module, kind, name, held) for name, held in getattr(module, kind).items()]
        for kind in _HOOKS:
            hooks.append((module, kind, tuple(getattr(module, kind).values())))
    return State(
        inference=torch.is_inference_mode_enabled(),
        modules=tuple((module, module.training) for module in modules.values()),
        slots=tuple(slots),
        hooks=tuple(hooks),
        cells=tuple(closure_cells(fn)),
        modes=function_modes(),
    )


def closure_cells(fn: Any, seen: set[int] | None = None) -> Iterator[tuple[Any, Any]]:
    """Closure cells with their contents: of a function, and of the functions that it holds in its cells."""
    seen = set() if seen is None else seen
    function = fn.func if isinstance(fn, functools.partial) else getattr(fn, "__func__", fn)
    if id(function) in seen:
        return
    seen.add(id(function))
    if isinstance(function, functools.partial | types.MethodType):
        yield from closure_cells(function, seen)
    for cell in getattr(function, "__closure__", None) or ():
        try:
            content = cell.cell_contents
        except ValueError:  # not filled yet
            continue
        yield cell, content
        if isinstance(content, types.FunctionType | types.MethodType | functools.partial):
            yield from closure_cells(content, seen)


def root_modules(fn: Any, leaves: list[Any]) -> list[nn.Module]:
    """Modules that a function holds or is called with, and theirs: its owner, what partials bind, cells, arguments."""
    held = [*_bound(fn), *(content for _, content in closure_cells(fn)), *leaves]
    roots = [module for module in held if isinstance(module, nn.Module)]
    return list({id(module): module for root in roots for module in root.modules()}.values())


def _bound(fn: Any) -> Iterator[Any]:
    """What calls of a function are made with besides their own arguments."""
    while isinstance(fn, functools.partial):
        bound: Any = (fn.args, fn.keywords)
        yield from flatten(bound)[0]
        fn = fn.func
    yield getattr(fn, "__self__", None)
    yield fn
