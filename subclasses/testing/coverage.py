"""Which rules of a declared class the cases reach."""

from __future__ import annotations

from typing import Any

import torch

from subclasses.errors import DispatchError, one_of
from subclasses.rules.results import describe
from subclasses.testing.cases import accepted, functional_cases
from subclasses.testing.errors import Attempt, Broken, Skipped, code_of, innermost
from subclasses.testing.reach import Case, functions_of, missed_rules, name_of, rules_run
from subclasses.testing.subject import Subject, once


def rules_tried(s: Subject, case: Case) -> None:
    """Raises for a rule that refuses each call of the kit, since an op that it calls has no rule."""
    if not s.declared:
        raise Skipped("only a declared class lists its rules")
    cases = accepted(s)
    for case in [case for case in functional_cases(s) if case.name not in {c.name for c in cases}]:
        with Attempt() as attempt, torch.no_grad():
            case.run(s.make())
        error = attempt.error
        rule = rule_that_raised(error, s.cls) if isinstance(error, DispatchError) else None
        if error is None or rule is None or code_of(error) != "no-rule":
            continue
        if innermost(error).tb_frame.f_code is not rule.__code__ and rule not in _working(s):
            words = f"{describe(rule)} is made of ops on {one_of(s.cls)}, and one has no rule"
            raise Broken(f"{case.name}: {words}: {error}") from error
    if missed := missed_rules(s, cases):
        names = ", ".join(sorted({name_of(key) for key in missed}))
        raise Skipped(f"not called: {names}; pass ops={{op: lambda x: (arguments with x in them)}}")


@once
def _working(s: Subject) -> set[Any]:
    """The rules that run in calls which the class takes."""
    return {rule for case in accepted(s) for _, rule in rules_run(s, lambda c=case: c.run(s.make()))}


def rule_that_raised(error: BaseException | None, cls: type) -> Any:
    """Returns the rule among the frames of an error's traceback, the innermost if there are several."""
    by_code = {rule.__code__: rule for _, rule in functions_of(cls)}
    found, trace = None, error.__traceback__ if error else None
    while trace is not None:
        found = by_code.get(trace.tb_frame.f_code, found)
        trace = trace.tb_next
    return found
