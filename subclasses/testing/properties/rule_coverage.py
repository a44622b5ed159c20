"""Which rules of a declared class the cases reach."""

from __future__ import annotations

from typing import Any

import torch

from subclasses.testing.cases import accepted, functional_cases, once
from subclasses.testing.errors import Attempt, Broken, Skipped
from subclasses.testing.faults import cut_of, missing_part, rule_that_raised
from subclasses.testing.property import promise
from subclasses.testing.reach import functions_of, missed_rules, name_of, rules_run
from subclasses.testing.subject import Subject


@promise("pass the ops with arguments: check(..., ops={op: lambda x: (arguments with x among them)})")
def rules_tried(s: Subject) -> None:
    """Every rule of a declared class is put to the test, gradients included."""
    if not s.declared:
        raise Skipped("only a declared class lists its rules")
    missed = missed_rules(s, accepted(s))
    _check_parts(s)
    if missed:
        names = sorted({name_of(key) for key in missed})
        losing = filter(None, (cut_of(s, key, rule) for key, rule in functions_of(s.cls) if key in missed))
        raise Skipped(
            "; ".join(
                [
                    *losing,
                    f"not called: {', '.join(names)}",
                    "pass ops={op: lambda x: (arguments with x in them)}",
                ]
            )
        )


def _check_parts(s: Subject) -> None:
    """Raises for a rule that refuses each call of the kit, since an op that it calls has no rule."""
    works = {case.name for case in accepted(s)}
    for case in functional_cases(s):
        if case.name in works:
            continue
        with Attempt() as attempt, torch.no_grad():
            case.run(s.make())
        rule = rule_that_raised(attempt.error, s.cls) if attempt.error else None
        mend = missing_part(attempt.error, s.cls) if rule else None
        if mend and rule not in _working(s):
            raise Broken(f"{case.name}: {attempt.error}", mend) from attempt.error


@once
def _working(s: Subject) -> set[Any]:
    """The rules that run in calls which the class takes."""
    return {rule for case in accepted(s) for _, rule in rules_run(s, lambda c=case: c.run(s.make()))}
