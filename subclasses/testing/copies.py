"""Promises about copies: in memory, in files, in modules and optimizers, on other devices and in other dtypes."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from subclasses._torch import storage_key
from subclasses.testing.compare import (
    check_close,
    check_equal,
    plain_type,
    snapshot,
)
from subclasses.testing.promise import Attempt, Broken, broke, promise
from subclasses.testing.subject import Subject, is_differentiable


def _check_copy(s: Subject, what: str, got: Any, x: Any, *, own_memory: bool = True) -> None:
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


def _must(what: str, run: Callable[[], Any]) -> Any:
    """The result of something that no class should refuse."""
    result = None
    with Attempt() as attempt:
        result = run()
    if attempt.error is not None:
        broke(what, attempt.error)
    return result


# ---- in memory ---------------------------------------------------------------------------------------------


@promise(
    "clone and detach must give values of the class, with every inner tensor cloned or detached and the same "
    "metadata; torch calls them everywhere"
)
def clone_and_detach(s: Subject) -> None:
    """clone() gives an equal value with memory of its own, detach() one that shares it."""
    x = s.make()
    with torch.no_grad():
        _check_copy(s, "x.clone()", _must("x.clone()", x.clone), x.detach())
    _check_copy(s, "x.detach()", _must("x.detach()", x.detach), x.detach(), own_memory=False)


@promise(
    "copy every inner tensor and the metadata; without a __deepcopy__ of your own, clone() and "
    "__reduce_ex__ must carry both"
)
def deepcopy(s: Subject) -> None:
    """copy.deepcopy gives an equal value with memory of its own."""
    x = s.make().detach()
    candidates = [x, x.detach().requires_grad_()] if is_differentiable(x) else [x]
    for value in candidates:
        got = _must("copy.deepcopy(x)", lambda value=value: copy.deepcopy(value))
        _check_copy(s, "copy.deepcopy(x)", got, value)


@promise(
    "pickling must carry every inner tensor and the metadata; for torch.load(weights_only=True) build values by a "
    "function or class that is registered with torch.serialization.add_safe_globals"
)
def serialization(s: Subject) -> None:
    """A value comes back from pickle and from torch.save, with weights_only=True too."""
    x = s.make().detach()
    if all(_pickles(t) for t in s.inners(x).values()):
        _check_copy(s, "a pickled value", _must("pickle", lambda: pickle.loads(pickle.dumps(x))), x)
    file = io.BytesIO()
    _must("torch.save", lambda: torch.save({"x": x}, file))
    file.seek(0)
    got = _must("torch.load(weights_only=True)", lambda: torch.load(file, weights_only=True))
    _check_copy(s, "a loaded value", got["x"], x)


def _pickles(t: Tensor) -> bool:
    """Whether pickle takes an inner tensor by itself; torch has no pickling of plain float8 tensors."""
    with Attempt() as attempt:
        pickle.loads(pickle.dumps(t))
    return attempt.error is None


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
    module = _must("nn.Parameter(x)", lambda: Holder(x, trains))
    weight: Any = module.weight
    if not isinstance(weight, s.cls) or not isinstance(weight, nn.Parameter):
        raise Broken(f"nn.Parameter(x) is a {type(weight).__name__}")
    check_equal(s, "nn.Parameter(x)", weight.detach(), x)
    if len(list(module.parameters())) != 1 or weight.requires_grad != trains:
        raise Broken("the module does not know its parameter")
    for assign in (True, False):
        _check_load(s, module, x, trains, assign)
    clone = _must("copy.deepcopy of a module", lambda: copy.deepcopy(module))
    check_equal(s, "the parameter of a copied module", clone.weight.detach(), x)


def _check_load(s: Subject, module: nn.Module, x: Any, trains: bool, assign: bool) -> None:
    state = module.state_dict()
    what = f"load_state_dict(assign={assign})"
    target = Holder(snapshot(s, x), trains)
    zero_inners(s, target.weight)
    works, _ = s.works(what, lambda: target.load_state_dict(state, assign=assign))
    if works:
        check_equal(s, f"a parameter after {what}", target.weight.detach(), x)


def zero_inners(s: Subject, x: Any) -> None:
    """Overwrites the floating point content of a value, so that only a real copy brings it back."""
    with torch.no_grad():
        for t in s.inners(x).values():
            if is_differentiable(t):
                t.detach().zero_()


@promise(
    "an optimizer calls zeros_like, mul_, add_, addcdiv_ and the like on a parameter and its gradient; write "
    "rules for them, or refuse those that write"
)
def optimizer(s: Subject) -> None:
    """A step of SGD moves a parameter as it would move what the parameter stands for, or is refused."""
    s.trainable()
    weight: Any = nn.Parameter(s.make().detach())
    works, loss = s.works("(w * w).sum()", lambda: weight * weight)
    if not works:
        return
    ones = torch.ones(loss.shape, dtype=loss.dtype)
    works, grads = s.works("the gradient of w * w", lambda: torch.autograd.grad(loss, weight, ones))
    if not works:
        return
    weight.grad = grads[0]
    before = snapshot(s, weight.detach())
    works, _ = s.works("SGD.step()", torch.optim.SGD([weight], lr=0.1).step)
    if not works:
        check_equal(s, "a parameter after a refused SGD.step()", weight.detach(), before)
        return
    if not s.has_reference or type(grads[0]) is not plain_type(weight.detach()):
        return
    expected = [p - 0.1 * g for p, g in zip(s.reference(before), s.reference(grads[0]), strict=True)]
    for got, e in zip(s.reference(weight.detach()), expected, strict=True):
        check_close(s, "a parameter after SGD.step()", got, e)


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
            plain = s.reference(got) if isinstance(got, s.cls) else (got,) * len(s.reference(x))
            for p, e in zip(plain, s.reference(x), strict=True):
                if p.dtype != dtype:
                    raise Broken(f"x.to({dtype}) says {dtype}, but stands for a tensor of {p.dtype}")
                check_close(s, f"x.to({dtype})", p.to(x.dtype), e)
    works, moved = s.works('x.to("meta")', lambda: x.to("meta"))
    if works and (moved.device.type != "meta" or moved.shape != x.shape):
        raise Broken(f'x.to("meta") is on {moved.device} and has shape {list(moved.shape)}')
    if x.to(x.dtype) is not x:
        raise Broken("x.to(x.dtype) is not x itself, as it is for a plain tensor")
