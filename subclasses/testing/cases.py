"""Which calls apply to a class: the kit's own, the author's, and one for each rule that neither reaches."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from subclasses._torch import OpOverload, OpOverloadPacket, TorchDispatchMode, is_composite, schema_of
from subclasses.autograd.python_functions import python_functions, twins
from subclasses.errors import one_of
from subclasses.op_schemas.schema import op_facts, ops_of_packet
from subclasses.rules.families import Family
from subclasses.rules.registry import BOOK, RuleBook, all_rules
from subclasses.rules.results import describe
from subclasses.spec.values import map_tensors
from subclasses.testing.calls import ARGUMENTS, FUNCTIONAL, VIEWS, WHOLE, Case, Table, like
from subclasses.testing.errors import Broken, entries_of, refusal, skip_unless, succeeds, tried
from subclasses.testing.subject import Subject, leaves, once, tried_alone

# ---- which apply -------------------------------------------------------------------------------------------


@torch.no_grad()
def applicable(s: Subject, table: Table, make: Callable[[], Any] | None = None) -> list[Case]:
    """The cases that the tensors of an operand take; ``make`` is a function that makes it, by default the factory.

    Cases that call a method which a field of the class hides, such as ``t``, are left out.
    """
    hidden = {name for name in s.cls.__spec__.names if hasattr(Tensor, name)} if s.declared else set[str]()
    names_of = lambda run: getattr(getattr(run, "__code__", None), "co_names", ())  # noqa: E731
    cases = [Case(name, run) for name, run in table.items() if not hidden.intersection(names_of(run))]
    plains = plains_of(s, make()) if make else stand_ins(s)
    return [c for c in cases if all(succeeds(c.run, copy.deepcopy(plain)) for plain in plains)]


def plains_of(s: Subject, operand: Any) -> list[Any]:
    """The plain tensors that a value represents; for a pair of values, pairs of their plain tensors."""
    if not isinstance(operand, list):
        return [t.detach().clone() for t in s.reference(operand.detach())]
    return [list(pair) for pair in zip(*(plains_of(s, x) for x in operand), strict=True)]


def stand_ins(s: Subject) -> list[Tensor]:
    """Copies of the tensors that a value represents.

    A class without a reference gives one plain tensor of the size and dtype of its value.
    """
    x = s.make().detach()
    return plains_of(s, x) if s.has_reference else [like(x)]


@once
def functional_cases(s: Subject) -> list[Case]:
    """The kit's own cases that apply, the author's cases, and a case for each rule that neither reaches."""
    properties = {f"x.{name}": key for key in unreached(s) if (name := _property_of(key)) in _PROPERTIES}
    made = calls_of(unreached(s), {"plain": (WHOLE.run, like), "x": (WHOLE.run, WHOLE.run)})
    return kit_cases(s) + author_cases(s) + applicable(s, properties | made)


@once
def kit_cases(s: Subject) -> list[Case]:
    """The kit's own cases that apply, with the class's own versions of methods; none writes to its argument."""
    table = FUNCTIONAL | VIEWS | own_methods(s)
    return applicable(s, {name: run for name, run in table.items() if name != "x.detach()"})


@once
def own_methods(s: Subject) -> dict[str, Callable[[Any], Any]]:
    """Calls of the author's methods that return a tensor for a plain tensor too, such as ``inverse``."""
    members = {
        n: m for base in s.own_bases for n, m in vars(base).items() if hasattr(Tensor, n) and n[0] != "_"
    }
    functions = {n for n, m in members.items() if inspect.isfunction(m) and not hasattr(m, "__source__")}
    calls = {f"x.{name}()": lambda x, name=name: getattr(x, name)() for name in functions - _NOT_CALLED}
    return {name: run for name, run in calls.items() if isinstance(tried(run, stand_ins(s)[0])[0], Tensor)}


# Methods that do not compute, that other promises check, or that have another meaning for plain tensors.
_NOT_CALLED = frozenset("detach requires_grad_ backward to_dense dequantize".split())


@once
def unreached(s: Subject) -> list[Any]:
    """The ops and functions with a rule that neither the kit's cases nor the author's cases reach."""
    return missed_rules(s, kit_cases(s) + author_cases(s)) if s.declared else []


# Python's errors for a call that has more arguments than a rule has parameters.
_TAKES_NOT = ("unexpected keyword argument", "positional arguments but")


@once
def argument_cases(s: Subject) -> list[Case]:
    """The calls of ``ARGUMENTS`` that apply and that the class does not refuse."""
    return not_refused(s, applicable(s, ARGUMENTS))


def not_refused(s: Subject, cases: Iterable[Case], make: Callable[[], Any] | None = None) -> list[Case]:
    """The cases that the class does not refuse, and whose arguments its rules have parameters for.

    Args:
        s: the class.
        cases: the calls.
        make: makes the operand; by default a value of the factory.
    """
    errors = [(case, tried_alone(lambda run=case.run: run((make or s.make)()))[1]) for case in cases]
    return [
        case
        for case, error in errors
        if refusal(error, s.is_own) is None and not any(words in str(error) for words in _TAKES_NOT)
    ]


@once
def accepted(s: Subject) -> list[Case]:
    """The cases that the class takes in eager mode."""
    with torch.no_grad():
        cases = [case for case in functional_cases(s) if succeeds(lambda c=case: c.run(s.make()))]
    return [dataclasses.replace(case, marks=("works",)) for case in cases]


@once
def recorded(s: Subject) -> list[Case]:
    """The accepted cases that have a derivative and that a plain tensor takes while autograd records.

    Without a reference, the author's arguments may fit the class and no plain tensor of its size. Such cases stay.

    Raises:
        Skipped: the dtype of the class cannot require grad.
    """
    s.needs("gradients")
    calls = {} if s.has_reference else {case.name: case.run for case in author_cases(s)}
    own = calls.keys() - {case.name for case in applicable(s, calls)}
    # A case that works without gradients may fail with them.
    cases = [dataclasses.replace(case, marks=()) for case in accepted(s)]
    return [case for case in cases if case.name in own or records_on(stand_ins(s), case)]


def records_on(plains: Iterable[Any], case: Case) -> bool:
    """Whether a case has a derivative for each of some plain tensors, or pairs of them."""
    run = lambda given: gradients_by(each(given, Tensor.requires_grad_), case.run(given))  # noqa: E731
    return all(succeeds(run, given) for given in plains)


def each(operand: Any, change: Callable[[Any], Any] = lambda x: x) -> list[Any]:
    """A function of each value of an operand, which is a value or a pair of values."""
    return [change(x) for x in (operand if isinstance(operand, list) else [operand])]


def live(result: Any) -> list[Tensor]:
    """The results that require grad."""
    return [t for t in leaves(result) if isinstance(t, Tensor) and t.requires_grad]


def ones_for(results: Sequence[Tensor]) -> list[Tensor]:
    """A plain cotangent for each result: small numbers, not all equal."""
    return [like(torch.empty(t.shape, dtype=t.dtype, device=t.device)) + 1 for t in results]


def gradients_by(tensors: Sequence[Tensor], result: Any) -> Sequence[Any]:
    """The gradient of a result by each tensor, for plain cotangents; None for a tensor without a gradient."""
    results = live(result)
    if not results or not tensors:
        return [None] * len(tensors)
    return torch.autograd.grad(results, tensors, ones_for(results), allow_unused=True, retain_graph=True)


# ---- calls of the author -----------------------------------------------------------------------------------


def author_cases(s: Subject) -> list[Case]:
    """Ops with arguments that the author passed as ``ops={op: lambda x: (...)}``."""
    given = s.options.get("ops")  # or names of OpInfo entries
    calls = given.items() if isinstance(given, Mapping) else ()
    return [
        Case(name_of(op).removeprefix("aten."), partial(_call_of_author, s, op, make)) for op, make in calls
    ]


def _call_of_author(s: Subject, op: Any, arguments: Callable[[Any], tuple[Any, ...]], x: Any) -> Any:
    """Calls an op on a value, or on a tensor.

    Where the author's function reads fields, it gets a value, and the tensor replaces that value in its result.
    """
    value = x if isinstance(x, s.cls) or succeeds(arguments, x) else s.make()
    given = map_tensors(tuple(arguments(value)), lambda t: x if t is value else t)
    if x.dtype != s.dtype:  # as in float64, in which differences estimate a slope
        given = map_tensors(given, lambda t: t.to(x.dtype) if t.dtype == s.dtype else t)
    return op(*given)


# ---- ops that calls reach ------------------------------------------------------------------------------------


def missed_rules(s: Subject, cases: Iterable[Case]) -> list[Any]:
    """The ops and functions that have a rule and that none of the calls reaches."""
    seen = set[Any]()

    def record(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if s.cls in types:
            seen.add(func)
        return func(*args, **(kwargs or {}))

    functions = type("Functions", (TorchFunctionMode,), {"__torch_function__": record})()
    ops = type("Ops", (TorchDispatchMode,), {"__torch_dispatch__": record})()
    for case in cases:
        with torch.no_grad(), functions, ops:
            tried(lambda run=case.run: run(s.make()))
    seen |= {op.overloadpacket for op in seen if isinstance(op, OpOverload)}
    books: list[RuleBook] = [vars(b)[BOOK] for b in s.cls.__mro__ if BOOK in vars(b)]
    keys = [k for b in books for k in (*b.overloads, *(op.overloadpacket for op in b.packets), *b.functions)]
    return [key for key in dict.fromkeys(keys) if not seen & _calls_of(key)]


def _calls_of(key: Any) -> set[Any]:
    """The ops and functions by which a mode may see a call that runs the rule of a key."""
    overloads = [getattr(key, n) for n in key.overloads()] if isinstance(key, OpOverloadPacket) else [key]
    composite = [op for op in overloads if isinstance(op, OpOverload) and is_composite(op)]
    return {key, *twins(key), *composite, *(f for op in composite for f in python_functions(op))}


def name_of(key: Any) -> str:
    """The name of the op or function of a rule, as a report shows it; a property is named like ``Tensor.T``."""
    if isinstance(key, OpOverload | OpOverloadPacket):
        return str(key)
    return f"Tensor.{attribute}" if (attribute := _property_of(key)) else getattr(key, "__name__", str(key))


def _property_of(key: Any) -> str | None:
    """The name of the property of tensors that a function reads, as ``torch.Tensor.T.__get__`` reads ``T``."""
    return key.__self__.__name__ if getattr(key, "__name__", "") == "__get__" else None


# ---- which rules a call runs ---------------------------------------------------------------------------------


def functions_of(cls: type) -> list[tuple[Any, types.FunctionType]]:
    """The rules of a declared class, each with its op or function, and its method ``materialize``."""
    rules = [
        *(all_rules(cls) if hasattr(cls, "__spec__") else ()),
        ("materialize", getattr(cls, "materialize", None)),
    ]
    unwrapped: list[tuple[Any, Any]] = [(key, inspect.unwrap(rule)) for key, rule in rules if callable(rule)]
    return [(key, rule) for key, rule in unwrapped if isinstance(rule, types.FunctionType)]


def rules_run(s: Subject, run: Callable[[], Any]) -> list[tuple[Any, types.FunctionType]]:
    """The rules of a declared class that a call runs, ``materialize`` included, each with its op or function."""
    codes, before = set[Any](), sys.getprofile()
    sys.setprofile(lambda frame, event, arg: codes.add(frame.f_code))
    try:
        tried(run)
    finally:
        sys.setprofile(before if callable(before) else None)
        getattr(before, "enable", bool)()  # cProfile's, which is not a function
    return [(key, rule) for key, rule in functions_of(s.cls) if rule.__code__ in codes]


def names_of_rules(s: Subject, run: Callable[[], Any]) -> list[str]:
    """The names and places of the rules of a declared class that a call runs; its ``materialize`` if there are none."""
    run_rules = rules_run(s, run)
    rules = [rule for key, rule in run_rules if key != "materialize"] or [rule for _, rule in run_rules]
    return list(dict.fromkeys(map(describe, rules)))


@once
def few_of_each_rule(s: Subject) -> list[Case]:
    """The accepted cases; below the level ``full``, at most four of the calls that the kit makes for one rule."""
    usual = {case.name for case in kit_cases(s) + author_cases(s)}
    made = [c for c in accepted(s) if c.name not in usual and s.options.get("level") != "full"]
    rules = [frozenset(rule for _, rule in rules_run(s, lambda c=c: c.run(s.make()))) for c in made]
    left = {case.name for i, case in enumerate(made) if rules[:i].count(rules[i]) >= 4}
    return [case for case in accepted(s) if case.name not in left]


def is_for_op(key: Any) -> bool:
    """Whether a rule for a key is for ops: it runs below autograd, or on differentiable fields of a structure."""
    return isinstance(key, OpOverload | OpOverloadPacket | Family | torch.Tag)


# ---- calls of the others -------------------------------------------------------------------------------------

# Properties that give a tensor.
_PROPERTIES = ("T", "mT", "H", "mH", "real", "imag")
# Ops whose results their arguments do not determine.
_UNDEFINED = ("empty", "new_empty")
# Modules whose functions call an op named after both, such as aten.linalg_inv for torch.linalg.inv.
_NAMESPACES = ("linalg", "special", "fft")
_KINDS = {"Tensor": "tensor", "number": "number", "float": "number"}
# Of an operand, the first tensor of a call and each other one.
Operands = tuple[Callable[[Any], Any], Callable[[Any], Any]]
PAIR: dict[str, Operands] = {"y": (itemgetter(0), itemgetter(1))}


def calls_of(missed: Iterable[Any], operands: Mapping[str, Operands]) -> dict[str, Callable[[Any], Any]]:
    """Makes calls of ops and functions that write to no argument, by their schemas.

    An argument without a default is a tensor or the number 2; ``operands`` makes the tensors, by words for the others.
    """
    calls = dict[str, Callable[[Any], Any]]()
    for key, op in ((rule, op) for rule in missed for op in _ops_of(rule)):
        facts, name = op_facts(op), op.overloadpacket.__name__
        types_of = {a.name: str(a.type) for a in schema_of(op).arguments}
        needed = [a for a in facts.arguments if not a.default]
        kinds = [_KINDS.get("" if a.keyword else types_of[a.name]) for a in needed]
        is_random = torch.Tag.nondeterministic_seeded in op.tags
        is_named = not name.startswith(("_", *_UNDEFINED)) and not name.endswith("_backward")
        if facts.written or "other" in facts.returns or is_random or not is_named:
            continue
        run, words = (op, str(op)) if isinstance(key, OpOverloadPacket) else (key, name_of(key))
        for word, of_operand in operands.items() if None not in kinds and kinds[:1] == ["tensor"] else ():
            if operands is not PAIR or "tensor" in kinds[1:]:
                shown = ["x", *(word if kind == "tensor" else "2" for kind in kinds[1:])]
                calls[f"{words}({', '.join(shown)})"] = partial(_call, run, kinds[1:], *of_operand)
    return calls


def _call(
    run: Any, kinds: list[str], first: Callable[[Any], Any], other: Callable[[Any], Any], x: Any
) -> Any:
    return run(first(x), *(other(x) if kind == "tensor" else 2 for kind in kinds))


def _ops_of(key: Any) -> list[OpOverload]:
    """The ops of a rule's key: an op, a packet or a function of torch."""
    name = getattr(key, "__name__", "")
    homes = [(torch, name), *((getattr(torch, m), name.removeprefix(f"{m}_")) for m in _NAMESPACES)]
    is_of_torch = any(getattr(home, short, None) is key for home, short in homes)
    candidate = getattr(torch.ops.aten, name, None) if is_of_torch else key
    if isinstance(candidate, OpOverloadPacket):
        return ops_of_packet(candidate)
    return [key] if isinstance(key, OpOverload) else []


# ---- rules that no call reaches ---------------------------------------------------------------------------------


def rules_tried(s: Subject, case: Case) -> None:
    """Raises for a rule that refuses each call of the kit, since an op that it calls has no rule."""
    by_code = {rule.__code__: rule for _, rule in functions_of(s.cls)}
    for case in functional_cases(s):
        _, error = tried_alone(lambda run=case.run: run(s.make()))
        is_without = error is not None and getattr(error, "code", None) == "no-rule"
        codes = [entry.tb_frame.f_code for entry in entries_of(error)] if error and is_without else []
        rule = next((by_code[code] for code in reversed(codes) if code in by_code), None)
        if rule is not None and rule not in _working(s) and codes[-1] is not rule.__code__:
            raise Broken(
                f"{case.name}: {describe(rule)} is made of ops on {one_of(s.cls)}, and one has no rule: {error}"
            ) from error
    missed = ", ".join(sorted({name_of(key) for key in missed_rules(s, accepted(s))}))
    skip_unless(not missed, f"not called: {missed}; pass ops={{op: lambda x: (arguments with x in them)}}")


@once
def _working(s: Subject) -> set[Any]:
    """The rules that run in calls which the class takes."""
    return {rule for case in accepted(s) for _, rule in rules_run(s, lambda c=case: c.run(s.make()))}
