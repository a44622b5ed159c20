"""The parts of a value and their memory: flattening, metadata, the outside, copies, views, and writes."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from subclasses._torch import fake_mode, storage_key
from subclasses.errors import one_of
from subclasses.layout import field_name
from subclasses.rules.results import describe
from subclasses.testing import derive
from subclasses.testing.calls import METADATA_MUTATIONS, MUTATIONS, VIEWS, WHOLE, WRITES, Case
from subclasses.testing.cases import (
    applicable,
    argument_cases,
    is_for_op,
    not_refused,
    own_methods,
    rules_run,
    stand_ins,
)
from subclasses.testing.errors import Broken, check_that, problem, succeeds, tried
from subclasses.testing.subject import (
    Subject,
    check_attributes,
    check_class,
    check_close,
    check_equal,
    differs,
    is_differentiable,
    leaves,
    memory_of,
    plain_type,
    same_context,
    shared_memory,
    snapshot,
    tried_alone,
)
from subclasses.testing.values import Setting, arguments, by_reference, harmless, step

# ---- the least -----------------------------------------------------------------------------------------------


READS: dict[str, Callable[[Any], Any]] = {
    "x.shape": lambda x: x.shape,
    "x.dtype": lambda x: x.dtype,
    "x.device": lambda x: x.device,
    "x.requires_grad": lambda x: x.requires_grad,
    "x.__tensor_flatten__()": lambda x: x.__tensor_flatten__(),
    "x.materialize()": lambda x: x.materialize(),
    "x.detach().materialize()": lambda x: x.detach().materialize(),
}


def reads(s: Subject) -> list[Case]:
    """The reads of a value on which every promise relies; the methods of a declared class alone."""
    has = {"()": s.declared, "materialize()": s.has_materialize}
    cases = [Case(name, run, marks=("works",)) for name, run in READS.items()]
    return [case for case in cases if all(has[words] for words in has if case.name.endswith(words))]


@torch.no_grad()
def readable(s: Subject, case: Case) -> None:
    """Raises where a read fails, or changes the value."""
    x = s.make()
    before = snapshot(s, x) if s.traceable else x
    case.run(x)
    check_equal(s, f"{case.name} changed x", x, before)


# ---- flattening ----------------------------------------------------------------------------------------------


def flatten(s: Subject, case: Case) -> None:
    """Raises where __tensor_flatten__ names an attribute that is not a tensor."""
    x = s.make()
    if not s.traceable:
        lacks = [n for n in ("__tensor_flatten__", "__tensor_unflatten__") if not hasattr(s.cls, n)]
        raise Broken(
            f"{s.name} has no {' and no '.join(lacks)}: no compiler, torch.export or fake tensor can flatten it",
            mend=f"write both; its attributes hold the tensors {', '.join(s.inners(x)) or 'none'}, the names to return",
        )
    names, _ = x.__tensor_flatten__()
    check_that(
        names and all(isinstance(n, str) for n in names),
        f"__tensor_flatten__ gave the names {names!r}",
    )
    for name in names:
        check_that(
            isinstance(inner := getattr(x, name, None), Tensor),
            f"{s.name}.{name} is {one_of(type(inner))}, and __tensor_flatten__ names it",
        )


ROUND_TRIPS = {
    "a value": lambda x: x,
    "x.detach()": lambda x: x.detach(),
    "x.transpose(0, -1)": lambda x: x.transpose(0, -1),
    "x[1:]": lambda x: x[1:],
    "x[..., ::2]": lambda x: x[..., ::2],
}


def round_trip(s: Subject, case: Case) -> None:
    """Compares a value, or a view of it, with a value that is put together from the same parts."""
    value, error = tried_alone(case.run, s.make())
    if error is not None:
        s.refuses(case.name, error)
    if type(value) is not s.cls:
        return
    back, what = s.unflatten(value, s.inners(value)), f"{case.name} put together from its parts"
    check_equal(s, what, back, value)
    check_equal(s, f"the stride of {what}", back.stride(), value.stride())
    for name, inner in s.inners(value).items():
        check_that(
            getattr(back, name, None) is inner or not inner.numel(),
            f"the inner tensor {field_name(name)} came back as another tensor",
        )
    restored, original = vars(back), vars(value).items()
    lost = {
        n: v for n, v in original if not isinstance(v, Tensor) and (n not in restored or restored[n] != v)
    }
    names = " and ".join(f"{n} ({v!r}, afterwards {restored.get(n)!r})" for n, v in lost.items())
    loss = f", where the flatten context {s.context(value)!r} loses {names}" if lost else ""
    words = f"the tensor that a value represents once it is put together from its parts{loss}"
    check_equal(s, words, s.meaning(back), s.meaning(value))


def check_metadata(s: Subject, case: Case) -> None:
    """Raises where the flatten context holds a tensor, differs for equal values, or has no hash."""
    one, other = (s.context(s.make()) for _ in range(2))
    check_that(not _holds_tensor(one), f"the flatten context {one!r} holds a tensor")
    check_that(
        same_context(one, other), f"two equal values have the contexts {one!r} and {other!r}, which differ"
    )
    check_that(hash(one) == hash(other), f"the hash of the equal contexts {one!r} differs")


def _holds_tensor(value: Any) -> bool:
    parts = [*value, *value.values()] if isinstance(value, dict) else value
    is_container = isinstance(parts, list | tuple | set | frozenset)
    return isinstance(value, Tensor) or (is_container and any(map(_holds_tensor, parts)))


def sizes(s: Subject, case: Case) -> None:
    """Compares the contexts of values of other sizes, and the sizes of values that are put together with a context."""
    x = s.make()
    for other in map(s.make, derive.sizes(s)):
        if s.has_reference:
            _check_outside(s, other)
        check_that(
            same_context(s.context(x), s.context(other)),
            f"the contexts are {s.context(x)!r} and {s.context(other)!r}",
        )
        back = s.cls.__tensor_unflatten__(s.inners(other), s.context(x), other.size(), other.stride())
        words = "inner tensors, put together with the equal context of another value"
        check_attributes(words, back, other, "shape")


def outside(s: Subject, case: Case) -> None:
    """Compares the size, dtype and device of a value with the tensors that it represents."""
    x = s.make()
    if odd := s.odd_sizes() if s.is_mapped else {}:
        words = " and ".join(f"{name} has size {size}" for name, size in odd.items())
        raise Broken(f"{words}, the value {list(x.shape)}", fault="inner-size")
    _check_outside(s, x)


def _check_outside(s: Subject, x: Any) -> None:
    s.needs("reference")
    plains, error = tried(s.reference, x)
    if error is not None:
        raise Broken(f"of a value of size {list(x.shape)}, {problem('reference=', error)}") from error
    for plain in plains:
        check_attributes("what the value shows", x, plain, "shape", "dtype", "device")


def without_data(s: Subject, case: Case) -> None:
    """Flattens a value and unflattens it as a fake, which has no data."""
    x, mode = s.make(), fake_mode()
    fake = mode.from_tensor(x)
    with mode:
        back = s.unflatten(fake, s.inners(fake))
    for made in (fake, back):
        check_attributes("a fake of a value", made, x, "__class__", "shape", "dtype")


@torch.no_grad()
def printing(s: Subject, case: Case) -> None:
    """Prints a value and its fake."""
    for x in (s.make(), *([fake_mode().from_tensor(s.make())] if s.traceable else [])):
        repr(x)


# ---- copies --------------------------------------------------------------------------------------------------


class Holder(nn.Module):
    """A module with a value of the class as its parameter, and an op on it.

    Args:
        x: the value.
        run: the op, whose result the module returns beside twice its argument.
    """

    def __init__(self, x: Tensor, run: Callable[[Any], Any] = lambda x: x) -> None:
        super().__init__()
        self.weight: Any = nn.Parameter(x, requires_grad=x.requires_grad)
        self.run = run

    def forward(self, x: Tensor) -> Any:
        """The op on the parameter, and something of the argument."""
        return self.run(self.weight), x * 2


def _pickled(t: Any) -> Any:
    return pickle.loads(pickle.dumps(t))


def _saved(x: Any) -> Any:
    file = io.BytesIO()
    torch.save({"x": x}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)["x"]


LOCAL_COPIES = [
    Case("x.clone()", lambda x: x.clone()),
    Case("x.detach()", lambda x: x.detach(), marks=("shares",)),
]
DEEPCOPY = Case("copy.deepcopy(x)", copy.deepcopy, marks=("trains",))
PICKLED = Case("a pickled value", _pickled)
FILES = [PICKLED, Case("torch.load(weights_only=True)", _saved)]


def files(s: Subject) -> list[Case]:
    """The copies that go through a file; torch cannot pickle plain float8 tensors."""
    inners = s.inners(s.make().detach()).values()
    return [case for case in FILES if case is not PICKLED or all(succeeds(_pickled, t) for t in inners)]


def parameters(s: Subject) -> list[Case]:
    """Parameters of a module: a new one, one of a copied module, one that a module loads."""

    def load(x: Any, assign: bool) -> Any:
        target = Holder(snapshot(s, x).requires_grad_(x.requires_grad))
        for t in filter(is_differentiable, s.inners(target.weight).values()):
            t.detach().zero_()  # so that only a real copy restores the numbers
        target.load_state_dict(Holder(x).state_dict(), assign=assign)
        return target

    made: dict[str, tuple[Callable[[Any], nn.Module], tuple[str, ...]]] = {
        "nn.Parameter(x)": (Holder, ("shares",)),
        "the parameter of a copied module": (lambda x: copy.deepcopy(Holder(x)), ()),
        "a parameter after load_state_dict(assign=True)": (lambda x: load(x, True), ("shares",)),
        "a parameter after load_state_dict(assign=False)": (lambda x: load(x, False), ()),
    }
    only = lambda make, x: next(iter(make(x).parameters()))  # noqa: E731
    return [Case(n, partial(only, make), marks=("trains", *marks)) for n, (make, marks) in made.items()]


def copied(s: Subject, case: Case) -> None:
    """Compares a copy with its value, of which it shares no memory."""
    x = s.make().detach()
    check_equal(s, "x.detach()", x, s.make())
    trains = "trains" in case.marks and is_differentiable(x)
    for value in [x, x.detach().requires_grad_()] if trains else [x]:
        with torch.no_grad():
            got = case.run(value)
        check_equal(s, case.name, got, value)
        check_attributes(case.name, got, value, "requires_grad", "is_leaf")
        check_equal(s, f"what {case.name} stands for", s.meaning(got), s.meaning(value))
        check_that(
            "shares" in case.marks or not shared_memory(s, got, value),
            f"{case.name} shares memory with the value that it is a copy of",
        )


def optimizer(s: Subject, case: Case) -> None:
    """Compares a parameter after a step of SGD with the same step on plain tensors.

    The plain tensors are the tensors that the parameter represents, or its inner tensors.
    """
    weight: Any = nn.Parameter(s.trainable())
    loss = weight * weight
    (weight.grad,) = torch.autograd.grad(loss, weight, torch.ones(loss.shape, dtype=loss.dtype))
    grad, before = weight.grad, snapshot(s, weight.detach())
    works, _ = s.works("SGD.step()", torch.optim.SGD([weight], lr=0.1).step)
    if not works:
        return check_equal(s, "a parameter after a refused SGD.step()", weight.detach(), before)
    trains_inners = s.declared and s.cls._traits.trainable
    floats = lambda x: [*filter(is_differentiable, s.inners(x).values())]  # noqa: E731
    parts = floats if trains_inners else s.reference
    if type(grad) is plain_type(weight.detach()) and (s.has_reference or trains_inners):
        for got, p, g in zip(*map(parts, (weight.detach(), before, grad)), strict=True):
            check_close(s, "a parameter after SGD.step()", got, p - 0.1 * g)


CONVERSIONS = {
    **{
        f"x.to({dtype})": lambda x, dtype=dtype: x.to(dtype)
        for dtype in (torch.float64, torch.bfloat16, torch.complex64, torch.int32)
    },
    'x.to("meta")': lambda x: x.to("meta"),
    "x.to(x.dtype)": lambda x: x.to(x.dtype),
}


def conversion(s: Subject, case: Case) -> None:
    """Compares a value in another dtype, or on another device, with the tensors that it represents."""
    x = s.make().detach()
    got, plain = case.run(x), case.run(torch.zeros(x.shape, dtype=x.dtype, device=x.device))
    check_attributes(case.name, got, plain, "dtype", "device", "shape")
    check_that(
        "x.dtype" not in case.name or got is x,
        "x.to(x.dtype) is not x itself, as it is for a plain tensor",
    )
    if s.has_reference and got.device == x.device and got.dtype == torch.float64 and x.is_floating_point():
        plains = s.reference(x)
        for p, e in zip(s.references(got, len(plains)), plains, strict=True):
            check_attributes(f"what {case.name} stands for", p, got, "dtype")
            check_close(s, case.name, p.to(x.dtype), e)


# ---- views -------------------------------------------------------------------------------------------------


def views(s: Subject, case: Case) -> None:
    """Compares a view with the reference, and raises for one that shares no memory with its base."""
    x, first = s.make(), first_of(case)
    with torch.no_grad():
        view = first.run(x)
    check_class(s, case.name, view)
    if s.has_reference:
        by_reference(s, first, Setting(s.make))
    is_own, claims = type(view) is s.cls, view._is_view() and view._base is x
    shares = bool(shared_memory(s, view, x)) or not [*memory_of(s, view)]
    is_plain_itself = view is x and first.run(plain := stand_ins(s)[0]) is plain  # as of ``flatten``
    for holds, words in (
        (view is not x or is_plain_itself, "gave x itself, not a view of it"),
        (
            not is_own or storage_key(view) == storage_key(x),
            "has a storage of its own, so that autograd and the compiler take it for a copy",
        ),
        (
            not is_own or claims or view is x or case.name == "x.detach()",
            "is not a view of x to autograd: _base is not x",
        ),
        (not is_own or shares, "holds copies: no inner tensor shares memory with one of x"),
        (
            is_own or not claims or shares,
            f"is a copy of type {type(view).__name__}, yet it claims to be a view of x",
        ),
    ):
        check_that(holds, f"{case.name} {words}")


def first_of(case: Case) -> Case:
    """A case that gives the first of its results."""
    return Case(case.name, lambda x: leaves(case.run(x))[0])


def is_view_of_plain(s: Subject, case: Case) -> bool:
    """Whether a case gives a plain tensor itself or a view of it, as ``contiguous`` and ``reshape`` may."""
    results = [
        (r, p) for p in stand_ins(s) for r in leaves(tried_alone(case.run, p)[0]) if isinstance(r, Tensor)
    ]
    return any(storage_key(r) == storage_key(p) or (r._is_view() and r._base is p) for r, p in results)


# ---- writes ------------------------------------------------------------------------------------------------


def written_to(case: Case, words: str, write: Callable[[Any], Any]) -> Case:
    """A write to the first result of a case; the case gives the result, its parts are the result and the write."""

    def run(x: Any) -> Any:
        y = result.run(x)
        write(y)
        return y

    result = first_of(case)
    return Case(f"y = {case.name}; {words}", run, parts=(result, Case(words, write)))


def mutations(s: Subject) -> list[Case]:
    """Writes to a value itself."""
    cases = applicable(s, MUTATIONS | METADATA_MUTATIONS)
    return [Case(case.name, case.run, parts=(WHOLE, case)) for case in cases]


def writes_to_results(s: Subject) -> Iterator[Case]:
    """Each call whose results are not views, and each write to the first of its results."""
    by_value = {
        "y.mul_(another value)": lambda y: y.mul_(derive.again(s)),
        "y.add_(another value)": lambda y: y.add_(derive.again(s)),
    }
    by_step = {"a step of an optimizer on nn.Parameter(y)": lambda y: step(s, y)}
    for case in (*harmless(s), *argument_cases(s)):
        y, error = tried_alone(first_of(case).run, x := s.make())
        if error is None and y is not x and shared_memory(s, y, x) and not is_view_of_plain(s, case):
            trains = s.declared and (s.cls._traits.trainable or case.name in own_methods(s))
            yield from (
                written_to(case, *write)
                for write in (WRITES | by_value | (by_step if trains else {})).items()
            )


def writes_to_views(s: Subject) -> list[Case]:
    """Each view with each write to it that the class takes."""
    # The entries of `expand` share memory, and many ops do not write to such.
    views = [case for case in applicable(s, VIEWS) if case.name not in ("x.expand", "x.detach()")]
    cases = [written_to(case, *write) for case in views for write in WRITES.items()]
    cases = not_refused(s, cases, lambda: stand_ins(s)[0])
    for case in map(first_of, views):
        other = lambda y, case=case: y.copy_(case.run(derive.again(s)))  # noqa: E731
        cases.append(written_to(case, "y.copy_(that of another value)", other))
    return not_refused(s, cases)


@torch.no_grad()
def written(s: Subject, case: Case) -> None:
    """Compares a value after a write to itself, or to a view of it."""
    x, (result, write) = s.make(), case.parts
    before, version = snapshot(s, x), x._version
    y = result.run(x)
    out, error = tried(write.run, y)
    if error is not None:
        check_equal(s, f"{case.name} was refused, but had changed x", x, before)
        raise error
    check_that(y is not x or out is x, f"{case.name} gave another object than x")
    if type(y) is s.cls:
        again = f"{case.name}: the view, taken again, does not have what was written to it"
        check_equal(s, again, result.run(x), y)
    elif y.numel() and not shared_memory(s, y, x):
        check_equal(s, f"x after {case.name}, which wrote to a plain copy", x, before)
        check_that(
            not y._is_view() or y._base is not x,
            f"{case.name} wrote to a copy that claims to be a view of x: the write is lost",
        )
        return
    if s.has_reference and "another value" not in case.name:
        after = Case(f"x after {case.name}", lambda x: (case.run(x), x)[1])
        by_reference(s, after, Setting(lambda: snapshot(s, before)))
    check_that(
        x._version != version or not isinstance(y, s.cls),
        f"{case.name} left the version counter of x as it was, so a stale gradient goes unnoticed",
    )


def own_memory(s: Subject, case: Case) -> None:
    """Raises where a write to a result changes the value that it was computed from."""
    _, change = tried(arguments, s, case)
    if change is not None:
        raise Broken(str(change), mend=_copies(s, case.parts[0]))


def _copies(s: Subject, result: Case) -> str:
    """The advice to copy what a rule hands on, in the way in which it reads its operand."""
    shared = shared_memory(s, tried_alone(result.run, x := s.make())[0], x)
    run = [pair for pair in rules_run(s, lambda: result.run(s.make())) if pair[0] != "materialize"]
    pairs = ", ".join(f"y{of_y} in the memory of x{of_x}" for of_y, of_x in shared)
    read = ".{}" if all(is_for_op(key) for key, _ in run) else '.unwrap("{}")'
    parts = dict.fromkeys(of_x.removeprefix(".").partition(".")[::2] for _, of_x in shared)
    copies = [f"x{read.format(field)}{'.' * bool(rest)}{rest}.clone()" for field, rest in parts]
    return (
        f"{' or '.join(dict.fromkeys(describe(rule) for _, rule in run)) or 'the rule'} hands on memory of its operand "
        f"({pairs}), and a write to y is one to x: return {' and '.join(copies)}"
    )


def stale_gradients(s: Subject, case: Case) -> None:
    """Raises where a gradient is computed from a value that was overwritten."""
    x = s.trainable()
    y = x * x
    gradient = partial(torch.autograd.grad, y, x, torch.ones(y.shape, dtype=y.dtype), retain_graph=True)
    expected = gradient()
    with torch.no_grad():
        x.mul_(2)
    got, error = tried(gradient)
    check_that(
        error is not None or not differs(s, got, expected),
        "y = x * x; x.mul_(2); the gradient of y came out, from the overwritten x",
    )
