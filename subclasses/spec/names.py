"""Names that a field cannot have, since PyTorch reads or calls something of that name on every tensor."""

from __future__ import annotations

import inspect
import types
from typing import Any

from torch import Tensor, nn

from subclasses._torch_capture import LIVE
from subclasses.errors import SpecError, one_of

# Methods that torch itself calls on any tensor.
CALLED_BY_TORCH = frozenset(
    """backward clone contiguous copy_ cpu cuda data_ptr detach detach_ dim element_size expand_as
    get_device half is_complex is_contiguous is_floating_point is_pinned is_shared item new_empty
    new_empty_strided numel pin_memory register_hook requires_grad_ retain_grad share_memory_ size
    storage_offset stride to tolist type untyped_storage view view_as""".split()
)
# Methods of these that return properties of the outer tensor. Compilers evaluate them without a call.
_SHOWING = frozenset(
    """dim element_size get_device is_complex is_contiguous is_floating_point ndimension nelement numel size
    storage_offset stride""".split()
)
# Methods for which compilers call no rule.
NEVER_DISPATCHED = frozenset({*_SHOWING, "ndimension", "__len__", "__iter__"})
# Other methods that this package and torch rely on; each is called on any value, or not at all in compiled code.
_RELIED_ON = frozenset(
    """data_ptr detach detach_ is_conj is_neg register_hook requires_grad_ resolve_conj resolve_neg retain_grad storage
    untyped_storage _is_param _is_view _make_subclass _make_wrapper_subclass _typed_storage _view_func""".split()
)
# Names that this package sets on a class, or calls on it, besides the methods that a class body may replace.
_OF_CLASSES = frozenset(
    """Cotangent __source__ __spec__ cotangent implements unruled unwrap _dispatch _function _handwritten
    _has_function_rules _has_formulas _is_cotangent _layout _new _own_fields _own_keywords _recorded_attributes
    _refresh _rulebook _rules_views _runs_above _serves_super _traits _value_cls _wrap""".split()
)
# Data attributes of Tensor on older releases.
FORMER_ATTRIBUTES = frozenset({"names"})
OWN_NAMES = frozenset({"check_loaded", "implements", "materialize", "outer", "unwrap", "wrap_cotangent"})


# Attributes of torch.fx.Proxy. Dynamo reads inner tensors of a result by name, from such an object.
OF_PROXIES = frozenset({"keys", "node", "tracer"})


def check_field_name(cls: type, name: str, *, is_inner: bool = False) -> None:
    """Raises SpecError if a field of this name would shadow a name that the tensor needs."""
    reason = None
    if name.startswith("_"):
        reason = "starts with an underscore"
    elif is_data_attribute(name):
        reason = "is a data attribute of Tensor"
    elif name in CALLED_BY_TORCH:
        reason = "is a method that torch itself calls"
    elif name in OWN_NAMES:
        reason = "is a method of TensorSubclass"
    elif is_inner and name in OF_PROXIES:
        reason = "is an attribute by which torch.compile would read something else than the inner tensor"
    elif name == "isinstance":
        reason = "is a builtin that generated code calls"
    if reason:
        raise SpecError(
            f"{cls.__name__}.{name} {reason}",
            code="name-taken",
            hint=f"choose another name, such as {name.strip('_')}_data",
        )


def check_method_name(cls: type, name: str, value: object) -> None:
    """Raises SpecError if a value in a class body hides a method or attribute that every tensor has."""
    _check_relied_on(cls, name)
    attribute = None if name.startswith("_") else inspect.getattr_static(Tensor, name, None)
    if attribute is None or name in OWN_NAMES:
        return
    if is_data_attribute(name):
        raise SpecError(
            f"{cls.__name__}.{name} hides a data attribute of Tensor, which compilers read from the tensor itself",
            code="name-taken",
            hint="choose another name, or say with `outer` what the value shows",
        )
    if callable(attribute) and isinstance(value, classmethod | staticmethod):
        raise SpecError(
            f"{cls.__name__}.{name} hides a method of Tensor, so that x.{name}(...) would call a function without x",
            code="name-taken",
            hint=f"choose another name, such as from_{name}",
        )


def _check_relied_on(cls: type, name: str) -> None:
    if name in _OF_CLASSES or name.startswith(LIVE):
        reason, hint = "is a name that this package uses on every class", ""
    elif name in _SHOWING:
        reason = "hides a method by which PyTorch learns what the value shows, and which compiled code does not call"
        hint = ", or say with `outer` what the value shows"
    elif name in _RELIED_ON or (
        name.startswith("_") and not name.startswith("__") and is_data_attribute(name)
    ):
        reason = "hides what PyTorch itself calls or reads on every tensor"
        hint = f", or write a rule: @{cls.__name__}.implements(torch.ops.aten.detach.default)"
        hint = hint if name == "detach" else ""
    else:
        return
    raise SpecError(
        f"{cls.__name__}.{name} {reason}",
        code="name-taken",
        hint=f"choose another name, such as {name.strip('_')}_of_mine{hint}",
    )


# Special methods that compilers evaluate from the size, or replace by the methods of Tensor.
_OF_SIZES = {
    "__len__": "len(x) is the first size",
    "__iter__": "a loop over x is one over its rows",
    "__getattr__": "x has no other attributes than those in the class",
}


# Operators, and the functions and ops of torch that compute the same. These functions and ops do not call a method of
# the class. Nor does an operator with the value on its right, or an in-place operator.
_OPERATORS = {
    name: f"ops.aten.{name}" for name in ("add", "sub", "mul", "pow", "neg", "abs", "lt", "le", "gt", "ge")
} | {
    "truediv": "ops.aten.div",
    "floordiv": "ops.aten.floor_divide",
    "mod": "ops.aten.remainder",
    "matmul": "matmul",
    # The ops of these have no derivative.
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "invert": "bitwise_not",
}
_OPS_OF_OPERATORS = {f"__{kind}{name}__": op for name, op in _OPERATORS.items() for kind in ("", "r", "i")}


_NO_BASES: dict[type, str] = {
    nn.Parameter: "pass a value to it, nn.Parameter(x)",
    nn.Module: "let a module hold values, as Parameters or buffers",
}


def check_special_methods(cls: type) -> None:
    """Raises SpecError for methods of a class body that would break every value, with errors that do not name them."""
    body = vars(cls)
    for base, instead in _NO_BASES.items():
        if issubclass(cls, base):
            raise SpecError(
                f"{cls.__name__} cannot inherit from {base.__name__} too", code="base-refused", hint=instead
            )
    if "__eq__" in body and body.get("__hash__") is None:
        raise SpecError(
            f"{cls.__name__} defines __eq__ without __hash__, so that Python makes its values unhashable, and autograd "
            "and optimizers hash tensors",
            code="method-signature",
            hint="write `__hash__ = torch.Tensor.__hash__` beside it, or, in place of __eq__, a rule: "
            f"@{cls.__name__}.implements(torch.eq)",
        )
    for name, meaning in _OF_SIZES.items():
        if name in body:
            raise SpecError(
                f"{cls.__name__}.{name} is not called by compiled code, in which {meaning}",
                code="method-not-called",
                hint=f"write a method of another name, such as {name.strip('_')}_of_mine",
            )
    if "__post_init__" in body:
        raise SpecError(
            f"{cls.__name__}.__post_init__ is never called, since the class is not a dataclass",
            code="method-not-called",
            hint="write its checks in a `__new__` that ends with `return super().__new__(cls, ...)`",
        )
    for name in ("__torch_function__", "__torch_dispatch__"):
        if isinstance(inspect.getattr_static(cls, name, None), types.FunctionType):
            raise SpecError(
                f"{cls.__name__}.{name} is a plain method, and torch calls it on the class",
                code="method-signature",
                hint=f"write `@classmethod` above `def {name}(cls, func, types, args=(), kwargs=None)`",
            )
    _check_operators(cls)
    _check_hooks(cls)


def _check_operators(cls: type) -> None:
    """Raises SpecError for an operator that is a method: most ways to write what it computes would not call it."""
    for name in sorted(_OPS_OF_OPERATORS.keys() & vars(cls)):
        raise SpecError(
            f"{cls.__name__}.{name} is not called by torch.{_OPS_OF_OPERATORS[name]}, nor for a tensor "
            "on the left, nor in place",
            code="method-not-called",
            hint=f"write a rule, which they call: @{cls.__name__}.implements(torch.{_OPS_OF_OPERATORS[name]})",
        )


def _check_hooks(cls: type) -> None:
    """Raises SpecError for methods that autograd, or loading, could not call."""
    wraps, checks = vars(cls).get("wrap_cotangent"), vars(cls).get("check_loaded")
    if wraps is not None and not (isinstance(wraps, types.FunctionType) and _takes(wraps, None, None)):
        raise SpecError(
            f"{cls.__name__}.wrap_cotangent is called on a value, with a plain cotangent",
            code="method-signature",
            hint=f"write it as a method, `def wrap_cotangent(self, cotangent)`, that returns {one_of(cls)}",
        )
    if checks is not None and not isinstance(checks, classmethod):
        raise SpecError(
            f"{cls.__name__}.check_loaded is called before there is a value",
            code="method-signature",
            hint="write `@classmethod` above `def check_loaded(cls, **fields)`",
        )


def _takes(function: types.FunctionType, *args: Any) -> bool:
    try:
        inspect.signature(function).bind(*args)
    except TypeError:
        return False
    return True


def is_data_attribute(name: str) -> bool:
    """Whether Tensor has a data attribute of this name."""
    attribute = inspect.getattr_static(Tensor, name, None)
    return isinstance(attribute, types.GetSetDescriptorType | property) or name in FORMER_ATTRIBUTES
