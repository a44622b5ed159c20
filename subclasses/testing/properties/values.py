"""The results of ops: those of the reference, and the same ones in every mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from subclasses._torch import is_traceable_wrapper_subclass
from subclasses.layout import RAW
from subclasses.rules.registry import all_rules
from subclasses.testing import derive
from subclasses.testing.cases import (
    CLONE,
    VIEWS,
    accepted,
    applicable,
    argument_cases,
    functional_cases,
    kit_cases,
    recorded,
    run_on_reference,
)
from subclasses.testing.compare import (
    check_equal,
    check_stands_for,
    leaves,
    snapshot,
    value_difference,
)
from subclasses.testing.derive import named_variants
from subclasses.testing.errors import Attempt, Broken, Skipped, must
from subclasses.testing.faults import change_of, mend_write
from subclasses.testing.properties.memory import step
from subclasses.testing.property import Case, promise, run_cases
from subclasses.testing.subject import Subject, seed


@promise(
    "write a rule that computes this, or refuse the op: raise subclasses.DispatchError or NotImplementedError "
    "with a message, or return NotImplemented",
    cases=functional_cases,
    declared="correct what the rule gives for such operands (a vector, a number, a value on either side), or refuse "
    "them; for an op without a rule, write one that computes this: to refuse, raise subclasses.DispatchError or "
    "NotImplementedError with a message, or return NotImplemented",
)
@torch.no_grad()
def values(s: Subject, case: Case) -> None:
    """An op on a value gives what it gives on the tensor that the value stands for."""
    try:
        check_stands_for(s, case.name, case.run(s.make()), run_on_reference(s, case))
    except Exception as error:
        if not isinstance(error, Skipped):
            s.wrong_values.add(case.name)
        raise


@promise(
    'fallback="map" runs an op on each inner tensor, which is not the op on what materialize() gives: use '
    'fallback="materialize", write rules for the ops, or give the method that is no more than a reading of the inner '
    "tensors another name. If they are meant to differ: skip={'mapped_values'}",
    cases=functional_cases,
)
@torch.no_grad()
def mapped_values(s: Subject, case: Case) -> None:
    """What materialize() gives of a result that was mapped is the op on what it gives of the operand."""
    if not s.is_mapped:
        return
    if not s.cls.__spec__.has_materialize:
        raise Skipped(f"{s.name} has no materialize()")
    plain = s.make().materialize().clone()
    with Attempt() as attempt:
        expected = leaves(case.run(plain))
    if attempt.error is not None:
        return
    for got, wanted in zip(leaves(case.run(s.make())), expected, strict=True):
        if isinstance(got, s.cls):
            with must(f"materialize() of {case.name}"):
                plain = got.materialize()
            check_equal(
                s, f"materialize() of {case.name} is not what the op gives of x.materialize()", plain, wanted
            )


@promise(
    "a rule takes every argument of its op, and refuses those that it has no answer to: an alpha=, rounding_mode=, "
    "keepdim= or dtype= that is dropped, a negative number, or operands in the other order, is a wrong result without "
    "an error",
    cases=argument_cases,
)
@torch.no_grad()
def keyword_arguments(s: Subject, case: Case) -> None:
    """An argument that is not the default means what it means for the tensor that the value stands for."""
    expected = run_on_reference(s, case)
    check_stands_for(s, case.name, case.run(s.make()), expected)


@promise("a rule for an op that is not in place must compute into a new tensor", cases=kit_cases)
@torch.no_grad()
def arguments(s: Subject, case: Case) -> None:
    """An op that is not in place leaves its argument as it was."""
    s.needs_flatten()
    if (problem := change_of(s, case)) is not None:
        raise Broken(f"{case.name} changed x: {problem}", mend_write(s, case))


@promise(
    "there, composite ops (linear, matmul, reshape) reach __torch_dispatch__ whole: take those without a rule "
    "apart with func.decompose(), as outside of inference mode; views of a value from outside must be made under "
    "torch.inference_mode(False), for they share its version counter",
    cases=accepted,
)
def inference_mode(s: Subject, case: Case) -> None:
    """An op gives in inference mode what it gives outside of it."""
    outside = s.make()
    with torch.no_grad():
        expected = case.run(s.make())
    with torch.inference_mode():
        check_equal(s, case.name, case.run(outside), expected)
        check_equal(s, case.name, case.run(s.make()), expected)


@promise(
    "a rule must not look at grad mode, and a rule above autograd must give what the op below it gives",
    cases=recorded,
)
def grad_mode(s: Subject, case: Case) -> None:
    """An op gives the same value whether gradients are recorded or not."""
    x = s.trainable()
    with torch.no_grad():
        expected = case.run(s.make())
    check_equal(s, case.name, case.run(x), expected)


# ---- other metadata ----------------------------------------------------------------------------------------


@promise(
    "a rule must compute with the static and dynamic fields of its operands, none of which it may take for granted; "
    "what it has no answer to it refuses: raise subclasses.DispatchError or NotImplementedError",
    cases=lambda s: functional_cases(s) + argument_cases(s),
)
@torch.no_grad()
def other_metadata(s: Subject, case: Case) -> None:
    """An op on a value with other metadata gives what it gives on the tensor that this value stands for."""
    for difference, make in named_variants(s):
        plains = [plain.clone() for plain in s.reference(s.make(make))]
        with Attempt() as attempt:
            expected = [case.run(plain) for plain in plains]
        if attempt.error is None:  # the value may have another size
            check_stands_for(s, f"{case.name} {difference}", case.run(s.make(make)), expected)


@promise(
    "a result has the metadata that the rule passes to the constructor, and the default of any other: pass each field "
    "on, as in type(x)(..., unit=x.unit)",
    cases=accepted,
)
@torch.no_grad()
def kept_metadata(s: Subject, case: Case) -> None:
    """A result has no default for metadata where the operand has another value."""
    if not s.declared:
        return  # nobody knows what its constructor takes by default
    if not s.metadata(s.make()):
        raise Skipped(f"{s.name} has no metadata")
    for make in (s.factory, *s.options.get("variants", ())):
        x = s.make(make)
        for result in leaves(case.run(s.make(make))):
            lost = _defaults_of(s, x, result) if isinstance(result, s.cls) else {}
            if lost and not derive.is_told_apart(s, x, lost):
                shown = ", ".join(f"{n}={value!r}, not {getattr(x, n)!r}" for n, value in lost.items())
                raise Broken(f"{case.name} has the default {shown}")


def _defaults_of(s: Subject, x: Any, result: Any) -> dict[str, Any]:
    """The metadata of a result that are the default, where those of its operand are not."""
    spec = s.cls.__spec__
    return {
        f.name: f.default
        for f in (*spec.statics, *spec.dynamics)
        if getattr(result, f.name) == f.default != getattr(x, f.name)
    }


# ---- after a write ------------------------------------------------------------------------------------------


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


# Ways to change the inner tensors of a value; one that a class refuses is left out.
CHANGES: dict[str, Callable[[Subject, Any], None]] = {
    "a write to inner tensors": step,
    "a copy_ to each inner tensor": _copy_inners,
    "x.copy_(y)": lambda s, x: x.copy_(s.make(derive.second(s))),
    "an assignment of each field": _assign,
    "load_state_dict": _load,
}


@promise(
    "let materialize() compute from the inner tensors at each call: what it keeps, on the value or by "
    "functools.cached_property or lru_cache, is stale after a step of an optimizer, a load or any write"
)
@torch.no_grad()
def fresh_values(s: Subject) -> None:
    """What a value stands for follows a write to its inner tensors."""
    if not hasattr(s.cls, "materialize"):
        raise Skipped(f"{s.name} has no materialize()")
    s.builder(s.make())
    with Attempt():
        derive.second(s)  # finding one would drive old values out of a cache
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


def _computed(s: Subject) -> list[Case]:
    """The calls that may compute by a rule and are no views; of a class written by hand, the first few."""
    if s.declared and not all_rules(s.cls):
        return []
    calls = [case for case in accepted(s) if case.name not in VIEWS]
    return calls if s.declared else calls[:8]


@promise(
    "a rule computes anew at each call: what it keeps for an operand, with functools.lru_cache or in a dict by id(), "
    "is stale after a step of an optimizer, a load or any write. Leave the cache out",
    cases=_computed,
)
@torch.no_grad()
def fresh_results(s: Subject, case: Case) -> None:
    """An op on a value follows a write to its inner tensors, though it was called with the value before."""
    s.needs_flatten()
    x = snapshot(s, s.make())  # which shares no memory with what the factory may hold
    case.run(x)
    step(s, x)
    copies, expected = [snapshot(s, x) for _ in range(COPIES)], None
    with Attempt() as attempt:
        expected = _seeded(case, copies[-1])
    if attempt.error is None:
        check_equal(
            s, f"{case.name}, called again after a write to inner tensors of x", _seeded(case, x), expected
        )


def _seeded(case: Case, x: Any) -> Any:
    seed()
    return case.run(x)


# ---- randomness --------------------------------------------------------------------------------------------

RANDOM: dict[str, Callable[[Any], Any]] = {
    "F.dropout(x)": lambda x: F.dropout(x, 0.5),
    "torch.rand_like(x)": lambda x: torch.rand_like(x),
    "torch.randn_like(x)": lambda x: torch.randn_like(x),
    "x.clone().uniform_()": lambda x: x.clone().uniform_(),
    "torch.bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.5)),
}


@promise(
    "draw from torch's generator at each call, once, by running the op itself on the inner tensors; keep no "
    "generator and no mask",
    cases=lambda s: [Case(name, run) for name, run in RANDOM.items()],
)
@torch.no_grad()
def randomness(s: Subject, case: Case) -> None:
    """Random ops follow the seed: the same after the same seed, something new at the next call."""
    x = s.make()
    if not (x.is_floating_point() and x.numel() > 8):
        raise Skipped("random ops draw floating point numbers, and want more than 8 of them")
    seed(1)
    first = case.run(x)
    seed(1)
    second = case.run(x)
    check_equal(s, f"{case.name} twice after the same seed", second, first)
    if value_difference(s, case.run(x), second) is None:
        raise Broken(f"{case.name} gave the same numbers twice, without a seed between")


@promise(
    "the backward of a random op must use the mask of its forward: save it, do not draw anew",
    declared="PyTorch differentiates F.dropout by the ops that it is made of: correct the rules for those that ran, or "
    "let a rule for the function draw one mask and compute with x.unwrap(name)",
)
def random_backward(s: Subject) -> None:
    """Forward and backward of dropout agree on what was dropped."""
    x = s.trainable()
    if not x.is_floating_point():
        raise Skipped("dropout of complex numbers is not defined")
    y = s.call("F.dropout(x)", lambda: F.dropout(x, 0.5))
    ones = torch.ones(x.shape, dtype=x.dtype)
    (grad,) = s.call("the gradient of F.dropout(x)", lambda: torch.autograd.grad(y, x, ones))
    if isinstance(grad, s.cls) and not isinstance(y, s.cls):
        return  # the gradient by inner tensors says nothing entry by entry
    plains = s.reference(x.detach())
    kept, flows = s.references(y.detach(), len(plains)), s.references(grad, len(plains))
    for k, g, plain in zip(kept, flows, plains, strict=True):
        if bool(((g != 0) != (k != 0))[plain != 0].any()):
            raise Broken("entries that F.dropout dropped have a gradient, or kept ones have none")


# ---- conjugate and negative bits ---------------------------------------------------------------------------

LAZY: dict[str, Callable[[Any], Any]] = {
    "x.conj()": lambda x: x.conj(),
    "x.conj().clone()": lambda x: x.conj().clone(),
    "x.conj() * x": lambda x: x.conj() * x,
    "x.conj().resolve_conj()": lambda x: x.conj().resolve_conj(),
    "x.conj().conj() + 1": lambda x: x.conj().conj() + 1,
    "x.conj().imag": lambda x: x.conj().imag,
    "x.conj().real": lambda x: x.conj().real,
    "x.mH": lambda x: x.mH,
    "x.conj().sum()": lambda x: x.conj().sum(),
}


@promise(
    "within __torch_dispatch__ PyTorch does not look at the lazy bits of inner tensors (its issue 130646): resolve "
    "them (t.resolve_conj().resolve_neg()) at construction and after _conj and _neg_view, or hand them on to the "
    "outer tensor",
    declared="correct the rules that ran: their results for conjugated or negated operands are not those for the same "
    "numbers without the lazy bits, or they drop a sign",
)
def lazy_bits(s: Subject) -> None:
    """Conjugate and negative bits are kept, on a value and on its inner tensors."""
    x = s.make()
    if x.is_complex():
        run_cases(s, applicable(s, LAZY), values.check)
    _check_lazy_inners(s, x)


def _check_lazy_inners(s: Subject, x: Any) -> None:
    s.reference(x)  # without a reference there is nothing to compare
    lazy = {name: _lazily(t) for name, t in s.inners(x).items()}
    solid = {name: t.resolve_conj().resolve_neg() for name, t in lazy.items()}
    pair = s.call("lazy inner tensors", lambda: (s.construct(x, lazy), s.construct(x, solid)))

    @torch.no_grad()
    def check(s: Subject, case: Case) -> None:
        got, expected = (_meaning(s, case.run(value)) for value in pair)
        check_equal(s, f"{case.name} on inner tensors with a lazy bit set", got, expected)

    run_cases(s, [CLONE, *accepted(s)[:8]], check)


def _lazily(t: Any) -> Any:
    """A plain tensor with its conjugate or negative bit set, as far as its dtype has one."""
    if is_traceable_wrapper_subclass(t):
        return t
    if t.is_complex():
        return t.conj()
    return torch.complex(t, t).conj().imag if t.dtype in (torch.float32, torch.float64) else t


def _meaning(s: Subject, result: Any) -> list[Any]:
    """The plain tensors that the results stand for."""
    return [tensor for leaf in leaves(result) for tensor in s.references(leaf, 1)]
