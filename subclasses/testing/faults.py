"""Causes of broken promises that have their own advice: faults of a rule, and what an error tells.

No error tells that a rule writes to its argument, or cuts its result off from autograd. The rule at fault is one that
ran in the case that showed it, and whose code has the mark of the fault.

A promise's advice fits what breaks it most often. A fault of one rule can break many promises, and then the advice is
the same for all of them.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from subclasses.base import TensorSubclass, descendants
from subclasses.errors import DispatchError, one_of
from subclasses.rules.author_code import global_names, steps_of
from subclasses.rules.results import describe
from subclasses.testing.cases import accepted, once
from subclasses.testing.compare import snapshot, value_difference
from subclasses.testing.errors import Attempt, Broken, Skipped, chain, code_of, innermost, problem
from subclasses.testing.property import Case
from subclasses.testing.reach import functions_of, is_for_op, names_of_rules, rules_run
from subclasses.testing.subject import Subject

# What takes a tensor out of the autograd graph, or a number out of a tensor.
_CUTS = ("detach", "data", "no_grad", "inference_mode", "numpy", "item", "tolist")

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
        who = " or ".join(names_of_rules(s, lambda: case.run(s.make()))) or "the rule"
        return f"{who} writes to its argument: compute into a new tensor, not by `add_`, `out=` or an index"
    return None


@once
def harmless(s: Subject) -> list[Case]:
    """The accepted cases that leave their argument as it was, as far as a copy of it can be made."""
    return [case for case in accepted(s) if not s.traceable or change_of(s, case) is None]


# ---- lost gradients ----------------------------------------------------------------------------------------


@contextmanager
def explaining(s: Subject, case: Case, *, reads: bool = True) -> Iterator[None]:
    """Names the rule at fault where a block, which compares gradients of a case, raises.

    Args:
        s: the class.
        case: the case.
        reads: whether reading raw inner tensors may be the fault; it loses the gradients of those alone.
    """
    try:
        yield
    except Skipped:
        raise
    except Exception as error:
        mend = mend_write(s, case) or mend_unused(s, case) or mend_cut(s, case, reads=reads)
        if mend is None or s.refuses(case.name, error):
            raise
        raise Broken(problem(case.name, error), mend) from error


def mend_unused(s: Subject, case: Case) -> str | None:
    """The advice for a rule that never reads an option of a case, such as ``padding_idx``, or None."""
    for key, rule in rules_run(s, lambda: case.run(s.make())):
        read = {step.name for step in steps_of(rule.__code__) if step.opname.startswith("LOAD")}
        parameters = inspect.signature(rule).parameters.values()
        rest = {p.name for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
        for option in _OPTION.findall(case.name):
            if key != "materialize" and not read & {option, *rest}:
                return f"{describe(rule)} does not use {option}=, which changes the results of the op or its gradients"
    return None


_OPTION = re.compile(r"[(, ](\w+)=")


def mend_cut(s: Subject, case: Case, *, reads: bool = True) -> str | None:
    """The advice for the rules above autograd that a case runs and that lose gradients, naming them, or None."""
    run = rules_run(s, lambda: case.run(s.trainable()))
    cuts = (cut_of(s, key, rule, reads=reads) for key, rule in run)
    return "; ".join(filter(None, cuts)) or None


def cut_of(s: Subject, key: Any, rule: types.FunctionType, *, reads: bool = True) -> str | None:
    """How a function of a declared class that runs above autograd cuts off gradients, by its code, or None."""
    names = set(_names(rule.__code__))
    if is_for_op(key) and s.cls._traits.is_representation:
        return None
    faults = [
        f"uses {name}, behind which gradients are lost: leave it out" for name in _CUTS if name in names
    ]
    faults += [
        f'reads the raw .{f.name} above autograd, where it carries no gradient: x.unwrap("{f.name}") does'
        for f in s.cls.__spec__.inners
        if reads
        and not is_for_op(key)
        and key != "materialize"
        and f.name in names
        and _may_lose_gradients(f)
    ]
    return f"{describe(rule)} {'; it '.join(faults)}" if faults else None


def _may_lose_gradients(f: Any) -> bool:
    is_float = f.dtype is None or f.dtype.is_floating_point or f.dtype.is_complex
    return is_float and not f.differentiable


def _names(code: types.CodeType) -> Iterator[str]:
    """The global and attribute names of a function and of those in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


# ---- an inner tensor of another size -----------------------------------------------------------------------

OTHER_SIZE = (
    'fallback="map" runs each op on each inner tensor, and dims, indices and plain operands fit one size alone: use '
    'fallback="materialize" with a materialize() that says what the value is, write rules for the ops, or hold the '
    "numbers in the size of the value. If the class is a container, on which no such ops are called: skip= the promise"
)


# ---- causes that an error tells ----------------------------------------------------------------------------

IsOwn = Callable[[types.FrameType], bool]

# PyTorch's message where a compiler's stand-in meets a tensor with data that is no argument.
_REAL_TENSOR = "Please convert all Tensors to FakeTensors"
_UNEXPECTED = re.compile(r"(\S+)\(\) got an unexpected keyword argument '(\w+)'")


def mend_of(error: BaseException | None, cls: type, is_own: IsOwn = lambda frame: False) -> str | None:
    """Returns the advice for the first known cause in a chain of errors, or None.

    Args:
        error: what broke a promise, with the errors that caused it.
        cls: the class under test.
        is_own: whether a frame runs code of a class that was written by hand.
    """
    for one in chain(error):
        for find in (
            _by_code,
            _other_operand,
            _unexpected_keyword,
            _foreign_tensor,
            _endless,
        ):
            if mend := find(one, cls):
                return mend
        if mend := _own_accident(one, cls, is_own):
            return mend
    for one in chain(error):  # what is true of many errors, after what is true of one kind
        for find in (_no_field, _in_materialize):
            if mend := find(one, cls):
                return mend
        if mend := _in_torch_function(one, cls, is_own):
            return mend
    return None


# ---- the causes --------------------------------------------------------------------------------------------


def _other_operand(error: BaseException, cls: type) -> str | None:
    """A rule reads a field of an operand that is a plain tensor: the value is another operand of the call."""
    if not isinstance(error, AttributeError) or isinstance(error.obj, cls):
        return None
    rule, name = rule_that_raised(error, cls), error.name or ""
    if rule is None or not isinstance(error.obj, Tensor | int | float):
        return None
    if not hasattr(cls, name) and name not in cls.__spec__.names:  # type: ignore[attr-defined]
        return None
    return _reads_any_operand(describe(rule), name, cls)


# The codes of errors that this package raises for a fault of the class, with the advice; {} is the error's own hint.
_ADVICE = {
    "rule-result": "correct what that rule returns: {}",
    "rule-parameters": "correct the parameters of that rule: {}",
    "materialize-result": "correct materialize(): it returns a plain tensor of the size, dtype and device that the "
    "value shows; or say with size_from=, dtype_from= or `outer` what the value shows",
    "inner-size": OTHER_SIZE,
}


def _by_code(error: BaseException, cls: type) -> str | None:
    """The advice for an error of this package that tells a fault of the class."""
    advice = _ADVICE.get(code_of(error) or "")
    if "keyword argument 'out'" in str(error):
        return None  # _unexpected_keyword says more, of the error that is the cause of this one
    return advice and advice.replace("{}", getattr(error, "hint", None) or "")


def _reads_any_operand(where: str, name: str, cls: type) -> str:
    return (
        f"{where} reads .{name} of an operand without a test. A rule is called when any operand is "
        f"{one_of(cls)}, the right one too: read it of an operand for which isinstance(operand, {cls.__name__}) "
        f"holds, and take the others as they are"
    )


def _own_accident(error: BaseException, cls: type, is_own: IsOwn) -> str | None:
    """Code of the class took a plain operand for one of its own, or asserted what a caller need not know."""
    trace = innermost(error)
    if trace is None or not is_own(trace.tb_frame):
        return None
    code = trace.tb_frame.f_code
    names = [part for part in code.co_qualname.split(".<locals>.") if not part.startswith("<")]
    where = f"{names[-1] if names else 'a lambda'} ({code.co_filename}:{trace.tb_lineno})"
    if isinstance(error, AssertionError):
        return f"{where} asserts: instead `return NotImplemented`, or raise a NotImplementedError that says what to do"
    if isinstance(error, AttributeError) and type(error.obj) in (Tensor, int, float):
        return _reads_any_operand(where, error.name or "", _owner(code, cls))
    return None


def _owner(code: types.CodeType, cls: type) -> type:
    """The class under test, or, if its inner tensors have a class of their own whose rule this is, that class."""
    classes = (cls, *descendants(TensorSubclass))
    return next((c for c in classes if any(rule.__code__ is code for _, rule in functions_of(c))), cls)


def _no_field(error: BaseException, cls: type) -> str | None:
    """A declared class reads an attribute that was set on a value and is no field."""
    if not (isinstance(error, AttributeError) and isinstance(error.obj, cls) and hasattr(cls, "__spec__")):
        return None
    if error.name is None or hasattr(cls, error.name):
        return None
    return (
        f"{error.name} is no field of {cls.__name__}, and the values that ops, copies and compilers make have fields "
        f"alone: declare it in the class body, as `{error.name}: float = static()` or `{error.name}: Tensor = inner()`"
    )


def _in_materialize(error: BaseException, cls: type) -> str | None:
    """``materialize`` fails on the inner tensors that it is given."""
    rule, trace = rule_that_raised(error, cls), error.__traceback__
    if rule is None or rule is not dict(functions_of(cls)).get("materialize"):
        return None
    while trace is not None and trace.tb_frame.f_code is not rule.__code__:
        trace = trace.tb_next
    x = trace.tb_frame.f_locals.get("self") if trace else None
    held = [(n, getattr(x, n, None)) for n in cls.__spec__.inner_names] if isinstance(x, cls) else []  # type: ignore[attr-defined]
    sizes = ", ".join(f"{name} of size {list(t.shape)}" for name, t in held if isinstance(t, Tensor))
    return (
        f"correct {describe(rule)}, which raises for the inner tensors {sizes}; or, if another rule made a value of "
        f"these, that rule"
    )


def _in_torch_function(error: BaseException, cls: type, is_own: IsOwn) -> str | None:
    """A declared class has a ``__torch_function__`` of its own, which fails."""
    trace, found = error.__traceback__, None
    while trace is not None and hasattr(cls, "__spec__"):
        code = trace.tb_frame.f_code
        found = trace if code.co_name == "__torch_function__" and is_own(trace.tb_frame) else found
        trace = trace.tb_next
    if found is None:
        return None
    return (
        f"{cls.__name__}.__torch_function__ ({found.tb_frame.f_code.co_filename}:{found.tb_lineno}) fails, and PyTorch "
        f"asks it for every function and attribute: leave it out, and write rules for the functions that it is about: "
        f"@{cls.__name__}.implements(function)"
    )


def _unexpected_keyword(error: BaseException, cls: type) -> str | None:
    """A rule lacks a parameter that its op has: ``out``, as a rule."""
    found = _UNEXPECTED.search(str(error)) if isinstance(error, TypeError) else None
    rule = next((r for _, r in functions_of(cls) if found and r.__qualname__ == found[1]), None)
    if found is None or rule is None:
        return None
    write = (
        ": write with out.copy_(result), which also counts the write, and return out, or refuse it with a DispatchError"
        if found[2] == "out"
        else ""
    )
    return f"{describe(rule)} takes no {found[2]}=, which callers may pass: give it the parameter{write}"


def _foreign_tensor(error: BaseException, cls: type) -> str | None:
    """A rule uses a tensor that is no operand, such as a table in a global."""
    if code_of(error) != "tensor-from-outside" and _REAL_TENSOR not in str(error):
        return None
    found = [f"{name}, which {describe(rule)} reads" for rule, name in _global_tensors(cls)]
    which = f" ({'; '.join(dict.fromkeys(found))})" if found else ""
    return (
        f"a rule uses a tensor that is neither an operand nor an inner tensor{which}. A compiler traces with stand-ins "
        f"and has none for it: declare it as a constant of the class, with constant(), or as a field, with inner()"
    )


def _endless(error: BaseException, cls: type) -> str | None:
    """``materialize`` runs an op on ``self``, which is materialized for it."""
    rule = rule_that_raised(error, cls) if isinstance(error, RecursionError) else None
    if rule is None:
        return None
    return (
        f"{describe(rule)} runs an op on a whole {cls.__name__}, which calls it again: compute with the fields "
        f"({', '.join(f'self.{n}' for n in cls.__spec__.inner_names)})"  # type: ignore[attr-defined]
    )


def missing_part(error: BaseException | None, cls: type) -> str | None:
    """Returns the advice for a rule that calls an op for which its class has no rule, or None.

    Such a rule refuses every call, in the words that refuse the other op.
    """
    rule = rule_that_raised(error, cls) if isinstance(error, DispatchError) else None
    trace = innermost(error) if error else None
    if rule is None or trace is None or trace.tb_frame.f_code is rule.__code__:
        return None
    return (
        f"{describe(rule)} is made of ops on {one_of(cls)}, and one has no rule ({error}). Write that rule, or let "
        f"this one compute with the inner tensors: x.unwrap() above autograd"
    )


# ---- the author's functions --------------------------------------------------------------------------------


def rule_that_raised(error: BaseException, cls: type) -> types.FunctionType | None:
    """Returns the rule among the frames of an error's traceback, the innermost if there are several."""
    by_code = {rule.__code__: rule for _, rule in functions_of(cls)}
    found, trace = None, error.__traceback__
    while trace is not None:
        found = by_code.get(trace.tb_frame.f_code, found)
        trace = trace.tb_next
    return found


def _global_tensors(cls: type) -> Iterator[tuple[Callable[..., Any], str]]:
    for _, rule in functions_of(cls):
        names = [n for n in global_names(rule.__code__) if isinstance(rule.__globals__.get(n), Tensor)]
        cells = dict(zip(rule.__code__.co_freevars, rule.__closure__ or (), strict=True))
        names += [n for n, cell in cells.items() if isinstance(cell.cell_contents, Tensor)]
        yield from ((rule, name) for name in names)
