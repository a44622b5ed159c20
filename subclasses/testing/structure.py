"""Structure: flattening and unflattening, metadata, the outer size and dtype, the repr, copies of every kind."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from subclasses._torch import fake_mode, storage_key
from subclasses.errors import one_of
from subclasses.layout import field_name
from subclasses.testing import derive
from subclasses.testing.compare import check_close, check_equal, plain_type, same_context, snapshot
from subclasses.testing.errors import Attempt, Broken, Skipped, problem, refusal, succeeds
from subclasses.testing.property import ADVICE
from subclasses.testing.reach import Case
from subclasses.testing.subject import Subject, is_differentiable, once

# ---- the least -----------------------------------------------------------------------------------------------

READS: dict[str, Callable[[Any], Any]] = {
    "x.shape": lambda x: x.shape,
    "x.dtype": lambda x: x.dtype,
    "x.device": lambda x: x.device,
    "x.requires_grad": lambda x: x.requires_grad,
}
READS_OF_DECLARED: dict[str, Callable[[Any], Any]] = {
    "x.__tensor_flatten__()": lambda x: x.__tensor_flatten__(),
    "x.materialize()": lambda x: x.materialize(),
    "x.detach().materialize()": lambda x: x.detach().materialize(),
}


@once
def unreadable(s: Subject) -> tuple[str, Exception] | None:
    """The first failing read of a value, such as of its shape, and its error; None if all reads work.

    Every promise relies on these reads.
    """
    for what, read in (READS | (READS_OF_DECLARED if s.declared else {})).items():
        with Attempt() as attempt, torch.no_grad():
            if "materialize" not in what or s.cls.__spec__.has_materialize:
                x = s.make()
                before = snapshot(s, x) if s.traceable else x
                read(x)
                check_equal(s, f"{what} changed x", x, before)
        if attempt.error is not None and refusal(attempt.error) is None:
            return what, attempt.error
    return None


def readable(s: Subject, case: Case) -> None:
    """Raises where a read fails."""
    if found := unreadable(s):
        raise Broken(problem(*found)) from found[1]


# ---- flattening ----------------------------------------------------------------------------------------------


def flatten(s: Subject, case: Case) -> None:
    """Raises where __tensor_flatten__ names an attribute that is no tensor."""
    x = s.make()
    if not s.traceable:
        lacks = [n for n in ("__tensor_flatten__", "__tensor_unflatten__") if not hasattr(s.cls, n)]
        raise Broken(
            f"{s.name} has no {' and no '.join(lacks)}: no compiler, torch.export or fake tensor can take it apart",
            mend=f"write both; its attributes hold the tensors {', '.join(s.inners(x)) or 'none'}, the names to return",
        )
    names, _ = x.__tensor_flatten__()
    if not names or not all(isinstance(n, str) for n in names):
        raise Broken(f"__tensor_flatten__ gave the names {names!r}")
    for name in names:
        inner = getattr(x, name, None)
        if not isinstance(inner, Tensor):
            raise Broken(f"{s.name}.{name} is {one_of(type(inner))}, and __tensor_flatten__ names it")


def round_trip(s: Subject, case: Case) -> None:
    """Compares a value, and views of it, with values that are put together from the same parts."""
    x = s.make()
    values = [x, x.detach()]
    for view in (lambda: x.transpose(0, -1), lambda: x[1:], lambda: x[..., ::2]):
        with Attempt() as attempt, torch.no_grad():
            values.append(view())
        s.refuses("a view of x", attempt.error)
    for value in [value for value in values if type(value) is s.cls]:
        back = s.unflatten(value, s.inners(value))
        check_equal(s, "a value put together from its parts", back, value)
        if back.stride() != value.stride():
            raise Broken(
                "a value put together from its parts has another stride",
                str(back.stride()),
                str(value.stride()),
            )
        for name, inner in s.inners(value).items():
            if getattr(back, name, None) is not inner and inner.numel():
                raise Broken(f"the inner tensor {field_name(name)} came back as another tensor")
        if s.has_reference:
            check_equal(s, _lost(s, value, back), s.reference(back), s.reference(value))


def _lost(s: Subject, x: Any, back: Any) -> str:
    """The words for a value that represents another tensor once it is put together again.

    They name the attributes that the flatten context loses.
    """
    kept, held = vars(back), vars(x).items()
    lost = [n for n, v in held if not isinstance(v, Tensor) and (n not in kept or kept[n] != v)]
    names = " and ".join(f"{n} ({vars(x)[n]!r}, afterwards {kept.get(n)!r})" for n in lost)
    loss = f", where the flatten context {s.context(x)!r} loses {names}" if lost else ""
    return f"what a value stands for that is put together from its parts{loss}"


def check_metadata(s: Subject, case: Case) -> None:
    """Raises where the flatten context holds a tensor, differs for equal values, or has no hash."""
    s.needs_flatten()
    contexts = [s.context(s.make()) for _ in range(2)]
    if _holds_tensor(contexts[0]):
        raise Broken(f"the flatten context {contexts[0]!r} holds a tensor")
    if not same_context(*contexts):
        raise Broken(f"two equal values have the contexts {contexts[0]!r} and {contexts[1]!r}, which differ")
    if len({hash(context) for context in contexts}) > 1:
        raise Broken(f"the hash of the equal contexts {contexts[0]!r} differs")


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple | set | frozenset):
        return any(map(_holds_tensor, value))
    return isinstance(value, Tensor)


def sizes(s: Subject, case: Case) -> None:
    """Compares the contexts of values of other sizes, and the sizes of values that are put together with a context."""
    s.needs_flatten()
    x = s.make()
    for factory in derive.sizes(s):
        other = s.make(factory)
        if s.has_reference:
            _check_outside(s, other)
        if not same_context(s.context(x), s.context(other)):
            raise Broken(f"the contexts are {s.context(x)!r} and {s.context(other)!r}")
        back = s.cls.__tensor_unflatten__(s.inners(other), s.context(x), other.size(), other.stride())
        if back.shape != other.shape:
            words = "inner tensors, put together with the equal context of another value, gave shape"
            raise Broken(words, str(list(back.shape)), str(list(other.shape)))


def outside(s: Subject, case: Case) -> None:
    """Compares the size, dtype and device of a value with the tensors that it represents."""
    x = s.make()
    if odd := s.odd_sizes() if s.is_mapped else {}:
        words = " and ".join(f"{name} has size {size}" for name, size in odd.items())
        raise Broken(f"{words}, the value {list(x.shape)}", mend=ADVICE["inner-size"])
    _check_outside(s, x)


def _check_outside(s: Subject, x: Any) -> None:
    plains: tuple[Tensor, ...] = ()
    with Attempt() as attempt:
        plains = s.reference(x)
    if attempt.error is not None and not isinstance(attempt.error, Skipped):
        raise Broken(
            f"of a value of size {list(x.shape)}, {problem('reference=', attempt.error)}"
        ) from attempt.error
    if attempt.error is not None:
        raise attempt.error
    for plain in plains:
        for what in ("shape", "dtype", "device"):
            if getattr(plain, what) != getattr(x, what):
                raise Broken(f"{what} is {getattr(x, what)} outside, but {getattr(plain, what)} inside")


def without_data(s: Subject, case: Case) -> None:
    """Takes a value apart and puts it together as a fake, which has no data."""
    s.needs_flatten()
    x, mode = s.make(), fake_mode()
    fake = mode.from_tensor(x)
    with mode:
        back = s.unflatten(fake, s.inners(fake))
    for made in (fake, back):
        if type(made) is not s.cls or made.shape != x.shape or made.dtype != x.dtype:
            raise Broken(
                "a fake of a value", *(f"{type(t).__name__}{list(t.shape)} of {t.dtype}" for t in (made, x))
            )


def printing(s: Subject, case: Case) -> None:
    """Prints a value and its fake."""
    for x in (s.make(), *([fake_mode().from_tensor(s.make())] if s.traceable else [])):
        with torch.no_grad():
            repr(x)


# ---- copies --------------------------------------------------------------------------------------------------


def _pickled(t: Any) -> Any:
    return pickle.loads(pickle.dumps(t))


def _saved(x: Any) -> Any:
    file = io.BytesIO()
    torch.save({"x": x}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)["x"]


# How copies are made; all but detach() have memory of their own.
COPIES: dict[str, Callable[[Any], Any]] = {
    "x.clone()": lambda x: x.clone(),
    "x.detach()": lambda x: x.detach(),
    "copy.deepcopy(x)": copy.deepcopy,
    "a pickled value": _pickled,
    "torch.load(weights_only=True)": _saved,
}


def copies_of(*names: str) -> Callable[[Subject], list[Case]]:
    """Makes cases of some copies."""
    return lambda s: [Case(name, COPIES[name]) for name in names]


def copied(s: Subject, case: Case) -> None:
    """Compares a copy with its value, of which it shares no memory."""
    if case.run in (_pickled, _saved) and "<locals>" in s.cls.__qualname__:
        words = (
            "pickle finds a class by its name, and this one is local to a function: declare it in a module"
        )
        raise Skipped(words)
    x = s.make().detach()
    if case.run is _pickled and not all(succeeds(_pickled, t) for t in s.inners(x).values()):
        return  # torch cannot pickle plain float8 tensors
    trains = case.run is copy.deepcopy and is_differentiable(x)
    for value in [x, x.detach().requires_grad_()] if trains else [x]:
        with torch.no_grad():
            got = case.run(value)
        check_equal(s, case.name, got, value)
        for attribute in ("requires_grad", "is_leaf"):
            if getattr(got, attribute) != getattr(value, attribute):
                raise Broken(f"{case.name}: {attribute} is {getattr(got, attribute)}, and was not")
        if s.has_reference:
            for g, e in zip(s.reference(got), s.reference(value), strict=True):
                check_close(s, f"what {case.name} stands for", g, e)
        shared = {storage_key(t) for t in s.inners(value).values() if t.numel()}
        owns = not any(storage_key(t) in shared for t in s.inners(got).values() if t.numel())
        if not owns and case.name != "x.detach()":
            raise Broken(f"{case.name} shares memory with the value that it is a copy of")


class Holder(nn.Module):
    """A module with a value of the class as its parameter, and an op on it.

    Args:
        x: the value.
        trains: whether the parameter requires grad.
        run: the op, whose result the module returns beside twice its argument.
    """

    def __init__(self, x: Tensor, trains: bool = False, run: Callable[[Any], Any] = lambda x: x) -> None:
        super().__init__()
        self.weight = nn.Parameter(x, requires_grad=trains)
        self.run = run

    def forward(self, x: Tensor) -> Any:
        """The op on the parameter, and something of the argument."""
        return self.run(self.weight), x * 2


def parameter(s: Subject, case: Case) -> None:
    """Compares a parameter with its value: in a module, loaded from a state_dict, and copied with its module."""
    x = s.make().detach()
    trains = is_differentiable(x)
    module = Holder(x, trains)
    weight: Any = module.weight
    if not isinstance(weight, s.cls) or not isinstance(weight, nn.Parameter):
        raise Broken(f"nn.Parameter(x) is {one_of(type(weight))}")
    if len(list(module.parameters())) != 1 or weight.requires_grad != trains:
        raise Broken("the module does not know its parameter")
    check_equal(s, "nn.Parameter(x)", weight.detach(), x)
    check_equal(s, "the parameter of a copied module", copy.deepcopy(module).weight.detach(), x)
    for assign in (True, False):
        what, target = f"load_state_dict(assign={assign})", Holder(snapshot(s, x), trains)
        with torch.no_grad():  # so that only a real copy restores the numbers
            for t in filter(is_differentiable, s.inners(target.weight).values()):
                t.detach().zero_()
        try:
            works, _ = s.works(
                what, lambda t=target, a=assign: t.load_state_dict(module.state_dict(), assign=a)
            )
            if works:
                check_equal(s, f"a parameter after {what}", target.weight.detach(), x)
        except Exception as error:
            raise Broken(problem(what, error), mend=None if assign else _COPY) from error


_COPY = (
    "load_state_dict(assign=False) calls weight.copy_(saved): let the class write the inner tensors of the one to "
    "those of the other for aten.copy_ and return it, or refuse that op"
)


def optimizer(s: Subject, case: Case) -> None:
    """Compares a parameter after a step of SGD with the same step on plain tensors.

    The plain tensors are the tensors that the parameter represents, or its inner tensors.
    """
    s.trainable()
    weight: Any = nn.Parameter(s.make().detach())
    loss = weight * weight
    (weight.grad,) = torch.autograd.grad(loss, weight, torch.ones(loss.shape, dtype=loss.dtype))
    grad, before = weight.grad, snapshot(s, weight.detach())
    works, _ = s.works("SGD.step()", torch.optim.SGD([weight], lr=0.1).step)
    if not works:
        check_equal(s, "a parameter after a refused SGD.step()", weight.detach(), before)
        return
    trains_inners = s.declared and s.cls._traits.trainable
    if type(grad) is not plain_type(weight.detach()) or not (s.has_reference or trains_inners):
        return
    parts = (lambda x: [*filter(is_differentiable, s.inners(x).values())]) if trains_inners else s.reference
    expected = [p - 0.1 * g for p, g in zip(parts(before), parts(grad), strict=True)]
    for got, e in zip(parts(weight.detach()), expected, strict=True):
        check_close(s, "a parameter after SGD.step()", got, e)


def conversion(s: Subject, case: Case) -> None:
    """Compares a value in another dtype, and on another device, with the tensors that it represents."""
    x = s.make().detach()
    for dtype in (torch.float64, torch.bfloat16, torch.complex64, torch.int32):
        works, got = s.works(f"x.to({dtype})", lambda dtype=dtype: x.to(dtype))
        if works and got.dtype != dtype:
            raise Broken(f"x.to({dtype}) has dtype {got.dtype}")
        if works and s.has_reference and dtype == torch.float64 and x.is_floating_point():
            plains = s.reference(x)
            for p, e in zip(s.references(got, len(plains)), plains, strict=True):
                if p.dtype != dtype:
                    raise Broken(f"x.to({dtype}) says {dtype}, but stands for a tensor of {p.dtype}")
                check_close(s, f"x.to({dtype})", p.to(x.dtype), e)
    works, moved = s.works('x.to("meta")', lambda: x.to("meta"))
    if works and (moved.device.type != "meta" or moved.shape != x.shape):
        raise Broken(f'x.to("meta") is on {moved.device} and has shape {list(moved.shape)}')
    if x.to(x.dtype) is not x:
        raise Broken("x.to(x.dtype) is not x itself, as it is for a plain tensor")
