"""Constants of a class that rules read: a codebook, a table of levels.

A tensor in a module global or in a class body has one device, and a compiler that traces with fake tensors refuses it.
A declared constant is kept as numbers. In eager mode its tensor is made once for each device; in a trace an op makes
it, so that the graph contains it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subclasses._torch_tracing import is_transient_here
from subclasses.errors import SpecError


class Constant:
    """A constant of a declared class; :func:`constant` returns one.

    Read from a value, as ``x.codebook``, it is a tensor on the device of the value. Read from the class, it is this
    object, and ``Cls.codebook.on(device)`` is the tensor. Code must not write to it: the next read would raise.
    """

    def __init__(self, values: Any, dtype: torch.dtype) -> None:
        self.values, self.dtype = values, dtype
        self._name = "constant"
        self._tensors: dict[torch.device, Tensor] = {}

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"{owner.__name__}.{name}"

    def __get__(self, x: Any, owner: type | None = None) -> Any:
        if x is None:
            return self
        # Dynamo reads an attribute of a fake value while no fake mode is active. It does not inspect a value if it
        # traces this code.
        mode = None if torch.compiler.is_dynamo_compiling() else _fake_mode_of(x)
        if mode is None:
            return self.on(x.device)
        with mode:
            return self._make(x.device)

    def __set__(self, x: Any, value: Any) -> None:
        raise AttributeError(
            f"{self._name} is a constant of the class; declare an inner() for a tensor that differs by value"
        )

    def __getattr__(self, attribute: str) -> Any:
        """Raises an AttributeError that names the constant, for an attribute that tensors have and this has not."""
        words = f"{type(self).__name__!r} object has no attribute {attribute!r}"
        name = vars(self).get("_name")
        if name and hasattr(Tensor, attribute) and not attribute.startswith("__"):
            words = (
                f"{name}, read from the class, is not a tensor and has no {attribute!r}: {name}.on(device) is the "
                f"tensor, and a method reads it from a value, as self.{name.rpartition('.')[2]}"
            )
        raise AttributeError(words)

    def __repr__(self) -> str:
        return f"constant({self.values!r}, dtype={self.dtype})"

    def on(self, device: torch.device | str) -> Tensor:
        """Returns the tensor on a device; each call in eager mode returns the same tensor."""
        if is_transient_here():
            return self._make(device)
        device = torch.device(device)
        tensor = self._tensors.get(device)
        if tensor is None:
            with torch.inference_mode(
                False
            ):  # a tensor of inference mode could not be saved for a backward later
                tensor = self._tensors[device] = self._make(device)
        elif tensor._version:
            del self._tensors[device]
            raise RuntimeError(
                f"{self._name} was written to, and is shared by all values of the class; write to a copy, as in "
                f"x.{self._name.rpartition('.')[2]}.clone()"
            )
        return tensor

    def _make(self, device: torch.device | str) -> Tensor:
        return torch.tensor(self.values, dtype=self.dtype, device=device)


def _fake_mode_of(x: Any) -> Any:
    """Returns the fake mode of a value's inner tensors, or None if they have data."""
    while "_layout" in vars(x):
        x = vars(x)[x._layout.present[0]]
    return getattr(x, "fake_mode", None)


def constant(values: Any, *, dtype: torch.dtype | None = None) -> Any:
    """Declares a constant of a class that its rules and methods read, such as a codebook.

    Args:
        values: numbers, nested lists of numbers, or a tensor. Compiled programs contain them; a large table is better
            an inner tensor.
        dtype: the dtype; ``None`` means the dtype of the tensor, or the dtype that ``torch.tensor`` infers.

    Raises:
        SpecError: the values are not numbers, or are a tensor that requires grad.
    """
    if isinstance(values, Tensor) and values.requires_grad:
        raise SpecError(
            "constant() takes a tensor that does not require grad, since a constant gets no gradient",
            code="constant-refused",
            hint="pass t.detach(), or declare what is trained with inner()",
        )
    try:
        made = torch.as_tensor(values, dtype=dtype, device=None if isinstance(values, Tensor) else "cpu")
        return Constant(_frozen(made.tolist()), made.dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        raise SpecError(
            f"constant() takes numbers, nested lists of them or a tensor with data, got {values!r}: {error}",
            code="constant-refused",
        ) from error


def _frozen(values: Any) -> Any:
    return tuple(map(_frozen, values)) if isinstance(values, list) else values


def constants_of(cls: type) -> dict[str, Constant]:
    """Returns the constants of a class by name, with inherited ones."""
    return {n: c for base in reversed(cls.__mro__) for n, c in vars(base).items() if isinstance(c, Constant)}
