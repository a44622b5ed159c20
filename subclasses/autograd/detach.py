"""A fast ``detach``, which autograd calls for each gradient that it keeps, and optimizers for each Parameter.

:mod:`Resolution <subclasses.dispatch.resolution>` handles any op and any call in several steps. For a class whose
``detach`` detaches each inner tensor and does nothing else, this callable has the same result in one step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import VIEWS_KEY, graph_task, is_excluded, set_excluded, set_storage_of
from subclasses._torch_callers import owns_memory
from subclasses.autograd.calling import is_called_by_engine
from subclasses.op_schemas.aliasing import holds_plain
from subclasses.spec.values import with_inners

aten = torch.ops.aten


def in_one_step(cls: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the callable of ``detach`` for most values of a class; it calls ``run`` for others.

    Others are values with marks (a Parameter and its copies have one), values that hold values of other classes, and
    normal values in inference mode.
    """
    spec = cls.__spec__
    attributes, dynamics = spec.attributes, [f.name for f in spec.dynamics]
    unmarked = len(attributes) + len(dynamics) + 1  # and the layout
    detach, wrap, is_inference_mode = aten.detach.default, cls._wrap, torch.is_inference_mode_enabled

    def wrapped(x: Any) -> Any:
        stored = x.__dict__
        if len(stored) != unmarked or x.__class__ is not cls or is_inference_mode():
            return run(x)
        layout = stored["_layout"]
        if layout.nested:
            return run(x)
        is_gradient = graph_task() != -1
        shares = not is_gradient and holds_plain(x) and is_excluded(VIEWS_KEY)
        if shares:
            set_excluded(VIEWS_KEY, False)
        try:
            inners = [None if (t := stored[name]) is None else detach(t) for name in attributes]
        finally:
            if shares:
                set_excluded(VIEWS_KEY, True)
        out = wrap(layout, *inners, *[stored[name] for name in dynamics])
        set_storage_of(out, x)
        return own_gradients(x, out) if is_gradient else out

    return wrapped


def own_gradients(gradient: Any, detached: Any) -> Any:
    """Returns the gradient that autograd keeps as `.grad`, by `detach()`, with memory of its own, as for plain tensors.

    The gradients of two inner tensors, or of two values, may hold one tensor: a write to one gradient would write to
    the other. In a hook, `detach()` returns an alias of its operand.
    """
    stored, own = gradient.__dict__, {}
    for name in gradient._layout.present:
        t = stored[name]
        if t.__class__ is not Tensor or not (t.is_floating_point() or t.is_complex()):
            continue
        # Both values hold a tensor with that memory; this variable refers to the first tensor, too.
        if 0 in t.stride() or not owns_memory(t, references=2, tensors=2):
            if not is_called_by_engine():
                return detached
            own[name] = t.clone()
    if not own:
        return detached
    # The value shows the strides of the copies.
    out = with_inners(
        detached, [own.get(name, detached.__dict__[name]) for name in type(detached).__spec__.attributes]
    )
    set_storage_of(out, gradient)
    return out
