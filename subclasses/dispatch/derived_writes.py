"""In-place and ``out=`` ops, by the callable of the functional op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from subclasses._torch import OpOverload, is_traceable_wrapper_subclass
from subclasses.autograd.above import copied
from subclasses.autograd.calling import in_rule
from subclasses.dispatch.mapping import raise_writes_plain
from subclasses.op_schemas.aliasing import write_into, write_plain
from subclasses.op_schemas.schema import op_facts
from subclasses.rules.registry import find_op_rule
from subclasses.rules.results import copying_by

aten = torch.ops.aten


def write_result(cls: Any, op: OpOverload, run: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the callable of an in-place or ``out=`` op, which writes the result of its functional counterpart."""
    facts, ruled = op_facts(op), find_op_rule(cls, aten.copy_.default)
    # A rule for copy_ defines how every derived op writes to the class.
    write = write_into if ruled is None else copying_by(cls, ruled)
    # An in-place op names its target as its functional counterpart does; an out= op has additional parameters.
    out = [facts.arguments[i].name for i in facts.written if facts.arguments[i].keyword]

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        targets = [kwargs.pop(n) for n in out] or [args[i] for i in facts.written]
        if in_rule() and cls._runs_above:  # which may have saved what is written to
            args = tuple([copied(t) if any(t is x for x in targets) else t for t in args])
        value = run(*args, **kwargs)
        if value is NotImplemented:
            return value
        for target, one in zip(targets, value if len(targets) > 1 else [value], strict=True):
            if isinstance(target, cls):
                write(op, target, one)
            elif not any(map(is_traceable_wrapper_subclass, (target, one))):
                write_plain(op, target, one, is_out=bool(out))
            else:
                raise_writes_plain(op, cls)
        return None if not facts.returns else targets[0] if len(targets) == 1 else tuple(targets)

    return wrapped
