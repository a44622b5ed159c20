"""The metadata of classes written by hand, as constants: equal metadata is one object, which is hashable.

The context that ``__tensor_flatten__`` returns may be a dict or a list, which is made anew at each call and cannot be
hashed. The context of an adopted class is a :class:`ConstantDict` or a :class:`ConstantList` instead. Code may read it
as a dict or a list; it is interned with the names of the inner tensors.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import types
from collections.abc import Callable, Hashable
from typing import Any

import torch

# Equal values of these types are interchangeable, once the type is compared too.
_ATOMS = (
    *(bool, int, str, bytes, complex, types.NoneType, types.EllipsisType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


class NotConstant(TypeError):
    """Raised for metadata that cannot be compared by its contents."""


def is_atom(value: Any) -> bool:
    """Whether a value has no parts, and is compared by its type and ``==``."""
    return type(value) in _ATOMS or isinstance(value, enum.Enum | type | types.FunctionType)


def freeze(value: Any) -> Hashable:
    """Returns a hashable description of metadata, which is equal exactly for values of equal types with equal parts.

    Raises:
        NotConstant: the metadata holds something other than plain values, containers and dataclasses of these.
    """
    if is_atom(value):
        return type(value), value
    cls = type(value)
    if cls is float:  # 0.0 == -0.0, and nan != nan
        return cls, value.hex()
    if cls is list or (isinstance(value, tuple) and not hasattr(value, "__dict__")):
        return cls, *map(freeze, value)
    if isinstance(value, dict) and cls in (dict, ConstantDict):
        return dict, *((freeze(k), freeze(v)) for k, v in value.items())
    if cls is ConstantList:
        return list, *map(freeze, value)
    if cls in (set, frozenset):
        return cls, frozenset(map(freeze, value))
    if dataclasses.is_dataclass(value):
        fields = [f.name for f in dataclasses.fields(value)]
        if set(getattr(value, "__dict__", ())).issubset(fields):
            return cls, *(freeze(getattr(value, name)) for name in fields)
    raise NotConstant(
        f"expected metadata of plain values, containers and dataclasses, got an object of type {cls.__name__}"
    )


# ---- constants ---------------------------------------------------------------------------------------------


class _Constant:
    """The base of constant containers; the hash is the hash of the contents."""

    __slots__ = ()
    key: Any

    def __hash__(self) -> int:
        return hash(self.key)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self

    def __reduce__(self) -> Any:
        cls, names, _ = self.key
        return intern_context, (cls, names, thaw(self))


def _refuse(self: Any, *_: Any, **__: Any) -> Any:
    raise TypeError("the metadata of a tensor is constant; change a copy of it")


class ConstantDict(_Constant, dict[Any, Any]):
    """A dict that cannot change."""

    __slots__ = ("__weakref__", "key")
    __hash__ = _Constant.__hash__  # type: ignore[assignment]
    __setitem__ = __delitem__ = __ior__ = _refuse  # type: ignore[assignment]
    clear = pop = popitem = setdefault = update = _refuse  # type: ignore[assignment]

    def __copy__(self) -> dict[Any, Any]:
        return dict(self)


class ConstantList(_Constant, list[Any]):
    """A list that cannot change."""

    __slots__ = ("__weakref__", "key")
    __hash__ = _Constant.__hash__  # type: ignore[assignment]
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse  # type: ignore[assignment]
    append = clear = extend = insert = pop = remove = reverse = sort = _refuse  # type: ignore[assignment]

    def __copy__(self) -> list[Any]:
        return list(self)


def is_constant(context: Any) -> bool:
    """Whether a context is interned: the names of the inner tensors follow from its identity."""
    return isinstance(context, _Constant)


def guards_names(x: Any) -> bool:
    """Whether Dynamo's guard on the metadata of a value implies the names of its inner tensors."""
    adoption = vars(type(x)).get(ADOPTED)
    return adoption is not None and adoption.guards_identity and is_constant(x.__tensor_flatten__()[1])


def intern_context(cls: Any, names: tuple[str, ...], context: Any) -> Any:
    """Returns the one constant for a dict or list of metadata and the names of inner tensors of an adopted class.

    Any other context, and one that cannot be frozen, is returned as it is.
    """
    made: Callable[[Any], Any] | None = {dict: ConstantDict, list: ConstantList}.get(type(context))
    adoption = vars(cls).get(ADOPTED)
    if made is None or adoption is None:
        return context
    try:
        key = cls, names, freeze(context)
    except NotConstant:
        return context
    table = adoption.contexts
    constant = table.get(key)
    if constant is None:
        constant = made(copy.deepcopy(context))
        constant.key = key
        # setdefault: another thread may have interned the same metadata meanwhile.
        constant = table.setdefault(key, constant)
    return constant


def thaw(context: Any) -> Any:
    """Returns metadata with the class's own containers; changeable objects are copied."""
    match context:
        case dict():
            return {k: thaw(v) for k, v in context.items()}
        case list():
            return [thaw(v) for v in context]
    return context if is_atom(context) or type(context) in (float, tuple) else copy.deepcopy(context)


# The attribute of a class that was adopted.
ADOPTED = "_adopted"


def is_adopted(cls: type) -> bool:
    """Whether this class itself was adopted; a class that inherits from it was not."""
    return ADOPTED in vars(cls)
