"""Faults of a rule that no error tells: it writes to its argument, or cuts its result off from autograd.

The rule at fault is one that ran in the case that showed it, and whose code has the mark of the fault.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from subclasses._torch import OpOverload, OpOverloadPacket
from subclasses.dispatch.families import Family
from subclasses.dispatch.rules import describe
from subclasses.testing.cases import accepted, once
from subclasses.testing.causes import functions_of
from subclasses.testing.compare import snapshot, value_difference
from subclasses.testing.errors import Attempt, Broken, Skipped, problem
from subclasses.testing.property import Case
from subclasses.testing.subject import Subject

# What takes a tensor out of the autograd graph, or a number out of a tensor.
_CUTS = ("detach", "data", "no_grad", "inference_mode", "numpy", "item", "tolist")

# ---- which rules a case runs -------------------------------------------------------------------------------


def rules_run(s: Subject, run: Callable[[], Any]) -> list[tuple[Any, types.FunctionType]]:
    """The rules of a declared class, and its ``materialize``, that a call runs, by what they are for."""
    codes = set[Any]()
    before: Any = sys.getprofile()
    sys.setprofile(lambda frame, event, arg: codes.add(frame.f_code))
    try:
        with Attempt():
            run()
    finally:
        sys.setprofile(before if callable(before) else None)
        if hasattr(before, "enable"):  # cProfile's, which is no function
            before.enable()
    return [(key, rule) for key, rule in functions_of(s.cls) if rule.__code__ in codes]


# ---- writes to an argument ---------------------------------------------------------------------------------


@torch.no_grad()
def change_of(s: Subject, case: Case) -> str | None:
    """How a case that is not in place changed its argument, or None."""
    x = s.make()
    before = snapshot(s, x)
    with Attempt():
        case.run(x)
    return value_difference(s, x, before)


def mend_write(s: Subject, case: Case) -> str | None:
    """The advice for a case that changes its argument, naming the rule; None if it leaves it alone."""
    if s.traceable and change_of(s, case) is not None:
        run = rules_run(s, lambda: case.run(s.make()))
        who = " or ".join(describe(rule) for key, rule in run if key != "materialize") or "the rule"
        return (
            f"{who} writes to its argument: compute into a new tensor (not `add_`, `out=` or an index of it)"
        )
    return None


@once
def harmless(s: Subject) -> list[Case]:
    """The accepted cases that leave their argument as it was, as far as a copy of it can be made."""
    return [case for case in accepted(s) if not s.traceable or change_of(s, case) is None]


# ---- lost gradients ----------------------------------------------------------------------------------------


@contextmanager
def explaining(s: Subject, case: Case) -> Iterator[None]:
    """Names the rule at fault where a block, which compares gradients of a case, raises."""
    try:
        yield
    except Skipped:
        raise
    except Exception as error:
        mend = mend_write(s, case) or mend_cut(s, case)
        if mend is None or s.refuses(case.name, error):
            raise
        raise Broken(problem(case.name, error), mend) from error


def mend_cut(s: Subject, case: Case) -> str | None:
    """The advice for the rules above autograd that a case runs and that lose gradients, naming them, or None."""
    cuts = (cut_of(s, key, rule) for key, rule in rules_run(s, lambda: case.run(s.trainable())))
    return "; ".join(filter(None, cuts)) or None


def cut_of(s: Subject, key: Any, rule: types.FunctionType) -> str | None:
    """How a function of a declared class that runs above autograd cuts off gradients, by its code, or None."""
    names = set(_names(rule.__code__))
    if key != "materialize" and isinstance(key, OpOverload | OpOverloadPacket | Family | torch.Tag):
        return None  # below autograd, or given inner tensors that carry gradients
    faults = [
        f"uses {name}, behind which gradients are lost: leave it out" for name in _CUTS if name in names
    ]
    faults += [
        f'reads the raw .{f.name} above autograd, where it carries no gradient: x.unwrap("{f.name}") does'
        for f in s.cls.__spec__.inners
        if f.name in names and not f.differentiable and key != "materialize" and _may_carry_gradients(f.dtype)
    ]
    return f"{describe(rule)} {'; it '.join(faults)}" if faults else None


def _may_carry_gradients(dtype: torch.dtype | None) -> bool:
    return dtype is None or dtype.is_floating_point or dtype.is_complex


def _names(code: types.CodeType) -> Iterator[str]:
    """The global and attribute names of a function and of those in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
