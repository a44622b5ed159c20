"""How ops with rules made a value, for derivatives by way of its inner tensors.

PyTorch derives an op by its own formula, which is about the tensors that values represent. What the rule for the op
computes is another function: from the inner tensors of the operands to those of the result. Where a program reads inner
tensors of the result, the rule runs again, above autograd and on open wrappers, and autograd derives that::

    operands ----- op, by PyTorch's formula ----> result             what is done with the result as a whole
    operands --unwrap--> rule, by its own ops --> inner tensors      what reads its inner tensors

A result refers to the call that made it until its inner tensors are read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import (
    DisableTorchFunctionSubclass,
    any_requires_grad,
    apply_function,
    autograd_enabled,
    current_transform,
    hooks_of,
)
from subclasses.autograd import construct
from subclasses.autograd.construct import is_differentiable, unwrap
from subclasses.autograd.history_errors import (
    NoDerivativeError,
    watched_view_error,
    written_error,
)
from subclasses.autograd.random_numbers import run_without_random_numbers
from subclasses.autograd.rule_runs import Read, in_recorded_rule, keep_readable, recorded_rule
from subclasses.errors import DispatchError, one_of
from subclasses.layout import HISTORY, OPEN
from subclasses.spec.values import map_tensors, tensors_in, with_inners

Call = Callable[..., Any]

# So many calls are kept in a row; the next one is derived at once, which keeps fewer Python objects.
_LONGEST = 200


class History:
    """The call that made a value, and from the first reading on its inner tensors as differentiable functions.

    Attributes:
        made: the call, its arguments, and the number of the result; None after the first reading.
        operands: the tensors of the arguments.
        versions: theirs and those of their inner tensors, when the op ran.
        own: those of the value and its inner tensors, when it was made.
        length: how many calls in a row are kept.
        is_view: whether the value is a view, which a write to either changes; its derivative is PyTorch's then, as that
            of a view without a rule is.
        parts: the inner tensors by attribute; None before the first reading, and empty if a rule wrote to the value in
            its own way, which has no derivative.
    """

    __slots__ = ("is_view", "length", "made", "operands", "own", "parts", "versions")

    def __init__(
        self,
        x: Any,
        made: tuple[Call, Any, Any, int | None] | None,
        parts: Any = None,
        *,
        operands: Sequence[Any] = (),
        version: int = 0,
        is_view: bool = False,
    ) -> None:
        self.made, self.parts, self.is_view, self.operands = made, parts, is_view, operands
        self.own, self.versions = _versions((x,), operands)
        self.own[0] = version
        self.length = 1 + max(map(_length, operands)) if made is not None else 0

    def read(self, x: Any, names: tuple[str, ...]) -> tuple[Tensor | None, ...]:
        """Returns inner tensors of the value, the differentiable ones as the rule computes them."""
        if self.is_view and _versions((x,))[0] != self.own:
            return construct.unwrap_by_formula(x, names)
        if self.is_view and is_watched(x):
            raise watched_view_error(type(x))
        if _versions((x,))[0] != self.own or self.parts == {}:
            raise written_error(type(x))
        if self.parts is None:
            _derive(x)
        held, parts = x.__dict__, self.parts or {}
        wanted = [n for n in names if is_differentiable(held[n])]
        found = (
            apply_function(Read, tuple([held[n] for n in wanted]), *[parts[n] for n in wanted])
            if wanted
            else ()
        )
        read = dict(zip(wanted, found, strict=True))
        return tuple([read.get(n, held[n]) for n in names])

    def derive(self, x: Any) -> None:
        """Runs the call again, on open wrappers.

        Raises:
            DispatchError: a tensor was written to since, or the rule's result does not depend on its operands.
        """
        made = self.made
        if made is None:
            return  # another thread was first
        run, args, kwargs, number = made
        if not self.is_view:
            check_unwritten(self, type(x))
        with torch.autocast(x.device.type, enabled=False):  # an op's arguments were cast before it ran
            found = run_again(type(x), run, _open(args), _open(kwargs))
        self.parts = rule_parts(found if number is None else found[number], type(x))
        self.made, self.operands, self.length = None, (), 0


def run_again(cls: type, run: Call, args: Any, kwargs: Any) -> Any:
    """Runs a call for its derivative; an error of the rule says so, for it did not come when the op ran."""
    try:
        with recorded_rule():
            return run_without_random_numbers(cls, run, args, kwargs)
    except Exception as error:
        error.add_note(
            f"A rule of {cls.__name__} ran again, for its derivative, on operands whose inner tensors require grad. "
            f"It may write to an operand only where its op does, and to plain tensors that it makes, not by out=; "
            f"where it writes to a value of a class that it made, let it make another: `t = t + y` for `t += y`."
        )
        raise


def _versions(*groups: Sequence[Any]) -> list[list[int]]:
    """The versions of values and of their inner tensors: autograd counts writes to the former, rules to the latter."""
    with DisableTorchFunctionSubclass():
        return [[version_of(t) for x in tensors for t in _held(x)] for tensors in groups]


def _held(x: Any) -> list[Any]:
    spec = getattr(type(x), "__spec__", None)
    return [x] if spec is None else [x, *(t for n in spec.attributes if (t := x.__dict__[n]) is not None)]


def version_of(t: Tensor) -> int:
    """Returns how often a tensor was written to; 0 for one that does not count it."""
    return 0 if t.is_inference() else t._version


def check_unwritten(history: History, cls: Any) -> None:
    """Raises DispatchError if an operand was written to since the op ran."""
    if _versions(history.operands)[0] != history.versions:
        raise written_error(cls)


def is_watched(x: Any) -> bool:
    """Whether a tensor has a hook, or retains its gradient."""
    with DisableTorchFunctionSubclass():
        return bool(hooks_of(x)) or x.retains_grad


def _length(t: Tensor) -> int:
    history = t.__dict__.get(HISTORY)
    return history.length if isinstance(history, History) else 0


def _derive(x: Any) -> None:
    """Derives a value, after those that it was computed from; without recursion, since there may be many in a row."""
    stack = [x]
    while stack:
        history = stack[-1].__dict__[HISTORY]
        before = [t for t in history.operands if _is_underived(t)]
        if before:
            stack += before
        else:
            history.derive(stack.pop())


def _is_underived(t: Tensor) -> bool:
    history = t.__dict__.get(HISTORY)
    return isinstance(history, History) and history.parts is None


# ---- open wrappers -----------------------------------------------------------------------------------------


def _open(value: Any) -> Any:
    """Replaces each value of a declared class in the arguments by an open wrapper."""
    return map_tensors(value, open_value)


def replace_tensors(value: Any, new: dict[int, Any]) -> Any:
    """Replaces tensors in the arguments by those of a dict from the ids of the old ones."""
    return map_tensors(value, lambda t: new.get(id(t), t))


def open_value(value: Any) -> Any:
    """Replaces a value of a declared class by an open wrapper; returns any other tensor unchanged."""
    spec, history = getattr(type(value), "__spec__", None), value.__dict__.get(HISTORY)
    if spec is None or history is OPEN:
        return value
    names = spec.attributes
    return opened(value, unwrap(value, names) if history is None else history.read(value, names))


def opened(x: Any, inners: Sequence[Tensor | None]) -> Any:
    """Returns an open wrapper like a value, around inner tensors that are differentiable functions."""
    new = with_inners(x, inners)
    new.__dict__[HISTORY] = OPEN
    return new


def rule_parts(found: Any, cls: Any) -> dict[str, Any]:
    """The inner tensors of what a rule returned for open wrappers.

    Raises:
        DispatchError: it is no value of the class, or does not depend on the operands.
    """
    names = cls.__spec__.attributes
    if type(found) is not cls:
        raise DispatchError(
            f"a rule of {cls.__name__} returned {one_of(cls)}, and now, run again for its derivative, "
            f"{one_of(type(found))}. Its operands hold other tensors then, equal ones that require grad: let it not "
            f"ask `x.a is y.a`, nor for requires_grad"
        )
    parts = dict(zip(names, unwrap(found, names), strict=True))
    if not any(t is not None and t.requires_grad for t in parts.values()):
        raise NoDerivativeError(cls)
    return parts


# ---- keeping it --------------------------------------------------------------------------------------------


def with_history(
    run: Call, *, is_rule: bool, is_view: bool, is_random: bool = False, derives_plain: bool = False
) -> Call:
    """Wraps the plan of an op so that each value that it makes of others knows how.

    Args:
        run: the plan.
        is_rule: whether it is a rule of the author. Any other plan computes each inner tensor from that one inner
            tensor of its operands, as PyTorch's formula does with cotangents; it matters only behind a rule.
        is_view: whether the op returns views.
        is_random: whether the op draws random numbers, others each time it runs.
        derives_plain: whether plain results follow the rule too: values of the class represent no plain tensors, which
            PyTorch's formula is about.
    """
    is_grad_enabled = torch.is_grad_enabled

    def plan(*args: Any, **kwargs: Any) -> Any:
        if not is_grad_enabled():
            return run(*args, **kwargs)
        operands = tensors_in(args, kwargs)
        if not is_kept(operands, by_rule=is_rule or in_recorded_rule()):
            return run(*args, **kwargs)
        if any(t.__dict__.get(HISTORY) is OPEN for t in operands):  # a rule that runs again calls another one
            with autograd_enabled():
                found = run(*_open(args), **_open(kwargs))
                _check_reaches(found, operands)
                return _open(found)
        if is_random:
            return _derived_at_once(run, args, kwargs)
        if derives_plain:
            out = map_tensors(run(*args, **kwargs), lambda t: _not_held(t, operands))
        else:
            out = run(*args, **kwargs)
        for number, one in enumerate(out) if isinstance(out, list | tuple) else ((None, out),):
            if hasattr(type(one), "__spec__") or derives_plain:
                _note(one, (run, args, kwargs, number), operands, is_rule, is_view)
        return out

    return plan


class _Calling(threading.local):
    """The function without a rule that this thread calls on a value.

    Attributes:
        func: which.
        target: the value x of ``x[index] = value``, if that is what it calls.
        made: what rules made for the ops inside, plain tensors and values.
    """

    func: Callable[..., Any] | None = None
    target: Any = None
    made: list[Tensor] | None = None


CALLING = _Calling()


def _note(x: Any, made: Any, operands: Sequence[Any], is_rule: bool, is_view: bool) -> None:
    """Attaches to a result how it was made, unless it is an operand itself, or a tensor without derivative."""
    if not hasattr(type(x), "__spec__"):
        if isinstance(x, Tensor) and is_differentiable(x):
            setattr(x, HISTORY, History(x, made, operands=operands))
            if CALLING.made is not None:
                CALLING.made.append(x)
        return
    if any(x is t for t in operands) or (HISTORY in x.__dict__ and not is_rule):
        return
    version = operands[0]._version if is_view else 0  # PyTorch counts for a view and its base together
    keep_history(x, History(x, made, operands=operands, version=version, is_view=is_view))
    if in_recorded_rule():
        _read_at_once(x)
    elif CALLING.made is not None and not type(x)._traits.is_representation and not is_view:
        CALLING.made.append(x)


def _not_held(t: Tensor, operands: Sequence[Any]) -> Tensor:
    """Returns a tensor, or one over the same memory if a rule handed on what an operand holds."""
    if hasattr(type(t), "__spec__") or not any(t is held for x in operands for held in _held(x)[1:]):
        return t
    return torch.ops.aten.alias.default(t)


def _read_at_once(x: Any) -> None:
    """Lets a rule that runs for its derivative read inner tensors of what an op made of values in it."""
    try:
        with autograd_enabled():
            _derive(x)
        keep_readable(x, [x.__dict__[HISTORY].parts[n] for n in type(x).__spec__.attributes])
    except NoDerivativeError:  # such as a mask, or zeros like a value: there is no gradient to lead on
        del x.__dict__[HISTORY]


def _check_reaches(found: Any, operands: Sequence[Any]) -> None:
    """Raises DispatchError if a rule computes a plain tensor from a whole operand and from another tensor.

    PyTorch's formula takes the place of what autograd recorded inside: the operand's inner tensors would get nothing.
    """
    is_plain = isinstance(found, Tensor) and not hasattr(type(found), "__spec__")
    if is_plain and any(not hasattr(type(t), "__spec__") and t.requires_grad for t in operands):
        cls = next(type(t) for t in operands if t.__dict__.get(HISTORY) is OPEN)
        raise DispatchError(
            f"a rule of {cls.__name__} runs an op on a whole operand that is {one_of(cls)}, and the inner tensors of "
            f"that operand would get no gradient; compute with its fields, or with what its materialize() returns"
        )


def _derived_at_once(run: Call, args: Any, kwargs: Any) -> Any:
    """Runs a call where autograd records, on open wrappers, since it would compute something else the next time."""

    def closed(t: Any) -> Any:
        if not hasattr(type(t), "__spec__"):
            return t.detach()
        parts = dict(zip(names := type(t).__spec__.attributes, unwrap(t, names), strict=True))
        value = with_inners(t, [None if i is None else i.detach() for i in parts.values()])
        if any(i is not None and i.requires_grad for i in parts.values()):
            keep_history(value, History(value, None, parts))
        return value

    with autograd_enabled(), recorded_rule():
        return map_tensors(run(*_open(args), **_open(kwargs)), closed)


def keep_history(x: Any, history: History) -> None:
    """Attaches a history to a value; a long one is derived at once."""
    x.__dict__[HISTORY] = history
    if history.length > _LONGEST:
        with autograd_enabled():
            _derive(x)


def is_kept(operands: Sequence[Any], *, by_rule: bool) -> bool:
    """Whether autograd records an op on values, by a rule or behind one."""
    for t in operands:
        if HISTORY in t.__dict__:
            break
    else:
        if not (by_rule and any_requires_grad(*operands)):
            return False
    return current_transform() is None


# ---- cotangents --------------------------------------------------------------------------------------------


def by_inner_tensors(results: Sequence[Any], cotangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Replaces each result that has a history by its inner tensors, where its cotangent is one of its class."""
    roots: list[Any] = []
    given: list[Any] = []
    for x, cotangent in zip(results, cotangents, strict=True):
        history = x.__dict__.get(HISTORY)
        if history is None or not isinstance(cotangent, type(x)):
            roots.append(x)
            given.append(cotangent)
            continue
        names = type(x).__spec__.attributes
        for t, g in zip(history.read(x, names), unwrap(cotangent, names), strict=True):
            if t is not None and t.requires_grad:
                roots.append(t)
                given.append(g)
    return roots, given
