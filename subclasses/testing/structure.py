"""Structure: flattening and unflattening, metadata, the outer size and dtype, the repr, copies of every kind."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from subclasses._torch import fake_mode
from subclasses.errors import one_of
from subclasses.layout import field_name
from subclasses.testing import derive
from subclasses.testing.calls import Case
from subclasses.testing.errors import (
    Broken,
    Skipped,
    check_that,
    problem,
    refusal,
    succeeds,
    tried,
)
from subclasses.testing.subject import (
    Subject,
    check_attributes,
    check_close,
    check_equal,
    is_differentiable,
    once,
    plain_type,
    same_context,
    shared_memory,
    snapshot,
    tried_alone,
)

# ---- the least -----------------------------------------------------------------------------------------------

# The calls are tried on declared classes alone, and ``materialize`` where the class has it.
READS: dict[str, Callable[[Any], Any]] = {
    "x.shape": lambda x: x.shape,
    "x.dtype": lambda x: x.dtype,
    "x.device": lambda x: x.device,
    "x.requires_grad": lambda x: x.requires_grad,
    "x.__tensor_flatten__()": lambda x: x.__tensor_flatten__(),
    "x.materialize()": lambda x: x.materialize(),
    "x.detach().materialize()": lambda x: x.detach().materialize(),
}


@once
def unreadable(s: Subject) -> tuple[str, Exception] | None:
    """The first failing read of a value, such as of its shape, and its error; None if all reads work.

    Every promise relies on these reads.
    """
    for what, read in READS.items():
        if s.has_materialize if "materialize" in what else s.declared or "(" not in what:
            _, error = tried(_check_read, s, what, read)
            if error is not None and refusal(error) is None:
                return what, error
    return None


@torch.no_grad()
def _check_read(s: Subject, what: str, read: Callable[[Any], Any]) -> None:
    x = s.make()
    before = snapshot(s, x) if s.traceable else x
    read(x)
    check_equal(s, f"{what} changed x", x, before)


def readable(s: Subject, case: Case) -> None:
    """Raises where a read fails."""
    if found := unreadable(s):
        raise Broken(problem(*found)) from found[1]


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
    check_equal(s, _lost(s, value, back), s.meaning(back), s.meaning(value))


def _lost(s: Subject, x: Any, back: Any) -> str:
    """The words for a value that represents another tensor once it is put together again.

    They name the attributes that the flatten context loses.
    """
    kept, held = vars(back), vars(x).items()
    lost = [n for n, v in held if not isinstance(v, Tensor) and (n not in kept or kept[n] != v)]
    names = " and ".join(f"{n} ({vars(x)[n]!r}, afterwards {kept.get(n)!r})" for n in lost)
    loss = f", where the flatten context {s.context(x)!r} loses {names}" if lost else ""
    return f"the tensor that a value represents once it is put together from its parts{loss}"


def check_metadata(s: Subject, case: Case) -> None:
    """Raises where the flatten context holds a tensor, differs for equal values, or has no hash."""
    one, other = (s.context(s.make()) for _ in range(2))
    check_that(not _holds_tensor(one), f"the flatten context {one!r} holds a tensor")
    check_that(
        same_context(one, other), f"two equal values have the contexts {one!r} and {other!r}, which differ"
    )
    check_that(hash(one) == hash(other), f"the hash of the equal contexts {one!r} differs")


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        value = [*value, *value.values()]
    return isinstance(value, Tensor) or (
        isinstance(value, list | tuple | set | frozenset) and any(map(_holds_tensor, value))
    )


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
    plains, error = tried(s.reference, x)
    if isinstance(error, Skipped):
        raise error
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


@dataclass(frozen=True)
class Copy(Case):
    """A copy of a value.

    Attributes:
        shares: whether it shares memory with the value.
        trains: whether a copy of a value that requires grad requires it, too.
    """

    shares: bool = False
    trains: bool = False


def _pickled(t: Any) -> Any:
    return pickle.loads(pickle.dumps(t))


def _saved(x: Any) -> Any:
    file = io.BytesIO()
    torch.save({"x": x}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)["x"]


DEEPCOPY = Copy("copy.deepcopy(x)", copy.deepcopy, trains=True)


LOCAL_COPIES: list[Case] = [
    Copy("x.clone()", lambda x: x.clone()),
    Copy("x.detach()", lambda x: x.detach(), shares=True),
]


def files(s: Subject) -> list[Case]:
    """The copies that go through a file."""
    cases: list[Case] = [Copy("a pickled value", _pickled), Copy("torch.load(weights_only=True)", _saved)]
    # torch cannot pickle plain float8 tensors
    return cases if all(succeeds(_pickled, t) for t in s.inners(s.make().detach()).values()) else cases[1:]


def parameters(s: Subject) -> list[Case]:
    """Parameters of a module: a new one, one of a copied module, one that a module loads."""

    def only(module: Holder) -> Any:
        (weight,) = module.parameters()
        return weight

    def load(x: Any, assign: bool) -> Any:
        target = Holder(snapshot(s, x).requires_grad_(x.requires_grad))
        for t in filter(is_differentiable, s.inners(target.weight).values()):
            t.detach().zero_()  # so that only a real copy restores the numbers
        target.load_state_dict(Holder(x).state_dict(), assign=assign)
        return target.weight

    return [
        Copy("nn.Parameter(x)", lambda x: only(Holder(x)), shares=True, trains=True),
        Copy("the parameter of a copied module", lambda x: only(copy.deepcopy(Holder(x))), trains=True),
        Copy(
            "a parameter after load_state_dict(assign=True)",
            lambda x: load(x, True),
            shares=True,
            trains=True,
        ),
        Copy("a parameter after load_state_dict(assign=False)", lambda x: load(x, False), trains=True),
    ]


def copied(s: Subject, case: Any) -> None:
    """Compares a copy with its value, of which it shares no memory."""
    x = s.make().detach()
    check_equal(s, "x.detach()", x, s.make())
    for value in [x, x.detach().requires_grad_()] if case.trains and is_differentiable(x) else [x]:
        with torch.no_grad():
            got = case.run(value)
        check_equal(s, case.name, got, value)
        check_attributes(case.name, got, value, "requires_grad", "is_leaf")
        check_equal(s, f"what {case.name} stands for", s.meaning(got), s.meaning(value))
        check_that(
            case.shares or not shared_memory(s, got, value),
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
    if type(grad) is plain_type(weight.detach()) and (s.has_reference or trains_inners):
        parts = (
            (lambda x: [*filter(is_differentiable, s.inners(x).values())]) if trains_inners else s.reference
        )
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
    if s.has_reference and got.dtype == torch.float64 and x.is_floating_point():
        plains = s.reference(x)
        for p, e in zip(s.references(got, len(plains)), plains, strict=True):
            check_attributes(f"what {case.name} stands for", p, got, "dtype")
            check_close(s, case.name, p.to(x.dtype), e)
