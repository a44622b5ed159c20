"""Which calls apply to a class: the kit's own, the author's, and one for each rule that neither reaches."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from subclasses._torch import OpOverload, OpOverloadPacket, TorchDispatchMode, is_composite, schema_of
from subclasses.autograd.python_functions import python_functions, twins
from subclasses.errors import one_of
from subclasses.ops.schema import op_facts, ops_of_packet
from subclasses.rules.families import Family
from subclasses.rules.registry import BOOK, RuleBook, all_rules
from subclasses.rules.results import describe
from subclasses.spec.values import map_tensors
from subclasses.testing.calls import ARGUMENTS, FUNCTIONAL, VIEWS, Case, Table, like
from subclasses.testing.errors import Broken, Skipped, code_of, innermost, refusal, succeeds, tried
from subclasses.testing.subject import Subject, leaves, once, tried_alone

# ---- which apply -------------------------------------------------------------------------------------------


@torch.no_grad()
def applicable(s: Subject, table: Table) -> list[Case]:
    """The cases that a plain tensor with the sizes and dtype of a value takes."""
    plains = stand_ins(s)
    return [case for case in callable_on(s, table) if all(succeeds(case.run, p.clone()) for p in plains)]


def callable_on(s: Subject, table: Table) -> list[Case]:
    """The cases that call no method which a field of the class hides, such as ``t``."""
    hidden = {name for name in s.cls.__spec__.names if hasattr(Tensor, name)} if s.declared else set[str]()
    names_of = lambda run: getattr(getattr(run, "__code__", None), "co_names", ())  # noqa: E731
    return [Case(name, run) for name, run in table.items() if not hidden.intersection(names_of(run))]


def stand_ins(s: Subject) -> list[Tensor]:
    """Copies of the tensors that a value represents.

    A class without a reference gives one plain tensor of the size and dtype of its value.
    """
    x = s.make().detach()
    return [t.detach().clone() for t in s.reference(x)] if s.has_reference else [like(x)]


@once
def functional_cases(s: Subject) -> list[Case]:
    """The kit's own cases that apply, the author's cases, and a case for each rule that neither reaches."""
    return kit_cases(s) + author_cases(s) + applicable(s, calls_of(unreached(s)))


@once
def kit_cases(s: Subject) -> list[Case]:
    """The kit's own cases that apply, with the class's own versions of methods; none writes to its argument."""
    views = {name: view for name, view in VIEWS.items() if name != "x.detach()"}
    return applicable(s, FUNCTIONAL | views | own_methods(s))


@once
def own_methods(s: Subject) -> dict[str, Callable[[Any], Any]]:
    """Calls of the author's methods that return a tensor for a plain tensor too, such as ``inverse``."""
    members = {n: m for base in s.own_bases for n, m in vars(base).items()}
    names = {n for n, m in members.items() if inspect.isfunction(m) and not hasattr(m, "__source__")}
    plain = stand_ins(s)[0]
    return {
        f"x.{name}()": lambda x, name=name: getattr(x, name)()
        for name in names
        if not name.startswith("_")
        and hasattr(Tensor, name)
        and name not in _NOT_CALLED
        and isinstance(tried(lambda name=name: getattr(plain.clone(), name)())[0], Tensor)
    }


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
    return [case for case in applicable(s, ARGUMENTS) if not refuses(s, case)]


def refuses(s: Subject, case: Case, make: Callable[[], Any] | None = None) -> bool:
    """Whether a class refuses a call, or its rule has no parameter for one of the arguments.

    Args:
        s: the class.
        case: the call.
        make: makes the argument of the call; by default a value of the factory.
    """
    _, error = tried_alone(lambda: case.run((make or s.make)()))
    return refusal(error, s.is_own) is not None or any(words in str(error) for words in _TAKES_NOT)


@once
def accepted(s: Subject) -> list[Case]:
    """The cases that the class takes in eager mode."""
    with torch.no_grad():
        cases = [case for case in functional_cases(s) if succeeds(lambda c=case: c.run(s.make()))]
    return [dataclasses.replace(case, works=True) for case in cases]


@once
def recorded(s: Subject) -> list[Case]:
    """The accepted cases that have a derivative and that a plain tensor takes while autograd records.

    Without a reference, the author's arguments may fit the class and no plain tensor of its size. Such cases stay.

    Raises:
        Skipped: the dtype of the class cannot require grad.
    """
    s.needs("gradients")

    def record(case: Case) -> None:
        for plain in stand_ins(s):
            gradients_by([plain], case.run(plain.requires_grad_()))

    # A case that works without gradients may fail with them.
    calls = {} if s.has_reference else {case.name: case.run for case in author_cases(s)}
    own = calls.keys() - {case.name for case in applicable(s, calls)}
    cases = [case for case in accepted(s) if case.name in own or succeeds(record, case)]
    return [dataclasses.replace(case, works=False) for case in cases]


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
    return torch.autograd.grad(results, tensors, ones_for(results), allow_unused=True)


# ---- calls of the author -----------------------------------------------------------------------------------


def author_cases(s: Subject) -> list[Case]:
    """Ops with arguments that the author passed as ``ops={op: lambda x: (...)}``."""
    ops = s.options.get("ops")
    calls = ops.items() if isinstance(ops, Mapping) else ()  # else names of OpInfo entries
    return [Case(name_of(op).removeprefix("aten."), _call_of(s, op, make)) for op, make in calls]


def _call_of(s: Subject, op: Any, arguments: Callable[[Any], tuple[Any, ...]]) -> Callable[[Any], Any]:
    dtype = s.make().dtype

    def run(x: Any) -> Any:
        given = arguments(x) if isinstance(x, s.cls) else _arguments_for(s, arguments, x)
        if x.dtype != dtype:  # as in float64, in which differences estimate a slope
            given = map_tensors(tuple(given), lambda t: t.to(x.dtype) if t.dtype == dtype else t)
        return op(*given)

    return run


def _arguments_for(s: Subject, arguments: Callable[[Any], tuple[Any, ...]], x: Any) -> tuple[Any, ...]:
    """The author's arguments for a tensor.

    Where the author's function reads fields, it gets a value, and the tensor replaces that value in its result.
    """
    try:
        return arguments(x)
    except AttributeError:
        value = s.make()
        return map_tensors(tuple(arguments(value)), lambda t: x if t is value else t)


# ---- ops that calls reach ------------------------------------------------------------------------------------


def _record(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Runs a call, and records its function if an argument is of the class."""
    if self.cls in types:
        self.seen.add(func)
    return func(*args, **(kwargs or {}))


class _Functions(TorchFunctionMode):
    """Records Python-level functions."""

    __torch_function__: Any = _record


class _Ops(TorchDispatchMode):
    """Records dispatched ops."""

    __torch_dispatch__: Any = _record


def missed_rules(s: Subject, cases: Iterable[Case]) -> list[Any]:
    """The ops and functions that have a rule and that none of the calls reaches."""
    functions, ops = _Functions(), _Ops()
    for mode in (functions, ops):
        mode.cls, mode.seen = s.cls, set()  # type: ignore[union-attr]
    for case in cases:
        with torch.no_grad(), functions, ops:
            tried(lambda run=case.run: run(s.make()))
    called, seen = functions.seen, ops.seen  # type: ignore[attr-defined]
    books: list[RuleBook] = [vars(b)[BOOK] for b in s.cls.__mro__ if BOOK in vars(b)]
    packets = {op.overloadpacket for op in seen}
    missed = [op for book in books for op in book.overloads if op not in seen]
    missed += [op.overloadpacket for book in books for op in book.packets if op.overloadpacket not in packets]
    ops_missed = [op for op in missed if not called & _functions_of(op)]
    return ops_missed + [f for book in books for f in book.functions if not called & {f, *twins(f)}]


def _functions_of(op: Any) -> set[Any]:
    """The functions that a mode may get for a composite op: its Python-level functions, or the op itself."""
    overloads = [getattr(op, n) for n in op.overloads()] if hasattr(op, "overloads") else [op]
    return {f for o in overloads if is_composite(o) for f in (o, *python_functions(o))}


def name_of(key: Any) -> str:
    """The name of the op or function of a rule, as a report shows it; a property is named like ``Tensor.T``."""
    if isinstance(key, OpOverload | OpOverloadPacket):
        return str(key)
    return f"Tensor.{found}" if (found := _property_of(key)) else getattr(key, "__name__", str(key))


def _property_of(key: Any) -> str | None:
    """The name of the property of tensors that a function reads, as ``torch.Tensor.T.__get__`` reads ``T``."""
    return key.__self__.__name__ if getattr(key, "__name__", "") == "__get__" else None


# ---- which rules a call runs ---------------------------------------------------------------------------------


def functions_of(cls: type) -> Iterator[tuple[Any, types.FunctionType]]:
    """Yields the rules of a declared class, each with its op or function, and its method ``materialize``."""
    rules = all_rules(cls) if hasattr(cls, "__spec__") else ()
    for key, rule in (*rules, ("materialize", getattr(cls, "materialize", None))):
        function: Any = inspect.unwrap(rule) if callable(rule) else None
        if isinstance(function, types.FunctionType):
            yield key, function


def rules_run(s: Subject, run: Callable[[], Any]) -> list[tuple[Any, types.FunctionType]]:
    """The rules of a declared class that a call runs, ``materialize`` included, each with its op or function."""
    codes = set[Any]()
    before: Any = sys.getprofile()
    sys.setprofile(lambda frame, event, arg: codes.add(frame.f_code))
    try:
        tried(run)
    finally:
        sys.setprofile(before if callable(before) else None)
        if hasattr(before, "enable"):  # cProfile's, which is not a function
            before.enable()
    return [(key, rule) for key, rule in functions_of(s.cls) if rule.__code__ in codes]


def names_of_rules(s: Subject, run: Callable[[], Any]) -> list[str]:
    """The names and places of the rules of a declared class that a call runs; its ``materialize`` if there are none."""
    run_rules = rules_run(s, run)
    rules = [rule for key, rule in run_rules if key != "materialize"] or [rule for _, rule in run_rules]
    return list(dict.fromkeys(map(describe, rules)))


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


def calls_of(missed: Sequence[Any]) -> dict[str, Callable[[Any], Any]]:
    """Makes calls of ops and functions by their schemas, with tensors and numbers for arguments without a default."""
    calls = {f"x.{name}": key for key in missed if (name := _property_of(key)) in _PROPERTIES}
    for name, run, kinds in _callable(missed):
        calls |= _call(name, run, kinds, "plain", like)
        calls |= _call(name, run, kinds, "x", lambda x: x)
    return calls


def pair_calls_of(missed: Sequence[Any]) -> dict[str, Callable[[Any], Any]]:
    """Makes calls of a pair of values by the schemas of ops and functions that take several tensors."""
    calls = [(name, run, kinds) for name, run, kinds in _callable(missed) if "tensor" in kinds]
    return dict(item for c in calls for item in _call(*c, "y", itemgetter(1), itemgetter(0)).items())


def _callable(missed: Iterable[Any]) -> Iterator[tuple[str, Any, list[str | None]]]:
    """Yields the ops and functions that write to no argument and can be called by their schemas.

    Each item is a name, the function, and the kinds of the arguments after the value.
    """
    for key in missed:
        for op in _ops_of(key):
            facts, name = op_facts(op), op.overloadpacket.__name__
            needed = [a for a in facts.arguments if not a.default]
            is_pure = not facts.written and "other" not in facts.returns
            is_pure = is_pure and torch.Tag.nondeterministic_seeded not in op.tags
            if not is_pure or name.startswith(("_", *_UNDEFINED)) or name.endswith("_backward"):
                continue
            types_of = {a.name: str(a.type) for a in schema_of(op).arguments}
            kinds = [_KINDS.get(types_of[a.name]) for a in needed]
            if needed and kinds[0] == "tensor" and not any(a.keyword for a in needed) and None not in kinds:
                called = op if isinstance(key, OpOverloadPacket) else key
                yield str(op) if called is op else name_of(key), called, kinds[1:]


def _ops_of(key: Any) -> list[OpOverload]:
    """The ops of a rule's key: an op, a packet or a function of torch."""
    if isinstance(key, OpOverload):
        return [key]
    if isinstance(key, OpOverloadPacket):
        return ops_of_packet(key)
    name = getattr(key, "__name__", "")
    places = ((torch, name), *((getattr(torch, m), name.removeprefix(f"{m}_")) for m in _NAMESPACES))
    packet = getattr(torch.ops.aten, name, None)
    is_of_torch = any(getattr(place, short, None) is key for place, short in places)
    return ops_of_packet(packet) if packet is not None and is_of_torch else []


def _call(
    name: str,
    run: Any,
    kinds: list[str | None],
    word: str,
    other: Callable[[Any], Any],
    first: Callable[[Any], Any] = lambda x: x,
) -> dict[str, Callable[[Any], Any]]:
    """A call with the first of its operands, another tensor for each other one, and 2 for each number."""
    shown = ["x", *(word if kind == "tensor" else "2" for kind in kinds)]
    call = lambda x: run(first(x), *(other(x) if kind == "tensor" else 2 for kind in kinds))  # noqa: E731
    return {f"{name}({', '.join(shown)})": call}


# ---- rules that no call reaches ---------------------------------------------------------------------------------


def rules_tried(s: Subject, case: Case) -> None:
    """Raises for a rule that refuses each call of the kit, since an op that it calls has no rule."""
    cases = accepted(s)
    for case in [case for case in functional_cases(s) if case.name not in {c.name for c in cases}]:
        _, error = tried_alone(lambda run=case.run: run(s.make()))
        rule = rule_that_raised(error, s.cls)
        if error is None or rule is None or code_of(error) != "no-rule" or rule in _working(s):
            continue
        if innermost(error).tb_frame.f_code is not rule.__code__:
            words = f"{describe(rule)} is made of ops on {one_of(s.cls)}, and one has no rule"
            raise Broken(f"{case.name}: {words}: {error}") from error
    if missed := missed_rules(s, cases):
        names = ", ".join(sorted({name_of(key) for key in missed}))
        raise Skipped(f"not called: {names}; pass ops={{op: lambda x: (arguments with x in them)}}")


@once
def _working(s: Subject) -> set[Any]:
    """The rules that run in calls which the class takes."""
    return {rule for case in accepted(s) for _, rule in rules_run(s, lambda c=case: c.run(s.make()))}


def rule_that_raised(error: BaseException | None, cls: type) -> Any:
    """Returns the rule among the frames of an error's traceback, the innermost if there are several."""
    by_code = {rule.__code__: rule for _, rule in functions_of(cls)}
    trace = traceback.walk_tb(error.__traceback__ if error else None)
    return next(iter([by_code[f.f_code] for f, _ in trace if f.f_code in by_code][::-1]), None)
