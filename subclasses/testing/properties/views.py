"""Views and mutation: which memory is shared, which is written, which is left alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import storage_key
from subclasses.testing import cases
from subclasses.testing.cases import applicable, run_on_reference, stand_ins
from subclasses.testing.compare import (
    check_class,
    check_equal,
    check_stands_for,
    leaves,
    snapshot,
    value_difference,
)
from subclasses.testing.errors import Attempt, Broken
from subclasses.testing.property import Case, promise
from subclasses.testing.reach import names_of_rules
from subclasses.testing.subject import Subject

_ALIASING = (
    "end __torch_dispatch__ with `return torch.utils._python_dispatch.return_and_correct_aliasing(func, args, "
    "kwargs, out)`"
)


_COPIES = (
    "let the rule make views of the inner tensors, as x.values.select(...) does, and copy nothing; a result that has "
    "to be a copy is that of a rule for the function, such as torch.select, which no one takes for a view, and then "
    "pass skip={'views', 'writes_to_views'}"
)


@promise(
    f"{_ALIASING}, and make the inner tensors of the result views of the inner tensors",
    cases=partial(applicable, table=cases.VIEWS),
    declared="correct the rule for this op: its result has the values of the view, and views of the inner tensors; "
    "what inner tensors cannot say, refuse with NotImplementedError",
)
def views(s: Subject, case: Case) -> None:
    """A view shares memory with the value that it is a view of; a copy does not claim to."""
    x = s.make()
    with torch.no_grad():
        view = leaves(case.run(x))[0]
        check_class(s, case.name, view)
        if s.has_reference:
            check_stands_for(s, case.name, view, run_on_reference(s, case))
    if view is x:
        plain = stand_ins(s)[0]
        if leaves(case.run(plain))[0] is not plain:  # as it is for ``flatten`` of one dimension
            raise Broken(f"{case.name} gave x itself, not a view of it")
    elif type(view) is s.cls:
        _check_view(s, case.name, x, view)
    elif view._is_view() and view._base is x and not _shares_memory(s, view, x):
        raise Broken(
            f"{case.name} is a copy of type {type(view).__name__}, yet it claims to be a view of x",
            "give back a view of the class, or refuse the op; a plain copy must be detached from x",
        )


def _of_an_op(s: Subject) -> str:
    """The mend for a declared class, whose results of ops are views already."""
    field = s.cls.__spec__.inners[0].name
    return (
        f"what a rule for a function, such as torch.t, or for an op that PyTorch decomposes, such as aten.reshape, "
        f"returns is no view to PyTorch: give the rule to the op, as torch.ops.aten.t, or to aten.view, and let "
        f"it make views of the inner tensors that it reads as x.{field}. Where the result has to be a copy, keep the "
        f"rule and pass skip={{'views', 'writes_to_views'}}"
    )


def _shares_memory(s: Subject, view: Any, x: Any) -> bool:
    """Whether a rule returned a plain view of an inner tensor, as that of one row may be, or a value that holds one."""
    return not {storage_key(view), *_storages(s, view)}.isdisjoint(_storages(s, x))


def _storages(s: Subject, x: Any) -> set[int]:
    """The storages of the inner tensors of a value, and of what these hold; a plain tensor has none."""
    held = [t for t in s.inners(x).values() if isinstance(t, Tensor)]
    return {storage_key(t) for t in held}.union(*(_storages(s, t) for t in held))


def _check_view(s: Subject, what: str, x: Any, view: Any) -> None:
    if storage_key(view) != storage_key(x):
        raise Broken(
            f"{what} has a storage of its own, so that autograd and the compiler take it for a copy",
            _of_an_op(s) if s.declared else _ALIASING,
        )
    if what != "x.detach()" and not (view._is_view() and view._base is x):
        raise Broken(
            f"{what} is no view of x to autograd: _base is not x", _of_an_op(s) if s.declared else _ALIASING
        )
    held = [t for t in s.inners(view).values() if isinstance(t, Tensor)]
    if held and all(t.numel() for t in held) and not _shares_memory(s, view, x):
        raise Broken(
            f"{what} holds copies: no inner tensor shares memory with one of x",
            _COPIES if s.declared else _ALIASING,
        )


# ---- mutation ----------------------------------------------------------------------------------------------


@promise(
    "write into the inner tensors (copy_) and return the very argument that was written; where a class cannot, "
    "raise before anything is written",
    cases=partial(applicable, table=cases.MUTATIONS),
    declared="correct the rule for this op: it writes the new numbers to the inner tensors (copy_) and returns the "
    "very argument that was written; where it cannot, it raises before anything is written",
)
def mutation(s: Subject, case: Case) -> None:
    """An in-place op changes the value itself, or is refused and changes nothing."""
    _check_write(s, case, returns_self=True)


@promise(
    "write through to the inner tensors of the base: a view must hold views, and an op that makes a copy must "
    "not be followed by a write that is lost",
    cases=partial(applicable, table=cases.VIEW_MUTATIONS),
)
def mutation_of_views(s: Subject, case: Case) -> None:
    """Writing to a view changes the value that it is a view of."""
    _check_write(s, case, returns_self=False)


@promise(
    "return x itself with its new sizes, through return_and_correct_aliasing; or refuse the op",
    cases=partial(applicable, table=cases.METADATA_MUTATIONS),
)
def metadata_mutation(s: Subject, case: Case) -> None:
    """An in-place change of sizes shows in the value itself, or is refused."""
    _check_write(s, case, returns_self=True)


def _check_write(s: Subject, case: Case, *, returns_self: bool) -> None:
    x = s.make()
    before, version, out = snapshot(s, x), x._version, None
    with Attempt() as attempt, torch.no_grad():
        out = case.run(x)
    if attempt.error is not None:
        check_equal(s, f"{case.name} was refused, but had changed x", x, before)
        raise attempt.error
    if not returns_self and not isinstance(out, s.cls) and not _is_written(s, out, x):
        _check_copy_was_plain(s, case, x, before, out)
        return
    if returns_self and out is not x:
        raise Broken(
            f"{case.name} gave another object than x", _of_a_function(s, case) if s.declared else _ALIASING
        )
    if s.has_reference:
        expected = [plain.detach().clone() for plain in s.reference(before)]
        with torch.no_grad():
            for plain in expected:
                case.run(plain)
        check_stands_for(s, f"x after {case.name}", x, expected)
    if x._version == version:
        raise Broken(
            f"{case.name} left the version counter of x as it was, so a stale gradient goes unnoticed"
        )


def _of_a_function(s: Subject, case: Case) -> str:
    """The mend for a declared class, of which what an op returns is what it wrote to."""
    rules = " or ".join(names_of_rules(s, lambda: case.run(s.make()))) or "the rule for the function"
    return (
        f"{rules} is given what is to be written (as out=, or as the value itself) and returns something else: let it "
        f"write there, as by x.copy_(...), and return x, or raise before anything is written; a rule for the op, such "
        f"as torch.ops.aten.mul, is not asked to"
    )


def _is_written(s: Subject, out: Any, x: Any) -> bool:
    """Whether a write to a result of another class is one to a value, whose memory it has."""
    return isinstance(out, Tensor) and out._is_view() and _shares_memory(s, out, x)


def _check_copy_was_plain(s: Subject, case: Case, x: Any, before: Any, out: Any) -> None:
    """A write to a plain copy is right if the copy does not claim to be a view."""
    check_equal(s, f"x after {case.name}, which wrote to a plain copy", x, before)
    if isinstance(out, Tensor) and out._is_view() and out._base is x:
        raise Broken(f"{case.name} wrote to a copy that claims to be a view of x: the write is lost")


def _gradient_of(y: Any, x: Any) -> tuple[Any, ...]:
    return torch.autograd.grad(y, x, torch.ones(y.shape, dtype=y.dtype))


@promise(
    "save tensors with ctx.save_for_backward, and raise version counters of what a rule writes to",
    declared="register the rule that writes for the op, as torch.ops.aten.mul_, whose writes are counted, and write to "
    "the tensors that its operands hold",
)
def stale_gradients(s: Subject) -> None:
    """A gradient that needs a value which has been overwritten is an error."""
    kept, x = s.trainable(), s.trainable()
    (expected,) = s.call("x * x", lambda: _gradient_of(kept * kept, kept))
    y = x * x
    with torch.no_grad():
        s.call("x.mul_(2)", lambda: x.mul_(2))
    got = None
    with Attempt() as attempt:
        (got,) = _gradient_of(y, x)
    if attempt.error is None and value_difference(s, got, expected):
        raise Broken("y = x * x; x.mul_(2); the gradient of y came out, from the overwritten x")
