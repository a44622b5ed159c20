"""Which rules of a declared class some calls reach, and a call for each rule that they do not."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from subclasses._torch import OpOverload, OpOverloadPacket, TorchDispatchMode, is_composite, schema_of
from subclasses.autograd.python_functions import python_functions, twins
from subclasses.ops.schema import op_facts, ops_of_packet
from subclasses.rules.families import Family
from subclasses.rules.registry import BOOK, RuleBook, all_rules
from subclasses.rules.results import describe
from subclasses.testing.errors import tried
from subclasses.testing.subject import Subject


@dataclass(frozen=True)
class Case:
    """A call by the name that a report shows.

    Attributes:
        name: the call, as an author would write it.
        run: the call, as a function of its operand.
        works: whether the class is known to take it in eager mode.
    """

    name: str
    run: Callable[[Any], Any]
    works: bool = False


WHOLE = Case("", lambda x: x)
"""The case of a promise about a class as a whole."""


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
        if hasattr(before, "enable"):  # cProfile's, which is no function
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
# Ops whose results are no function of their arguments.
_UNDEFINED = ("empty", "new_empty")
# Modules whose functions call an op named after both, such as aten.linalg_inv for torch.linalg.inv.
_NAMESPACES = ("linalg", "special", "fft")
_KINDS = {"Tensor": "tensor", "number": "number", "float": "number"}


def calls_of(missed: Iterable[Any], like: Callable[[Any], Tensor]) -> Iterator[Case]:
    """Makes calls of ops and functions by their schemas, with tensors and numbers for arguments without a default.

    Args:
        missed: ops, packets and functions, such as :func:`missed_rules` finds.
        like: makes a plain tensor of the size and dtype of a value.
    """
    missed = list(missed)
    yield from (Case(f"x.{_property_of(key)}", key) for key in missed if _property_of(key) in _PROPERTIES)
    for name, run, kinds in _callable(missed):
        yield _call(name, run, kinds, "plain", like)
        if "tensor" in kinds:  # with the value for each
            yield _call(name, run, kinds, "x", lambda x: x)


def pair_calls_of(missed: Iterable[Any]) -> Iterator[Case]:
    """Makes calls of a pair of values by the schemas of ops and functions that take several tensors."""
    for name, run, kinds in _callable(missed):
        if "tensor" in kinds:
            case = _call(name, run, kinds, "y", lambda y: y)
            yield Case(case.name, lambda pair, case=case: case.run(*pair))


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


def _call(name: str, run: Any, kinds: list[str | None], word: str, other: Callable[[Any], Any]) -> Case:
    """A call of a value, with a tensor made of it or of a second value for each other one, and 2 for each number."""

    def call(x: Any, y: Any = None) -> Any:
        source = x if y is None else y
        return run(x, *(other(source) if kind == "tensor" else 2 for kind in kinds))

    shown = [word if kind == "tensor" else "2" for kind in kinds]
    return Case(f"{name}({', '.join(['x', *shown])})", call)
