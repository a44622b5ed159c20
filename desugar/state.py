"""What a program depends on besides its arguments: modules, their slots, closure cells."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from desugar.modes import function_modes
from desugar.signature import State


def find_state(fn: Callable[..., Any], ran: list[nn.Module]) -> State:
    """The state that a call of `fn` depended on.

    Args:
        fn: The function.
        ran: Modules whose forward ran in the call, however the function reached them.
    """
    cells = tuple(closure_cells(fn))
    roots = [*ran, *(content for _, content in cells if isinstance(content, nn.Module))]
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


def closure_cells(fn: Callable[..., Any]) -> Iterator[tuple[Any, Any]]:
    """Closure cells of a function whose content is a tensor, a module, a number, a string or None."""
    function = getattr(fn, "__func__", fn)
    for cell in getattr(function, "__closure__", None) or ():
        try:
            content = cell.cell_contents
        except ValueError:  # not filled yet
            continue
        if content is None or isinstance(content, (Tensor, nn.Module, bool, int, float, str)):
            yield cell, content
