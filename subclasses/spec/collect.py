"""From a class statement to a frozen :class:`SubclassSpec`.

Everything that can be wrong with a declaration is found here, once, with the name of the class and what to
write instead. The emitters that follow take a spec as given and decide nothing.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from subclasses._torch import OpOverload, OpOverloadPacket, is_dispatched
from subclasses.errors import SpecError
from subclasses.spec.construction import find_tensor
from subclasses.spec.fields import MISSING, DynamicMarker, InnerMarker, Marker, StaticMarker

Fallback = Literal["error", "materialize", "map"]
FALLBACKS = ("error", "materialize", "map")


@dataclass(frozen=True)
class InnerField:
    """One inner tensor: its name, the only dtype it may have, whether it may be absent, where it lives."""

    name: str
    dtype: torch.dtype | None
    optional: bool
    device: str | None
    subclass: type[Tensor]


@dataclass(frozen=True)
class MetaField:
    """One piece of metadata, static or dynamic; ``default`` is ``MISSING`` where it must be given."""

    name: str
    default: Any


@dataclass(frozen=True)
class SubclassSpec:
    """The whole declaration of a class, inherited parts included."""

    name: str
    inners: tuple[InnerField, ...]
    statics: tuple[MetaField, ...]
    dynamics: tuple[MetaField, ...]
    size_from: str
    dtype_from: str
    fallback: Fallback
    decompose: bool | frozenset[Any]
    outer_args: tuple[str, ...] | None
    has_materialize: bool

    @property
    def has_outer(self) -> bool:
        """Whether the class computes its outer size itself."""
        return self.outer_args is not None

    @property
    def stands_for_plain(self) -> bool:
        """Whether a value means the plain tensor it materializes to, so that adding is not inner by inner."""
        return self.has_materialize and self.fallback != "map"

    @property
    def inner_names(self) -> tuple[str, ...]:
        """All inner tensors in order of declaration."""
        return tuple(f.name for f in self.inners)

    @property
    def names(self) -> tuple[str, ...]:
        """All fields: inner tensors, static metadata, dynamic ints."""
        return tuple(f.name for f in (*self.inners, *self.statics, *self.dynamics))


# ---- collecting --------------------------------------------------------------------------------------------

# What a class hands down to the classes that inherit from it, before anything is resolved.
OWN_FIELDS, OWN_KEYWORDS = "_own_fields", "_own_keywords"

KEYWORDS = ("size_from", "dtype_from", "fallback", "decompose")


def raise_unknown_keywords(cls: type, unknown: Collection[str]) -> NoReturn:
    """A class statement has keywords that neither this package nor another base takes."""
    raise SpecError(
        f"{cls.__name__}: unknown class keyword {', '.join(map(repr, unknown))}; the keywords are {', '.join(KEYWORDS)}"
    )


# Tensor has an unrelated method of this name, the outer product.
_TENSOR_OUTER = inspect.getattr_static(Tensor, "outer")

Field = InnerField | tuple[Literal["static", "dynamic"], MetaField]


def collect_spec(cls: type, keywords: Mapping[str, Any], scope: Mapping[str, Any]) -> SubclassSpec:
    """Reads a class statement.

    Args:
        cls: the class, its markers still in place; they are taken out.
        keywords: the class keywords that were given.
        scope: names of the place where the class statement stands, for annotations that are strings.

    Raises:
        SpecError: the declaration is wrong.
    """
    own = {n: _field(cls, n, m, scope) for n, m in list(vars(cls).items()) if isinstance(m, Marker)}
    for name in own:
        delattr(cls, name)
    setattr(cls, OWN_FIELDS, own)
    setattr(cls, OWN_KEYWORDS, {k: v for k, v in keywords.items() if v is not None})
    fields: dict[str, Field] = {}
    merged: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        fields |= vars(base).get(OWN_FIELDS, {})
        merged |= vars(base).get(OWN_KEYWORDS, {})
    spec = _assemble(cls, fields, merged)
    check_spec(cls, spec)
    return spec


def _field(cls: type, name: str, marker: Marker, scope: Mapping[str, Any]) -> Field:
    check_field_name(cls, name)
    match marker:
        case InnerMarker():
            return _inner_field(cls, name, marker, scope)
        case StaticMarker(default):
            return "static", MetaField(name, default)
        case DynamicMarker(default):
            _check_count_annotation(cls, name, scope)
            return "dynamic", MetaField(name, default)


def _inner_field(cls: type, name: str, marker: InnerMarker, scope: Mapping[str, Any]) -> InnerField:
    subclass, optional = _annotation(cls, name, scope)
    if optional != marker.optional:
        has, lacks = ("the annotation", "inner()") if optional else ("inner()", "the annotation")
        raise SpecError(
            f"{cls.__name__}.{name}: {has} says that the inner tensor may be None and {lacks} does not; "
            f"write `{name}: Tensor | None = inner(optional=True)` or `{name}: Tensor = inner()`"
        )
    if marker.default is not MISSING and not (marker.default is None and marker.optional):
        raise SpecError(
            f"{cls.__name__}.{name}: default= may be None beside optional=True, got {marker.default!r}"
        )
    if marker.device not in (None, "any"):
        raise SpecError(f"{cls.__name__}.{name}: expected device None or 'any', got {marker.device!r}")
    if not isinstance(marker.dtype, torch.dtype | None):
        raise SpecError(f"{cls.__name__}.{name}: expected a torch.dtype or None, got {marker.dtype!r}")
    return InnerField(name, marker.dtype, marker.optional, marker.device, subclass)


def _check_count_annotation(cls: type, name: str, scope: Mapping[str, Any]) -> None:
    """Raises where a dynamic int is annotated as something else; it may be without an annotation."""
    written = inspect.get_annotations(cls).get(name)
    hint = int if written is None else _resolve(cls, name, written, scope)
    if int not in (hint, *typing.get_args(hint)) and hint is not Any:
        raise SpecError(
            f"{cls.__name__}.{name}: dynamic() declares a non-negative int, and the annotation is {written!r}; write "
            f"`{name}: int = dynamic()`, or static() for what is no int"
        )


def _annotation(cls: type, name: str, scope: Mapping[str, Any]) -> tuple[type[Tensor], bool]:
    """The tensor type that an annotation names, and whether it allows None."""
    written = inspect.get_annotations(cls).get(name)
    if written is None:
        raise SpecError(f"{cls.__name__}.{name} has no annotation; write `{name}: Tensor = inner()`")
    hint = _resolve(cls, name, written, scope)
    options = set(typing.get_args(hint)) if _is_union(hint) else {hint}
    kinds = options - {type(None)}
    if len(kinds) == 1 and isinstance(kind := kinds.pop(), type) and issubclass(kind, Tensor):
        return kind, type(None) in options
    raise SpecError(
        f"{cls.__name__}.{name}: expected the annotation Tensor, Tensor | None or a subclass, got {written!r}"
    )


def _resolve(cls: type, name: str, written: Any, scope: Mapping[str, Any]) -> Any:
    """What an annotation means, where it may be a string."""
    holder = types.new_class("Holder", exec_body=lambda ns: ns.update(__annotations__={name: written}))
    holder.__module__ = cls.__module__
    try:
        # The class's own name means the class, which the scope does not hold yet.
        return typing.get_type_hints(holder, localns={**scope, cls.__name__: cls})[name]
    except (NameError, SyntaxError, AttributeError, TypeError) as error:
        raise SpecError(
            f"{cls.__name__}.{name}: cannot resolve the annotation {written!r}: {error}"
        ) from error


def _is_union(hint: object) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _assemble(cls: type, fields: Mapping[str, Field], keywords: Mapping[str, Any]) -> SubclassSpec:
    inners = tuple(f for f in fields.values() if isinstance(f, InnerField))
    meta = [f for f in fields.values() if not isinstance(f, InnerField)]
    if not inners:
        raise SpecError(f"{cls.__name__} declares no inner tensor; write `data: Tensor = inner()`")
    size_from = keywords.get("size_from", inners[0].name)
    outer = inspect.getattr_static(cls, "outer")
    return SubclassSpec(
        name=cls.__name__,
        inners=inners,
        statics=tuple(f for kind, f in meta if kind == "static"),
        dynamics=tuple(f for kind, f in meta if kind == "dynamic"),
        size_from=size_from,
        dtype_from=keywords.get("dtype_from", size_from),
        fallback=keywords.get("fallback", "error"),
        decompose=_decompose(cls, keywords.get("decompose", False)),
        outer_args=None if outer is _TENSOR_OUTER else _outer_args(cls, outer, frozenset(fields)),
        has_materialize=inspect.getattr_static(cls, "materialize", None) is not None,
    )


def _decompose(cls: type, value: bool | Collection[Any]) -> bool | frozenset[Any]:
    if isinstance(value, bool):
        return value
    if isinstance(value, str | OpOverload | OpOverloadPacket) or not isinstance(value, Iterable):
        raise SpecError(f"{cls.__name__}: decompose= takes a bool or a collection of ops, got {value!r}")
    ops: set[Any] = set()
    for op in value:
        if isinstance(op, OpOverload):
            ops.add(op)
        elif isinstance(op, OpOverloadPacket):
            ops.update(found for name in op.overloads() if is_dispatched(found := getattr(op, name)))
        else:
            raise SpecError(f"{cls.__name__}: decompose= takes ops such as torch.ops.aten.silu, got {op!r}")
    return frozenset(ops)


def _outer_args(cls: type, outer: object, fields: frozenset[str]) -> tuple[str, ...]:
    if isinstance(outer, staticmethod):
        args = tuple(inspect.signature(outer.__func__).parameters)
        if fields.issuperset(args):
            return args
    raise SpecError(
        f"{cls.__name__}.outer must be a @staticmethod whose parameters are names of fields "
        f"({', '.join(sorted(fields))}), and which returns an Outer(size, ...)"
    )


# ---- checking ----------------------------------------------------------------------------------------------

# Methods that torch itself calls on any tensor, and the names that every declared class has.
CALLED_BY_TORCH = frozenset(
    """backward clone contiguous copy_ cpu cuda data_ptr detach detach_ dim element_size expand_as
    get_device half is_complex is_contiguous is_floating_point is_pinned is_shared item new_empty
    new_empty_strided numel pin_memory register_hook requires_grad_ retain_grad share_memory_ size
    storage_offset stride to tolist type untyped_storage view view_as""".split()
)
# A data attribute of Tensor on older releases.
FORMER_ATTRIBUTES = frozenset({"names"})
OWN_NAMES = frozenset({"implements", "materialize", "outer", "unwrap", "wrap_cotangent"})


def check_field_name(cls: type, name: str) -> None:
    """Raises if a field of this name would break the tensor that it is a field of."""
    found = inspect.getattr_static(Tensor, name, None)
    reason = None
    if name.startswith("_"):
        reason = "starts with an underscore"
    elif isinstance(found, types.GetSetDescriptorType | property) or name in FORMER_ATTRIBUTES:
        reason = "is a data attribute of Tensor"
    elif name in CALLED_BY_TORCH:
        reason = "is a method that torch itself calls"
    elif name in OWN_NAMES:
        reason = "is a method of TensorSubclass"
    elif name == "isinstance":
        reason = "is a builtin that generated code calls"
    if reason:
        raise SpecError(
            f"{cls.__name__}.{name} {reason}; choose another name, such as {name.strip('_')}_data"
        )


def check_spec(cls: type, spec: SubclassSpec) -> None:
    """Raises where the parts of a declaration do not fit together."""
    for keyword in ("size_from", "dtype_from"):
        named = getattr(spec, keyword)
        if named not in spec.inner_names:
            raise SpecError(
                f"{spec.name}: {keyword}={named!r} is no inner tensor; they are {', '.join(spec.inner_names)}"
            )
        field = spec.inners[spec.inner_names.index(named)]
        if field.optional and not spec.has_outer:
            raise SpecError(f"{spec.name}: {keyword}={named!r} may be None; name one that is always there")
    if spec.fallback not in FALLBACKS:
        raise SpecError(f"{spec.name}: expected fallback in {FALLBACKS}, got {spec.fallback!r}")
    if spec.fallback == "materialize" and not spec.has_materialize:
        raise SpecError(
            f'{spec.name}: fallback="materialize" needs a method `materialize(self) -> Tensor` that returns '
            f"the plain tensor this stands for"
        )
    for field in spec.statics:
        _check_static_default(spec, field)
    for field in spec.dynamics:
        default = field.default
        if default is not MISSING and (type(default) is not int or default < 0):
            raise SpecError(f"{spec.name}.{field.name}: expected a non-negative int default, got {default!r}")


def _check_static_default(spec: SubclassSpec, field: MetaField) -> None:
    if field.default is MISSING:
        return
    if find_tensor(field.default) is not None:
        raise SpecError(f"{spec.name}.{field.name}: a default cannot be a tensor; declare an inner() instead")
    try:
        hash(field.default)
    except TypeError as error:
        raise SpecError(
            f"{spec.name}.{field.name}: static metadata is hashable, and the default {field.default!r} is not; "
            f"use a tuple or a frozen dataclass"
        ) from error
