"""Oracles: each runs a case, observes results, memory or fields, and raises where two observations differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from subclasses._torch import disabled_torch_function_impl, make_wrapper_subclass
from subclasses.layout import RAW
from subclasses.rules.registry import all_rules
from subclasses.testing import derive
from subclasses.testing.calls import MORE_PAIRS, PAIRS, POINTWISE, VIEWS, Case, like
from subclasses.testing.cases import (
    PAIR,
    accepted,
    applicable,
    calls_of,
    few_of_each_rule,
    gradients_by,
    not_refused,
    plains_of,
    unreached,
)
from subclasses.testing.contexts import Setting, two
from subclasses.testing.errors import Broken, Skipped, check_that, skip_unless, succeeds, tried
from subclasses.testing.subject import (
    Subject,
    check_equal,
    check_stands_for,
    differs,
    is_differentiable,
    leaves,
    metadata,
    once,
    seed,
    snapshot,
    tried_alone,
)

# ---- results -----------------------------------------------------------------------------------------------


@torch.no_grad()
def by_reference(s: Subject, case: Case, setting: Setting, *, rounded: bool = False) -> None:
    """Compares with the results on the tensors that the operands represent.

    Under ``rounded``, it compares only where one of these results is ``bfloat16``.
    """
    with setting.mode():
        got, error = tried(lambda: setting.read(case.run(setting.operand())))
        if error is not None and not setting.words:
            raise error
        plains = setting.usual or (lambda: plains_of(s, setting.operand()))
        expected, failure = tried(lambda: [case.run(plain) for plain in plains()])
    if failure is not None and setting.words and not isinstance(failure, Skipped):
        return  # the value has another size
    if cause := error or failure:
        raise cause
    if rounded and torch.bfloat16 not in [getattr(leaf, "dtype", None) for leaf in leaves(expected)]:
        return
    try:
        check_stands_for(s, f"{case.name}{setting.words}", got, expected, rounded=rounded)
    except Broken as broken:
        if any(_defaults(s, setting.operand(), result) for result in leaves(got)):
            broken.fault = "metadata-default"
        raise


@torch.no_grad()
def by_eager(s: Subject, case: Case, setting: Setting, usual: str = "the usual call") -> None:
    """Compares with the usual call in eager mode."""
    known = s.usual if setting.usual is None else {}
    if case.run not in known:
        works, result = s.works(case.name, lambda: case.run((setting.usual or s.make)()))
        if not works:
            return
        known[case.run] = result
    with setting.mode():
        got = case.run(setting.operand())
    what = f"{case.name}{setting.words} is not what {usual} gives"
    check_equal(s, what, setting.read(got), setting.read(known[case.run]))


@torch.no_grad()
def unchanged(s: Subject, case: Case) -> None:
    """Raises where a call changes its operand."""
    x = s.make()
    before = snapshot(s, x) if s.traceable else x
    _, error = tried(case.run, x)
    if error is not None and "works" in case.marks:
        raise error
    check_equal(s, f"{case.name} changed x", x, before)


@once
def harmless(s: Subject) -> list[Case]:
    """The cases of each rule that leave their argument as it was, as far as a copy of it can be made."""
    return [case for case in few_of_each_rule(s) if succeeds(unchanged, s, case)]


# ---- two values --------------------------------------------------------------------------------------------


@once
def pair_cases(s: Subject) -> list[Case]:
    """The calls of two values that the class does not refuse and that the tensors that they represent take.

    Raises:
        Skipped: there is no second value, or no reference.
    """
    make = partial(two, s)
    return not_refused(s, applicable(s, PAIRS | MORE_PAIRS | calls_of(unreached(s), PAIR), make), make)


def mixed_metadata(s: Subject, case: Case, setting: Setting) -> None:
    """Compares an op on two values of different metadata.

    Raises:
        Skipped: no comparison can tell that the metadata of the result is right.
    """
    by_reference(s, case, setting)
    got, error = tried_alone(lambda: case.run(setting.operand()))
    words = setting.words.partition(" ")[2].partition(" ")[2]
    skip_unless(
        error is not None or not _is_unseen(s, setting.operand(), got),
        f"pass reference=, which distinguishes values {words} from others, as by numbers in one unit: both "
        f"represent the same so far, and {case.name} was not refused",
    )


def _is_unseen(s: Subject, pair: Sequence[Any], result: Any) -> bool:
    """Whether no comparison can show that a result's metadata, of one of two values or of none, is right."""
    one, other = map(metadata, pair) if s.declared and isinstance(result, Tensor) else ({}, {})
    changed = {name for name, value in one.items() if other[name] != value}
    if not changed or derive.reference_depends_on(s, pair[0], {name: other[name] for name in changed}):
        return False
    if not isinstance(result, s.cls):  # without materialize, a rule gave it
        return not s.has_materialize
    return any(all(metadata(result)[name] == of[name] for name in changed) for of in (one, other))


# ---- fields that the reference does not show ---------------------------------------------------------------


@torch.no_grad()
def kept_metadata(s: Subject, case: Case, setting: Setting) -> None:
    """Raises where a result has the default of a declared field, and the operand another value."""
    x = setting.operand()
    for result in leaves(case.run(setting.operand())):
        lost = _defaults(s, x, result)
        if lost and not derive.reference_depends_on(s, x, lost):
            shown = ", ".join(f"{n}={value!r}, not {getattr(x, n)!r}" for n, value in lost.items())
            raise Broken(f"{case.name} has the default {shown}", fault="metadata-default")


def _defaults(s: Subject, x: Any, result: Any) -> dict[str, Any]:
    """The declared fields in which a result has the default, and the operand another value."""
    is_own = s.declared and isinstance(x, s.cls) and isinstance(result, s.cls)
    fields = (*s.cls.__spec__.statics, *s.cls.__spec__.dynamics) if is_own else ()
    return {f.name: f.default for f in fields if getattr(result, f.name) == f.default != getattr(x, f.name)}


@torch.no_grad()
def kept_inners(s: Subject, case: Case) -> None:
    """Raises where a result lacks an optional inner tensor, or has other integers than results of other calls keep."""
    x = s.make().detach()
    s.needs("reference")
    for name, t in _lost(s, x, case.run(s.make())).items():
        keeper = _keepers(s).get(name)
        if (t is None or keeper) and not derive.reference_depends_on(s, x, {name: t}):
            others = f", which {keeper} keeps" if keeper else ""
            raise Broken(f"{case.name} {'loses' if t is None else 'changes'} {name}{others}")


@once
def pointwise(s: Subject) -> list[Case]:
    """The accepted calls on each entry of a value with labels, or with optional inner tensors."""
    has_more = s.declared and any(f.optional or is_label(t) for f, t in s.inner_fields(s.make().detach()))
    return [case for case in accepted(s) if case.name in POINTWISE and has_more]


def is_label(t: Tensor) -> bool:
    """Whether an inner tensor holds integers, which may name rows."""
    return not (is_differentiable(t) or t.dtype is torch.bool)


def _lost(s: Subject, x: Any, result: Any) -> dict[str, Any]:
    """The optional inner tensors that a result lacks, and the integer tensors in it that differ, by field."""
    if not isinstance(result, s.cls) or result.shape != x.shape:
        return {}
    pairs = [(f.name, t, s.inners(result).get(f.attribute)) for f, t in s.inner_fields(x)]
    return {name: got for name, t, got in pairs if got is None or (is_label(t) and differs(s, got, t))}


@once
def _keepers(s: Subject) -> dict[str, str]:
    """For each field, a pointwise call whose result keeps its inner tensor.

    A call that changes the inner tensor of such a field differs from the keeper, and may be wrong.
    """
    x = s.make().detach()
    results = {case.name: case.run(s.make()) for case in reversed(pointwise(s))}
    kept = {name: r for name, r in results.items() if isinstance(r, s.cls) and r.shape == x.shape}
    return {
        f.name: name for f, _ in s.inner_fields(x) for name, r in kept.items() if f.name not in _lost(s, x, r)
    }


@torch.no_grad()
def cached_inners(s: Subject, case: Case) -> None:
    """Raises where an optional inner tensor repeats the others, and an optimizer steps both."""
    fields = s.inner_fields(s.make().detach())
    for field in [field for field, t in fields if field.optional and is_differentiable(t)]:
        x = snapshot(s, s.make().detach())
        before, error = tried(_reads, s, case, x, field)
        step(s, x, field.attribute)
        check_that(
            error is not None or before or not tried(_reads, s, case, x, field)[0],
            f"{case.name} computes with {field.name}, which repeats other inner tensors and is stale after a step",
        )


def _reads(s: Subject, case: Case, x: Any, field: Any) -> bool:
    """Whether a call has another result without a field of its operand."""
    both = [case.run(y) for y in (s.of_fields(x, **{field.name: None}), x)]
    return differs(s, *([s.references(leaf, 1) for leaf in leaves(result)] for result in both))


# ---- after a write -----------------------------------------------------------------------------------------


def step(s: Subject, x: Any, *left: str) -> None:
    """Writes to the inner tensors as an optimizer's step does, except to the inner tensors that ``left`` names."""
    for name, t in s.floats(x).items() if isinstance(x, s.cls) else ():  # other integers may have no meaning
        if name not in left:
            tried(t.add_, 1)  # elements of an expanded tensor share memory, which is not written to


def _of_second(write: Callable[[Any, str, Any], Any]) -> Callable[[Subject, Any], Any]:
    """A change of a value: each of its inner tensors gets the numbers of the second value."""
    return lambda s, x: [write(x, n, other) for n, other in s.inners(s.make(derive.second(s))).items()]


# Ways to change the inner tensors of a value; a way that a class refuses is left out. A load is a ``copy_``.
CHANGES: dict[str, Callable[..., Any]] = {
    "a write to inner tensors": step,
    "a copy_ to each inner tensor": _of_second(lambda x, name, other: getattr(x, name).copy_(other)),
    "x.copy_(y)": lambda s, x: x.copy_(s.make(derive.second(s))),
    "an assignment of each field": _of_second(
        lambda x, name, other: setattr(x, name.removeprefix(RAW), other)
    ),
}


COPIES = 16
"""Copies that live at once. The first ones take the addresses, and so the ids, of freed values, for which a rule
may have kept a result. No result is kept for the last one."""


def changed_operands(s: Subject) -> list[Case]:
    """The calls that may compute by a rule and are not views; for a class written by hand, the first eight."""
    words, change = "called again after a write to inner tensors of x", Case("a step", partial(step, s))
    calls = [
        replace(c, name=f"{c.name}, {words}", parts=(change,)) for c in accepted(s) if c.name not in VIEWS
    ]
    return (calls if all_rules(s.cls) else []) if s.declared else calls[:8]


@torch.no_grad()
def fresh(s: Subject, case: Case) -> None:
    """Compares a second call, after a change of the operand, with the call on a copy."""
    tried(derive.second, s)  # found here, since the search would evict old values from a cache
    x = snapshot(s, s.make())  # shares no memory with tensors that the factory may hold
    case.run(x)
    copies = [snapshot(s, x) for _ in range(COPIES)] if succeeds(case.parts[0].run, x) else []
    for copy in copies[-1:]:
        seed()
        expected, error = tried(case.run, copy)
        seed()
        if error is None:
            check_equal(s, case.name, case.run(x), expected)


# ---- random numbers, other classes ---------------------------------------------------------------------------


@torch.no_grad()
def randomness(s: Subject, case: Case) -> None:
    """Compares a random op after the same seed, and without a seed between."""
    by_eager(s, case, Setting(s.make))
    x = s.make()
    check_that(
        differs(s, case.run(x), case.run(x)),
        f"{case.name} gave the same numbers twice, without a seed between",
    )


def random_backward(s: Subject, case: Case) -> None:
    """Compares the entries that dropout kept with the entries that have a gradient."""
    y = F.dropout(x := s.trainable(), 0.5)
    (grad,) = gradients_by([x], y)
    if isinstance(grad, s.cls) and not isinstance(y, s.cls):
        return  # the gradient by inner tensors says nothing entry by entry
    plains = s.reference(x.detach())
    for k, g, plain in zip(*(s.references(t, len(plains)) for t in (y.detach(), grad)), plains, strict=True):
        check_that(
            ((g != 0) == (k != 0))[plain != 0].all(),
            "entries that F.dropout dropped have a gradient, or kept ones have none",
        )


class ForeignSubclass(Tensor):
    """A subclass that no other class handles; it records the types of each call that it handles."""

    dispatched: ClassVar[list[tuple[type, ...]]] = []

    @staticmethod
    def __new__(cls, inside: Tensor) -> Any:
        """A value with the outer size, dtype and device of its inner tensor."""
        x = make_wrapper_subclass(cls, inside.shape, dtype=inside.dtype, device=inside.device)
        x.inside = inside
        return x

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inside"], None

    @staticmethod
    def __tensor_unflatten__(inners: Any, context: Any, size: Any, stride: Any) -> Any:
        return ForeignSubclass(inners["inside"])

    __torch_function__ = disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.dispatched.append(tuple(types))
        return torch.zeros(())


STRANGERS: dict[str, Callable[..., Any]] = {
    "torch.hypot": torch.hypot,
    "torch.fmax": torch.fmax,
    "torch.logaddexp": torch.logaddexp,
}


@torch.no_grad()
def strangers(s: Subject, case: Case) -> None:
    """Raises where a call with an unknown subclass gives a result without a dispatch to that subclass."""
    x = s.make()
    for order in (1, -1):
        ForeignSubclass.dispatched.clear()
        works, _ = s.works(case.name, lambda o=order: case.run(*(x, ForeignSubclass(like(x)))[::o]))
        dispatch = "called for its part alone" if ForeignSubclass.dispatched else "never called"
        check_that(
            not works or any(s.cls in types for types in ForeignSubclass.dispatched),
            f"{case.name} on a {s.name} and an unknown subclass gave a result, and the unknown subclass was {dispatch}",
        )
