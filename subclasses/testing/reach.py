"""Which rules of a declared class some calls reach, and a call for each rule that they do not."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from subclasses._torch import OpOverload, OpOverloadPacket, TorchDispatchMode, is_composite, schema_of
from subclasses.autograd.python_functions import python_functions, twins
from subclasses.ops.schema import Argument, op_facts, ops_of_packet
from subclasses.rules.families import Family
from subclasses.rules.registry import BOOK, RuleBook, all_rules
from subclasses.rules.results import describe
from subclasses.spec.values import map_tensors
from subclasses.testing.errors import Attempt, Broken
from subclasses.testing.property import Case
from subclasses.testing.subject import Subject

# ---- what calls reach ----------------------------------------------------------------------------------------


class _Recorder:
    """Records what is called with a value of a class."""

    def __init__(self, cls: type) -> None:
        super().__init__()
        self.cls, self.seen = cls, set[Any]()

    def record(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs a call, and records it if an argument is of the class."""
        if self.cls in types:
            self.seen.add(func)
        return func(*args, **(kwargs or {}))


class _Functions(_Recorder, TorchFunctionMode):
    """Records Python-level functions."""

    __torch_function__: Any = _Recorder.record


class _Ops(_Recorder, TorchDispatchMode):
    """Records dispatched ops."""

    __torch_dispatch__: Any = _Recorder.record


def missed_rules(s: Subject, cases: Iterable[Case]) -> list[Any]:
    """The ops and functions that have a rule and that none of the calls reaches."""
    functions, ops = _Functions(s.cls), _Ops(s.cls)
    for case in cases:
        with Attempt(), torch.no_grad(), functions, ops:
            case.run(s.make())
    books: list[RuleBook] = [vars(b)[BOOK] for b in s.cls.__mro__ if BOOK in vars(b)]
    packets = {op.overloadpacket for op in ops.seen}
    missed = [op for book in books for op in book.overloads if op not in ops.seen]
    missed += [op.overloadpacket for book in books for op in book.packets if op.overloadpacket not in packets]
    ops_missed = [op for op in missed if not functions.seen & _functions_of(op)]
    return ops_missed + [f for book in books for f in book.functions if not functions.seen & {f, *twins(f)}]


def rules_reached(s: Subject, case: Case) -> list[Any]:
    """The ops and functions with a rule, not one for a family or a tag, that a call reaches."""
    missed = missed_rules(s, [case])
    return [key for key in missed_rules(s, []) if key not in missed]


def name_of(key: Any) -> str:
    """The name of what a rule is for, as a report shows it: that of a property is ``Tensor.T``."""
    if isinstance(key, OpOverload | OpOverloadPacket):
        return str(key)
    return f"Tensor.{found}" if (found := _property_of(key)) else getattr(key, "__name__", str(key))


def _property_of(key: Any) -> str | None:
    """The name of the property of tensors that a function reads, as ``torch.Tensor.T.__get__`` reads ``T``."""
    return key.__self__.__name__ if getattr(key, "__name__", "") == "__get__" else None


def _functions_of(op: Any) -> set[Any]:
    """What a mode for functions sees of a composite op: the Python-level functions of its rule, or the op itself."""
    overloads = [getattr(op, n) for n in op.overloads()] if hasattr(op, "overloads") else [op]
    return {f for o in overloads if is_composite(o) for f in (o, *python_functions(o))}


# ---- which rules a call runs ---------------------------------------------------------------------------------


def rules_run(s: Subject, run: Callable[[], Any]) -> list[tuple[Any, types.FunctionType]]:
    """The rules of a declared class, and its ``materialize``, that a call runs, by what they are for."""
    codes = set[Any]()
    before: Any = sys.getprofile()
    sys.setprofile(lambda frame, event, arg: codes.add(frame.f_code))
    try:
        with Attempt():
            run()
    finally:
        sys.setprofile(before if callable(before) else None)
        if hasattr(before, "enable"):  # cProfile's, which is no function
            before.enable()
    return [(key, rule) for key, rule in functions_of(s.cls) if rule.__code__ in codes]


def names_of_rules(s: Subject, run: Callable[[], Any]) -> list[str]:
    """The names and places of the rules of a declared class that a call runs."""
    return list(dict.fromkeys(describe(rule) for key, rule in rules_run(s, run) if key != "materialize"))


def name_rules(s: Subject, error: Broken) -> str:
    """Begins the advice for a broken promise: the rules that ran where it broke, if they are few."""
    named = names_of_rules(s, error.again) if error.again else []
    return f"look at {' and '.join(named)}, which ran: " if 0 < len(named) <= 3 else ""


def is_for_op(key: Any) -> bool:
    """Whether a rule for a key is for ops: it runs below autograd, or on differentiable fields of a structure."""
    return isinstance(key, OpOverload | OpOverloadPacket | Family | torch.Tag)


def functions_of(cls: type) -> Iterator[tuple[Any, types.FunctionType]]:
    """Yields the rules of a declared class, and its method ``materialize``, by what they are for."""
    rules = all_rules(cls) if hasattr(cls, "__spec__") else ()
    for key, rule in (*rules, ("materialize", getattr(cls, "materialize", None))):
        function: Any = inspect.unwrap(rule) if callable(rule) else None
        if isinstance(function, types.FunctionType):
            yield key, function


# ---- calls of the others -------------------------------------------------------------------------------------

# Properties that give a tensor.
_PROPERTIES = ("T", "mT", "H", "mH", "real", "imag")
# What they give is no function of their arguments.
_UNDEFINED = ("empty", "new_empty")


def calls_of(missed: Iterable[Any], like: Callable[[Any], Tensor]) -> Iterator[Case]:
    """Makes calls of ops and functions by their schemas, with tensors and numbers for what has no default.

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


def vector_calls(s: Subject, like: Callable[..., Tensor]) -> Iterator[Case]:
    """Makes products with a vector, for which a rule for those of matrices may be wrong, as far as they reach one.

    Args:
        s: the class under test; one written by hand gets the products alone that PyTorch makes of an operator.
        like: makes a plain tensor of the dtype of a value, of a size.
    """
    right = Case("x @ vector", lambda x: x @ like(x, x.shape[-1]))
    products = [right, Case("vector @ x", lambda x: like(x, x.shape[-2]) @ x)]
    if not s.declared:
        yield from products
        return
    products.append(Case("F.linear(vector, x)", lambda x: F.linear(like(x, x.shape[-1]), x)))
    yield from (case for case in products if rules_reached(s, case))
    same = Case("torch.mv(x, vector)", lambda x: torch.mv(x, like(x, x.shape[-1])))
    if {*rules_reached(s, same)}.difference(rules_reached(s, right)):
        yield same


def pair_calls_of(missed: Iterable[Any]) -> Iterator[Case]:
    """Makes calls of a pair of values by the schemas of ops and functions that take several tensors."""
    for name, run, kinds in _callable(missed):
        if "tensor" in kinds:
            case = _call(name, run, kinds, "y", lambda y: y)
            yield Case(case.name, lambda pair, case=case: case.run(*pair))


def _callable(missed: Iterable[Any]) -> Iterator[tuple[str, Any, list[str | None]]]:
    """Those that write to nothing and can be called by their schemas: name, function, what to pass after the value."""
    for key in missed:
        for op in _ops_of(key):
            facts = op_facts(op)
            called = op if isinstance(key, OpOverloadPacket) else key
            needed = [a for a in facts.arguments if not a.default]
            is_pure = (
                not facts.written
                and "other" not in facts.returns
                and torch.Tag.nondeterministic_seeded not in op.tags
            )
            name = op.overloadpacket.__name__
            is_internal = name.startswith("_") or name.endswith("_backward")
            if not is_pure or is_internal or name.startswith(_UNDEFINED):
                continue
            kinds = [_kind(op, a) for a in needed]
            if needed and kinds[0] == "tensor" and not any(a.keyword for a in needed) and None not in kinds:
                yield str(op) if called is op else name_of(key), called, kinds[1:]


def _ops_of(key: Any) -> list[OpOverload]:
    """The ops behind what a rule is for."""
    if isinstance(key, OpOverload):
        return [key]
    if isinstance(key, OpOverloadPacket):
        return ops_of_packet(key)
    name = getattr(key, "__name__", "")
    places = ((torch, name), *((getattr(torch, m), name.removeprefix(f"{m}_")) for m in _NAMESPACES))
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or all(getattr(place, short, None) is not key for place, short in places):
        return []
    return ops_of_packet(packet)


# Modules whose functions call an op named after both, such as aten.linalg_inv for torch.linalg.inv.
_NAMESPACES = ("linalg", "special", "fft")


def _kind(op: OpOverload, argument: Argument) -> str | None:
    """Whether an argument is a tensor or a number; None for another kind."""
    kind = next(str(a.type) for a in schema_of(op).arguments if a.name == argument.name)
    return {"Tensor": "tensor", "number": "number", "float": "number"}.get(kind)


def _call(name: str, run: Any, kinds: list[str | None], word: str, other: Callable[[Any], Any]) -> Case:
    """A call of a value, with a tensor made of it or of a second value for each other one, and 2 for each number."""

    def call(x: Any, y: Any = None) -> Any:
        source = x if y is None else y
        out = run(x, *(other(source) if kind == "tensor" else 2 for kind in kinds))
        return list(out) if isinstance(out, tuple) else out

    shown = [word if kind == "tensor" else "2" for kind in kinds]
    return Case(f"{name}({', '.join(['x', *shown])})", call)


# ---- calls of the author -----------------------------------------------------------------------------------


def author_cases(s: Subject) -> list[Case]:
    """Ops with arguments that the author passed as ``ops={op: lambda x: (...)}``."""
    ops = s.options.get("ops")
    if not isinstance(ops, Mapping):
        return []  # names of OpInfo entries
    return [
        Case(name_of(op).removeprefix("aten."), _call_of(s, op, arguments)) for op, arguments in ops.items()
    ]


def _call_of(s: Subject, op: Any, arguments: Callable[[Any], tuple[Any, ...]]) -> Callable[[Any], Any]:
    dtype = s.make().dtype

    def run(x: Any) -> Any:
        given = arguments(x) if isinstance(x, s.cls) else _arguments_for(s, arguments, x)
        if x.dtype != dtype:  # as in float64, whose differences tell a slope
            given = map_tensors(tuple(given), lambda t: t.to(x.dtype) if t.dtype == dtype else t)
        return op(*given)

    return run


def _arguments_for(s: Subject, arguments: Callable[[Any], tuple[Any, ...]], x: Any) -> tuple[Any, ...]:
    """The author's arguments for a tensor; where they read fields, those for a value, with the tensor in its place."""
    try:
        return arguments(x)
    except AttributeError:
        value = s.make()
        return map_tensors(tuple(arguments(value)), lambda t: x if t is value else t)
