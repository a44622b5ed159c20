"""``Cls.Cotangent``: the class of the derivatives by the inner tensors of a value of ``Cls``.

A cotangent has the fields and the metadata of its value. PyTorch dispatches an op to a subclass before its base, so
an op on a cotangent reaches the table of ``subclasses.dispatch.cotangents``. So does an op on a cotangent and values.
The op adds, scales and steps one inner tensor at a time; the rules of ``Cls`` do not apply. Rules for cotangents are
registered with ``Cls.Cotangent.implements``.

A class whose rules add inner tensors, such as the ragged ones, is its own ``Cotangent``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import resolve_name

from subclasses._torch import (
    DisableTorchFunctionSubclass,
    OpOverload,
    is_below_autograd,
    is_tracing,
    skip_frames,
)
from subclasses.autograd.calling import CALLING
from subclasses.autograd.construct import cotangent_like
from subclasses.autograd.gradient_errors import TAKES_GRADIENTS
from subclasses.errors import DispatchError, one_of
from subclasses.spec.values import is_differentiable, is_of_parameter, known_to_differ, tensors_in


class CotangentClass:
    """The attribute ``Cls.Cotangent``; the first read makes the class and replaces this descriptor by it."""

    def __get__(self, obj: Any, owner: Any = None) -> Any:
        cls = type(obj) if owner is None else owner
        cls.Cotangent = cls if cls._is_cotangent or not cls._traits.has_cotangents else _make(cls)
        return cls.Cotangent


def made_cotangent_class(cls: type) -> Any:
    """Returns the separate class of cotangents of a class, if it has one and that was made."""
    made = vars(cls).get("Cotangent")
    return made if isinstance(made, type) and made is not cls else None


def _make(cls: Any) -> Any:
    body = {
        "__module__": cls.__module__,
        "__qualname__": f"{cls.__qualname__}.Cotangent",
        "__doc__": f"The derivatives by the inner tensors of {one_of(cls)}.",
        "_is_cotangent": True,
    }
    made: Any = type(cls)(f"{cls.__name__}.Cotangent", (cls,), body)
    # The author's own methods of these names are about values.
    made.__new__ = staticmethod(made._new)
    made.__init__ = _init
    made.__torch_dispatch__ = classmethod(made._dispatch)
    return made


def _init(self: Any, *inners: Any, **metadata: Any) -> None:
    """Does nothing: ``__new__`` has set the fields."""


def call_without_rules(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """The ``__torch_function__`` of cotangents: rules of the class of values do not apply.

    Raises:
        DispatchError: a caller computes with a cotangent and a value. PyTorch's formulas do, but do not call this.
    """
    is_mixed = cls._value_cls in types and func not in _TAKING_BOTH and not isinstance(func, OpOverload)
    if is_mixed and not (torch.compiler.is_dynamo_compiling() or is_tracing() or is_below_autograd()):
        _check_operands(cls, func, tensors_in(args, kwargs or {}))
    before = CALLING.func
    if not is_below_autograd():  # else dispatch calls an op on the inner tensors of a cotangent
        CALLING.func = None if func in TAKES_GRADIENTS else func
    try:
        with DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))
    finally:
        CALLING.func = before


skip_frames(call_without_rules)  # Dynamo inlines it, and compiles no call of it alone


# Functions that take a value and a cotangent, and do not compute with both.
_TAKING_BOTH = frozenset(
    {Tensor.backward, Tensor.copy_, Tensor.grad.__set__, torch.autograd.backward, torch.autograd.grad}  # type: ignore[attr-defined]
)


def _check_operands(cls: Any, func: Any, operands: Sequence[Any]) -> None:
    """Raises DispatchError if an operand is a value that no optimizer updates: not a Parameter or a copy of one."""
    for x in operands:
        if isinstance(x, cls._value_cls) and not (is_cotangent(x) or is_of_parameter(x)):
            raise DispatchError(
                f"{resolve_name(func) or func} on {one_of(cls)} beside {one_of(type(x))}: a product or a sum of "
                "derivatives and a value has no defined meaning",
                code="cotangent-mixed",
                hint="compute with inner tensors, g.unwrap() and x.unwrap(). An optimizer is given "
                "torch.nn.Parameter(x), and not x",
            )


def is_cotangent(x: Any) -> bool:
    """Whether a tensor is a cotangent of a declared class."""
    return getattr(type(x), "_is_cotangent", False)


def make_cotangent(x: Any, inners: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """Implements ``x.cotangent(...)``."""
    cls, spec = type(x), type(x).__spec__
    call = f"{cls._value_cls.__name__}.cotangent"
    tensors = {f.name: x.__dict__[f.attribute] for f in spec.inners}
    if len(inners) > len(tensors):
        raise TypeError(
            f"{call}: expected at most {len(tensors)} derivatives ({', '.join(tensors)}), got {len(inners)}"
        )
    given = dict(zip(tensors, inners, strict=False))
    for name, g in named.items():
        if name not in tensors or name in given:
            why = (
                "is given twice"
                if name in given
                else f"is not an inner tensor; these are {', '.join(tensors)}"
            )
            raise TypeError(f"{call}: {name} {why}")
        given[name] = g
    for name, g in given.items():
        if g is not None:
            _check_derivative(f"{call}: {name}", tensors[name], g)
    return cotangent_like(x, [given.get(name) for name in tensors])


def _check_derivative(where: str, t: Any, g: Any) -> None:
    """Raises unless a derivative by an inner tensor has its size."""
    if not is_differentiable(t):
        raise TypeError(
            f"{where} has no derivative, since it is {'absent' if t is None else t.dtype}; leave it out"
        )
    if not isinstance(g, Tensor):
        raise TypeError(f"{where}: expected a tensor or None, got {one_of(type(g))}")
    expected = getattr(type(t), "Cotangent", Tensor)
    if not isinstance(g, expected):
        raise TypeError(f"{where}: expected {one_of(expected)}, got {one_of(type(g))}")
    if known_to_differ(g.shape, t.shape):
        raise ValueError(
            f"{where}: expected a derivative of size {tuple(t.shape)}, got one of size {tuple(g.shape)}"
        )
