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


def find_state(fn: Callable[..., Any], ran: list[nn.Module]) -> State:
    """The state that a call of `fn` depended on.

    Args:
        fn: The function.
        ran: Modules whose forward ran in the call, however the function reached them.
    """
    cells = tuple(closure_cells(fn))
    roots = [*ran, *bound_module(fn), *(content for _, content in cells if isinstance(content, nn.Module))]
    modules: dict[int, nn.Module] = {}
    for root in roots:
        for module in root.modules():
            modules.setdefault(id(module), module)
    slots, hooks = [], []
    for module in modules.values():
        for kind in ("_parameters", "_buffers", "_modules"):
            slots += [(module, kind, name, held) for name, held in getattr(module, kind).items()]
        for kind in ("_forward_hooks", "_forward_pre_hooks"):
            hooks.append((module, kind, tuple(getattr(module, kind).values())))
    return State(
        inference=torch.is_inference_mode_enabled(),
        modules=tuple((module, module.training) for module in modules.values()),
        slots=tuple(slots),
        hooks=tuple(hooks),
        cells=cells,
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


def bound_module(fn: Any) -> list[nn.Module]:
    """The module whose method a function is."""
    owner = getattr(fn.func if isinstance(fn, functools.partial) else fn, "__self__", None)
    return [owner] if isinstance(owner, nn.Module) else []
