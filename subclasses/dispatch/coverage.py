"""``coverage(Cls)``: reports how a class runs each aten op, and which functions have rules, without running any."""

from __future__ import annotations

import textwrap
from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch.overrides import resolve_name

from subclasses._torch import OpOverload, all_aten_ops
from subclasses.dispatch.resolution import find_step
from subclasses.errors import DispatchError, SpecError
from subclasses.op_schemas.schema import op_facts, undeclared_writes
from subclasses.rules.registry import collect_function_rules

# In order of precedence. The first word of a step is its kind.
KINDS = (
    *("rule", "derived", "inners", "tag", "decomposition"),
    *("map", "views", "materialize", "refused", "error", "ambiguous"),
)
OWN_KINDS = ("rule", "derived", "tag", "ambiguous")


@dataclass(frozen=True)
class Coverage:
    """Result of :func:`coverage`; ``print`` shows it as a table.

    Attributes:
        name: the name of the class.
        steps: for each op, such as ``"aten.add.Tensor"``, the resolution step that applies:
            ``"rule"``, ``"derived from aten.add.Tensor (rule)"``, ``"inners"``, ``"tag rule"``,
            ``"decomposition"``, or the class's fallback ``"map"``, ``"views"``, ``"materialize"`` or
            ``"error"``;
            ``"refused"`` where the class materializes and the op would write to the value. Of a trainable class it
            runs on each inner tensor of a Parameter;
            ``"ambiguous"`` where two equally specific rules apply.
        functions: the names of the Python-level functions with a rule, which runs before any op is dispatched.
    """

    name: str
    steps: dict[str, str]
    functions: tuple[str, ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        """Number of ops for each kind of step; kinds without ops are omitted."""
        counted = Counter(step.split()[0] for step in self.steps.values())
        return {kind: counted[kind] for kind in KINDS if counted[kind]}

    def ops(self, kind: str) -> list[str]:
        """Returns the ops that a kind of step runs.

        Raises:
            ValueError: the kind does not exist.
        """
        if kind not in KINDS:
            raise ValueError(f"expected a kind of step in {KINDS}, got {kind!r}")
        return [op for op, step in self.steps.items() if step.split()[0] == kind]

    def __str__(self) -> str:
        """Returns one line for each kind, and the names of the ops and functions that have rules."""
        lines = [f"{self.name}: {len(self.steps)} ops of aten"]
        own = {
            kind: [op for op in self.ops(kind) if "(decomposition)" not in self.steps[op]]
            for kind in OWN_KINDS
        }
        for kind, count in (self.counts | {"functions": len(self.functions)}).items():
            names = " ".join(
                n.removeprefix("aten.") for n in (own | {"functions": self.functions}).get(kind, ())
            )
            lines.append(f"  {kind:<14}{count:>6}")
            lines += textwrap.wrap(names, 100, initial_indent=" " * 8, subsequent_indent=" " * 8)
        return "\n".join(lines)


def coverage(cls: Any) -> Coverage:
    """Reports, for every op of ``torch.ops.aten`` that takes a tensor, how a class runs it, and functions with rules.

    Raises:
        SpecError: ``cls`` is not a declared class.
    """
    if not isinstance(cls, type) or not hasattr(cls, "__spec__"):
        raise SpecError(
            f"coverage() takes a class declared with TensorSubclass, got {cls!r}", code="class-not-declared"
        )
    functions = {resolve_name(function) or "" for function in collect_function_rules(cls)}
    return Coverage(
        cls.__name__,
        {str(op): _step(cls, op) for op in all_aten_ops() if takes_tensors(op)},
        tuple(sorted(name for name in functions if name.startswith("torch."))),
    )


def takes_tensors(op: OpOverload) -> bool:
    """Whether an op has a tensor argument; other ops never reach a subclass."""
    return any(a.role != "other" for a in op_facts(op).arguments)


def _step(cls: Any, op: OpOverload) -> str:
    try:
        step = find_step(cls, op)
    except DispatchError:
        return "ambiguous"
    facts = op_facts(op)
    in_place = [i for i in facts.written if not facts.arguments[i].keyword]
    return "refused" if step == "materialize" and (in_place or undeclared_writes(op)) else step
