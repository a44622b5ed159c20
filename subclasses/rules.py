"""The rules of a class: who may write one, which of several applies.

Each class has a :class:`RuleBook` of its own. A rule is found along the class's bases, the nearest first; two
that are equally near (on two unrelated bases, or two tags of one op) raise an error that names both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from subclasses._torch import OpOverload, OpOverloadPacket, is_composite, schema_of
from subclasses.aliases import python_functions, twins
from subclasses.errors import DispatchError, SpecError

Rule = Callable[..., Any]


@dataclass
class RuleBook:
    """The rules registered on one class.

    Attributes:
        overloads: rules for one ``OpOverload``.
        packets: rules for a whole packet, listed by the functional overloads it has.
        functions: rules for Python-level functions as the author named them.
        implied: rules for their twins, and for the functions of a composite op.
        tags: rules for all ops that carry a ``torch.Tag``.
    """

    overloads: dict[OpOverload, Rule] = field(default_factory=dict)
    packets: dict[OpOverload, Rule] = field(default_factory=dict)
    functions: dict[Any, Rule] = field(default_factory=dict)
    implied: dict[Any, Rule] = field(default_factory=dict)
    tags: dict[torch.Tag, Rule] = field(default_factory=dict)


BOOK = "_rulebook"


# ---- registering -------------------------------------------------------------------------------------------


def register_rule(cls: type, key: Any, rule: Rule) -> None:
    """Files a rule under an op, a packet, a tag or a Python-level function.

    Raises:
        SpecError: the key is none of these, the class has a rule for it already, or it is a composite op
            that cannot be intercepted.
    """
    book: RuleBook = vars(cls)[BOOK]
    if isinstance(key, OpOverload):
        _file(cls, book.overloads, key, rule)
        if is_composite(key):
            _intercept_composite(cls, book, key, rule)
    elif isinstance(key, OpOverloadPacket):
        for op in (getattr(key, name) for name in key.overloads()):
            if not schema_of(op).is_mutable:
                _file(cls, book.packets, op, rule)
                if is_composite(op):
                    _intercept_composite(cls, book, op, rule)
    elif isinstance(key, torch.Tag):
        _file(cls, book.tags, key, rule)
    elif callable(key) and not isinstance(key, type):
        _file(cls, book.functions, key, rule)
        for twin in twins(key):
            book.implied.setdefault(twin, rule)
    else:
        raise SpecError(
            f"{cls.__name__}.implements takes ops (torch.ops.aten.mul.Tensor), packets (torch.ops.aten.mul), "
            f"functions (torch.sum, F.linear) and tags (torch.Tag.pointwise), got {key!r}"
        )


def _file(cls: type, shelf: dict[Any, Rule], key: Any, rule: Rule) -> None:
    if key in shelf:
        raise SpecError(
            f"{cls.__name__} has two rules for {key}: {describe(shelf[key])} and {describe(rule)}; remove one"
        )
    shelf[key] = rule


def _intercept_composite(cls: type, book: RuleBook, op: OpOverload, rule: Rule) -> None:
    """A composite op reaches dispatch in inference mode only, so its functions are intercepted as well."""
    functions = python_functions(op)
    if not functions:
        raise SpecError(
            f"{cls.__name__}: {op} is composite: PyTorch takes it apart before a rule is asked, and it has no "
            f"Python-level function in torch, torch.Tensor, torch.nn.functional or torch.linalg on which the "
            f"rule could stand instead; write rules for the ops that it is made of"
        )

    def intercepted(func: Any, *args: Any, **kwargs: Any) -> Any:
        if "input" in kwargs:
            kwargs[schema_of(op).arguments[0].name] = kwargs.pop("input")
        return rule(op, *args, **kwargs)

    intercepted.__wrapped__ = rule  # type: ignore[attr-defined]
    for function in functions:
        book.implied.setdefault(function, intercepted)


# ---- finding -----------------------------------------------------------------------------------------------


def find_rule(cls: type, shelf: str, key: Any) -> Rule | None:
    """The rule of the nearest base that has one; raises if two bases are equally near."""
    owners = [b for b in cls.__mro__ if BOOK in vars(b) and key in getattr(vars(b)[BOOK], shelf)]
    nearest = [b for b in owners if not any(o is not b and issubclass(o, b) for o in owners)]
    rules = list(dict.fromkeys(getattr(vars(b)[BOOK], shelf)[key] for b in nearest))
    if len(rules) > 1:
        raise _ambiguous(cls, key, rules)
    return rules[0] if rules else None


def find_op_rule(cls: type, op: OpOverload) -> Rule | None:
    """The rule for exactly this op: one for the overload before one for the packet."""
    return find_rule(cls, "overloads", op) or find_rule(cls, "packets", op)


def find_tag_rule(cls: type, op: OpOverload) -> Rule | None:
    """The rule for a tag of this op; raises if two of its tags have one."""
    rules = list(dict.fromkeys(r for tag in op.tags if (r := find_rule(cls, "tags", tag)) is not None))
    if len(rules) > 1:
        raise _ambiguous(cls, op, rules)
    return rules[0] if rules else None


def all_rules(cls: type) -> list[Rule]:
    """Every rule on a class or its bases."""
    books = [vars(b)[BOOK] for b in cls.__mro__ if BOOK in vars(b)]
    shelves = [s for b in books for s in (b.overloads, b.packets, b.functions, b.tags)]
    return [rule for shelf in shelves for rule in shelf.values()]


def collect_function_rules(cls: type) -> dict[Any, Rule]:
    """Every Python-level function with the rule that applies to it.

    On one class a rule that names the function comes before an implied one.
    """
    table: dict[Any, Rule] = {}
    for base in reversed([b for b in cls.__mro__ if BOOK in vars(b)]):
        book: RuleBook = vars(base)[BOOK]
        table |= {f: _checked(cls, f, r) for f, r in (book.implied | book.functions).items()}
    return table


def _checked(cls: type, function: Any, rule: Rule) -> Rule:
    """The rule, or if another base has an equally near one, a rule that raises."""
    try:
        find_rule(cls, "functions", function)
    except DispatchError as error:
        text = str(error)

        def ambiguous(func: Any, *args: Any, **kwargs: Any) -> Any:
            raise DispatchError(text)

        return ambiguous
    return rule


def _ambiguous(cls: type, key: Any, rules: list[Rule]) -> DispatchError:
    both = " and ".join(describe(r) for r in rules)
    return DispatchError(
        f"{cls.__name__}: two rules apply to {key}, equally specific: {both}; give {cls.__name__} its own"
    )


def describe(rule: Rule) -> str:
    """Where a rule was written."""
    rule = getattr(rule, "__wrapped__", rule)
    code = getattr(rule, "__code__", None)
    where = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
    return f"{getattr(rule, '__qualname__', rule)}{where}"
