"""Collects a class statement into a frozen :class:`SubclassSpec`.

:func:`collect_spec` raises the errors of a declaration, with the name of the class and a hint. Other modules of this
package hold some of the checks. :mod:`subclasses.base` refuses a few more, such as an operator as a method. The
emitters that follow accept a spec without checks, and emit text by its fields.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from subclasses._torch import OpOverload, OpOverloadPacket, is_dispatched
from subclasses.errors import SpecError, check_keyword
from subclasses.layout import RAW
from subclasses.spec.annotations import (
    annotations_of,
    check_static_annotation,
    is_union,
    resolve_annotation,
    static_choices,
)
from subclasses.spec.fields import MISSING, DynamicMarker, InnerMarker, Marker, StaticMarker, show_spec
from subclasses.spec.names import check_field_name
from subclasses.spec.shapes import Shape, leading_outer, parse_shape
from subclasses.spec.statics import check_default
from subclasses.spec.traits import check_kind, default_kind

Fallback = Literal["error", "views", "materialize", "map"]
FALLBACKS = ("error", "views", "materialize", "map")


@dataclass(frozen=True)
class InnerField:
    """One inner tensor.

    Attributes:
        name: the name of the field.
        dtype: the dtype that is required, or None.
        optional: whether the inner tensor may be None.
        device: None, or ``"any"`` for a device of its own.
        subclass: the class of tensors.
        differentiable: whether reading the attribute is differentiable.
        shape: the declared shape, or None.
        attribute: the attribute that holds the inner tensor itself; ``__tensor_flatten__`` returns this name.
    """

    name: str
    dtype: torch.dtype | None
    optional: bool
    device: str | None
    subclass: type[Tensor]
    differentiable: bool
    shape: Shape | None = None
    attribute: str = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "attribute", f"{RAW}{self.name}" if self.differentiable else self.name)


@dataclass(frozen=True)
class MetaField:
    """One metadata field, static or dynamic.

    Attributes:
        name: the name of the field.
        default: the default, or ``MISSING`` if the argument is required.
        choices: the values that the annotation allows, if it names an enum or a ``Literal``; empty if any is allowed.
        types: the types that the annotation allows, if it names only numbers, text and similar types; empty otherwise.
    """

    name: str
    default: Any
    choices: tuple[Any, ...] = ()
    types: tuple[type, ...] = ()


@dataclass(frozen=True, repr=False)
class SubclassSpec:
    """The complete declaration of a class, including what it inherits."""

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
    # Whether an optimizer may update the differentiable inner tensors of a Parameter as if they were the parameters.
    trainable: bool
    # Whether a value is one plain tensor ("representation") or its inner tensors ("structure").
    kind: str
    # Whether the dims of a value are the leading ones of each inner tensor, which `shape="... 4"` declares.
    leads: bool
    # The fields that follow from others, each with the function that computes it.
    derived: tuple[tuple[str, Callable[[Any], Tensor]], ...]
    # Names of all inner tensors in order of declaration, and of the attributes that hold the inner tensors themselves.
    inner_names: tuple[str, ...] = dataclasses.field(init=False, repr=False, compare=False)
    attributes: tuple[str, ...] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "inner_names", tuple(f.name for f in self.inners))
        object.__setattr__(self, "attributes", tuple(f.attribute for f in self.inners))

    def __repr__(self) -> str:
        return show_spec(self)

    @property
    def has_outer(self) -> bool:
        """Whether the class computes its outer size with a function ``outer``."""
        return self.outer_args is not None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all fields: inner tensors, static metadata, dynamic ints."""
        return tuple(f.name for f in (*self.inners, *self.statics, *self.dynamics))


# ---- collecting --------------------------------------------------------------------------------------------

# Attributes with a class's own fields and keywords, unresolved. Subclasses merge the fields and keywords of all bases.
OWN_FIELDS, OWN_KEYWORDS = "_own_fields", "_own_keywords"

KEYWORDS = ("size_from", "dtype_from", "fallback", "decompose", "trainable", "kind")


def raise_unknown_keywords(cls: type, unknown: Collection[str]) -> NoReturn:
    """Raises SpecError for class keywords that neither this package nor another base accepts."""
    raise SpecError(
        f"{cls.__name__}: unknown class keyword {', '.join(map(repr, unknown))}",
        code="keyword-value",
        hint=f"the keywords are {', '.join(KEYWORDS)}",
    )


# Tensor's unrelated method of the same name, the outer product.
_TENSOR_OUTER = inspect.getattr_static(Tensor, "outer")

Field = InnerField | tuple[Literal["static", "dynamic", "derived"], MetaField]


def collect_spec(cls: type, keywords: Mapping[str, Any], scope: Mapping[str, Any]) -> SubclassSpec:
    """Collects the declaration of a class and checks it.

    Args:
        cls: the class with its markers, which are removed from it.
        keywords: the class keywords; a value of None means that the keyword was not given.
        scope: the local names at the class statement, to resolve annotations that are strings.

    Raises:
        SpecError: the declaration is invalid.
    """
    own = {n: _collect_field(cls, n, m, scope) for n, m in list(vars(cls).items()) if isinstance(m, Marker)}
    for name in own:
        delattr(cls, name)
    setattr(cls, OWN_FIELDS, own)
    setattr(cls, OWN_KEYWORDS, {k: v for k, v in keywords.items() if v is not None})
    fields: dict[str, Field] = {}
    merged: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        _check_stays_differentiable(cls, fields, vars(base).get(OWN_FIELDS, {}))
        fields |= vars(base).get(OWN_FIELDS, {})
        merged |= vars(base).get(OWN_KEYWORDS, {})
    spec = _assemble(cls, fields, merged)
    check_spec(cls, spec)
    return spec


def _check_stays_differentiable(cls: type, inherited: Mapping[str, Field], own: Mapping[str, Field]) -> None:
    """Raises SpecError if a class redeclares a differentiable field of its base as a non-differentiable field."""
    for name, field in own.items():
        before = inherited.get(name)
        if getattr(before, "differentiable", False) and not getattr(field, "differentiable", False):
            raise SpecError(
                f"{cls.__name__}.{name}: a base of the class declares it differentiable",
                code="keyword-conflict",
                hint=f"write `{name}: Tensor = inner(differentiable=True)`, since rules of the base rely on it",
            )


def _collect_field(cls: type, name: str, marker: Marker, scope: Mapping[str, Any]) -> Field:
    is_inner = isinstance(marker, InnerMarker) and not marker.differentiable  # those are held by another name
    check_field_name(cls, name, is_inner=is_inner)
    match marker:
        case InnerMarker(derived=derived) if derived is not None:
            _check_derived(cls, name, marker, scope)
            return "derived", MetaField(name, derived)
        case InnerMarker():
            return _collect_inner(cls, name, marker, scope)
        case StaticMarker(default):
            allowed = check_static_annotation(cls, name, default, scope)
            return "static", MetaField(name, default, static_choices(cls, name, scope), allowed)
        case DynamicMarker(default):
            _check_count_annotation(cls, name, scope)
            return "dynamic", MetaField(name, default)


def _check_derived(cls: type, name: str, marker: InnerMarker, scope: Mapping[str, Any]) -> None:
    if not callable(marker.derived) or marker != InnerMarker(None, False, None, derived=marker.derived):
        raise SpecError(
            f"{cls.__name__}.{name}: derived= is a function from the value to a tensor, and no other keyword goes with "
            "it",
            code="keyword-conflict",
            hint=f"write `{name}: Tensor = inner(derived=lambda x: ...)`",
        )
    _tensor_annotation(cls, name, scope)


def _collect_inner(cls: type, name: str, marker: InnerMarker, scope: Mapping[str, Any]) -> InnerField:
    subclass, optional = _tensor_annotation(cls, name, scope)
    if optional != marker.optional:
        has, lacks = ("the annotation", "inner()") if optional else ("inner()", "the annotation")
        raise SpecError(
            f"{cls.__name__}.{name}: {has} says that the inner tensor may be None and {lacks} does not",
            code="annotation-wrong",
            hint=f"write `{name}: Tensor | None = inner(optional=True)` or `{name}: Tensor = inner()`",
        )
    where = f"{cls.__name__}.{name}"
    check_keyword(
        marker.default is MISSING or (marker.default is None and marker.optional),
        f"{where}: default= may be None beside optional=True",
        marker.default,
    )
    check_keyword(marker.device in (None, "any"), f"{where}: expected device None or 'any'", marker.device)
    check_keyword(
        isinstance(marker.dtype, torch.dtype | None), f"{where}: expected a torch.dtype or None", marker.dtype
    )
    if marker.differentiable and marker.dtype is not None and not _is_differentiable(marker.dtype):
        raise SpecError(
            f"{where}: a tensor of {marker.dtype} has no gradient",
            code="keyword-conflict",
            hint="remove differentiable=True or dtype=",
        )
    shape = parse_shape(where, marker.shape, marker.ndim)
    return InnerField(
        name, marker.dtype, marker.optional, marker.device, subclass, marker.differentiable, shape
    )


def _is_differentiable(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _check_count_annotation(cls: type, name: str, scope: Mapping[str, Any]) -> None:
    """Raises SpecError if a dynamic int is annotated as another type; the annotation may be missing."""
    annotation = annotations_of(cls).get(name)
    hint = int if annotation is None else resolve_annotation(cls, name, annotation, scope)
    if int not in (hint, *typing.get_args(hint)) and hint is not Any:
        raise SpecError(
            f"{cls.__name__}.{name}: dynamic() declares a non-negative int, and the annotation is {annotation!r}",
            code="annotation-wrong",
            hint=f"write `{name}: int = dynamic()`, or declare metadata of another type with static()",
        )


def _tensor_annotation(cls: type, name: str, scope: Mapping[str, Any]) -> tuple[type[Tensor], bool]:
    """Returns the tensor class that an annotation names, and whether the annotation allows None."""
    annotation = annotations_of(cls).get(name)
    if annotation is None:
        raise SpecError(
            f"{cls.__name__}.{name} has no annotation",
            code="annotation-wrong",
            hint=f"write `{name}: Tensor = inner()`",
        )
    hint = resolve_annotation(cls, name, annotation, scope)
    options = set(typing.get_args(hint)) if is_union(hint) else {hint}
    tensor_types = [t for t in options if t is not type(None)]
    if len(tensor_types) == 1 and isinstance(tensor_types[0], type) and issubclass(tensor_types[0], Tensor):
        return tensor_types[0], type(None) in options
    raise SpecError(
        f"{cls.__name__}.{name}: expected the annotation Tensor, Tensor | None or a subclass, got {annotation!r}",
        code="annotation-wrong",
    )


def _assemble(cls: type, fields: Mapping[str, Field], keywords: Mapping[str, Any]) -> SubclassSpec:
    inners = tuple(f for f in fields.values() if isinstance(f, InnerField))
    meta = [f for f in fields.values() if not isinstance(f, InnerField)]
    if not inners:
        raise SpecError(
            f"{cls.__name__} declares no inner tensor",
            code="inner-missing",
            hint="write `values: Tensor = inner()`",
        )
    size_from = keywords.get("size_from", inners[0].name)
    fallback, has_materialize = keywords.get("fallback", "error"), _has_materialize(cls)
    kind = keywords.get("kind", default_kind(fallback, has_materialize))
    derived = {f.name: f.default for role, f in meta if role == "derived"}
    leads = kind == "structure" and all(f.shape is not None and f.shape.leading for f in inners)
    outer = inspect.getattr_static(cls, "outer")
    if outer is _TENSOR_OUTER and leads and (longest := max(inners, key=_further_dims)).shape.dims:  # type: ignore[union-attr]
        outer = cls.outer = staticmethod(leading_outer(longest.name, _further_dims(longest)))  # type: ignore[attr-defined]
    return SubclassSpec(
        name=cls.__name__,
        inners=inners,
        statics=tuple(f for role, f in meta if role == "static"),
        dynamics=tuple(f for role, f in meta if role == "dynamic"),
        size_from=size_from,
        dtype_from=keywords.get("dtype_from", size_from),
        fallback=fallback,
        decompose=_collect_decompose(cls, keywords.get("decompose", False)),
        outer_args=None
        if outer is _TENSOR_OUTER
        else _collect_outer_args(cls, outer, frozenset(fields) - derived.keys()),
        has_materialize=has_materialize,
        trainable=keywords.get("trainable", fallback == "map"),
        kind=kind,
        leads=leads,
        derived=tuple(derived.items()),
    )


def _further_dims(field: InnerField) -> int:
    """Returns how many dims of an inner tensor are not the value's; 0 for an optional inner tensor."""
    return 0 if field.optional or field.shape is None else len(field.shape.dims)


def _has_materialize(cls: type) -> bool:
    materialize = inspect.getattr_static(cls, "materialize", None)
    if materialize is not None and not isinstance(materialize, types.FunctionType):
        raise SpecError(
            f"{cls.__name__}.materialize must be a method, `def materialize(self) -> Tensor`, got {materialize!r} of "
            f"type {type(materialize).__name__}",
            code="method-signature",
        )
    if materialize is not None:
        _check_no_arguments(cls, materialize)
    return materialize is not None


def _check_no_arguments(cls: type, materialize: types.FunctionType) -> None:
    signature = inspect.signature(materialize, follow_wrapped=False)
    try:
        signature.bind(None)
    except TypeError:
        raise SpecError(
            f"{cls.__name__}.materialize{signature} is called without arguments",
            code="method-signature",
            hint="write `def materialize(self) -> Tensor`, or give the other parameters defaults",
        ) from None


def _collect_decompose(cls: type, value: Any) -> bool | frozenset[Any]:
    if isinstance(value, bool):
        return value
    check_keyword(
        isinstance(value, Iterable) and not isinstance(value, str | OpOverload | OpOverloadPacket),
        f"{cls.__name__}: decompose= takes a bool or a collection of ops",
        value,
    )
    ops: set[Any] = set()
    for op in value:
        if isinstance(op, OpOverload):
            ops.add(op)
        elif isinstance(op, OpOverloadPacket):
            ops.update(overload for name in op.overloads() if is_dispatched(overload := getattr(op, name)))
        else:
            check_keyword(False, f"{cls.__name__}: decompose= takes ops such as torch.ops.aten.silu", op)
    return frozenset(ops)


def _collect_outer_args(cls: type, outer: object, fields: frozenset[str]) -> tuple[str, ...]:
    if isinstance(outer, staticmethod):
        args = tuple(inspect.signature(outer.__func__).parameters)
        if fields.issuperset(args):
            return args
    raise SpecError(
        f"{cls.__name__}.outer must be a @staticmethod whose parameters are names of fields that are not derived "
        f"({', '.join(sorted(fields))}), and which returns an Outer(size, ...)",
        code="method-signature",
    )


# ---- checking ----------------------------------------------------------------------------------------------


def check_spec(cls: type, spec: SubclassSpec) -> None:
    """Raises SpecError if parts of a declaration contradict each other."""
    for keyword in ("size_from", "dtype_from"):
        named = getattr(spec, keyword)
        if named not in spec.inner_names:
            raise SpecError(
                f"{spec.name}: {keyword}={named!r} is not an inner tensor; the class has {', '.join(spec.inner_names)}",
                code="keyword-value",
            )
        field = spec.inners[spec.inner_names.index(named)]
        if field.optional and not spec.has_outer:
            raise SpecError(
                f"{spec.name}: {keyword}={named!r} may be None",
                code="keyword-value",
                hint="name one that is always there",
            )
    check_keyword(spec.fallback in FALLBACKS, f"{spec.name}: expected fallback in {FALLBACKS}", spec.fallback)
    if spec.fallback == "materialize" and not spec.has_materialize:
        raise SpecError(
            f'{spec.name}: fallback="materialize" needs a method `materialize(self) -> Tensor` that returns '
            f"the plain tensor that a value represents",
            code="materialize-missing",
        )
    check_kind(spec)
    _check_trainable(spec)
    for field in spec.statics:
        check_default(spec.name, field)
    for field in spec.dynamics:
        default = field.default
        if default is not MISSING and (type(default) is not int or default < 0):
            raise SpecError(
                f"{spec.name}.{field.name}: expected a non-negative int default, got {default!r}",
                code="default-refused",
            )


def _check_trainable(spec: SubclassSpec) -> None:
    check_keyword(
        isinstance(spec.trainable, bool), f"{spec.name}: expected a bool as trainable=", spec.trainable
    )
    dtypes = [f.dtype for f in spec.inners]
    if (
        spec.trainable
        and spec.fallback != "map"
        and not any(d is None or _is_differentiable(d) for d in dtypes)
    ):
        raise SpecError(
            f"{spec.name}: trainable=True needs an inner tensor that an optimizer can update, and all are declared "
            f"with the dtypes {', '.join(map(str, dtypes))}",
            code="keyword-conflict",
            hint="remove trainable=True",
        )
