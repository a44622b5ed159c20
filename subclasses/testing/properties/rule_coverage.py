"""Which rules of a declared class the cases reach."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from subclasses._torch import OpOverload, OpOverloadPacket, TorchDispatchMode, is_composite
from subclasses.autograd.python_functions import python_functions, twins
from subclasses.dispatch.rules import BOOK, RuleBook
from subclasses.testing.cases import accepted, functional_cases
from subclasses.testing.causes import functions_of, missing_part, rule_that_raised
from subclasses.testing.errors import Attempt, Broken, Skipped
from subclasses.testing.faults import cut_of, rules_run
from subclasses.testing.property import Case, promise
from subclasses.testing.subject import Subject


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


def _missed_rules(s: Subject, cases: Iterable[Case]) -> list[Any]:
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


def _name(key: Any) -> str:
    return str(key) if isinstance(key, OpOverload | OpOverloadPacket) else getattr(key, "__name__", str(key))


def _functions_of(op: Any) -> set[Any]:
    """The Python-level functions on which the rule for a composite op is installed."""
    overloads = [getattr(op, n) for n in op.overloads()] if hasattr(op, "overloads") else [op]
    return {f for o in overloads if is_composite(o) for f in python_functions(o)}


@promise("pass the ops with arguments: check(..., ops={op: lambda x: (arguments with x among them)})")
def rules_tried(s: Subject) -> None:
    """Every rule of a declared class is put to the test, gradients included."""
    if not s.declared:
        raise Skipped("only a declared class lists its rules")
    missed = _missed_rules(s, accepted(s))
    _check_parts(s)
    if missed:
        names = sorted({_name(key) for key in missed})
        losing = filter(None, (cut_of(s, key, rule) for key, rule in functions_of(s.cls) if key in missed))
        raise Skipped(
            "; ".join(
                [
                    f"not tried: {', '.join(names)}",
                    *losing,
                    "pass ops={op: lambda x: (arguments with x in them)}",
                ]
            )
        )


def _check_parts(s: Subject) -> None:
    """Raises for a rule that refuses each call of the kit, since an op that it calls has no rule."""
    working = {rule for case in accepted(s) for _, rule in rules_run(s, lambda c=case: c.run(s.make()))}
    for case in functional_cases(s):
        with Attempt() as attempt, torch.no_grad():
            case.run(s.make())
        rule = rule_that_raised(attempt.error, s.cls) if attempt.error else None
        mend = missing_part(attempt.error, s.cls) if rule and rule not in working else None
        if mend:
            raise Broken(f"{case.name}: {attempt.error}", mend) from attempt.error
