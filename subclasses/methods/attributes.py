"""Field access on values: assigning inner tensors, reading static metadata, and dims that follow a dynamic int."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import (
    DisableTorchFunctionSubclass,
    is_recording,
    marked_dims_name,
    skip_frames,
)
from subclasses._torch_capture import (
    LIVE,
    VIEWS,
    break_at_assignments,
    check_assignable,
    find_methods,
    guard_flags,
    guard_identities,
    record_readings,
)
from subclasses._torch_tracing import is_transient_here, set_version_counters
from subclasses.autograd import construct
from subclasses.autograd.calling import in_rule
from subclasses.autograd.gradient_errors import assigned_error
from subclasses.errors import SpecError, one_of
from subclasses.methods import parameters
from subclasses.spec.collect import InnerField
from subclasses.spec.constants import constants_of
from subclasses.spec.construction import raise_no_conversion, raise_not_a_tensor
from subclasses.spec.fields import MISSING
from subclasses.spec.shapes import check_shapes
from subclasses.spec.values import DERIVED, PLAIN, carrier, dynamic_ints, innermost

# ---- dynamic ints ------------------------------------------------------------------------------------------


class DynamicDims:
    """Marks for Dynamo the outer dims that follow a dynamic int, so that its first program supports every size.

    A non-data descriptor under the attribute name that Dynamo reads. Marks that torch stores on an instance take
    precedence.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def __get__(self, x: Any, owner: type | None = None) -> set[int]:
        if x is None:
            return set()
        # Symbolic ints are excluded: comparing them would add guards, and they are dynamic already.
        counts = [c for name in self.names if type(c := x.__dict__.get(name)) is int and c > 1]
        return {i for i, size in enumerate(x.shape) if type(size) is int and size in counts}


class VaryingDims:
    """Marks for Dynamo and ``torch.export`` the outer dims that vary, by the class's ``_varying_dims``.

    A non-data descriptor under the name of the marks, so that all values of the class are marked alike. The first read
    stores them on the value, where ``torch._dynamo.maybe_mark_dynamic`` adds further ones and ``torch.export`` deletes.
    """

    def __get__(self, x: Any, owner: type | None = None) -> set[int]:
        if x is None:
            return set()
        return x.__dict__.setdefault(marked_dims_name, set(x._varying_dims()[""]))


# ---- assigning ---------------------------------------------------------------------------------------------


# Attributes of torch whose assignment changes the inner tensors or the gradient.
_SPECIAL = {
    "data": lambda x, value: _set_data(x, value),
    "_is_param": parameters.become_parameter,
    "requires_grad": parameters.require_grad,
    "__dict__": parameters.swap_attributes,
}
SPECIAL_ATTRIBUTES = frozenset(_SPECIAL)


def check_constant(cls: Any, name: str) -> None:
    """Warns if an attribute of a value hides a constant of its class, which compiled rules and methods read."""
    if not hasattr(cls, name) or hasattr(Tensor, name):
        return
    value = inspect.getattr_static(cls, name)
    if not hasattr(type(value), "__get__"):
        warnings.warn(
            f"{cls.__name__}.{name} is a constant of the class, and was set on one value. Ops, copies and compilers "
            f"make values from fields alone, whose rules and methods read the constant; declare "
            f"`{name} = static(default={value!r})`",
            stacklevel=3,
        )


def set_field(x: Any, name: str, value: Any) -> None:
    """Assigns an inner tensor, with the checks of the constructor, or an attribute of torch.

    Raises:
        AttributeError: the field is metadata, which is constant.
        ValueError: the inner tensor requires grad, or would change the outer size, dtype or device.
        SpecError: the class is a dataclass.
    """
    cls: Any = type(x)
    spec = cls.__spec__
    if name in _SPECIAL:
        return _SPECIAL[name](x, value)
    field = next((f for f in spec.inners if name in (f.name, f.attribute)), None)
    if field is None:
        return _check_unchanged(x, name, value)
    name = field.name
    is_open = cls._runs_above and in_rule() and not x.requires_grad  # a rule runs on it
    if isinstance(value, Tensor) and value.requires_grad and not is_open:
        raise ValueError(
            f"{cls.__name__}.{name}: inner tensors are stored raw and never require grad. To differentiate by the "
            f"tensor, construct a new {cls.__name__}. Where an __init__ assigns it, hand it to super().__new__ in a "
            f"__new__ of the class. Otherwise assign .detach(): derivatives are by the value's own {name}"
        )
    inners = {f.name: x.__dict__[f.attribute] for f in spec.inners} | {name: value}
    meta = {f.name: getattr(x, f.name) for f in (*spec.statics, *spec.dynamics)}
    if "__dataclass_fields__" in vars(cls):  # its __init__ assigns each field
        raise SpecError(
            f"{cls.__name__}: leave out @dataclass, whose __init__, __eq__ and __hash__ are not a tensor's",
            code="method-not-called",
        )
    if field.shape is not None and isinstance(value, Tensor):
        check_shapes(spec, list(inners.values()), meta, assigned=name)
    new = cls.__new__(cls, **inners, **meta)  # without an __init__ of the class, which may assign fields
    for what in ("shape", "dtype", "device"):
        if getattr(new, what) != getattr(x, what):
            raise ValueError(
                f"{cls.__name__}.{name}: would change the outer {what} from {getattr(x, what)} to "
                f"{getattr(new, what)}; construct a new {cls.__name__}"
            )

    def store() -> None:
        x.__dict__[field.attribute] = value if is_open else new.__dict__[field.attribute]
        x.__dict__["_layout"] = new._layout

    if is_open:
        store()
    else:
        check_assignable(x, name)
        _assign(x, store)


def _assign(x: Any, store: Callable[[], None]) -> None:
    """Assigns an inner tensor, as an op that writes to the value.

    Raises:
        DispatchError: autograd recorded the construction of the value.
    """
    with DisableTorchFunctionSubclass():
        if is_recording(x) and x.grad_fn is not None:
            raise assigned_error(type(x))
        store()
        if torch.is_grad_enabled() and not x.is_inference():
            set_version_counters((x,), (x._version + 1,))


def _check_unchanged(x: Any, name: str, value: Any) -> None:
    """Raises AttributeError unless a value has this metadata already, as an ``__init__`` may assign it."""
    if getattr(x, name) is not value:
        cls = type(x).__name__
        raise AttributeError(f"{cls}.{name} is metadata and constant; construct a new {cls}")


def _set_data(x: Any, value: Any) -> None:
    """Implements ``x.data = value``: ``x`` gets the inner tensors, metadata and outer properties of ``value``."""
    if type(value) is Tensor and value.dtype != x.dtype:
        raise_no_conversion(type(x).__name__, x.dtype, value.dtype)
    if type(value) is not type(x):
        raise_not_a_tensor(type(x).__name__, "data", type(x), value)
    object.__setattr__(x, "data", value)
    for name in (*type(x).__spec__.attributes, *(f.name for f in type(x).__spec__.dynamics), "_layout"):
        x.__dict__[name] = value.__dict__[name]
    for field in type(x).__spec__.dynamics:
        x.__dict__.pop(carrier(field.name), None)


# ---- reading -----------------------------------------------------------------------------------------------


class DifferentiableField:
    """Reads an inner tensor: where autograd records, as a differentiable function of the value, else as it is stored.

    In a graph of Dynamo, reading it is a node, which runs when the graph is traced or called.
    """

    def __init__(self, field: InnerField) -> None:
        self.name, self.attribute = field.name, field.attribute

    def __get__(self, x: Any, owner: type | None = None) -> Any:
        if x is None:
            return self
        if is_recording(x):
            return construct.unwrap(x, (self.attribute,))[0]
        return x.__dict__[self.attribute]

    def __set__(self, x: Any, value: Any) -> None:
        set_field(x, self.name, value)

    def __delete__(self, x: Any) -> None:
        raise AttributeError(
            f"{type(x).__name__}.{self.name} is a field, which every value has; it is not deleted"
        )


# Dynamo cannot compile it as a separate frame, and would try below a frame that it does not compile.
skip_frames(DifferentiableField.__get__)

# The attribute of a class with the names of its differentiable fields and constants, and of views that are copies.
RECORDED = "_recorded_attributes"

record_readings(RECORDED)
find_methods(RECORDED)
guard_flags(RECORDED)
guard_identities(RECORDED)
break_at_assignments(lambda x, name, graph: hasattr(type(x), "__spec__") and name in x.__spec__.names)


def install_fields(cls: Any) -> None:
    """Sets the descriptors of static metadata and of differentiable fields, also for inherited fields."""
    spec = cls.__spec__
    for i, static in enumerate(spec.statics):
        setattr(cls, static.name, StaticField(static.name, i))
    for name, compute in spec.derived:
        setattr(cls, name, DerivedField(name, compute))
    for name in (*spec.inner_names, *(f.name for f in spec.dynamics)):
        if isinstance(inspect.getattr_static(cls, name, None), StaticField | DerivedField):
            setattr(cls, name, MISSING)  # a value's attribute precedes this, and no data descriptor
    differentiable = [field for field in spec.inners if field.differentiable]
    for field in differentiable:
        setattr(cls, field.name, DifferentiableField(field))
    for field in spec.inners:
        setattr(cls, LIVE + field.attribute, DifferentiableField(field))
    for dynamic in spec.dynamics:
        setattr(cls, carrier(dynamic.name), CarrierField(carrier(dynamic.name)))
    copies = VIEWS if spec.fallback == "materialize" else ()
    derived = [name for name, _ in spec.derived]
    names = frozenset(field.name for field in differentiable).union(constants_of(cls), derived, copies)
    setattr(cls, RECORDED, names)


class CarrierField:
    """Makes the carrier of a dynamic int when it is read from a value that was never flattened.

    Guards of ``torch.export`` read attributes by the names that ``__tensor_flatten__`` returned when it traced. This is
    a non-data descriptor: the carrier that a value holds precedes it.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, x: Any, owner: type | None = None) -> Any:
        if x is None:
            return self
        x.__tensor_flatten__()
        return x.__dict__[self.name]


class DerivedField:
    """Reads a tensor that follows from the fields of a value; it is computed once for the current inner tensors.

    In a graph of Dynamo, reading it is a node, which computes it from the inner tensors of the trace.
    """

    def __init__(self, name: str, compute: Callable[[Any], Tensor]) -> None:
        self.name, self.compute = name, compute

    def __get__(self, x: Any, owner: type | None = None) -> Any:
        if x is None:
            return self
        tensors = [*innermost(x)]
        is_cached = not (is_transient_here() or torch.is_inference_mode_enabled())
        if not is_cached or any(
            t.requires_grad or t.is_inference() or t.__class__ not in PLAIN for t in tensors
        ):
            return self.make(x)
        # The state that it was computed from: the metadata, and the memory and the version of each tensor.
        state = (x._layout, _all_ints(x), [(t, t.data_ptr(), t._version) for t in tensors])
        known = x.__dict__.get(DERIVED, {}).get(self.name)
        if known is not None and _is_same_state(known[0], state) and known[1]._version == known[2]:
            return known[1]
        with torch.no_grad():
            derived = self.make(x)
        if type(derived) is Tensor and not derived.is_inference() and derived._base is not x:
            x.__dict__.setdefault(DERIVED, {})[self.name] = state, derived, derived._version
        return derived

    def make(self, x: Any) -> Tensor:
        """Computes the tensor; if inner tensors require grad, as a differentiable function of them."""
        derived = self.compute(x)
        if not isinstance(derived, Tensor):
            raise TypeError(
                f"{type(x).__name__}.{self.name}: expected a tensor from derived=, got {one_of(type(derived))}"
            )
        return derived

    def __set__(self, x: Any, value: Any) -> None:
        raise AttributeError(
            f"{type(x).__name__}.{self.name} follows from the other fields; assign one of these"
        )


def _all_ints(x: Any) -> tuple[Any, ...]:
    """Returns the dynamic ints of a value, and of the values inside of it."""
    inside = [
        _all_ints(x.__dict__[name]) for name, layout in x._layout.nested if hasattr(layout.cls, "__spec__")
    ]
    return (*dynamic_ints(x), *inside)


def _is_same_state(one: Any, other: Any) -> bool:
    (layout, ints, tensors), (now, ints_now, tensors_now) = one, other
    return (
        layout is now
        and ints == ints_now
        and len(tensors) == len(tensors_now)
        and all(t is u and rest == more for (t, *rest), (u, *more) in zip(tensors, tensors_now, strict=True))
    )


class StaticField:
    """Reads static metadata from a value's layout.

    Dynamo would trace into the getter of a ``property``; it treats the value of this descriptor as a constant.
    """

    def __init__(self, name: str, index: int) -> None:
        self.name, self.index = name, index

    def __get__(self, x: Any, owner: type | None = None) -> Any:
        return self if x is None else x._layout.statics[self.index]

    def __set__(self, x: Any, value: Any) -> None:
        set_field(x, self.name, value)
