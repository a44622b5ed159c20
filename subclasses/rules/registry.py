"""The rules of a class: registration, and which of several rules applies.

Each class has a :class:`RuleBook` of its own. A rule is looked up along the MRO, nearest base first. Two rules that are
equally near (on two unrelated bases, or for two tags of one op) raise an error that names both.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import resolve_name

from subclasses._torch import (
    OpOverload,
    OpOverloadPacket,
    any_requires_grad,
    is_composite,
    schema_of,
)
from subclasses.after_import import after_import
from subclasses.autograd.above import call
from subclasses.autograd.cotangent_class import made_cotangent_class
from subclasses.autograd.intercept import check_interceptable, intercept_packet
from subclasses.autograd.python_functions import (
    WITHOUT_DERIVATIVE,
    in_place_forms,
    python_functions,
    twins,
    writes_of,
)
from subclasses.errors import DispatchError, SpecError, one_of
from subclasses.op_schemas.aliasing import check_writes_target, is_written_unseen, raw_state
from subclasses.op_schemas.schema import op_facts, ops_of_packet
from subclasses.rules.checks import is_a_function_of_tensors
from subclasses.rules.families import Family, arithmetic, comparisons, reductions
from subclasses.rules.keyword_names import Taken, taken_by, with_keyword_names
from subclasses.rules.results import (
    Rule,
    check_refusal,
    describe,
    with_refusal,
    with_result,
    with_results_of,
)
from subclasses.rules.symbolic_numbers import with_numbers
from subclasses.spec.values import tensors_in


@dataclass
class RuleBook:
    """The rules registered on one class.

    Attributes:
        overloads: rules for a single ``OpOverload``.
        packets: rules for a whole packet, stored under each of its functional overloads.
        families: rules for a family of ops, adapted to each op of it.
        functions: rules for Python-level functions that the author named.
        implied: the same rules for functions equivalent to those.
        composite: functions that call a composite op with a rule, and the packet of that op.
        tags: rules for all ops with a ``torch.Tag``.
    """

    overloads: dict[OpOverload, Rule] = field(default_factory=dict)
    packets: dict[OpOverload, Rule] = field(default_factory=dict)
    families: dict[OpOverload, Rule] = field(default_factory=dict)
    functions: dict[Any, Rule] = field(default_factory=dict)
    implied: dict[Any, Rule] = field(default_factory=dict)
    composite: dict[Any, OpOverloadPacket] = field(default_factory=dict)
    tags: dict[torch.Tag, Rule] = field(default_factory=dict)


BOOK = "_rulebook"


# ---- registration ------------------------------------------------------------------------------------------


@contextmanager
def registration(cls: type, refresh: Callable[[], None]) -> Iterator[Callable[[tuple[Any, ...], Rule], None]]:
    """Yields a function that registers a rule under keys, then refreshes the class; an error rolls all back."""
    before: RuleBook = vars(cls)[BOOK]
    tables = {f.name: dict(getattr(before, f.name)) for f in fields(RuleBook)}
    setattr(cls, BOOK, RuleBook(**tables))
    try:
        yield functools.partial(register_rule, cls)
        refresh()
    except BaseException:
        setattr(cls, BOOK, before)
        refresh()
        raise


def register_rule(cls: type, keys: tuple[Any, ...], rule: Rule) -> None:
    """Registers a rule under keys: ops, packets, families, tags or Python-level functions.

    ``check_key`` accepted each key, and ``check_rule`` the rule for it.

    Raises:
        SpecError: the class already has a rule for a key, or it is a composite op that cannot be intercepted.
    """
    book: RuleBook = vars(cls)[BOOK]
    functions: dict[Any, Rule] = {}
    taken = taken_by(rule)
    for key in keys:
        if isinstance(key, OpOverload):
            _register_ops(cls, book, book.overloads, [key], rule)
        elif isinstance(key, OpOverloadPacket):
            _register_ops(cls, book, book.packets, ops_of_packet(key), rule)
        elif isinstance(key, Family):
            for op, adapt in key.entries.items():
                _add(cls, book.families, op, adapt(rule))
        elif isinstance(key, torch.Tag):
            _add(cls, book.tags, key, rule)
        else:
            functions[key] = _for_function(cls, key, rule, taken)
            _add(cls, book.functions, key, functions[key])
    for key, adapted in functions.items():
        _register_implied(cls, book, key, adapted)


# Functions in Python that call a function of another name. Dynamo traces their body, and would not call their rules.
_INLINED = frozenset({F.pad, F.rms_norm, F.threshold})


# If both operands return NotImplemented for x == y, Python compares identities and returns a bool, not a tensor.
_EQUALITY = frozenset({torch.eq, torch.ne, Tensor.eq, Tensor.ne, Tensor.__eq__, Tensor.__ne__})


def _for_function(cls: type, key: Any, rule: Rule, taken: Taken | None) -> Rule:
    """Returns a rule as it is called for a Python-level function."""
    if key in _INLINED:
        after_import("torch._dynamo", lambda module: torch.compiler.allow_in_graph(key))
    if is_a_function_of_tensors(key):
        rule = with_result(cls, key, rule)
    rule = with_numbers(with_keyword_names(key, rule, taken))
    if key in _EQUALITY:
        rule = with_refusal(rule, functools.partial(check_refusal, cls, resolve_name(key), rule))
    written = writes_of(key)
    return rule if written is None else _keeping_writes(cls, rule, written)


def _register_implied(cls: Any, book: RuleBook, key: Any, rule: Rule) -> None:
    """Registers the rule of a function for equivalent functions without a rule of their own."""
    implied = [twin for twin in twins(key) if twin not in book.functions]
    if implied:
        # A function in Python may call its equivalent: torch.split calls Tensor.split, whose rule it would be again.
        named = rule if isinstance(key, types.FunctionType) else _called_with(key, rule)
        for twin in implied:
            if _REFUSES in getattr(book.implied.get(twin), "__dict__", {}):
                del book.implied[twin]
            book.implied.setdefault(twin, named)
    for in_place in in_place_forms(key) if cls._traits.is_mapped else ():
        book.implied.setdefault(in_place, _refused_in_place(cls, key, in_place))


def _keeping_writes(cls: type, rule: Rule, written: Callable[[Any, Any], Sequence[Any]]) -> Rule:
    """Returns a rule for a function that writes to arguments; it raises if the write, or a gradient, would be lost."""

    @functools.wraps(rule)
    def keeping(func: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or not (targets := written(args, kwargs)):
            return rule(func, *args, **kwargs)
        recorded = torch.is_grad_enabled() and any_requires_grad(*args, **kwargs)
        before = [raw_state(x) if recorded else None for x in targets]
        out = rule(func, *args, **kwargs)
        results = out if isinstance(out, list | tuple) else [out] * len(targets)
        for x, state, result in zip(targets, before, results, strict=False):
            name = resolve_name(func) or str(func)
            if result is not None:
                check_writes_target(cls, name, f"the rule {describe(rule)}", x, result)
            if state is not None and is_written_unseen(state, x):
                raise DispatchError(
                    f"{name}: the rule {describe(rule)} wrote to inner tensors of {one_of(cls)} where autograd does "
                    "not see it, and gradients would be lost",
                    code="rule-write",
                    hint=_instead_of_writing(cls, func),
                )
        return out

    return keeping


def _instead_of_writing(cls: type, func: Any) -> str:
    if func is Tensor.__setitem__:
        return (
            f"Write rules for the ops that it runs, whose writes have derivatives: "
            f"@{cls.__name__}.implements(torch.ops.aten.copy_), and select, slice or index_put_"
        )
    # For an operator such as `x &= y`, the name of the equivalent method.
    written = next(f.__name__ for f in (*twins(func), func) if not f.__name__.startswith("__") or f is func)
    name, is_out = written.strip("_"), not (written.endswith("_") or isinstance(func, types.FunctionType))
    if is_out or name in WITHOUT_DERIVATIVE or not hasattr(torch.ops.aten, f"{name}_"):
        return f"Write a rule for a function that returns a new value, as torch.{name} does, and call that"
    return f"Register it for the op, @{cls.__name__}.implements(torch.ops.aten.{name}_), whose writes have derivatives"


def _called_with(key: Any, rule: Rule) -> Rule:
    """Returns a rule that receives the function that the author named, for calls of all equivalent functions.

    ``x + y`` calls ``Tensor.add``, and a rule for several functions compares with ``torch.add``.
    """

    @functools.wraps(rule)
    def named(func: Any, *args: Any, **kwargs: Any) -> Any:
        return rule(key, *args, **kwargs)

    return named


def _shown(key: Any) -> str:
    return f"torch.{key.__name__}" if hasattr(torch, key.__name__) else f"the result of {key.__name__}"


def _refused_in_place(cls: Any, key: Any, in_place: Any) -> Rule:
    """Returns the rule of ``x += y`` for a mapped class whose author wrote a rule for ``x + y``, and not for this.

    The fallback would run the op on each inner tensor, with another result. Optimizers do that, without gradients, and
    the rule permits it.
    """
    packets: list[Any] = [getattr(torch.ops.aten, n, None) for n in (in_place.__name__, key.__name__)]
    ops = [getattr(p, o) for p in packets if p is not None for o in p.overloads()]

    def refused(func: Any, *args: Any, **kwargs: Any) -> Any:
        own = next(type(x) for x in (*args, *kwargs.values()) if isinstance(x, cls))
        if not torch.is_grad_enabled() or any(find_op_rule(own, op) is not None for op in ops):
            return call(func, (own,), args, kwargs)
        raise DispatchError(
            f"{cls.__name__} has a rule for {key.__name__} and none for Tensor.{in_place.__name__}",
            code="rule-not-asked",
            hint=f"write x = {_shown(key)}(x, ...) in place of a write to x, or add one with "
            f"@{cls.__name__}.implements({_op_or_method(in_place)})",
        )

    refused.__dict__[_REFUSES] = True
    return refused


def _op_or_method(in_place: Any) -> str:
    """Returns the key for a rule that writes: the op if there is one, since its writes have derivatives."""
    home = "torch.ops.aten" if hasattr(torch.ops.aten, in_place.__name__) else "torch.Tensor"
    return f"{home}.{in_place.__name__}"


_REFUSES = "_refuses"


def _register_ops(cls: type, book: RuleBook, table: Any, ops: list[OpOverload], rule: Rule) -> None:
    """Registers a rule under ops, and marks the functions that call composite ones for interception."""
    composite = [op for op in ops if is_composite(op)]
    if len(composite) == len(ops):
        for op in composite:
            check_interceptable(cls, op)
    for op in ops:
        _add(cls, table, op, rule)
    for op in composite:
        # The op itself too: a composite op called with a wrapper is decomposed before dispatch like any other call.
        functions = (*python_functions(op), op, op.overloadpacket)
        book.composite.update((function, op.overloadpacket) for function in functions)


def is_decomposed(op: OpOverload | OpOverloadPacket) -> bool:
    """Whether PyTorch decomposes an op, or an overload of a packet, before dispatch."""
    ops = [op] if isinstance(op, OpOverload) else [getattr(op, name) for name in op.overloads()]
    return all(is_composite(op) for op in ops if len(ops) == 1 or not schema_of(op).is_mutable)


_FORMULA = "_has_formula"


def by_formula(rule: Rule) -> Rule:
    """Returns a rule with PyTorch's formula for its op as its derivative."""

    @functools.wraps(rule)
    def formula(*args: Any, **kwargs: Any) -> Any:
        return rule(*args, **kwargs)

    formula.__dict__[_FORMULA] = True
    return formula


def has_formula(rule: Rule) -> bool:
    """Whether a rule was registered with ``derivative="formula"``."""
    return _FORMULA in getattr(rule, "__dict__", ())


def _add(cls: type, table: dict[Any, Rule], key: Any, rule: Rule) -> None:
    if key in table:
        raise SpecError(
            f"{cls.__name__} has two rules for {key}: {describe(table[key])} and {describe(rule)}",
            code="rules-conflict",
            hint="remove one",
        )
    table[key] = rule


# ---- finding -----------------------------------------------------------------------------------------------


def find_rule(cls: type, tables: tuple[str, ...], key: Any) -> Rule | None:
    """Returns the rule of the nearest base, from the first of its tables with one; raises if two are equally near."""
    by_base = {b._value_cls: r for b in _ruled(cls) if (r := _own_rule(b, tables, key)) is not None}
    nearest = [b for b in by_base if not any(o is not b and issubclass(o, b) for o in by_base)]
    rules = list(dict.fromkeys(by_base[b] for b in nearest))
    if len(rules) > 1:
        raise _ambiguity_error(cls, key, rules)
    return rules[0] if rules else None


def _ruled(cls: Any) -> list[Any]:
    """Returns the classes whose rules apply: a class's bases; for cotangents, the cotangent classes of these bases."""
    if not getattr(cls, "_is_cotangent", False):
        return [b for b in cls.__mro__ if BOOK in vars(b)]
    return [c for b in cls._value_cls.__mro__ if (c := made_cotangent_class(b)) is not None]


def _books(cls: Any) -> list[RuleBook]:
    return [vars(b)[BOOK] for b in _ruled(cls)]


def _own_rule(base: type, tables: tuple[str, ...], key: Any) -> Rule | None:
    book = vars(base)[BOOK]
    rules = (getattr(book, table).get(key) for table in tables)
    return next((rule for rule in rules if rule is not None), None)


def find_op_rule(cls: type, op: OpOverload) -> Rule | None:
    """Returns the rule for exactly this op; on one class an overload precedes a packet, and a packet a family."""
    return find_rule(cls, ("overloads", "packets", "families"), op)


def find_tag_rule(cls: type, op: OpOverload) -> Rule | None:
    """Returns the rule for a tag of this op; raises DispatchError if two of its tags have different rules."""
    rules = list(dict.fromkeys(r for tag in op.tags if (r := find_rule(cls, ("tags",), tag)) is not None))
    if len(rules) > 1:
        raise _ambiguity_error(cls, op, rules)
    return rules[0] if rules else None


def all_rules(cls: type) -> list[tuple[Any, Rule]]:
    """Returns every rule on a class or its bases, with its op, function or tag."""
    tables = [s for b in _books(cls) for s in (b.overloads, b.packets, b.families, b.functions, b.tags)]
    return [item for table in tables for item in table.items()]


def family_of(cls: type, op: OpOverload) -> Family | None:
    """Returns the family whose rule applies to an op; None if another rule, or none, does."""
    book = next((b for b in _books(cls) if _is_ruled(b, op)), None)
    if book is None or op in book.overloads or op in book.packets:
        return None
    return next((f for f in (arithmetic, comparisons, reductions) if op in f.entries), None)


def _is_ruled(book: RuleBook, op: OpOverload) -> bool:
    return op in book.overloads or op in book.packets or op in book.families


def has_op_rules(cls: type) -> bool:
    """Whether a class or a base of it has a rule below autograd."""
    return any(b.overloads or b.packets or b.families or b.tags for b in _books(cls))


def rules_views(cls: type) -> bool:
    """Whether a class or a base of it has a rule for an op that returns a view."""
    return any(isinstance(key, OpOverload) and op_facts(key).viewed for key, _ in all_rules(cls))


def has_formulas(cls: type) -> bool:
    """Whether a class or a base of it has a rule with ``derivative="formula"``."""
    return any(has_formula(rule) for _, rule in all_rules(cls))


def is_named(cls: type, function: Any) -> bool:
    """Whether a rule names this Python-level function itself."""
    return any(function in b.functions for b in _books(cls))


def collect_function_rules(cls: type) -> dict[Any, Rule]:
    """Returns the applicable rule for each Python-level function.

    On one class a rule that names the function takes precedence over an implied one.
    """
    table: dict[Any, Rule] = {}
    books = _books(cls)
    for book in reversed(books):
        find = functools.cache(functools.partial(_find_checked, cls))
        table |= {f: intercept_packet(p, find) for f, p in book.composite.items()}
        rules = book.implied | book.functions
        # One base has one rule for a function.
        table |= rules if len(books) == 1 else {f: _unless_ambiguous(cls, f, r) for f, r in rules.items()}
    return table


def has_function_rule(function: Any, args: Any, kwargs: Any) -> bool:
    """Whether the class of an argument has a rule for a Python-level function, or for the op of its name."""
    keys = {function, getattr(torch.ops.aten, function.__name__, function)}
    classes = {type(x) for x in tensors_in(args, kwargs) if hasattr(type(x), "__spec__")}
    return any(not keys.isdisjoint(collect_function_rules(cls)) for cls in classes)


def _find_checked(cls: type, op: OpOverload) -> Rule | None:
    rule = find_op_rule(cls, op)
    return None if rule is None else with_results_of(cls, op, rule)


def _unless_ambiguous(cls: type, function: Any, rule: Rule) -> Rule:
    """Returns the rule, or a rule that raises if another base has an equally near one."""
    find: Any = functools.partial(find_rule, cls, ("functions", "implied"), function)
    try:
        find()
    except DispatchError:
        return lambda *args, **kwargs: find()(*args, **kwargs)
    return rule


def _ambiguity_error(cls: type, key: Any, rules: list[Rule]) -> DispatchError:
    both = " and ".join(describe(r) for r in rules)
    return DispatchError(
        f"{cls.__name__}: two rules apply to {key}, equally specific: {both}",
        code="rules-conflict",
        hint=f"give {cls.__name__} its own",
    )
