"""Which rules of a declared class a list of calls reaches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from subclasses._torch import TorchDispatchMode, is_composite
from subclasses.autograd.python_functions import python_functions, twins
from subclasses.dispatch.rules import BOOK, RuleBook
from subclasses.testing.cases import Case
from subclasses.testing.promise import Attempt
from subclasses.testing.subject import Subject


class _Functions(TorchFunctionMode):
    """Notes the Python-level functions that are called with a value of the class."""

    def __init__(self, cls: type) -> None:
        super().__init__()
        self.cls, self.seen = cls, set[Any]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.cls in types:
            self.seen.add(func)
        return func(*args, **(kwargs or {}))


class _Ops(TorchDispatchMode):
    """Notes the ops that are dispatched with a value of the class."""

    def __init__(self, cls: type) -> None:
        super().__init__()
        self.cls, self.seen = cls, set[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.cls in types:
            self.seen.add(func)
        return func(*args, **(kwargs or {}))


def missed_rules(s: Subject, cases: Iterable[Case]) -> list[str]:
    """The ops and functions that have a rule and that none of the calls reaches."""
    functions, ops = _Functions(s.cls), _Ops(s.cls)
    for case in cases:
        with Attempt(), torch.no_grad(), functions, ops:
            case.run(s.make())
    books: list[RuleBook] = [vars(b)[BOOK] for b in s.cls.__mro__ if BOOK in vars(b)]
    packets = {op.overloadpacket for op in ops.seen}
    missed = [op for book in books for op in book.overloads if op not in ops.seen]
    missed += [op.overloadpacket for book in books for op in book.packets if op.overloadpacket not in packets]
    missed = [op for op in missed if not functions.seen & _functions_of(op)]
    missed += [f for book in books for f in book.functions if not functions.seen & {f, *twins(f)}]
    return sorted({getattr(m, "__name__", str(m)) if m in _named(books) else str(m) for m in missed})


def _named(books: list[RuleBook]) -> set[Any]:
    """The Python-level functions with a rule, which are known by their names."""
    return {f for book in books for f in book.functions}


def _functions_of(op: Any) -> set[Any]:
    """The Python-level functions on which the rule for a composite op stands."""
    overloads = [getattr(op, n) for n in op.overloads()] if hasattr(op, "overloads") else [op]
    return {f for o in overloads if is_composite(o) for f in python_functions(o)}
