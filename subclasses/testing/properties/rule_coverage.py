"""Which rules of a declared class the cases reach."""

from __future__ import annotations

from typing import Any

import torch

from subclasses._torch import OpOverload, OpOverloadPacket
from subclasses.testing.cases import accepted, functional_cases
from subclasses.testing.errors import Attempt, Broken, Skipped
from subclasses.testing.faults import cut_of, functions_of, missing_part, rule_that_raised, rules_run
from subclasses.testing.property import promise
from subclasses.testing.reach import missed_rules
from subclasses.testing.subject import Subject


def _name(key: Any) -> str:
    return str(key) if isinstance(key, OpOverload | OpOverloadPacket) else getattr(key, "__name__", str(key))


@promise("pass the ops with arguments: check(..., ops={op: lambda x: (arguments with x among them)})")
def rules_tried(s: Subject) -> None:
    """Every rule of a declared class is put to the test, gradients included."""
    if not s.declared:
        raise Skipped("only a declared class lists its rules")
    missed = missed_rules(s, accepted(s))
    _check_parts(s)
    if missed:
        names = sorted({_name(key) for key in missed})
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
    working = {rule for case in accepted(s) for _, rule in rules_run(s, lambda c=case: c.run(s.make()))}
    for case in functional_cases(s):
        with Attempt() as attempt, torch.no_grad():
            case.run(s.make())
        rule = rule_that_raised(attempt.error, s.cls) if attempt.error else None
        mend = missing_part(attempt.error, s.cls) if rule and rule not in working else None
        if mend:
            raise Broken(f"{case.name}: {attempt.error}", mend) from attempt.error
