"""From a spec to a working class: the generated text compiled, and put in place."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor

from subclasses import autograd, plans
from subclasses._torch import (
    call_unruled,
    disabled_torch_function_impl,
    dynamic_dims_name,
    is_traceable_wrapper_subclass,
    mark_dim_dynamic,
)
from subclasses.build import build_functions
from subclasses.caching import stable_hash
from subclasses.checks import check_statics, raise_not_a_tensor
from subclasses.emit_class import carrier, emit_class
from subclasses.layout import Layout, intern_layout, nested_layouts
from subclasses.rules import collect_function_rules
from subclasses.serialize import allow_loading
from subclasses.spec import SubclassSpec
from subclasses.views import view_functions

_STATIC_METHODS = frozenset({"__new__", "__tensor_unflatten__", "_wrap"})
_CLASS_METHODS = frozenset({"__torch_dispatch__", "__torch_function__", "__metadata_guard__"})


def install(cls: Any, root: type) -> None:
    """Generates the methods of a class and puts them in place; one that the class body defines stays."""
    spec: SubclassSpec = cls.__spec__
    e = emit_class(spec)
    plan_table: dict[Any, Any] = {}
    function_table: dict[Any, Any] = {}
    made = build_functions(
        e.source,
        e.namespace | _supplied(cls, spec, plan_table, function_table),
        filename=f"<subclasses {spec.name}>",
        owner=cls,
    )
    cls.__source__ = e.source
    cls._handwritten = frozenset(name for name in made if name in vars(cls))
    for i, field in enumerate(spec.statics):
        setattr(cls, field.name, StaticField(field.name, i))
    if names := tuple(f.name for f in spec.dynamics if f.name in (spec.outer_args or ())):
        setattr(cls, dynamic_dims_name, DynamicDims(names))
    cls._new = staticmethod(made["__new__"])
    for name, function in made.items():
        if not _is_overridden(cls, name, root):
            setattr(cls, name, _as_method(cls, name, function))
    allow_loading(cls)
    cls._saves_inners = spec.stands_for_plain or cls.wrap_cotangent is not root.wrap_cotangent  # type: ignore[attr-defined]
    cls._refresh = functools.partial(_refresh, weakref.ref(cls), plan_table, function_table, made, root)
    cls._refresh()


def _is_overridden(cls: Any, name: str, root: type) -> bool:
    """Whether the class body, or that of a base, defines a method that would be generated."""
    bases = cls.__mro__[: cls.__mro__.index(root)]
    return any(name in vars(b).get("_handwritten", vars(b)) for b in bases)


def _as_method(cls: Any, name: str, function: Any) -> Any:
    function.__qualname__ = f"{cls.__qualname__}.{name}"
    if name in _STATIC_METHODS:
        return staticmethod(function)
    return classmethod(function) if name in _CLASS_METHODS else function


def _refresh(
    ref: Any, plan_table: dict[Any, Any], functions: dict[Any, Any], made: dict[str, Any], root: type
) -> None:
    """Forgets what was resolved, and intercepts above autograd if there is a rule that needs it."""
    cls = ref()
    plan_table.clear()
    functions.clear()
    if cls.__spec__.fallback == "materialize":
        functions.update(view_functions)
    functions.update(collect_function_rules(cls))
    name = "__torch_function__"
    if not _is_overridden(cls, name, root):
        found = classmethod(made[name]) if functions else disabled_torch_function_impl
        setattr(cls, name, found)


# ---- what the generated text calls -------------------------------------------------------------------------


def _supplied(
    cls: Any, spec: SubclassSpec, plan_table: dict[Any, Any], functions: dict[Any, Any]
) -> dict[str, object]:
    layouts: weakref.WeakValueDictionary[Any, Layout] = weakref.WeakValueDictionary()

    def resolve(op: Any) -> Any:
        plan = plan_table[op] = plans.choose_plan(cls, op).run
        return plan

    return {
        "_Cls": cls,
        "_as_cotangent": autograd.as_cotangent,
        "_call_unruled": call_unruled,
        "_coerce_tangent": autograd.coerce_tangent,
        "_construct": autograd.construct,
        "_functions": functions,
        "_is_foreign": functools.partial(plans.is_foreign, cls),
        "_layouts": layouts,
        "_make_carrier": make_carrier,
        "_make_layout": functools.partial(make_layout, cls, spec, layouts),
        "_outer_of": cls.outer if spec.has_outer else None,
        "_plans": plan_table,
        "_resolve": resolve,
        "_set_field": set_field,
        "_stable_hash": stable_hash,
    }


# Values of these types are equal only if they are the same to a program; others, such as tuples, may hold
# 1 and True, which are equal and not the same.
_ATOMS = (int, bool, str, bytes, type(None), torch.dtype, torch.device)


def make_layout(
    cls: Any, spec: SubclassSpec, layouts: Any, key: Any, inners: tuple[Any, ...], statics: tuple[Any, ...]
) -> Layout:
    """The layout of a construction that is not in the class's small table yet."""
    check_statics(spec.name, tuple(f.name for f in spec.statics), statics)
    pairs = [(n, t) for n, t in zip(spec.inner_names, inners, strict=True) if t is not None]
    nested = nested_layouts(pairs)
    layout = intern_layout(cls, statics, tuple(n for n, _ in pairs), nested)
    if not nested and all(type(s) in _ATOMS for s in statics):
        layouts[key] = layout
    return layout


def make_carrier(x: Any, count: int) -> Tensor:
    """A zero-element tensor whose extent carries a dynamic int to where only tensors go."""
    like = next((x.__dict__[n] for n in x._layout.present), None)
    while like is not None and is_traceable_wrapper_subclass(like):
        like = getattr(like, like.__tensor_flatten__()[0][0])
    if like is None:
        return torch.empty((count, 0), dtype=torch.uint8, device=x.device)
    tensor = like.new_empty((count, 0), dtype=torch.uint8)
    if type(tensor) is Tensor:
        mark_dim_dynamic(tensor)
    return tensor


class DynamicDims:
    """Tells Dynamo which outer dims follow a dynamic int, so that its first program serves every value.

    A non-data descriptor under a name that torch reads: what torch itself notes on an instance comes first.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def __get__(self, x: Any, owner: type | None = None) -> set[int]:
        if x is None:
            return set()
        # Comparing symbolic ints would add guards, and those are dynamic already.
        counts = [c for name in self.names if type(c := x.__dict__.get(name)) is int and c > 1]
        return {i for i, size in enumerate(x.shape) if type(size) is int and size in counts}


def set_field(x: Any, name: str, value: Any) -> None:
    """Assigns an inner tensor, checked as at construction.

    Raises:
        AttributeError: the field is metadata, which is constant.
        ValueError: the inner tensor requires grad, or would change the outer size, dtype or device.
    """
    cls, spec = type(x), type(x).__spec__
    if name == "data":
        return _set_data(x, value)
    if name not in spec.inner_names:
        raise AttributeError(
            f"{cls.__name__}.{name} is metadata and constant; construct a new {cls.__name__}"
        )
    if isinstance(value, Tensor) and value.requires_grad:
        raise ValueError(
            f"{cls.__name__}.{name}: inner tensors are stored raw and never require grad; assign .detach(), or "
            f"construct a new {cls.__name__} to be differentiable in it"
        )
    inners = {n: x.__dict__[n] for n in spec.inner_names} | {name: value}
    meta = {f.name: getattr(x, f.name) for f in (*spec.statics, *spec.dynamics)}
    new = cls(**inners, **meta)
    for what in ("shape", "dtype", "device"):
        if getattr(new, what) != getattr(x, what):
            raise ValueError(
                f"{cls.__name__}.{name}: would change the outer {what} from {getattr(x, what)} to "
                f"{getattr(new, what)}; construct a new {cls.__name__}"
            )
    x.__dict__[name] = new.__dict__[name]
    x.__dict__["_layout"] = new._layout


def _set_data(x: Any, value: Any) -> None:
    """``x.data = value``: the inner tensors, metadata and outer facts of another value of the class."""
    if type(value) is not type(x):
        raise_not_a_tensor(type(x).__name__, "data", type(x), value)
    object.__setattr__(x, "data", value)
    for name in (*type(x).__spec__.inner_names, *(f.name for f in type(x).__spec__.dynamics), "_layout"):
        x.__dict__[name] = value.__dict__[name]
    for field in type(x).__spec__.dynamics:
        x.__dict__.pop(carrier(field.name), None)


class StaticField:
    """Reads static metadata from a value's layout.

    Not a ``property``, for then Dynamo would trace into the getter; of this it takes the value as a constant.
    """

    def __init__(self, name: str, index: int) -> None:
        self.name, self.index = name, index

    def __get__(self, x: Any, owner: type | None = None) -> Any:
        return self if x is None else x._layout.statics[self.index]

    def __set__(self, x: Any, value: Any) -> None:
        set_field(x, self.name, value)
