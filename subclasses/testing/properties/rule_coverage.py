"""Which rules of a declared class the cases reach."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from subclasses._torch import TorchDispatchMode, is_composite
from subclasses.autograd.python_functions import python_functions, twins
from subclasses.dispatch.rules import BOOK, RuleBook
from subclasses.testing.cases import accepted
from subclasses.testing.errors import Attempt, Skipped
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


def _missed_rules(s: Subject, cases: Iterable[Case]) -> list[str]:
    """The ops and functions that have a rule and that none of the calls reaches."""
    functions, ops = _Functions(s.cls), _Ops(s.cls)
    for case in cases:
        with Attempt(), torch.no_grad(), functions, ops:
            case.run(s.make())
    books: list[RuleBook] = [vars(b)[BOOK] for b in s.cls.__mro__ if BOOK in vars(b)]
    packets = {op.overloadpacket for op in ops.seen}
    missed = [op for book in books for op in book.overloads if op not in ops.seen]
    missed += [op.overloadpacket for book in books for op in book.packets if op.overloadpacket not in packets]
    named = {str(op) for op in missed if not functions.seen & _functions_of(op)}
    missed = [f for book in books for f in book.functions if not functions.seen & {f, *twins(f)}]
    return sorted(named | {getattr(f, "__name__", str(f)) for f in missed})


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
    if missed:
        raise Skipped(
            f"not tried: {', '.join(missed)}; pass ops={{op: lambda x: (arguments with x in them)}}"
        )
