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
from subclasses.layout import field_name
from subclasses.rules.results import describe
from subclasses.testing import derive
from subclasses.testing.calls import VIEWS, WRITES, Case
from subclasses.testing.cases import (
    applicable,
    argument_cases,
    gradients_by,
    is_for_op,
    not_refused,
    own_methods,
    rules_run,
    stand_ins,
)
from subclasses.testing.contexts import Setting
from subclasses.testing.errors import Broken, check_that, tried
from subclasses.testing.oracles import by_eager, by_reference, harmless, step, unchanged
from subclasses.testing.subject import (
    Subject,
    check_attributes,
    check_class,
    check_equal,
    differs,
    is_differentiable,
    leaves,
    memory_of,
    shared_memory,
    snapshot,
    tried_alone,
)

# ---- the least -----------------------------------------------------------------------------------------------


READ = Case("x.materialize()", lambda x: x.materialize(), marks=("works",))
READS: dict[str, Callable[[Any], Any]] = {
    "x.shape": lambda x: x.shape,
    "x.dtype": lambda x: x.dtype,
    "x.device": lambda x: x.device,
    "x.requires_grad": lambda x: x.requires_grad,
    "x.__tensor_flatten__()": lambda x: x.__tensor_flatten__(),
    READ.name: READ.run,
    "x.detach().materialize()": lambda x: x.detach().materialize(),
}


def reads(s: Subject) -> list[Case]:
    """The reads of a value on which every promise relies; the methods of a declared class alone."""
    has = {"()": s.declared, "materialize()": s.has_materialize}
    names = [name for name in READS if all(has[words] for words in has if name.endswith(words))]
    return [Case(name, READS[name], marks=("works",)) for name in names]


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
    wrong = [n for n in names if not (isinstance(n, str) and isinstance(getattr(x, n, None), Tensor))]
    check_that(
        names and not wrong, f"__tensor_flatten__ gave the names {names!r}, of which {wrong} hold no tensors"
    )


ROUND_TRIPS = [
    Case("a value", lambda x: x),
    Case("x.detach()", lambda x: x.detach()),
    Case("x.transpose(0, -1)", lambda x: x.transpose(0, -1)),
    Case("x[1:]", lambda x: x[1:]),
    Case("x[..., ::2]", lambda x: x[..., ::2]),
]


@torch.no_grad()
def round_trip(s: Subject, case: Case) -> None:
    """Compares a value, or a view of it, with a value that is put together from the same parts."""
    value, what = case.run(s.make()), f"{case.name} put together from its parts"
    back = s.unflatten(value, s.inners(value))
    check_equal(s, what, {"": back, "stride": back.stride()}, {"": value, "stride": value.stride()})
    for name, inner in s.inners(value).items():
        is_same = getattr(back, name) is inner or not inner.numel()
        check_that(is_same, f"the inner tensor {field_name(name)} came back as another tensor")
    lost = [
        f"{n} ({v!r}, afterwards {vars(back).get(n)!r})"
        for n, v in vars(value).items()
        if not isinstance(v, Tensor) and (n, v) not in vars(back).items()
    ]
    loss = f", where the flatten context {s.context(value)!r} loses {' and '.join(lost)}" if lost else ""
    check_equal(s, f"the tensor that {what} represents{loss}", s.meaning(back), s.meaning(value))


def check_metadata(s: Subject, case: Case) -> None:
    """Raises where the flatten context holds a tensor, differs for equal values, or has no hash."""
    one, other = (s.context(s.make()) for _ in range(2))
    check_that(
        not any(isinstance(v, Tensor) for v in leaves(one)), f"the flatten context {one!r} holds a tensor"
    )
    check_that(one == other, f"two equal values have the contexts {one!r} and {other!r}, which differ")
    check_that(hash(one) == hash(other), f"the hash of the equal contexts {one!r} differs")


SHOWN = Case(
    "the outside of a value",
    lambda x: {"shape": list(x.shape), "dtype": x.dtype, "device": x.device},
    marks=("works",),
)


def outsides(s: Subject) -> list[Case]:
    """The size, dtype and device of a value.

    Raises:
        Broken: a value that represents its inner tensors has one of another size.
    """
    words = " and ".join(f"{name} has size {size}" for name, size in s.odd_sizes.items())
    if words:
        raise Broken(f"{words}, the value {list(s.make().shape)}", fault="inner-size")
    return [SHOWN]


def sizes(s: Subject, case: Case, setting: Setting) -> None:
    """Compares the metadata of values of two sizes, and the outside of one of them with the reference."""
    by_eager(s, case, setting)
    if s.has_reference:
        by_reference(s, SHOWN, Setting(setting.operand))


def rebuilt_fake(s: Subject) -> Any:
    """A value that is put together from its parts as a fake, which has no data."""
    mode = fake_mode()
    fake = mode.from_tensor(s.make())
    with mode:
        return s.unflatten(fake, s.inners(fake))


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


def _saved(x: Any) -> Any:
    torch.save({"x": x}, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=True)["x"]


LOCAL_COPIES = [
    Case("x.clone()", lambda x: x.clone()),
    Case("x.detach()", lambda x: x.detach(), marks=("shares",)),
]
DEEPCOPY = Case("copy.deepcopy(x)", copy.deepcopy, marks=("trains",))
PICKLED = Case("a pickled value", lambda x: pickle.loads(pickle.dumps(x)))
FILES = [PICKLED, Case("torch.load(weights_only=True)", _saved)]


def parameters(s: Subject) -> list[Case]:
    """Parameters of a module: a new one, one of a copied module, one that a module loads."""

    def loaded(x: Any, assign: bool) -> Any:
        target = Holder(snapshot(s, x).requires_grad_(x.requires_grad))
        for t in s.floats(target.weight).values():
            t.detach().zero_()  # so that only a real copy restores the numbers
        target.load_state_dict(Holder(x).state_dict(), assign=assign)
        return target.weight

    load, shares = "a parameter after load_state_dict(assign={})", ("trains", "shares")
    return [
        Case("nn.Parameter(x)", lambda x: Holder(x).weight, shares),
        Case("the parameter of a copied module", lambda x: copy.deepcopy(Holder(x)).weight, shares[:1]),
        Case(load.format(True), lambda x: loaded(x, True), shares),
        Case(load.format(False), lambda x: loaded(x, False), shares[:1]),
    ]


def copied(s: Subject, case: Case) -> None:
    """Compares a copy with its value, of which it shares no memory."""
    x = s.make().detach()
    check_equal(s, "x.detach()", x, s.make())
    trains = "trains" in case.marks and is_differentiable(x)
    for value in [x, x.detach().requires_grad_()] if trains else [x]:
        got = torch.no_grad()(case.run)(value)
        check_equal(s, case.name, got, value)
        check_attributes(case.name, got, value, "requires_grad", "is_leaf")
        check_equal(s, f"what {case.name} stands for", s.meaning(got), s.meaning(value))
        shares = "shares" not in case.marks and shared_memory(s, got, value)
        is_apart = not (shares and _is_reached(s, got, value))
        check_that(is_apart, f"{case.name} shares memory with the value that it is a copy of")


@torch.no_grad()
def _is_reached(s: Subject, copy: Any, x: Any) -> bool:
    """Whether a write to a copy, or an optimizer's step, changes the value; no op writes to offsets of rows."""
    before = snapshot(s, x)
    for write in (*WRITES.values(), partial(step, s)):
        tried(write, copy)
    return differs(s, x, before)


def optimizer(s: Subject, case: Case) -> None:
    """Compares a parameter after a step of SGD with the same step on plain tensors.

    The plain tensors are the tensors that the parameter represents, or its inner tensors.
    """
    weight: Any = nn.Parameter(s.trainable())
    (weight.grad,) = gradients_by([weight], weight * weight)
    grad, before = weight.grad, snapshot(s, weight.detach())
    works, _ = s.works("SGD.step()", torch.optim.SGD([weight], lr=0.1).step)
    if not works:
        return check_equal(s, "a parameter after a refused SGD.step()", weight.detach(), before)
    trains_inners = s.declared and s.cls._traits.trainable
    plains = (lambda x: [*s.floats(x).values()]) if trains_inners else s.meaning
    if type(grad) is s.cls:
        expected = [p - 0.1 * g for p, g in zip(plains(before), plains(grad), strict=True)]
        check_equal(s, "a parameter after SGD.step()", plains(weight.detach()), expected)


CONVERSIONS = [
    *(
        Case(f"x.to({dtype})", lambda x, dtype=dtype: SHOWN.run(x.to(dtype)))
        for dtype in (torch.float64, torch.bfloat16, torch.complex64, torch.int32)
    ),
    Case('x.to("meta")', lambda x: SHOWN.run(x.to("meta"))),
    Case("x.to(x.dtype) is x", lambda x: x.to(x.dtype) is x),
]
NUMBERS = Case("the numbers of x.to(torch.float64)", lambda x: x.to(torch.float64).to(x.dtype))


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
    result = first_of(case)
    run = lambda x: (y := result.run(x), write(y))[0]  # noqa: E731
    return Case(f"y = {case.name}; {words}", run, parts=(result, Case(words, write)))


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
    is_own = type(y) is s.cls
    if is_own:
        check_equal(
            s, f"{case.name}: the view, taken again, does not have what was written to it", result.run(x), y
        )
    is_apart = not is_own and y.numel() and not shared_memory(s, y, x)
    check_that(
        not (is_apart and y._is_view() and y._base is x),
        f"{case.name} wrote to a copy that claims to be a view of x: the write is lost",
    )
    if s.has_reference and not is_apart and "another value" not in case.name:
        after = Case(f"x after {case.name}", lambda x: (case.run(x), x)[1])
        by_reference(s, after, Setting(lambda: snapshot(s, before)))
    check_that(
        x._version != version or not isinstance(y, s.cls),
        f"{case.name} left the version counter of x as it was, so a stale gradient goes unnoticed",
    )


def own_memory(s: Subject, case: Case) -> None:
    """Raises where a write to a result changes the value that it was computed from."""
    _, change = tried(unchanged, s, case)
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
    expected = gradients_by([x], y)
    torch.no_grad()(x.mul_)(2)
    got, error = tried(gradients_by, [x], y)
    check_that(
        error is not None or not differs(s, got, expected),
        "y = x * x; x.mul_(2); the gradient of y came out, from the overwritten x",
    )
