"""Shapes in a declaration: ``inner(shape="out in")``, in the notation of jaxtyping.

A shape is a list of dims, separated by spaces. A name binds a size, and is the same size in the whole class; the name
of a static or dynamic int is its value. An int is exact, ``_`` is any size, and a leading ``...`` is any number of
dims. The constructor compares sizes inline. If a size differs or is symbolic, it calls the functions of this module.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from inspect import Parameter, Signature
from typing import Any

from torch import Tensor

from subclasses.errors import SpecError, check_keyword
from subclasses.spec.fields import Outer
from subclasses.spec.values import differ

ANY = "_"


@dataclass(frozen=True)
class Shape:
    """The declared shape of an inner tensor.

    Attributes:
        dims: for each dim a name, a size, or ``"_"`` for any size; without leading dims of any number.
        leading: whether any number of dims may precede them.
    """

    dims: tuple[str | int, ...]
    leading: bool

    def __str__(self) -> str:
        return " ".join(["..."] * self.leading + [str(d) for d in self.dims])


def parse_shape(where: str, text: Any, ndim: Any) -> Shape | None:
    """Parses the ``shape=`` or ``ndim=`` of a field.

    Args:
        where: class and field, for errors.
        text: the notation, or None.
        ndim: the number of dims, or None.

    Raises:
        SpecError: both are given, or one of them is not valid.
    """
    if ndim is not None:
        if text is not None:
            raise SpecError(
                f"{where}: shape={text!r} fixes the number of dims already",
                code="keyword-conflict",
                hint=f"remove ndim={ndim!r}",
            )
        check_keyword(
            type(ndim) is int and ndim >= 0, f"{where}: expected ndim= to be a non-negative int", ndim
        )
        return Shape((ANY,) * ndim, False)
    if text is None:
        return None
    check_keyword(isinstance(text, str), f'{where}: expected shape= to be a string such as "out in"', text)
    words = text.replace(",", " ").split()
    if "," in text:
        raise SpecError(
            f"{where}: shape={text!r}: dims are separated by spaces",
            code="keyword-value",
            hint=f"write shape={' '.join(words)!r}",
        )
    leading = words[:1] == ["..."]
    return Shape(tuple(_parse_dim(where, text, w) for w in words[leading:]), leading)


def _parse_dim(where: str, text: str, word: str) -> str | int:
    if re.fullmatch(r"\d+", word):
        return int(word)
    if word.isidentifier():
        return word
    if word == "...":
        raise SpecError(
            f"{where}: shape={text!r}: `...` is for leading dims and stands first",
            code="keyword-value",
            hint="write `_` for one dim",
        )
    raise SpecError(
        f"{where}: shape={text!r}: a dim is a name, an int, `_` for any size, or a leading `...`, and {word!r} is none "
        "of these",
        code="keyword-value",
        hint="write a name, and compare sizes that depend on others in `__new__`",
    )


# ---- leading dims ------------------------------------------------------------------------------------------


def leading_outer(name: str, count: int) -> Callable[..., Outer]:
    """Returns the function ``outer`` of a class whose values have the leading dims of each inner tensor.

    Args:
        name: An inner tensor.
        count: How many further dims it has.
    """

    def outer(**fields: Tensor) -> Outer:
        t = fields[name]
        size, strides, entries = t.shape[:-count], t.stride(), math.prod(t.shape[-count:])
        if is_dense(t.shape[-count:], strides[-count:]) and not any(s % entries for s in strides[:-count]):
            stride = tuple([s // entries for s in strides[:-count]])
            return Outer(size, stride, storage_offset=t.storage_offset() // entries)
        return Outer(size)

    outer.__dict__[_LEADING] = True
    outer.__signature__ = Signature([Parameter(name, Parameter.POSITIONAL_OR_KEYWORD)])  # type: ignore[attr-defined]
    return outer


_LEADING = "_leading"


def tells_strides(cls: Any) -> bool:
    """Whether the outer strides equal the strides of the inner tensors, in entries of the value."""
    return not cls.__spec__.has_outer or _LEADING in cls.outer.__dict__


def is_dense(sizes: Sequence[Any], strides: Sequence[Any]) -> bool:
    """Whether the elements of some dims lie next to one another, in order."""
    expected = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if stride != expected and size != 1:
            return False
        expected *= size
    return expected > 0


# ---- the comparisons of a class ----------------------------------------------------------------------------


@dataclass(frozen=True)
class InnerDim:
    """One dim of one inner tensor, counted from the end if any number of dims may precede."""

    field: str
    index: int


@dataclass(frozen=True)
class Comparison:
    """A dim that must equal an int, a metadata field, or a dim of another inner tensor that binds its name."""

    inner_dim: InnerDim
    expected: int | str | InnerDim


def comparisons(spec: Any) -> Iterator[Comparison]:
    """Yields the comparisons of the constructor, for each dim with the dim that binds its name.

    Required inner tensors bind before optional ones. A name of optional inner tensors alone is compared for each pair.
    """
    metadata = {f.name for f in (*spec.statics, *spec.dynamics)}
    bound: dict[str, list[tuple[InnerDim, bool]]] = {}
    for field in sorted((f for f in spec.inners if f.shape is not None), key=lambda f: f.optional):
        for i, dim in enumerate(field.shape.dims):
            inner_dim = InnerDim(field.name, i - len(field.shape.dims) if field.shape.leading else i)
            if isinstance(dim, int) or dim in metadata:
                yield Comparison(inner_dim, dim)
            elif dim != ANY:
                before = bound.setdefault(dim, [])
                required = [p for p, optional in before if not optional]
                yield from (Comparison(inner_dim, p) for p in required[:1] or [p for p, _ in before])
                before.append((inner_dim, field.optional))


# ---- at a construction -------------------------------------------------------------------------------------


def check_shapes(
    spec: Any, tensors: Sequence[Tensor | None], metadata: dict[str, Any], assigned: str = ""
) -> None:
    """Checks the shapes of inner tensors; sizes that are symbolic and unknown count as equal.

    Args:
        spec: The declaration.
        tensors: The inner tensors, in order of declaration.
        metadata: The static and dynamic fields.
        assigned: The name of an inner tensor that is compared with the others, and binds no name before them.

    Raises:
        ValueError: a tensor has another number of dims, or a size that differs from the int or from the size that its
            name is bound to.
    """
    bound: dict[str, tuple[Any, str]] = {name: (value, "metadata") for name, value in metadata.items()}
    fields = [
        (f, t) for f, t in zip(spec.inners, tensors, strict=True) if f.shape is not None and t is not None
    ]
    for field, t in sorted(fields, key=lambda pair: (pair[0].name == assigned, pair[0].optional)):
        shape, sizes = field.shape, tuple(t.shape)
        where = f"{spec.name}.{field.name}: expected shape ({shape})"
        if len(sizes) < len(shape.dims) or (len(sizes) > len(shape.dims) and not shape.leading):
            least = "at least " * shape.leading
            raise ValueError(f"{where}, {least}{len(shape.dims)} dims, got {_show(sizes)}")
        for dim, size in zip(shape.dims, sizes[len(sizes) - len(shape.dims) :], strict=True):
            if dim == ANY:
                continue
            if isinstance(dim, str) and dim not in bound:
                bound[dim] = size, f"{field.name!r}"
            expected, source = (dim, "") if isinstance(dim, int) else bound[dim]
            if differ(size, expected):
                reason = f" with {dim}={expected!s} of {source}" if source else ""
                raise ValueError(f"{where}{reason}, got {_show(sizes)}")


def _show(sizes: tuple[Any, ...]) -> str:
    return f"({', '.join(map(str, sizes))})"
