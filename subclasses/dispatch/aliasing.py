"""View and in-place semantics, from an op's schema.

Below autograd a wrapper's op returns fresh wrappers. Where the schema says that a result is a view it shares
its argument's storage, so that AOTAutograd and version counters see the alias; where it says that an argument
is written, that very argument comes back. An op that does neither pays nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import OpOverload, return_and_correct_aliasing, set_storage_of
from subclasses.dispatch.schema import OpFacts, op_facts
from subclasses.errors import DispatchError


def with_semantics(op: OpOverload, run: Callable[..., Any]) -> Callable[..., Any]:
    """``run``, with what the schema of ``op`` says about views and writes applied to its result."""
    facts = op_facts(op)
    if facts.functional:
        return run
    if facts.changes_metadata:
        return lambda *args, **kwargs: return_and_correct_aliasing(op, args, kwargs, run(*args, **kwargs))
    correct = returns_written if facts.written else alias_views

    def plan(*args: Any, **kwargs: Any) -> Any:
        return correct(facts, args, kwargs, run(*args, **kwargs))

    return plan


def alias_views(facts: OpFacts, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Any:
    """Gives results the storage of the argument they are views of; a result of another class is a copy."""
    outs = out if len(facts.returns) > 1 else (out,)
    if out is NotImplemented:
        return out
    for i, j in facts.viewed:
        base = argument(facts, args, kwargs, i)
        for view in outs[j] if isinstance(outs[j], list | tuple) else (outs[j],):
            if type(view) is type(base) and view is not base:
                set_storage_of(view, base)
    return out


def returns_written(facts: OpFacts, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Any:
    """The arguments that were written, where the schema says that they come back."""
    if out is NotImplemented or not facts.returns:
        return out
    outs = out if len(facts.returns) > 1 else (out,)
    back = [
        o if i is None else argument(facts, args, kwargs, i)
        for i, o in zip(facts.returned, outs, strict=True)
    ]
    return back[0] if len(back) == 1 else tuple(back)


def argument(facts: OpFacts, args: Sequence[Any], kwargs: dict[str, Any], index: int) -> Any:
    """The argument at an index of the schema, however it was passed."""
    return args[index] if index < len(args) else kwargs.get(facts.arguments[index].name)


def with_normal_views(op: OpOverload, run: Callable[..., Any]) -> Callable[..., Any]:
    """``run``, such that in inference mode too a view of a normal tensor is normal and shares its version counter."""
    facts = op_facts(op)
    index = facts.viewed[0][0]

    def plan(*args: Any, **kwargs: Any) -> Any:
        if torch.is_inference_mode_enabled() and not argument(facts, args, kwargs, index).is_inference():
            with torch.inference_mode(False), torch.no_grad():
                return run(*args, **kwargs)
        return run(*args, **kwargs)

    return plan


# ---- writing -----------------------------------------------------------------------------------------------


def bump_versions(tensors: Sequence[Tensor | None]) -> None:
    """Raises version counters of inner tensors as eager does for the tensor that an op writes to.

    Below autograd nothing raises them, and a tensor that :meth:`unwrap` saved would change unnoticed.
    """
    for t in tensors:
        if t is not None and not t.is_inference():
            torch.autograd.graph.increment_version(t)


def follow_resize(written: Any, cls: Any) -> None:
    """An op with ``out=`` resizes what it writes to; the outside of a wrapper follows its inner tensors."""
    if isinstance(written, cls):
        spec = cls.__spec__
        values = [written.__dict__[n] for n in (*spec.inner_names, *(f.name for f in spec.dynamics))]
        new = cls._wrap(written._layout, *values)
        if new.shape != written.shape:
            # The setter of torch itself: it takes over size and stride, and nothing of the inner tensors.
            object.__setattr__(written, "data", new)


def write_into(op: OpOverload, target: Any, value: Any) -> None:
    """Copies a result into a wrapper, inner tensor by inner tensor.

    Raises:
        DispatchError: the result has another class, metadata or inner sizes, so that it does not fit.
    """
    cls = type(target)
    if type(value) is not cls or value._layout is not target._layout:
        raise DispatchError(
            f"{op}: cannot write {_shown(value)} into {_shown(target)}; use the functional op"
        )
    spec = cls.__spec__
    pairs = [(target.__dict__[n], value.__dict__[n]) for n in spec.inner_names]
    pairs = [(a, b) for a, b in pairs if a is not None and a is not b]
    if any(a.shape != b.shape for a, b in pairs):
        raise DispatchError(f"{op}: the result has inner tensors of other sizes than {_shown(target)}")
    for a, b in pairs:
        a.copy_(b)
    bump_versions([a for a, _ in pairs])


def _shown(x: Any) -> str:
    layout = x.__dict__.get("_layout") if isinstance(x, Tensor) else None
    return f"a {type(x).__name__}" + (f" with {layout}" if layout is not None else "")
