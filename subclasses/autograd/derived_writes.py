"""Writes to values by rules, and their derivatives.

Where autograd records, the rule runs on an open wrapper around copies, and what it made is written to the value. The
copies are differentiable functions of the operands then. For a view they are views of copies of its base::

    base  --copy-->  its inner tensors  --the same view, a copy-->  open wrapper  --the rule-->  what it wrote
                            ^                                                                      |
                            ---------------------------- written there, too ----------------------

so that the base, and each other view of it, has the derivative of what was written.

An assignment to a field is such a write, to one inner tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import (
    DisableTorchFunctionSubclass,
    apply_function,
    autograd_enabled,
    is_recording,
    storage_key,
)
from subclasses._torch_tracing import set_version_counters
from subclasses.autograd.construct import is_differentiable, unwrap
from subclasses.autograd.history import History, is_kept, keep_history, open_value, opened, version_of
from subclasses.autograd.history_errors import assigned_view_error
from subclasses.autograd.nodes import MadeByRule, Parts
from subclasses.autograd.rule_runs import read_before_write, recorded_rule
from subclasses.errors import DispatchError
from subclasses.layout import HISTORY
from subclasses.spec.values import PLAIN, map_tensors, tensors_in, with_inners

Call = Callable[..., Any]


def run_derived(
    run: Call, target: Any, args: Any, kwargs: Any, *, overwrites: bool = False
) -> tuple[Any, Callable[[Any], None]]:
    """Runs a rule for an op that writes to a value; returns the value to write and what attaches its history.

    Args:
        run: the rule, of the op itself or of the op that writes nothing.
        target: the value.
        args: the arguments of the op.
        kwargs: its keyword arguments.
        overwrites: whether the result does not depend on what is there.
    """
    if not (torch.is_grad_enabled() and is_kept(tensors_in(args, kwargs), by_rule=True)):
        return run(*args, **kwargs), _keep_nothing
    copies = _Copies()

    def open_one(t: Any) -> Any:
        if t is not target:
            return open_value(t)
        return copies.of(t, overwrites)

    with autograd_enabled(), recorded_rule():
        found = run(*map_tensors(args, open_one), **map_tensors(kwargs, open_one))
        if copies.note_written(target, found):
            found = run(*map_tensors(args, open_one), **map_tensors(kwargs, open_one))
        if not hasattr(type(found), "__spec__"):
            return found.detach() if isinstance(found, Tensor) else found, _keep_nothing
        parts = dict(zip(names := type(found).__spec__.attributes, unwrap(found, names), strict=True))
        copies.write(parts)
    value = with_inners(found, [copies.written_by(target, n, t) for n, t in parts.items()])
    is_known = not any(map(_is_written_unseen, [*parts.values(), *copies.whole.values()]))

    def attach(target: Any) -> None:
        _attach(target, parts if is_known else {})
        if target._is_view():
            _attach(target._base, copies.whole if is_known else {})

    return value, attach


def _attach(x: Any, parts: dict[str, Any]) -> None:
    """Attaches the inner tensors after a write; none of which is known where none has a derivative."""
    is_known = any(t is not None and t.requires_grad for t in parts.values())
    # The version after the op, which PyTorch counts when it is done.
    parts = parts if is_known else {}
    keep_history(x, History(x, None, parts, version=x._version + 1, is_view=is_known and x._is_view()))


@dataclass(slots=True)
class _Copies:
    """Copies of the inner tensors of a value, to which a rule writes.

    Attributes:
        made: the copies, by attribute.
        views: for a view, its inner tensors as views of copies of those of its base.
        whole: these copies, by attribute; empty if they are not known.
        written: those without a derivative, such as a mask, that the rule makes anew; what its ops save of them is not
            what is written to.
    """

    made: dict[str, Tensor] = field(default_factory=dict)
    views: dict[str, Tensor] = field(default_factory=dict)
    whole: dict[str, Any] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)

    def note_written(self, x: Any, found: Any) -> bool:
        """Notes what a rule makes anew; returns whether there is such a thing, and the rule is to run on copies."""
        if type(found) is not type(x) or not hasattr(type(x), "__spec__"):
            return False
        for name in type(x).__spec__.attributes:
            old, new = x.__dict__[name], found.__dict__[name]
            if (
                old is not None
                and new is not old
                and not is_differentiable(old)
                and not holds_already(old, new)
            ):
                self.written.add(name)
        return bool(self.written)

    def of(self, x: Any, overwrites: bool) -> Any:
        """Returns an open wrapper around copies, which a rule's ops may save: what they are copies of is written to."""
        if not hasattr(type(x), "__spec__"):
            return x
        if x._is_view():
            self._view(x, x._base)
        names = type(x).__spec__.attributes
        source = {n: self.views.get(n, t) for n, t in x.__dict__.items()}
        if not (self.views or overwrites):
            with read_before_write():
                source = open_value(x).__dict__
        inners = {n: source.get(n) for n in names}
        self.made = {
            n: t.clone()
            for n, t in inners.items()
            if t is not None and (n in self.written or is_differentiable(t))
        }
        return opened(x, [*(inners | self.made).values()])

    def written_by(self, x: Any, name: str, part: Any) -> Any:
        """Returns what is to be written: what ``x`` holds, where the rule passes on the copy of it unchanged."""
        copy = None if name in self.views else self.made.get(name)
        if copy is not None and part is not None and copy._version == 0 and is_same_memory(copy, part):
            return x.__dict__[name]
        return part if part is None else part.detach()

    def _view(self, x: Any, base: Any) -> None:
        """Makes the view of copies of the base, if that view is one of each inner tensor in its place."""
        if type(base) is not type(x):
            return
        try:
            with read_before_write():
                held = open_value(base).__dict__
        except DispatchError:
            return  # what was written before has no derivative
        names = [n for n in type(x).__spec__.attributes if is_differentiable(held[n])]
        whole = {n: held[n].clone() for n in names}
        if all(_is_in_place(x.__dict__[n], base.__dict__[n], whole[n]) for n in names):
            self.whole = whole
            self.views = {n: _same_view(x.__dict__[n], base.__dict__[n], whole[n]) for n in names}

    def write(self, parts: dict[str, Any]) -> None:
        """Writes what a rule made to the copies of the base."""
        for name, view in self.views.items():
            view.copy_(parts[name])


def _is_in_place(view: Any, base: Any, copy: Any) -> bool:
    """Whether a tensor is a view of another, and a copy of that lies in memory as it does."""
    is_plain = not hasattr(type(view), "__spec__") and view.layout is torch.strided
    return (
        is_plain and storage_key(view) == storage_key(base) and tuple(copy.stride()) == tuple(base.stride())
    )


def _same_view(view: Any, base: Any, copy: Any) -> Tensor:
    return copy.as_strided(view.size(), view.stride(), view.storage_offset() - base.storage_offset())


def _is_written_unseen(part: Any) -> bool:
    """Whether an inner tensor is a copy to which a rule wrote where autograd does not record, as under no_grad()."""
    return part is not None and type(part.grad_fn).__name__ == "CloneBackward0" and version_of(part) > 0


def _keep_nothing(target: Any) -> None:
    pass


def holds_already(a: Tensor, b: Tensor) -> bool:
    """Whether writing one tensor to another of its size changes nothing.

    They are the same elements of the same memory, where a rule passes one on, or equal integers. A write to those
    would be an error in the backward of what saved them, as an index for example.
    """
    if a.device.type == "cpu" and not is_differentiable(a) and PLAIN.issuperset((a.__class__, b.__class__)):
        return a.dtype is b.dtype and torch.equal(a, b)
    return is_same_memory(a, b)


def is_same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one size are the same elements of the same memory."""
    return (
        storage_key(a) == storage_key(b)
        and (a.dtype, a.stride(), a.storage_offset()) == (b.dtype, b.stride(), b.storage_offset())
        and not (a.is_conj() or b.is_conj() or a.is_neg() or b.is_neg())
    )


# ---- assignments -------------------------------------------------------------------------------------------


class _Assigned(Parts):
    """A value after an assignment to a field: a function of what its other fields held before."""

    replaces_formula = True

    def pull_back(self, cotangent: Any) -> list[Any]:
        if hasattr(type(cotangent), "__spec__"):
            return super().pull_back(cotangent)
        # Absent, or plain: each inner tensor of a mapped class has it.
        return [cotangent for _ in self.sources]


def assign(x: Any, name: str, store: Callable[[], None]) -> None:
    """Assigns an inner tensor of a value: where gradients are on, an op that writes to it.

    Args:
        x: the value.
        name: the attribute of the inner tensor, which becomes independent of what made the value.
        store: makes the assignment.

    Raises:
        DispatchError: the value is a view, whose node is PyTorch's.
    """
    names, made = tuple(n for n in type(x).__spec__.attributes if n != name), None
    if not torch.is_grad_enabled():
        return store()
    with DisableTorchFunctionSubclass():
        if is_recording(x) and x.grad_fn is not None:
            if x._is_view():
                raise assigned_view_error(type(x))
            made = _Assigned(dict(zip(names, unwrap(x, names), strict=True)))
        store()
        if made is not None:
            x.__dict__.pop(HISTORY, None)
            apply_function(MadeByRule, x, made, *made.sources)  # counts the write
        elif not x.is_inference():
            set_version_counters((x,), (x._version + 1,))
