"""Checks of a registration: that PyTorch can call the rule.

A rule for a function that never calls ``__torch_function__`` would never run, and no error would show it.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import get_ignored_functions, get_overridable_functions

from subclasses._torch import HigherOrderOperator, OpOverload, OpOverloadPacket, schema_of
from subclasses.errors import SpecError
from subclasses.op_schemas.schema import ops_of_packet
from subclasses.rules.families import Family

# ---- functions that dispatch -------------------------------------------------------------------------------

_ACCEPTED = (
    "ops (torch.ops.aten.mul.Tensor), packets (torch.ops.aten.mul), families (subclasses.arithmetic), tags "
    "(torch.Tag.pointwise) and functions: torch.sum, F.linear, and for an attribute torch.Tensor.T.__get__"
)
_C_CALLABLES = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.ClassMethodDescriptorType,
)
# Methods that wrap a method of another name, which torch passes to `__torch_function__`.
_OPERATOR_METHODS = {
    **{f"__{n}__": n for n in ("add", "sub", "mul", "matmul", "ne", "lt", "le", "gt", "ge")},
    **{f"__i{n}__": f"{n}_" for n in ("add", "sub", "mul")},
    **{f"__r{n}__": f"bitwise_{n}" for n in ("and", "or", "xor")},
    **{f"__r{n}__": n for n in ("add", "mul")},
    "__mod__": "remainder",
    "__imod__": "remainder_",
    **{f"__{n}__": "div" for n in ("truediv", "div")},
    **{f"__i{n}__": "div_" for n in ("truediv", "div")},
}


# Methods of Tensor that each declared class has for itself.
_GENERATED = frozenset("__repr__ __deepcopy__ __reduce_ex__ __setattr__ share_memory_ is_shared".split())


def check_key(cls: type, key: Any) -> None:
    """Checks a key of a rule.

    Raises:
        SpecError: it is not an op, packet, tag or function, or it is a callable that torch never dispatches.
    """
    name = f"{cls.__name__}.implements"
    if isinstance(key, OpOverload) and not _takes_a_tensor(key):
        packet = key.overloadpacket
        others = [str(op) for op in ops_of_packet(packet) if _takes_a_tensor(op)]
        hint = f"name torch.ops.{packet}, for {' and '.join(others[:3])}" if others else "name one that does"
        raise SpecError(
            f"{name}: torch never calls a rule for {key}, which takes no tensor",
            code="rule-not-called",
            hint=hint,
        )
    if isinstance(key, OpOverload | OpOverloadPacket | torch.Tag | HigherOrderOperator | Family):
        return
    method = getattr(key, "__name__", "")
    if method in _GENERATED and getattr(Tensor, method, None) == key:
        raise SpecError(
            f"{name}: torch never calls a rule for Tensor.{method}, since the class has a method {method} of its own, "
            "which is generated",
            code="rule-not-called",
            hint=f"define {method} in the body of {cls.__name__} to replace it",
        )
    if not callable(key) or isinstance(key, type):
        raise SpecError(f"{name} takes {_ACCEPTED}, got {key!r}", code="rule-key")
    if called := _operator_method(key):
        home = "torch.Tensor" if called.endswith("_") else "torch"
        raise SpecError(
            f"{name}: torch never calls a rule for Tensor.{key.__name__}, since the operator calls Tensor.{called}",
            code="rule-not-called",
            hint=f"name {home}.{called}",
        )
    if not is_dispatchable(key):
        raise SpecError(
            f"{name}: torch never calls a rule for {_describe(key)}",
            code="rule-not-called",
            hint=f"{_advice(cls, key)} {name} takes {_ACCEPTED}",
        )


def _takes_a_tensor(op: OpOverload) -> bool:
    return any("Tensor" in str(a.type) for a in schema_of(op).arguments)


def is_dispatchable(function: Any) -> bool:
    """Whether a callable can dispatch to its arguments' classes.

    A function in Python dispatches by a name of ``torch.overrides`` in its code, or in the code that it wraps. Dynamo
    dispatches every method of ``Tensor``. A callable in C dispatches if it belongs to torch; a callable of another
    extension may dispatch, and is accepted.
    """
    owner = getattr(function, "__self__", None)
    if isinstance(function, types.MethodWrapperType) and isinstance(owner, property):
        return is_dispatchable(owner.fget)  # torch dispatches a property as its getter's __get__
    if _is_function_class(owner):
        return False
    if isinstance(function, _C_CALLABLES):
        return not isinstance(owner, Tensor) and not _is_of_python(function) and not _is_a_factory(function)
    name, call = getattr(function, "__name__", ""), inspect.getattr_static(type(function), "__call__", None)
    return (
        _asks(function)
        or _asks(call)
        or inspect.getattr_static(Tensor, name, None) is function
        or _is_overridable(function)
    )


def _is_function_class(owner: Any) -> bool:
    """Whether this is an ``autograd.Function``, whose ``apply`` does not dispatch; newer releases have it in C."""
    return isinstance(owner, type) and issubclass(owner, torch.autograd.Function)


def _asks(function: Any) -> bool:
    while function is not None:
        code = getattr(function, "__code__", None)
        if isinstance(code, types.CodeType) and any("torch_function" in name for name in code.co_names):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def _is_of_python(function: Any) -> bool:
    """Whether a callable in C belongs to Python's standard library, such as ``len`` or ``math.sqrt``."""
    owner = getattr(
        getattr(function, "__self__", None), "__objclass__", None
    )  # the getter's __objclass__, for its __get__
    owner = owner or getattr(function, "__objclass__", None) or function
    module = getattr(owner, "__module__", None) or ""
    return module.partition(".")[0] in sys.stdlib_module_names


def _is_a_factory(function: Any) -> bool:
    """Whether a function of torch takes no tensor, such as ``torch.ones``, and hence does not dispatch."""
    name = getattr(function, "__name__", "")
    if getattr(torch, name, None) is not function or function not in get_ignored_functions():
        return False
    packet: Any = getattr(torch.ops.aten, name, None)
    schemas = [schema_of(getattr(packet, o)) for o in packet.overloads()] if packet is not None else []
    taken = [a for schema in schemas for a in schema.arguments if not a.is_out]
    return not any("Tensor" in str(a.type) for a in taken)


def _is_overridable(function: Any) -> bool:
    """Whether a function of torch dispatches through a function that it closes over, as F.max_pool2d does, or calls.

    PyTorch's list of functions that call another is slow to compute.
    """
    module = getattr(function, "__module__", None) or ""
    if module.partition(".")[0] != "torch":
        return False
    closed_over = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    return any(map(_asks, closed_over)) or function in _overridable_functions()


@functools.cache
def _overridable_functions() -> frozenset[Any]:
    return frozenset(f for group in get_overridable_functions().values() for f in group)


def _describe(key: Any) -> str:
    if isinstance(key, types.FunctionType | types.BuiltinFunctionType):
        return f"the function {key.__qualname__} of {key.__module__ or 'torch'}"
    return f"{key!r} of type {type(key).__name__}"


def _advice(cls: type, key: Any) -> str:
    if isinstance(key, nn.Module):
        return "A module calls functions in its forward: name one of those, such as F.linear."
    if type(key).__name__ == "CustomOpDef":
        return "Name the op that it registers, as in torch.ops.my_library.my_op."
    if isinstance(getattr(key, "__self__", None), Tensor):
        return f"Name the function and not a method of one tensor: torch.Tensor.{key.__name__}."
    if isinstance(key, _C_CALLABLES) and _is_a_factory(key):
        return "It makes a tensor from none, and dispatches to no class: call the constructor or a function of yours."
    module = getattr(key, "__module__", None) or ""
    if module.partition(".")[0] == "torch" or _is_function_class(getattr(key, "__self__", None)):
        return "It runs as Python code, and the functions of torch that it calls dispatch to rules: name one of those."
    if not isinstance(key, types.FunctionType):
        return "Name a function of torch."
    return (
        f"A decorator names its op: write `@{cls.__name__}.implements(torch.add)` above `def rule(func, *args, "
        f"**kwargs)`. A function of your own dispatches to rules if torch.overrides.wrap_torch_function decorates it."
    )


def _operator_method(key: Any) -> str | None:
    """Returns the function that torch dispatches if an operator runs a method in C such as ``Tensor.__add__``, or None.

    ``x + y`` dispatches ``Tensor.add``. For other operators, such as ``-x`` and ``x & y``, torch dispatches the method
    itself.
    """
    name = getattr(key, "__name__", "")
    if not isinstance(key, _C_CALLABLES) or getattr(Tensor, name, None) is not key:
        return None
    return _OPERATOR_METHODS.get(name)


# ---- rules -------------------------------------------------------------------------------------------------


def check_rule(cls: type, keys: Iterable[Any], rule: Callable[..., Any]) -> None:
    """Checks that a rule is a function without the parameters of a ``__torch_dispatch__``.

    Raises:
        SpecError: it is another object, or has these parameters.
    """
    expected = f"write `@{cls.__name__}.implements(...)` above `def rule(func, *args, **kwargs)`"
    if not callable(rule):
        raise SpecError(
            f"{cls.__name__}: expected a function as the rule for {next(iter(keys))}, got {rule!r} of type "
            f"{type(rule).__name__}",
            code="rule-parameters",
            hint=expected,
        )
    code = getattr(rule, "__code__", None)
    if code is not None and code.co_varnames[1:3] == ("types", "args"):
        raise SpecError(
            f"{cls.__name__}: the rule {rule.__qualname__} has the parameters of a __torch_dispatch__, and a rule is "
            "called with the arguments of the op",
            code="rule-parameters",
            hint=expected,
        )


def is_a_function_of_tensors(key: Any) -> bool:
    """Whether a key is a function of torch or torch.nn.functional that returns something, or an in-place method."""
    name = getattr(key, "__name__", "")
    if name.endswith("_") and not name.endswith("__") and getattr(Tensor, name, None) is key:
        return True
    is_check = name.startswith(("_assert", "_check"))
    return not is_check and any(getattr(home, name, None) is key for home in (torch, nn.functional))
