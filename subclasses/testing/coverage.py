"""Which rules of a declared class the cases reach."""

from __future__ import annotations

import traceback
from typing import Any

import torch

from subclasses.errors import one_of
from subclasses.rules.results import describe
from subclasses.testing.cases import accepted, functional_cases
from subclasses.testing.errors import Broken, Skipped, code_of, innermost, tried
from subclasses.testing.reach import Case, functions_of, missed_rules, name_of, rules_run
from subclasses.testing.subject import Subject, once


def rules_tried(s: Subject, case: Case) -> None:
    """Raises for a rule that refuses each call of the kit, since an op that it calls has no rule."""
    cases = accepted(s)
    for case in [case for case in functional_cases(s) if case.name not in {c.name for c in cases}]:
        with torch.no_grad():
            _, error = tried(lambda run=case.run: run(s.make()))
        rule = rule_that_raised(error, s.cls)
        if error is None or rule is None or code_of(error) != "no-rule" or rule in _working(s):
            continue
        if innermost(error).tb_frame.f_code is not rule.__code__:
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
    trace = traceback.walk_tb(error.__traceback__ if error else None)
    return next(iter([by_code[f.f_code] for f, _ in trace if f.f_code in by_code][::-1]), None)
