"""Which rules of a declared class some calls reach, and a call for each rule that they do not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from subclasses._torch import OpOverload, OpOverloadPacket, TorchDispatchMode, is_composite, schema_of
from subclasses.autograd.python_functions import python_functions, twins
from subclasses.ops.schema import Argument, op_facts, ops_of_packet
from subclasses.rules.registry import BOOK, RuleBook
from subclasses.spec.values import map_tensors
from subclasses.testing.errors import Attempt
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
    """The Python-level functions on which the rule for a composite op is installed."""
    overloads = [getattr(op, n) for n in op.overloads()] if hasattr(op, "overloads") else [op]
    return {f for o in overloads if is_composite(o) for f in python_functions(o)}


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
    packet = getattr(torch.ops.aten, getattr(key, "__name__", ""), None)
    if packet is None or getattr(torch, packet.__name__, None) is not key:
        return []
    return ops_of_packet(packet)


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
