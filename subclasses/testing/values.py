"""Compares the results of ops in each context with the reference or with eager mode.

A context makes settings. A setting has an operand, a mode in which the case runs, and words that a report adds to the
call. An oracle compares the result of one case in one setting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from threading import Barrier
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import (
    disabled_torch_function_impl,
    is_traceable_wrapper_subclass,
    make_wrapper_subclass,
)
from subclasses.base import TensorSubclass
from subclasses.layout import RAW
from subclasses.rules.registry import all_rules
from subclasses.spec.fields import inner
from subclasses.testing import derive
from subclasses.testing.cases import (
    LAZY,
    MORE_PAIRS,
    PAIRS,
    POINTWISE,
    VIEWS,
    accepted,
    applicable,
    callable_on,
    like,
    operands_as_parameters,
    refuses,
    unreached,
)
from subclasses.testing.compare import (
    check_equal,
    check_stands_for,
    leaves,
    snapshot,
    value_difference,
)
from subclasses.testing.errors import Attempt, Broken, Skipped, problem, succeeds
from subclasses.testing.reach import Case, pair_calls_of
from subclasses.testing.subject import SEED, Factory, Subject, is_differentiable, metadata, once, seed


@dataclass(frozen=True)
class Setting:
    """Where a case runs.

    Attributes:
        operand: makes the value, or the pair of values, that the case gets.
        words: added to the call in a report.
        mode: the mode in which it runs, within ``no_grad``.
        expected: makes the operand whose result in eager mode is expected; by default a value of the factory.
        read: returns the part of the results that is compared.
    """

    operand: Callable[[], Any]
    words: str = ""
    mode: Callable[[], AbstractContextManager[Any]] = nullcontext
    expected: Callable[[], Any] | None = None
    read: Callable[[Any], Any] = lambda results: results


Context = Callable[[Subject], Iterable[Setting]]
Oracle = Callable[[Subject, Case, Setting], None]
Check = Callable[[Subject, Case], None]


def within(context: Context, oracle: Oracle) -> Check:
    """The check of a case in each setting of a context by an oracle."""

    def check(s: Subject, case: Case) -> None:
        for setting in context(s):
            oracle(s, case, setting)

    return check


def told(check: Check) -> Check:
    """A check that records the names of its failing calls, which other promises leave out.

    Such calls give wrong values or change their argument.
    """

    def telling(s: Subject, case: Case) -> None:
        with Attempt() as attempt:
            check(s, case)
        if attempt.error is not None:
            s.wrong_values |= set() if isinstance(attempt.error, Skipped) else {case.name}
            raise attempt.error

    return telling


# ---- oracles -----------------------------------------------------------------------------------------------


@torch.no_grad()
def by_reference(s: Subject, case: Case, setting: Setting, *, rounded: bool = False) -> None:
    """Compares with the results on the tensors that the operands represent.

    Under ``rounded``, it compares only where one of these results is ``bfloat16``.
    """
    with Attempt() as called, setting.mode():
        got = case.run(setting.operand())
    if called.error is not None and not setting.words:
        raise called.error
    with Attempt() as attempt, setting.mode():
        expected = [case.run(plain) for plain in plains_of(s, setting.operand())]
    if attempt.error is not None and setting.words and not isinstance(attempt.error, Skipped):
        return  # the value has another size
    for error in filter(None, (called.error, attempt.error)):
        raise error
    if rounded and torch.bfloat16 not in [getattr(leaf, "dtype", None) for leaf in leaves(expected)]:
        return
    check_stands_for(s, f"{case.name}{setting.words}", got, expected, rounded=rounded)


def plains_of(s: Subject, operand: Any) -> list[Any]:
    """The plain tensors that a value represents; for a pair of values, pairs of their plain tensors."""
    if not isinstance(operand, list):
        return [t.detach().clone() for t in s.reference(operand.detach())]
    return [[t.detach().clone() for t in both] for both in zip(*map(s.reference, operand), strict=True)]


def by_eager(s: Subject, case: Case, setting: Setting) -> None:
    """Compares with the same call in eager mode, without gradients."""
    with torch.no_grad():
        expected = case.run((setting.expected or s.make)())
        with setting.mode():
            got = case.run(setting.operand())
        check_equal(s, f"{case.name}{setting.words}", setting.read(got), setting.read(expected))


def by_eager_always(s: Subject, case: Case, setting: Setting) -> None:
    """Compares as by_eager() does, and raises Broken where the class refuses the call."""
    with Attempt() as attempt:
        by_eager(s, case, setting)
    if attempt.error is not None:
        raise Broken(problem(f"{case.name}{setting.words}", attempt.error)) from attempt.error


# ---- contexts ----------------------------------------------------------------------------------------------


class Nest(TensorSubclass, fallback="map"):
    """A hostile wrapper: it has no data of its own, and runs each op on its inner tensor."""

    held: Tensor = inner()


def unnested(value: Any, opens: bool = False) -> Any:
    """The same results with the inner tensor of every nest in its place; with ``opens``, values as type and parts."""
    if isinstance(value, list | tuple):
        return [unnested(part, opens) for part in value]
    if isinstance(value, Nest):
        return unnested(value.held, opens)
    if opens and is_traceable_wrapper_subclass(value):
        return [
            type(value).__name__,
            *(unnested(getattr(value, n), opens) for n in value.__tensor_flatten__()[0]),
        ]
    return value


def with_nests(s: Subject) -> Any:
    """A value whose plain inner tensors are wrappers, also within declared inner values."""
    x = s.make().detach()
    inners = s.changed(x, lambda path, t: t if path.endswith("_carrier") else Nest(t))
    works, value = s.works("inner tensors that are wrappers", lambda: s.construct(x, inners))
    if not works:
        raise Skipped("the class refuses inner tensors that are wrappers")
    return value


def eager(s: Subject) -> list[Setting]:
    """A value of the factory."""
    return [Setting(s.make)]


def autocast(s: Subject) -> list[Setting]:
    """Matrix products in ``bfloat16``."""
    x = s.make()
    if x.dtype is not torch.float32:
        raise Skipped(f"autocast leaves {x.dtype} as it is")
    return [Setting(s.make, " under autocast", lambda: torch.autocast(x.device.type, torch.bfloat16))]


def inference(s: Subject) -> list[Setting]:
    """Inference mode, of a value from outside and of one that is made there."""
    x = s.make()
    outside = Setting(lambda: x, " of a value from outside", torch.inference_mode)
    return [outside, Setting(s.make, mode=torch.inference_mode)]


def variants(s: Subject) -> list[Setting]:
    """Values with other metadata."""
    return [Setting(partial(s.make, make), f" {words}") for words, make in derive.named_variants(s)]


def lazy_inners(s: Subject) -> list[Setting]:
    """Inner tensors with a conjugate or negative bit, beside the same numbers without."""
    s.reference(s.make())
    x = s.make()
    lazy = s.changed(x, _lazily)
    solid = {name: t.resolve_conj().resolve_neg() for name, t in lazy.items()}
    return [
        Setting(
            lambda: s.construct(x, lazy),
            " on inner tensors with a lazy bit set",
            expected=lambda: s.construct(x, solid),
        )
    ]


def _lazily(path: str, t: Tensor) -> Tensor:
    """A tensor with its conjugate or negative bit set, as far as its dtype has one."""
    if t.is_complex():
        return t.conj()
    return torch.complex(t, t).conj().imag if t.dtype in (torch.float32, torch.float64) else t


CONTEXTS: dict[str, Context] = {
    "grad": lambda s: [Setting(s.trainable, mode=torch.enable_grad)],
    "inference": inference,
    "parameters": lambda s: [Setting(s.make, " with Parameters for plain operands", operands_as_parameters)],
    "nested inside": lambda s: [
        Setting(
            partial(with_nests, s),
            " on a value whose inner tensors are wrappers",
            read=partial(unnested, opens=True),
        )
    ],
    "nested outside": lambda s: [
        Setting(lambda: Nest(s.make()), " on a wrapper around a value", read=unnested)
    ],
}

# ---- two values --------------------------------------------------------------------------------------------


def values_of(s: Subject, pair: Sequence[Factory]) -> list[Any]:
    """The values of two factories."""
    return [s.make(factory).detach() for factory in pair]


def two(s: Subject) -> list[Any]:
    """A value of the factory, and the second value."""
    return values_of(s, (s.factory, derive.second(s)))


@once
@torch.no_grad()
def pair_cases(s: Subject) -> list[Case]:
    """The calls of two values that the class does not refuse and that the tensors that they represent take.

    Raises:
        Skipped: there is no second value, or no reference.
    """
    s.reference(s.make())
    table = callable_on(s, PAIRS | MORE_PAIRS)
    table |= {case.name: case.run for case in pair_calls_of(unreached(s))}
    plains = plains_of(s, two(s))
    takes = {
        name: run
        for name, run in table.items()
        if succeeds(lambda run=run: [run([*map(torch.clone, p)]) for p in plains])
    }
    cases = [Case(name, run) for name, run in takes.items()]
    return [case for case in cases if not refuses(s, case, lambda: two(s))]


def two_values(s: Subject, case: Case) -> None:
    """Compares an op on two values with different numbers, and with other integers in the second one."""
    by_reference(s, case, Setting(lambda: two(s)))
    other = derive.other_integers(s)
    if other is not None and not refuses(s, case, lambda: values_of(s, (s.factory, other))):
        by_reference(
            s, case, Setting(lambda: values_of(s, (s.factory, other)), ", where y holds other integers")
        )


def mixed_metadata(s: Subject, case: Case) -> None:
    """Compares an op on two values of different metadata, in both orders."""
    for words, make in derive.named_variants(s):
        for pair, name in (((s.factory, make), "y"), ((make, s.factory), "x")):
            by_reference(s, case, Setting(lambda pair=pair: values_of(s, pair), f", {name} {words}"))
            got = None
            with Attempt() as attempt, torch.no_grad():
                got = case.run(values_of(s, pair))
            if attempt.error is None and _is_unseen(s, make, got):
                raise Skipped(
                    f"pass reference=, which tells values {words} from others, as by numbers in one unit: both stand "
                    f"for the same so far, and {case.name} was not refused"
                )


def _is_unseen(s: Subject, make: Factory, result: Any) -> bool:
    """Whether no comparison can show that a result's metadata, of one of two values or of none, is right."""
    if not (s.declared and isinstance(result, Tensor)):
        return False
    changed, usual = derive.changed_fields(s, s.make(make)), metadata(s.make())
    if not changed or derive.is_told_apart(s, s.make().detach(), changed):
        return False
    if not isinstance(result, s.cls):  # without materialize, a rule gave it
        return not s.cls.__spec__.has_materialize
    got = metadata(result)
    return any(all(got[name] == one[name] for name in changed) for one in (usual, changed))


# ---- metadata, and differences that the reference does not show --------------------------------------------


@torch.no_grad()
def mapped_values(s: Subject, case: Case) -> None:
    """Compares materialize() of a result that was mapped with the op on materialize() of the operand."""
    if not s.is_mapped:
        return
    if not s.cls.__spec__.has_materialize:
        raise Skipped(f"{s.name} has no materialize()")
    expected: list[Any] = []
    with Attempt():
        expected = leaves(case.run(s.make().materialize().clone()))
    for got, wanted in zip(leaves(case.run(s.make())), expected, strict=False):
        if isinstance(got, s.cls):
            what = f"materialize() of {case.name} is not what the op gives of x.materialize()"
            check_equal(s, what, got.materialize(), wanted)


@torch.no_grad()
def kept_metadata(s: Subject, case: Case) -> None:
    """Raises where a result has the default of a field, and the operand another value."""
    if not s.declared:
        return  # the defaults of its constructor are not declared
    if not metadata(s.make()):
        raise Skipped(f"{s.name} has no metadata")
    spec = s.cls.__spec__
    defaults = {f.name: f.default for f in (*spec.statics, *spec.dynamics)}
    for make in (s.factory, *s.options.get("variants", ())):
        x = s.make(make)
        for result in leaves(case.run(s.make(make))):
            kept = metadata(result) if isinstance(result, s.cls) else {}
            lost = {n: v for n, v in kept.items() if v == defaults[n] != getattr(x, n)}
            if lost and not derive.is_told_apart(s, x, lost):
                shown = ", ".join(f"{n}={value!r}, not {getattr(x, n)!r}" for n, value in lost.items())
                raise Broken(f"{case.name} has the default {shown}")


@once
def pointwise(s: Subject) -> list[Case]:
    """The accepted calls on each entry of one value."""
    return [case for case in accepted(s) if case.name in POINTWISE]


@torch.no_grad()
def kept_inners(s: Subject, case: Case) -> None:
    """Raises where a result lacks an optional inner tensor, or has other integers than results of other calls keep."""
    x = s.make().detach()
    if s.declared and any(f.optional or is_label(t) for f, t in s.held(x)):
        s.reference(x)  # raises Skipped without one
        for name, t in _lost(s, x, case.run(s.make())).items():
            keeper = _keepers(s).get(name)
            if (t is None or keeper is not None) and not derive.is_told_apart(s, x, {name: t}):
                others = "" if keeper is None else f", which {keeper} keeps"
                raise Broken(f"{case.name} {'loses' if t is None else 'changes'} {name}{others}")


def _lost(s: Subject, x: Any, result: Any) -> dict[str, Any]:
    """The optional inner tensors that a result lacks, and the integer tensors in it that differ, by field."""
    if not isinstance(result, s.cls) or result.shape != x.shape:
        return {}
    found = s.inners(result)
    pairs = [(f.name, t, found.get(f.attribute)) for f, t in s.held(x)]
    return {
        name: got for name, t, got in pairs if got is None or (is_label(t) and value_difference(s, got, t))
    }


@once
def _keepers(s: Subject) -> dict[str, str]:
    """For each field, a pointwise call whose result keeps its inner tensor.

    A call that changes the inner tensor of such a field differs from the keeper, and may be wrong.
    """
    x = s.make().detach()
    results = {case.name: case.run(s.make()) for case in pointwise(s)}
    whole = {name: r for name, r in results.items() if isinstance(r, s.cls) and r.shape == x.shape}
    return {
        f.name: name
        for f, _ in s.held(x)
        for name, r in reversed(whole.items())
        if f.name not in _lost(s, x, r)
    }


def is_label(t: Tensor) -> bool:
    """Whether an inner tensor holds integers, which may name rows."""
    return not (is_differentiable(t) or t.dtype is torch.bool)


# ---- after a write -----------------------------------------------------------------------------------------


def step(s: Subject, x: Any, *left: str) -> None:
    """Writes to the inner tensors as an optimizer's step does, except to the inner tensors that ``left`` names."""
    for name, t in s.inners(x).items() if isinstance(x, s.cls) else ():
        with Attempt():  # elements of an expanded tensor share memory, which is not written to
            if is_differentiable(t) and name not in left:  # other integers may have no meaning
                t.add_(1)


def _copy_inners(s: Subject, x: Any) -> None:
    others = s.inners(s.make(derive.second(s)))
    for name, t in s.inners(x).items():
        t.copy_(others[name])


def _assign(s: Subject, x: Any) -> None:
    for name, t in s.inners(s.make(derive.second(s))).items():
        setattr(x, name.removeprefix(RAW), t)


def _load(s: Subject, x: Any) -> None:
    module = torch.nn.Module()
    module.register_buffer("x", x)
    module.load_state_dict({"x": s.make(derive.second(s))})


# Ways to change the inner tensors of a value; a way that a class refuses is left out.
CHANGES: dict[str, Callable[[Subject, Any], None]] = {
    "a write to inner tensors": step,
    "a copy_ to each inner tensor": _copy_inners,
    "x.copy_(y)": lambda s, x: x.copy_(s.make(derive.second(s))),
    "an assignment of each field": _assign,
    "load_state_dict": _load,
}


@torch.no_grad()
def fresh_values(s: Subject, case: Case) -> None:
    """Compares materialize() after each change with materialize() of a value that was made after the change."""
    if not hasattr(s.cls, "materialize"):
        raise Skipped(f"{s.name} has no materialize()")
    s.builder(s.make())
    with Attempt():
        derive.second(s)  # found here, since the search would evict old values from a cache
    for how, change in CHANGES.items():
        x = s.make()
        x.materialize()
        with Attempt() as attempt:
            change(s, x)
        if attempt.error is None:
            other = s.construct(x, {name: t.clone() for name, t in s.inners(x).items()})
            check_equal(s, f"x.materialize() after {how}", x.materialize(), other.materialize())


COPIES = 16
"""Copies that live at once: the first ones take the addresses, and so the ids, of values that are gone, for which
a rule may have kept a result; the last one is unknown to it."""


def computed(s: Subject) -> list[Case]:
    """The calls that may compute by a rule and are no views; for a class written by hand, the first eight."""
    if s.declared and not all_rules(s.cls):
        return []
    calls = [case for case in accepted(s) if case.name not in VIEWS]
    return calls if s.declared else calls[:8]


@torch.no_grad()
def fresh_results(s: Subject, case: Case) -> None:
    """Compares a second call, after a write to the inner tensors of the operand, with the call on a copy."""
    s.needs_flatten()
    x = snapshot(s, s.make())  # shares no memory with tensors that the factory may hold
    case.run(x)
    step(s, x)
    copies, expected = [snapshot(s, x) for _ in range(COPIES)], None
    with Attempt() as attempt:
        expected = _seeded(case, copies[-1])
    if attempt.error is None:
        what = f"{case.name}, called again after a write to inner tensors of x"
        check_equal(s, what, _seeded(case, x), expected)


def _seeded(case: Case, x: Any) -> Any:
    seed()
    return case.run(x)


@torch.no_grad()
def cached_inners(s: Subject, case: Case) -> None:
    """Raises where an optional inner tensor repeats the others, and an optimizer steps both."""
    x = s.make().detach()
    for field, _ in s.held(x) if s.declared and s.cls._traits.trainable else ():
        if field.optional and is_differentiable(s.inners(x)[field.attribute]):
            _check_cache(s, case, field)


def _check_cache(s: Subject, case: Case, field: Any) -> None:
    """Raises if a result does not depend on a field before a write to the others, and does afterwards."""
    verdicts = []
    for change in (lambda x: None, lambda x: step(s, x, field.attribute)):
        x = snapshot(s, s.make().detach())
        change(x)
        without = None
        with Attempt() as attempt:
            without = case.run(s.of_fields(x, **{field.name: None}))
        if attempt.error is not None:
            return
        plain, other = ([p for r in leaves(y) for p in s.references(r, 1)] for y in (case.run(x), without))
        verdicts.append(value_difference(s, plain, other))
    if verdicts[0] is None and verdicts[1] is not None:
        raise Broken(
            f"{case.name} computes with {field.name}, which repeats other inner tensors and is stale after a step: "
            f"{verdicts[1]}"
        )


# ---- random numbers, lazy bits -----------------------------------------------------------------------------


@torch.no_grad()
def randomness(s: Subject, case: Case) -> None:
    """Compares a random op after the same seed, and without a seed between."""
    x = s.make()
    if not (x.is_floating_point() and x.numel() > 8):
        raise Skipped("random ops draw floating point numbers, and want more than 8 of them")
    results = []
    for number in (1, 1, None):
        if number is not None:
            seed(number)
        results.append(case.run(x))
    check_equal(s, f"{case.name} twice after the same seed", *results[:2])
    if value_difference(s, *results[1:]) is None:
        raise Broken(f"{case.name} gave the same numbers twice, without a seed between")


def random_backward(s: Subject, case: Case) -> None:
    """Compares the entries that dropout kept with the entries that have a gradient."""
    x = s.trainable()
    if not x.is_floating_point():
        raise Skipped("dropout of complex numbers is not defined")
    y = torch.nn.functional.dropout(x, 0.5)
    (grad,) = torch.autograd.grad(y, x, torch.ones(x.shape, dtype=x.dtype))
    if isinstance(grad, s.cls) and not isinstance(y, s.cls):
        return  # the gradient by inner tensors says nothing entry by entry
    plains = s.reference(x.detach())
    kept, flows = s.references(y.detach(), len(plains)), s.references(grad, len(plains))
    for k, g, plain in zip(kept, flows, plains, strict=True):
        if bool(((g != 0) != (k != 0))[plain != 0].any()):
            raise Broken("entries that F.dropout dropped have a gradient, or kept ones have none")


def lazy_cases(s: Subject) -> list[Case]:
    """Calls of complex numbers that set conjugate bits, and some that read inner tensors."""
    return (applicable(s, LAZY) if s.make().is_complex() else []) + accepted(s)[:9]


def lazy_bits(s: Subject, case: Case) -> None:
    """Compares lazy results with the reference, and results on lazy inner tensors with results on resolved ones."""
    if case.name in LAZY:
        return by_reference(s, case, Setting(s.make))
    (setting,) = lazy_inners(s)
    meant = Case(case.name, lambda x: [p for r in leaves(case.run(x)) for p in s.references(r, 1)])
    return by_eager(s, meant, setting)


# ---- other threads, other classes --------------------------------------------------------------------------

_THREADS, _ROUNDS = 4, 3


def threads(cases: Callable[[Subject], Sequence[Case]]) -> Check:
    """The check of calls from several threads at once, each on a value of its own."""

    def check(s: Subject, case: Case) -> None:
        calls, given, expected = cases(s), [], []
        for i in range(_THREADS):
            seed(SEED + i)
            given.append(
                s.factory()
            )  # a factory that draws random numbers makes another value for each thread
            with torch.no_grad():
                expected.append([call.run(given[i]) for call in calls])
        together = Barrier(_THREADS)

        def work(i: int) -> None:
            together.wait()
            for call, wanted in [*zip(calls, expected[i], strict=True)] * _ROUNDS:
                with Attempt() as attempt, torch.no_grad():
                    check_equal(s, call.name, call.run(given[i]), wanted)
                if attempt.error is not None:
                    raise Broken(
                        f"beside other threads, {problem(call.name, attempt.error)}"
                    ) from attempt.error

        with ThreadPoolExecutor(_THREADS) as pool:
            for done in [pool.submit(work, i) for i in range(_THREADS)]:
                done.result()

    return check


class ForeignSubclass(Tensor):
    """A subclass that no other class handles; it records the types of each call that it handles."""

    asked: list[tuple[type, ...]]

    @staticmethod
    def __new__(cls, like: Tensor) -> Any:
        """A value with the outer size, dtype and device of another tensor."""
        x = make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)
        x.asked = []
        x.inside = torch.ones(like.shape, dtype=like.dtype, device=like.device)
        return x

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return "ForeignSubclass()"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inside"], None

    @staticmethod
    def __tensor_unflatten__(inners: Any, context: Any, size: Any, stride: Any) -> Any:
        return ForeignSubclass(inners["inside"])

    __torch_function__ = disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in args:
            if isinstance(x, ForeignSubclass):
                x.asked.append(tuple(types))
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
    for flip in (False, True):
        foreign = ForeignSubclass(like(x))
        works, _ = s.works(case.name, lambda args=(x, foreign)[:: -1 if flip else 1]: case.run(*args))
        if works and not any(s.cls in types for types in foreign.asked):
            raise Broken(
                f"{case.name} on a {s.name} and an unknown subclass gave a result, and the unknown subclass was "
                f"{'never asked' if not foreign.asked else 'asked about its part alone'}"
            )
