"""``Rules``: an explicit table of rules, which a module fills and ``register.py`` registers with classes.

Importing a module of rules changes no class, so the order of imports does not matter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from subclasses.ragged.autocast import following_autocast

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

    def register(self, register_rule: Callable[[tuple[Any, ...], Callable[..., Any]], None]) -> None:
        """Registers all rules with a function of ``many_rules``."""
        for ops, rule in self.entries:
            register_rule(ops, following_autocast(ops, rule))
