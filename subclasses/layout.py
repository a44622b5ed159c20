"""Layouts: the constant part of a subclass value.

A :class:`~subclasses.spec.collect.SubclassSpec` describes a class; a :class:`Layout` describes one value of it: the
class, the static metadata, the names of present inner tensors, and the layouts of inner tensors that are wrappers
themselves. Layouts are immutable and *interned*: two values have equal metadata exactly if their layouts are the same
object, so comparing metadata is an identity test. A layout holds no tensors, dynamic ints, sizes, strides or dtypes
(interned sizes would leak and would conflict with dynamic shapes).

Layouts are held weakly: a layout is collected once no tensor and no compiled program refers to it.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from subclasses._torch import is_traceable_wrapper_subclass
from subclasses.errors import one_of
from subclasses.handwritten import flatten_handwritten

# Prefix of the attribute that holds the inner tensor of a field whose own attribute is differentiable.
RAW = "_raw_"

# The attribute of a value of a representation that a rule for an op made (:mod:`subclasses.autograd.by_formula`).
BY_FORMULA = "_by_formula"

# The attribute of an argument of a graph with the inner tensors that the graph reads: a set of attributes, which nodes
# of the autograd graph share, since a read may come after an op that takes the whole value.
READS = "_reads"


def field_name(attribute: str) -> str:
    """Returns the name of the field whose inner tensor an attribute holds."""
    return attribute.removeprefix(RAW)


Nested = tuple[tuple[str, "Layout"], ...]


class Layout:
    """The interned description of one value; :func:`intern_layout` creates one.

    Attributes:
        cls: the subclass.
        statics: values of the static metadata in the order of the spec. For a handwritten class, a tuple of the
            constant that rebuilds it.
        present: names of the attributes that hold the inner tensors that are present, in order of declaration.
        nested: name and layout of each inner tensor that is itself a traceable wrapper subclass.
        values: for a cotangent, and a value that holds one, the layout of the value; None for any other layout.
        cotangents: weakly, the layout of its cotangents, after the first call of :func:`cotangent_layout`.
    """

    __slots__ = ("__weakref__", "cls", "cotangents", "nested", "present", "statics", "values")

    cls: type[Tensor]
    statics: tuple[Any, ...]
    present: tuple[str, ...]
    nested: Nested
    values: Layout | None
    cotangents: weakref.ref[Layout] | None

    @property
    def cotangent(self) -> bool:
        """Whether values of this layout are cotangents."""
        return getattr(self.cls, "_is_cotangent", False)

    def __init__(self, *_: object, **__: object) -> None:
        raise TypeError("Layouts are interned: use intern_layout(...) or layout_of(x)")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"A Layout is immutable; cannot set {name!r}")

    def __repr__(self) -> str:
        parts = [
            self.cls.__name__,
            f"statics={self.statics}",
            f"present={tuple(map(field_name, self.present))}",
        ]
        parts += [f"nested={self.nested}"] * bool(self.nested) + ["cotangent"] * self.cotangent
        return f"Layout({', '.join(parts)})"

    def __copy__(self) -> Layout:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Layout:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # By the names of fields: whether the attribute of a field is differentiable may change, and files still load.
        present = tuple(map(field_name, self.present))
        nested = tuple((field_name(name), layout) for name, layout in self.nested)
        cls: Any = self.cls
        return intern_layout, (
            cls._value_cls if self.cotangent else cls,
            self.statics,
            present,
            nested,
            self.cotangent,
        )


# ---- interning ---------------------------------------------------------------------------------------------

# class -> key -> layout. The key includes the type of each value, since 1 == True == 1.0.
_tables: weakref.WeakKeyDictionary[type, weakref.WeakValueDictionary[Any, Layout]] = (
    weakref.WeakKeyDictionary()
)


def intern_layout(
    cls: type[Tensor],
    statics: tuple[Any, ...],
    present: tuple[str, ...],
    nested: Nested = (),
    cotangent: bool = False,
) -> Layout:
    """Returns the unique layout with this description, and creates it if necessary.

    Args:
        cls: The subclass.
        statics: The values of the static metadata.
        present: The attributes of the inner tensors that are present.
        nested: The name and the layout of each inner tensor that is a wrapper.
        cotangent: Whether it is the layout of a cotangent of the class, as a flag in files.

    Raises:
        TypeError: static metadata is not hashable.
    """
    if cotangent:
        cls = cls.Cotangent  # type: ignore[attr-defined]
    table = _tables.get(cls)
    if table is None:
        table = _tables[cls] = weakref.WeakValueDictionary()
    key = (_typed(statics), present, nested)
    layout = table.get(key)
    if layout is None and (attributes := _attributes(cls, present)) != present:
        nested = tuple(
            zip(_attributes(cls, [name for name, _ in nested]), [n for _, n in nested], strict=True)
        )
        return intern_layout(cls, statics, attributes, nested)
    if layout is None:
        layout = object.__new__(Layout)
        fields = {"cls": cls, "statics": statics, "present": present, "nested": nested, "cotangents": None}
        fields["values"] = _of_values(cls, statics, present, nested)
        for name, value in fields.items():
            object.__setattr__(layout, name, value)
        # setdefault: another thread may have interned the same key meanwhile, and there must be only one layout.
        layout = table.setdefault(key, layout)
    return layout


def _of_values(cls: Any, statics: Any, present: Any, nested: Nested) -> Layout | None:
    inside = tuple((name, layout.values or layout) for name, layout in nested)
    is_cotangent = getattr(cls, "_is_cotangent", False)
    if inside == nested and not is_cotangent:
        return None
    return intern_layout(cls._value_cls if is_cotangent else cls, statics, present, inside)


def has_values(cls: type[Tensor]) -> bool:
    """Whether a value of a class, or a compiled program that takes one, exists."""
    return bool(_tables.get(cls))


def _attributes(cls: Any, names: Iterable[str]) -> tuple[str, ...]:
    """Returns the attributes that hold inner tensors, for names of attributes or, as in files, of fields."""
    spec = getattr(cls, "__spec__", None)
    by_name = {} if spec is None else dict(zip(spec.inner_names, spec.attributes, strict=True))
    return tuple(by_name.get(name, name) for name in names)


def _typed(value: Any) -> Any:
    """Pairs a value with its type, also inside of tuples, frozensets and dataclasses; distinguishes -0.0 and 0.0."""
    if isinstance(value, tuple):
        return (type(value), *map(_typed, value))
    if isinstance(value, frozenset):
        return (type(value), frozenset(map(_typed, value)))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        compared = [getattr(value, f.name) for f in dataclasses.fields(value) if f.compare]
        return (type(value), value, *map(_typed, compared))
    if isinstance(value, float | complex) and value == 0:
        return (type(value), repr(value))
    return (type(value), value)


# ---- reading -----------------------------------------------------------------------------------------------


def layout_of(x: Tensor) -> Layout:
    """Returns the layout of a wrapper, declared or handwritten.

    Raises:
        TypeError: ``x`` is not a traceable wrapper subclass, or its flatten context is not hashable.
    """
    layout = x.__dict__.get("_layout")
    if layout is not None:
        return layout
    if not is_traceable_wrapper_subclass(x):
        raise TypeError(f"Expected a traceable wrapper subclass, got {one_of(type(x))}")
    names, context = flatten_handwritten(x)
    return intern_layout(type(x), (context,), names, nested_layouts([(n, getattr(x, n)) for n in names]))


def nested_layouts(inners: list[tuple[str, Any]]) -> Nested:
    """Returns the name and layout of each inner tensor that is itself a wrapper."""
    wrappers = [(name, t) for name, t in inners if t is not None and is_traceable_wrapper_subclass(t)]
    return tuple((name, layout_of(t)) for name, t in wrappers)  # type: ignore[arg-type]


def with_nested(layout: Layout, *inners: Tensor | None) -> Layout:
    """Returns the layout of a value with other inner tensors: one may now be a wrapper, of another class, or plain.

    Args:
        layout: the layout of a value with as many inner tensors.
        *inners: all inner tensors in order of declaration; None for those that are absent.
    """
    spec: Any = layout.cls.__spec__  # type: ignore[attr-defined]
    nested = nested_layouts(list(zip(spec.attributes, inners, strict=True)))
    if nested == layout.nested:
        return layout
    return intern_layout(layout.cls, layout.statics, layout.present, nested)


def describe_metadata(layout: Layout) -> str:
    """Returns the metadata of a layout in the author's notation: ``Pair(tag='a', scale=None)``."""
    spec: Any = getattr(layout.cls, "__spec__", None)
    if spec is None:
        return repr(layout)
    parts = [f"{f.name}={value!r}" for f, value in zip(spec.statics, layout.statics, strict=True)]
    parts += [f"{f.name}=None" for f in spec.inners if f.attribute not in layout.present]
    parts += [f"{field_name(name)}={describe_metadata(nested)}" for name, nested in layout.nested]
    return f"{'cotangent of ' * layout.cotangent}{layout.cls.__name__}({', '.join(parts)})"


def value_layout(layout: Layout) -> Layout:
    """Returns the layout of values whose cotangents have this layout."""
    return intern_layout(layout.cls._value_cls, layout.statics, layout.present, layout.nested)  # type: ignore[attr-defined]


def cotangent_layout(layout: Layout) -> Layout:
    """Returns the layout of a cotangent of values with this layout."""
    cotangents = None if layout.cotangents is None else layout.cotangents()
    if cotangents is None:
        cls: Any = layout.cls
        cotangents = intern_layout(cls.Cotangent, layout.statics, layout.present, layout.nested)
        object.__setattr__(layout, "cotangents", weakref.ref(cotangents))
    return cotangents


def are_alike(one: Layout, other: Layout) -> bool:
    """Whether two layouts differ at most in which values are cotangents, also of inner tensors."""
    return one is other or (one.values or one) is (other.values or other)
