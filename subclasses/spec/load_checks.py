"""Checks of a file's description of a value, before the value is made.

``torch.load(weights_only=True)`` prevents a file from running code; it does not reject the description of an invalid
value. Each argument that :func:`subclasses.serialize.reduce` writes is checked here, and errors name the field. A file
may hold other tensors and other metadata, if the class's own constructor accepts them.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

from subclasses._torch import is_traceable_wrapper_subclass
from subclasses.errors import one_of
from subclasses.spec.collect import SubclassSpec
from subclasses.spec.fields import MISSING
from subclasses.spec.names import OWN_NAMES
from subclasses.spec.values import DERIVED, HOOKS, OF_PARAMETER, RANKS, SHARD, carrier

# Prefix of the attributes that Dynamo sets on tensors; files store dynamic dims among the flags.
OF_DYNAMO = "_dynamo_"
# Marks that torch and this package set on values, each of which is True or, for a Parameter, a bool.
_MARKS = frozenset({"_is_param", OF_PARAMETER})
_FLAGS = ("requires_grad", "cotangent", "dynamic_dims")

# ---- the arguments -----------------------------------------------------------------------------------------


def check_arguments(cls: Any, inners: Any, metadata: Any, flags: Any, extras: Any) -> None:
    """Raises unless the arguments have the types and names that :func:`subclasses.serialize.reduce` writes.

    The constructor and ``check_loaded`` check the contents of the fields.
    """
    spec = vars(cls).get("__spec__") if isinstance(cls, type) else None
    if not isinstance(spec, SubclassSpec):
        raise TypeError(f"Loading a tensor: expected a class declared with TensorSubclass, got {cls!r}")
    for what, given in (
        ("inner tensors", inners),
        ("metadata", metadata),
        ("flags", flags),
        ("attributes", extras),
    ):
        if not isinstance(given, dict) or not all(isinstance(name, str) for name in given):
            raise TypeError(f"{spec.name}: expected the {what} of a file by name, got {_describe(given)}")
    _check_names(spec, "inner tensors", inners, spec.inner_names)
    for field in spec.inners:
        t = inners.get(field.name)
        if not isinstance(t, Tensor) and not (field.optional and field.name not in inners):
            raise TypeError(f"{spec.name}.{field.name}: expected a Tensor, got {_describe(t)}")
    _check_names(spec, "metadata", metadata, tuple(f.name for f in (*spec.statics, *spec.dynamics)))
    _check_flags(spec, flags)
    check_extras(cls, extras)


def _check_names(spec: SubclassSpec, what: str, given: dict[str, Any], known: tuple[str, ...]) -> None:
    unknown = [name for name in given if name not in known]
    if unknown:
        raise ValueError(
            f"{spec.name}.{unknown[0]}: the file has {what} of this name, and the class has "
            f"{', '.join(known) or 'none'}"
        )


def _check_flags(spec: SubclassSpec, flags: dict[str, Any]) -> None:
    _check_names(spec, "flags", flags, _FLAGS)
    for name in _FLAGS[:2]:
        if type(flags.get(name)) is not bool:
            raise TypeError(f"{spec.name}: expected a bool for {name}, got {_describe(flags.get(name))}")


# ---- attributes --------------------------------------------------------------------------------------------


def own_attributes(spec: SubclassSpec) -> set[str]:
    """Returns the names of the attributes in which a value keeps its fields, derived tensors and marks."""
    return {
        *spec.names,
        *spec.attributes,
        "_layout",
        DERIVED,
        HOOKS,
        SHARD,
        RANKS,
        *(carrier(f.name) for f in spec.dynamics),
    }


def check_extras(cls: Any, extras: dict[str, Any]) -> None:
    """Raises unless attributes are such as a user may set on a value: no field, method or other part of the class.

    Raises:
        ValueError: an attribute would replace a field, a method or another attribute of the class.
        TypeError: a mark of torch is not a bool.
    """
    own = own_attributes(cls.__spec__)
    for name, value in extras.items():
        if name in _MARKS:
            if type(value) is not bool:
                raise TypeError(f"{cls.__name__}.{name}: expected a bool, got {_describe(value)}")
        elif name in own or name.startswith(("__", OF_DYNAMO)) or _is_of_class(cls, name):
            raise ValueError(
                f"{cls.__name__}.{name}: is set on a value, and such an attribute may not replace a "
                f"field, a method, or a name that torch reads"
            )


def _is_of_class(cls: Any, name: str) -> bool:
    """Whether a class has an attribute that no user sets on a value; plain data in a class body is a default."""
    owner = next((base for base in cls.__mro__ if name in vars(base)), None)
    if owner is None:
        return name in OWN_NAMES
    attribute = vars(owner)[name]
    is_default = "__spec__" in vars(owner) and not name.startswith("_")
    return not is_default or callable(attribute) or hasattr(type(attribute), "__get__")


# ---- the fields --------------------------------------------------------------------------------------------


def check_fields(cls: Any, inners: dict[str, Tensor], metadata: dict[str, Any]) -> None:
    """Checks by the class whether a value may have these fields; fields missing in an older file have defaults."""
    spec: SubclassSpec = cls.__spec__
    defaults = {f.name: f.default for f in (*spec.statics, *spec.dynamics) if f.default is not MISSING}
    cls.check_loaded(**dict.fromkeys(spec.inner_names) | inners, **defaults | metadata)


def check_dynamic_dims(x: Any, marked: Any) -> None:
    """Raises ValueError unless the dims to be marked dynamic are dims of the value, or of its inner tensors."""
    spec: SubclassSpec = type(x).__spec__
    tensors = {f.name: x.__dict__[f.attribute] for f in spec.inners} | {"": x}
    if not isinstance(marked, dict) or not all(tensors.get(name) is not None for name in marked):
        raise ValueError(f"{spec.name}: expected dynamic_dims of its inner tensors, got {_describe(marked)}")
    for name, dims in marked.items():
        rank = tensors[name].dim()
        if not isinstance(dims, list) or not all(type(d) is int and 0 <= d < rank for d in dims):
            raise ValueError(
                f"{spec.name}.{name}: expected a list of dimensions below {rank} in dynamic_dims, got {dims!r:.200}"
            )


def has_data(t: Tensor) -> bool:
    """Whether the numbers of a tensor can be read: it is neither on the meta device nor fake, and no part of it is."""
    if is_traceable_wrapper_subclass(t):
        return all(has_data(getattr(t, name)) for name in t.__tensor_flatten__()[0])
    return not t.is_meta and _dispatch_of(type(t)) is _dispatch_of(Tensor)


def _dispatch_of(cls: Any) -> Any:
    return cls.__torch_dispatch__


def check_unwrapped(owner: str, field: str, t: Tensor | None) -> None:
    """Raises TypeError if an inner tensor that holds offsets into others is a wrapper, and cannot be checked."""
    if t is not None and is_traceable_wrapper_subclass(t):
        raise TypeError(f"{owner}.{field}: expected a plain tensor in a file, got {one_of(type(t))}")


def check_by_constructor(cls: Any, fields: dict[str, Any]) -> None:
    """Implements ``check_loaded``: calls the ``__new__`` of a class body, if it takes the fields by their names."""
    if inspect.unwrap(cls.__new__) is cls._new or not _takes(cls.__new__, cls, fields):
        return
    inners = (fields[name] for name in cls.__spec__.inner_names)
    if all(t is None or has_data(t) for t in inners):
        cls.__new__(cls, **fields)


def _takes(function: Any, cls: type, fields: dict[str, Any]) -> bool:
    try:
        inspect.signature(function).bind(cls, **fields)
    except TypeError:
        return False
    return True


def _describe(value: object) -> str:
    return f"{value!r:.200} of type {type(value).__name__}"
