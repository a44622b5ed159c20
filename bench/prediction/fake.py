"""Fake tensors of a device that is not there, and the copies of a function and its arguments that hold them."""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bench.prediction import _torch as private, _torch_patches as patches
from bench.prediction.attention import attend
from bench.prediction.autograd_engine import grad, note_materializing
from bench.prediction.devices import Device, find_device
from bench.prediction.recorder import Recorder
from desugar.backends.inductor_patches import recorded
from desugar.ir.values import is_wrapper
from desugar.user_code import is_library_file
from subclasses.ragged.attention import fused

# ------------------------------------------------------------------------------------------------ the context


@dataclass(frozen=True)
class Hooks:
    """The functions that the patches of torch call.

    Attributes:
        define: Gets a kernel's name, the scheduler's nodes in it, and Inductor's kernel object.
        triton: Gets a kernel's name and Triton's compiled kernel; returns an object that the generated code calls.
        host: Gets the source of a C++ kernel; returns a function that the generated code calls.
        grad: Differentiates as `torch.autograd.grad`.
        materialize: Replaces `FunctionCtx.set_materialize_grads`.
        attend: Computes `scaled_dot_product_attention` by an op with a kernel; NotImplemented without one.
    """

    define: Callable[[str, Any, Any], None]
    triton: Callable[[str, Any], Any]
    host: Callable[[str], Any]
    grad: Callable[..., Any] = grad
    materialize: Callable[[Any, bool], None] = note_materializing
    attend: Callable[..., Any] = attend


@dataclass
class FakeDevice:
    """A device that answers while a context is open.

    Attributes:
        device: The device.
        mode: The mode of its fake tensors; inside it, `torch.randn(..., device="cuda")` makes one.
        recorder: Notes the kernels that are compiled and run at the moment.
    """

    device: Device
    mode: Any
    recorder: Recorder = field(default_factory=Recorder)

    @contextlib.contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Notes compilations and runs inside the context in a recorder of its own."""
        outer, self.recorder = self.recorder, Recorder()
        try:
            yield self.recorder
        finally:
            self.recorder = outer


@contextlib.contextmanager
def fake_device(name: str | Device) -> Iterator[FakeDevice]:
    """Makes torch, Inductor and Triton believe in a CUDA device that is not there, in the whole process.

    Inside the context CUDA tensors are fake: they have sizes and no data. Functions over them are traced, lowered and
    compiled as for the device, and cannot be run.

    Args:
        name: A device of the table (`bench.prediction.DEVICES`).

    Yields:
        The device; `.mode` is the mode in which its tensors are made.

    Raises:
        ValueError: The table has no such device.
        RuntimeError: This installation of PyTorch lacks a part that is needed, or is of a release that the patches of
            torch do not fit.
    """
    device = find_device(name)
    check_installation(device)
    with recorded():  # patches Inductor for good, which must not happen while other patches are in place
        pass
    fake = FakeDevice(device, private.FakeTensorMode())
    hooks = Hooks(
        define=lambda *args: fake.recorder.define(*args),
        triton=lambda *args: fake.recorder.triton(*args),
        host=lambda source: fake.recorder.host(source),
    )
    fused._devices.cache_clear()
    try:
        with patches.patched(device.properties, hooks):
            yield fake
    finally:
        fused._devices.cache_clear()


def check_installation(device: Device) -> None:
    """Raises a RuntimeError unless this installation of PyTorch can compile for a device."""
    requirement = (
        f"predicting for {device.title} needs a CUDA build of PyTorch with Triton (no driver and no GPU)"
    )
    if missing := private.missing_parts():
        raise RuntimeError(
            f"{requirement}, but torch {torch.__version__} comes without {' and without '.join(missing)}: "
            "pip install torch==2.15.0 triton==3.9.0"
        )
    if wrong := patches.patches_that_do_not_fit():
        raise RuntimeError(
            f"{requirement} in which these names exist, but torch {torch.__version__} lacks {', '.join(wrong)}: "
            "pip install torch==2.15.0 triton==3.9.0"
        )


# ------------------------------------------------------------------------------------------------ the arguments


def move(fake: FakeDevice, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Returns a function and its arguments with a fake tensor of the device for each tensor; the originals are kept.

    Tensors move in arguments, in nested tuples, lists and dictionaries, and in modules. A tensor subclass moves by its
    `.to`. Tensors that a function of the user closes over or reads from a global variable move, too. So do the `self`
    of a method and the arguments of a `functools.partial`. Attributes of other objects stay where they are.
    """
    mover = _Mover(fake)
    return mover.move(fn), tuple(map(mover.move, args)), {name: mover.move(x) for name, x in kwargs.items()}


class _Mover:
    """Moves values; one that is met again becomes the same object."""

    def __init__(self, fake: FakeDevice) -> None:
        self.fake = fake
        self.made: dict[int, Any] = {}  # also the memo of deep copies
        self.scopes: dict[int, dict[str, Any]] = {}  # globals, by the id of the original
        self.originals: list[Any] = []  # keeps the ids in `made` from being given to new objects

    def move(self, value: Any) -> Any:
        if id(value) not in self.made:
            self.originals.append(value)
            self.made[id(value)] = self._move(value)
        return self.made[id(value)]

    def _move(self, value: Any) -> Any:
        match value:
            case Tensor():
                return self._tensor(value)
            case nn.Module():
                return self._module(value)
            case Mapping() if type(value) is dict:
                return {key: self.move(part) for key, part in value.items()}
            case tuple() | list():
                parts = [self.move(part) for part in value]
                return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
            case functools.partial() if type(value) is functools.partial:
                rest = {name: self.move(part) for name, part in value.keywords.items()}
                return functools.partial(self.move(value.func), *map(self.move, value.args), **rest)
            case types.MethodType():
                return types.MethodType(value.__func__, self.move(value.__self__))
            case types.FunctionType():
                return self._function(value)
        return value

    def _tensor(self, x: Tensor) -> Tensor:
        if getattr(x, "fake_mode", None) is self.fake.mode and x.is_cuda:
            return x
        moved = self._like(x)
        if is_wrapper(x):
            with self.fake.mode, torch.no_grad():
                moved = moved.to("cuda")
        moved = moved.detach().requires_grad_(x.requires_grad) if moved.is_floating_point() else moved
        return nn.Parameter(moved, x.requires_grad) if isinstance(x, nn.Parameter) else moved

    def _like(self, x: Any, device: torch.device | str = "cuda") -> Any:
        """Returns a fake tensor on a device, or a wrapper with fake inner tensors on the devices where they are."""
        if not is_wrapper(x):
            with self.fake.mode:
                return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
        names, context = x.__tensor_flatten__()  # may make tensors, which have to be real ones
        inner = {name: self._like(part := getattr(x, name), part.device) for name in names}
        with self.fake.mode, torch.no_grad():
            return type(x).__tensor_unflatten__(inner, context, x.size(), x.stride())

    def _module(self, module: nn.Module) -> nn.Module:
        """Copies a module; its tensors, also those in plain attributes, are moved first."""
        for part in module.modules():
            values = (*part._parameters.values(), *part._buffers.values(), *vars(part).values())
            for value in values:
                if isinstance(value, Tensor):
                    self.move(value)
        with torch.no_grad():
            return copy.deepcopy(module, self.made)

    def _function(self, fn: types.FunctionType) -> types.FunctionType:
        """Copies a function of the user whose variables, closed over or global, hold a value to move."""
        if is_library_file(fn.__code__.co_filename):
            return fn
        scope = self._scope(fn)
        cells = tuple(types.CellType(self.move(cell.cell_contents)) for cell in fn.__closure__ or ())
        copied = types.FunctionType(fn.__code__, scope, fn.__name__, fn.__defaults__, cells)
        copied.__kwdefaults__, copied.__qualname__ = fn.__kwdefaults__, fn.__qualname__
        copied.__dict__.update(fn.__dict__)
        return copied

    def _scope(self, fn: types.FunctionType) -> dict[str, Any]:
        """Returns the globals of a function, with the tensors, modules and functions that it names moved."""
        given = fn.__globals__
        self.made[id(fn)] = fn  # a recursive function calls its original
        scope = self.scopes.setdefault(id(given), dict(given))
        for name in _names_in(fn.__code__):
            value = given.get(name)
            is_of_user = isinstance(value, types.FunctionType) and value.__globals__ is given
            if is_of_user or isinstance(value, Tensor | nn.Module):
                scope[name] = self.move(value)
        return scope


def _names_in(code: types.CodeType) -> Iterator[str]:
    """Yields the global names in a function, and in the functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)
