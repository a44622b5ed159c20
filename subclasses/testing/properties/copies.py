"""Copies of a value: in memory, in files, in modules and optimizers, on other devices and in other dtypes."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from subclasses._torch import storage_key
from subclasses.errors import one_of
from subclasses.testing.compare import check_close, check_equal, plain_type, snapshot, value_difference
from subclasses.testing.errors import Broken, Skipped, must, problem, succeeds
from subclasses.testing.property import promise
from subclasses.testing.subject import Subject, is_differentiable


def _check_copy(s: Subject, what: str, make: Callable[[], Any], x: Any, *, own_memory: bool = True) -> None:
    """Raises unless a function makes an equal value, in memory of its own."""
    with must(what):
        got = make()
    check_equal(s, what, got, x)
    for attribute in ("requires_grad", "is_leaf"):
        if getattr(got, attribute) != getattr(x, attribute):
            raise Broken(f"{what}: {attribute} was {getattr(x, attribute)} and is {getattr(got, attribute)}")
    if s.has_reference:
        for g, e in zip(s.reference(got), s.reference(x), strict=True):
            check_close(s, f"what {what} stands for", g, e)
    shared = {storage_key(t) for t in s.inners(x).values() if t.numel()}
    if own_memory and any(storage_key(t) in shared for t in s.inners(got).values() if t.numel()):
        raise Broken(f"{what} shares memory with the value that it is a copy of")


# ---- in memory ---------------------------------------------------------------------------------------------


@promise(
    "clone and detach must give values of the class, with every inner tensor cloned or detached and the same "
    "metadata; torch calls them everywhere"
)
def clone_and_detach(s: Subject) -> None:
    """clone() gives an equal value with memory of its own, detach() one that shares it."""
    x = s.make()
    with torch.no_grad():
        _check_copy(s, "x.clone()", x.clone, x.detach())
    _check_copy(s, "x.detach()", x.detach, x.detach(), own_memory=False)


@promise(
    "copy every inner tensor and the metadata; without a __deepcopy__ of your own, clone() and "
    "__reduce_ex__ must carry both"
)
def deepcopy(s: Subject) -> None:
    """copy.deepcopy gives an equal value with memory of its own."""
    x = s.make().detach()
    candidates = [x, x.detach().requires_grad_()] if is_differentiable(x) else [x]
    for value in candidates:
        _check_copy(s, "copy.deepcopy(x)", lambda value=value: copy.deepcopy(value), value)


@promise(
    "pickling must carry every inner tensor and the metadata; for torch.load(weights_only=True) build values by a "
    "function or class that is registered with torch.serialization.add_safe_globals"
)
def serialization(s: Subject) -> None:
    """A value comes back from pickle and from torch.save, with weights_only=True too."""
    if "<locals>" in s.cls.__qualname__:
        raise Skipped(
            "pickle finds a class by its name, and this one is local to a function: declare it in a module"
        )
    x = s.make().detach()
    # torch cannot pickle plain float8 tensors
    if all(succeeds(_pickled, t) for t in s.inners(x).values()):
        _check_copy(s, "a pickled value", lambda: _pickled(x), x)
    file = io.BytesIO()
    with must("torch.save"):
        torch.save({"x": x}, file)
    file.seek(0)
    with must("torch.load(weights_only=True)"):
        loaded = torch.load(file, weights_only=True)["x"]
    _check_copy(s, "a loaded value", lambda: loaded, x)


def _pickled(t: Tensor) -> Tensor:
    return pickle.loads(pickle.dumps(t))


# ---- in modules --------------------------------------------------------------------------------------------


class Holder(nn.Module):
    """A module with one parameter."""

    def __init__(self, x: Tensor, trains: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(x, requires_grad=trains)


@promise("detach() must give a value of the class, for nn.Parameter(x) is built on it")
def parameter(s: Subject) -> None:
    """nn.Parameter(x) is a parameter and a value of the class, and moves between modules by state_dict."""
    x = s.make().detach()
    trains = is_differentiable(x)
    with must("nn.Parameter(x)"):
        module = Holder(x, trains)
    weight: Any = module.weight
    if not isinstance(weight, s.cls) or not isinstance(weight, nn.Parameter):
        raise Broken(f"nn.Parameter(x) is {one_of(type(weight))}")
    check_equal(s, "nn.Parameter(x)", weight.detach(), x)
    if len(list(module.parameters())) != 1 or weight.requires_grad != trains:
        raise Broken("the module does not know its parameter")
    for assign in (True, False):
        _check_load(s, module, x, trains, assign)
    with must("copy.deepcopy of a module"):
        clone = copy.deepcopy(module)
    check_equal(s, "the parameter of a copied module", clone.weight.detach(), x)


def _check_load(s: Subject, module: nn.Module, x: Any, trains: bool, assign: bool) -> None:
    state = module.state_dict()
    what = f"load_state_dict(assign={assign})"
    target = Holder(snapshot(s, x), trains)
    with torch.no_grad():  # so that only a real copy restores the numbers
        for t in filter(is_differentiable, s.inners(target.weight).values()):
            t.detach().zero_()
    try:
        works, _ = s.works(what, lambda: target.load_state_dict(state, assign=assign))
    except RuntimeError as error:  # of the module, which gathers those of its parameters
        raise Broken(problem(what, error), None if assign else _COPY) from error
    differs = value_difference(s, target.weight.detach(), x) if works else None
    if differs:
        raise Broken(f"a parameter after {what}: {differs}", None if assign else _COPY)


_COPY = (
    "load_state_dict(assign=False) calls weight.copy_(saved): let the class write the inner tensors of the one to "
    "those of the other for aten.copy_ and return it, or refuse that op"
)


@promise(
    "an optimizer calls zeros_like, mul_, add_, addcdiv_ and the like on a parameter and its gradient; write "
    "rules for them, or refuse those that write"
)
def optimizer(s: Subject) -> None:
    """A step of SGD moves a parameter as it would move what the parameter stands for, or is refused.

    It moves the inner tensors of a class that is declared trainable.
    """
    s.trainable()
    weight: Any = s.call("nn.Parameter(x)", lambda: nn.Parameter(s.make().detach()))
    loss = s.call("(w * w).sum()", lambda: weight * weight)
    ones = torch.ones(loss.shape, dtype=loss.dtype)
    (grad,) = s.call("the gradient of w * w", lambda: torch.autograd.grad(loss, weight, ones))
    weight.grad = grad
    before = snapshot(s, weight.detach())
    works, _ = s.works("SGD.step()", torch.optim.SGD([weight], lr=0.1).step)
    if not works:
        check_equal(s, "a parameter after a refused SGD.step()", weight.detach(), before)
        return
    trains_inners = s.declared and s.cls._traits.trainable
    if type(grad) is not plain_type(weight.detach()) or not (s.has_reference or trains_inners):
        return
    parts = _differentiable_inners if trains_inners else Subject.reference
    expected = [p - 0.1 * g for p, g in zip(parts(s, before), parts(s, grad), strict=True)]
    for got, e in zip(parts(s, weight.detach()), expected, strict=True):
        check_close(s, "a parameter after SGD.step()", got, e)


def _differentiable_inners(s: Subject, x: Any) -> tuple[Any, ...]:
    return tuple(filter(is_differentiable, s.inners(x).values()))


# ---- other dtypes and devices ------------------------------------------------------------------------------


@promise(
    "_to_copy must honour dtype=: convert the inner tensors that have the outer dtype, or give back the plain "
    "tensor in that dtype, or refuse"
)
def conversion(s: Subject) -> None:
    """x.to(dtype) has that dtype, and stands for the converted tensor; x.to("meta") moves."""
    x = s.make().detach()
    for dtype in (torch.float64, torch.bfloat16, torch.complex64, torch.int32):
        works, got = s.works(f"x.to({dtype})", lambda dtype=dtype: x.to(dtype))
        if not works:
            continue
        if got.dtype != dtype:
            raise Broken(f"x.to({dtype}) has dtype {got.dtype}")
        if s.has_reference and dtype == torch.float64 and x.is_floating_point():
            plain = s.reference(x)
            for p, e in zip(s.references(got, len(plain)), plain, strict=True):
                if p.dtype != dtype:
                    raise Broken(f"x.to({dtype}) says {dtype}, but stands for a tensor of {p.dtype}")
                check_close(s, f"x.to({dtype})", p.to(x.dtype), e)
    works, moved = s.works('x.to("meta")', lambda: x.to("meta"))
    if works and (moved.device.type != "meta" or moved.shape != x.shape):
        raise Broken(f'x.to("meta") is on {moved.device} and has shape {list(moved.shape)}')
    if x.to(x.dtype) is not x:
        raise Broken("x.to(x.dtype) is not x itself, as it is for a plain tensor")
