"""The functions of a declaration: ``inner``, ``static``, ``dynamic`` and ``Outer``.

``inner``, ``static`` and ``dynamic`` return markers that :func:`subclasses.spec.collect.collect_spec` reads and removes
from the class. They check nothing: errors are raised at the class statement, with the name of the class. The parameter
``kw_only`` exists for type checkers only, since metadata is passed by keyword.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

# The default of a field without one; None is a valid default.
MISSING: Any = type("MISSING", (), {"__repr__": lambda self: "MISSING"})()


@dataclass(frozen=True)
class InnerMarker:
    """The arguments of ``inner(...)``."""

    dtype: torch.dtype | None
    optional: bool
    device: str | None
    differentiable: bool = False
    default: Any = MISSING
    shape: str | None = None
    ndim: int | None = None
    derived: Callable[[Any], Tensor] | None = None


@dataclass(frozen=True)
class StaticMarker:
    """The arguments of ``static(...)``."""

    default: Any


@dataclass(frozen=True)
class DynamicMarker:
    """The arguments of ``dynamic(...)``."""

    default: Any


Marker = InnerMarker | StaticMarker | DynamicMarker


def inner(  # noqa: PLR0913 - each is a keyword of a declaration
    *,
    dtype: torch.dtype | None = None,
    optional: bool = False,
    device: str | None = None,
    differentiable: bool = False,
    shape: str | None = None,
    ndim: int | None = None,
    default: Any = MISSING,
    derived: Callable[[Any], Tensor] | None = None,
) -> Any:
    """Declares an inner tensor.

    Args:
        dtype: the only dtype that the inner tensor may have; ``None`` allows any.
        optional: whether the inner tensor may be ``None``; the annotation is then ``Tensor | None``.
        device: ``"any"`` allows the inner tensor to be on another device than the others.
        differentiable: whether reading the attribute is differentiable. If so, and autograd records for a value that
            requires grad, each read calls ``unwrap`` and returns a new tensor. In all other cases, and for all other
            fields, a read returns the stored inner tensor itself.
        shape: the dims, separated by spaces, as in ``"out in"``. A name is one size in the whole class; the name of a
            static or dynamic int is its value. An int is exact, ``_`` is any size, a leading ``...`` any number of
            dims. Checked at construction and assignment, not for the results of mapped ops.
        ndim: the number of dims, in place of ``shape``.
        default: ``None`` is allowed together with ``optional=True``. It only tells type checkers that the argument may
            be omitted.
        derived: a function from the value to the tensor, which follows from the other fields. The constructor does not
            take it. The first read computes it, and so does the first read after a write to an inner tensor or an
            assignment. A write that PyTorch does not count, as by NumPy or through ``t.data``, is not detected.
            It is not a parameter, and not saved. A rule that autograd differentiates, and a compiled program, compute
            it each time. It cannot be combined with another keyword.
    """
    return InnerMarker(dtype, optional, device, differentiable, default, shape, ndim, derived)


def static(*, default: Any = MISSING, kw_only: Literal[True] = True) -> Any:
    """Declares constant metadata: hashable, picklable, without tensors, and not changed in place.

    A new value compiles a new program.
    """
    return StaticMarker(default)


def dynamic(*, default: Any = MISSING, kw_only: Literal[True] = True) -> Any:
    """Declares a non-negative int that may change without a recompile."""
    return DynamicMarker(default)


class Outer(NamedTuple):
    """The outer properties of a wrapper, for a class where no single inner tensor has them.

    Attributes:
        size: the outer size.
        stride: the outer stride; ``None`` means contiguous.
        dtype: the outer dtype; ``None`` means the dtype of the inner tensor named by ``dtype_from``.
        device: the outer device; ``None`` means the device of the inner tensor named by ``size_from``.
        storage_offset: the offset of the first element, in elements; ``None`` means 0. A class with views computes it
            from its inner tensors, because ``torch.compile`` recreates a view of an argument by ``as_strided`` with it.
    """

    size: Sequence[int]
    stride: Sequence[int] | None = None
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    storage_offset: int | torch.SymInt | None = None


# ---- the text of a declaration ---------------------------------------------------------------------------------


def show_spec(spec: Any) -> str:
    """Returns a class statement that shows the keywords, the fields, ``outer`` and ``materialize`` of a declaration.

    It leaves out annotations of static and dynamic fields, constants, and other methods.
    """
    decompose = spec.decompose
    keywords = {
        "size_from": repr(spec.size_from),
        "dtype_from": repr(spec.dtype_from),
        "fallback": repr(spec.fallback),
        "decompose": str(decompose)
        if isinstance(decompose, bool)
        else f"[{', '.join(sorted(map(str, decompose)))}]",
    }
    if spec.trainable and spec.fallback != "map":
        keywords["trainable"] = "True"
    if spec.kind == "structure" and spec.has_materialize and spec.fallback != "map":
        keywords["kind"] = repr(spec.kind)
    head = ", ".join(f"{key}={value}" for key, value in keywords.items())
    lines = [f"class {spec.name}(TensorSubclass, {head}):", *(f"    {line}" for line in _lines(spec))]
    return "\n".join(lines)


def _lines(spec: Any) -> Iterator[str]:
    for f in spec.inners:
        tensor_type = "Tensor" if f.subclass is Tensor else f.subclass.__name__
        shown = {
            "dtype": f.dtype,
            "shape": None if f.shape is None else repr(str(f.shape)),
            "device": None if f.device is None else repr(f.device),
            "optional": f.optional or None,
            "differentiable": f.differentiable or None,
        }
        arguments = ", ".join(f"{key}={value}" for key, value in shown.items() if value is not None)
        yield f"{f.name}: {tensor_type}{' | None' * f.optional} = inner({arguments})"
    for name, _ in spec.derived:
        yield f"{name}: Tensor = inner(derived=...)"
    for role, fields in (("static", spec.statics), ("dynamic", spec.dynamics)):
        for f in fields:
            yield f"{f.name} = {role}({'' if f.default is MISSING else f'default={f.default!r}'})"
    if spec.outer_args is not None:
        yield f"def outer({', '.join(spec.outer_args)}): ..."
    if spec.has_materialize:
        yield "def materialize(self): ..."
