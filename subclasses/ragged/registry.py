"""``Rules``: an explicit table of rules, which a module fills and ``register.py`` registers with classes.

Importing a module of rules changes no class, so the order of imports does not matter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from subclasses.ragged.autocast import following_autocast
from subclasses.ragged.base import is_ragged, name_of
from subclasses.ragged.checks import check_all_exist

Rule = TypeVar("Rule", bound=Callable[..., Any])


class Rules:
    """Rules, and the ops, functions and tags of each rule."""

    def __init__(self) -> None:
        self.entries: list[tuple[tuple[Any, ...], Callable[..., Any]]] = []

    def of(self, *ops: Any) -> Callable[[Rule], Rule]:
        """Adds the decorated function as the rule for ops, which are arguments of ``TensorSubclass.implements``."""

        def enter(rule: Rule) -> Rule:
            self.entries.append((ops, rule))
            return rule

        return enter

    def register(
        self,
        register_rule: Callable[[tuple[Any, ...], Callable[..., Any]], None],
        wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda rule: rule,
    ) -> None:
        """Registers all rules, each wrapped, with a function of ``many_rules``."""
        for ops, rule in self.entries:
            register_rule(ops, wrap(following_autocast(ops, rule)))


def where_all_exist(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a rule that raises for a batch with a count, whose spare rows it would compute."""

    @functools.wraps(rule)
    def checked(func: Any, *args: Any, **kwargs: Any) -> Any:
        for a in (*args, *kwargs.values()):
            if is_ragged(a):
                check_all_exist(a, name_of(func))
        return rule(func, *args, **kwargs)

    return checked
