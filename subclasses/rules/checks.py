"""Checks of a registration: that torch can ask for the rule, that it can take what it is called with, and returns.

These mistakes would be silent or late otherwise: a rule for a function that never calls ``__torch_function__`` never
runs, a rule with too few or too many parameters fails at its first call, in the middle of a program, and a rule without
``return`` gives None, which something else fails at.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import get_ignored_functions, get_overridable_functions

from subclasses._torch import HigherOrderOperator, OpOverload, OpOverloadPacket, schema_of
from subclasses.errors import SpecError
from subclasses.ops.schema import ops_of_packet
from subclasses.rules.families import Family
from subclasses.spec.return_analysis import returns_nothing

# ---- what torch can ask for --------------------------------------------------------------------------------

_ACCEPTED = (
    "ops (torch.ops.aten.mul.Tensor), packets (torch.ops.aten.mul), families (subclasses.arithmetic), functions "
    "(torch.sum, F.linear, and for an attribute torch.Tensor.T.__get__) and tags (torch.Tag.pointwise)"
)
_C_CALLABLES = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.ClassMethodDescriptorType,
)
# Methods that wrap a method of another name, for which torch asks.
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
    """Checks what a rule is registered for.

    Raises:
        SpecError: it is no op, packet, tag or function, or a callable that torch never dispatches.
    """
    name = f"{cls.__name__}.implements"
    if isinstance(key, OpOverload) and not _takes_a_tensor(key):
        packet = key.overloadpacket
        others = [str(op) for op in ops_of_packet(packet) if _takes_a_tensor(op)]
        mend = f"name torch.ops.{packet}, for {' and '.join(others[:3])}" if others else "name one that does"
        raise SpecError(f"{name}: torch never calls a rule for {key}, which takes no tensor; {mend}")
    if isinstance(key, OpOverload | OpOverloadPacket | torch.Tag | HigherOrderOperator | Family):
        return
    method = getattr(key, "__name__", "")
    if method in _GENERATED and getattr(Tensor, method, None) == key:
        raise SpecError(
            f"{name}: torch never calls a rule for Tensor.{method}, since the class has a method {method} of its own, "
            f"which is generated; define {method} in the body of {cls.__name__} to replace it"
        )
    if not callable(key) or isinstance(key, type):
        raise SpecError(f"{name} takes {_ACCEPTED}, got {key!r}")
    if called := _operator_method(key):
        home = "torch.Tensor" if called.endswith("_") else "torch"
        raise SpecError(
            f"{name}: torch never calls a rule for Tensor.{key.__name__}, since the operator calls Tensor.{called}; "
            f"name {home}.{called}"
        )
    if not is_dispatchable(key):
        raise SpecError(
            f"{name}: torch never calls a rule for {_describe(key)}. {_advice(cls, key)} {name} takes {_ACCEPTED}"
        )


def _takes_a_tensor(op: OpOverload) -> bool:
    return any("Tensor" in str(a.type) for a in schema_of(op).arguments)


def is_dispatchable(function: Any) -> bool:
    """Whether a callable can ask its arguments' classes for a rule.

    A function in Python asks by a name of ``torch.overrides`` in its code, or in the code that it wraps. Dynamo asks
    for every method of ``Tensor``. What is written in C asks if it belongs to torch; a callable of another extension
    may, and is accepted.
    """
    owner = getattr(function, "__self__", None)
    if isinstance(function, types.MethodWrapperType) and isinstance(owner, property):
        return is_dispatchable(owner.fget)  # a property is asked for as its getter's __get__
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
    """Whether this is an ``autograd.Function``, whose ``apply`` asks no class; newer releases have it in C."""
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
    )  # that of a getter, for its __get__
    owner = owner or getattr(function, "__objclass__", None) or function
    module = getattr(owner, "__module__", None) or ""
    return module.partition(".")[0] in sys.stdlib_module_names


def _is_a_factory(function: Any) -> bool:
    """Whether a function of torch makes a tensor from none, such as ``torch.ones``, and hence asks no class."""
    name = getattr(function, "__name__", "")
    if getattr(torch, name, None) is not function or function not in get_ignored_functions():
        return False
    packet: Any = getattr(torch.ops.aten, name, None)
    schemas = [schema_of(getattr(packet, o)) for o in packet.overloads()] if packet is not None else []
    taken = [a for schema in schemas for a in schema.arguments if not a.is_out]
    return not any("Tensor" in str(a.type) for a in taken)


def _is_overridable(function: Any) -> bool:
    """Whether a function of torch asks through another one, which it closes over as F.max_pool2d does, or calls.

    PyTorch's list of the latter takes long to make.
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
        return (
            "It makes a tensor from none, and asks no class; call the constructor, or a function of your own."
        )
    module = getattr(key, "__module__", None) or ""
    if module.partition(".")[0] == "torch" or _is_function_class(getattr(key, "__self__", None)):
        return "It runs as Python code, and the functions of torch that it calls ask for a rule: name one of those."
    if not isinstance(key, types.FunctionType):
        return "Name a function of torch."
    return (
        f"A decorator names its op: write `@{cls.__name__}.implements(torch.add)` above `def rule(func, *args, "
        f"**kwargs)`. A function of your own asks for a rule if torch.overrides.wrap_torch_function decorates it."
    )


def _operator_method(key: Any) -> str | None:
    """Returns the function that torch names where an operator runs a method in C such as ``Tensor.__add__``, or None.

    ``x + y`` asks for a rule of ``Tensor.add``. Of the other operators, such as ``-x`` and ``x & y``, torch names the
    method itself.
    """
    name = getattr(key, "__name__", "")
    if not isinstance(key, _C_CALLABLES) or getattr(Tensor, name, None) is not key:
        return None
    return _OPERATOR_METHODS.get(name)


# ---- what a rule can take ----------------------------------------------------------------------------------


def check_rule(cls: type, keys: Iterable[Any], rule: Callable[..., Any]) -> None:
    """Checks that a rule is a function that can be called for each of its keys, and returns something.

    It is called as ``rule(func, *args, **kwargs)`` with the arguments that an op requires. Arguments with a default
    are passed only where they have another value, so a rule may leave them out. A Python-level function passes on what
    its caller wrote; the rule may then be one for calls with all arguments. For a packet or a function with several
    overloads, the rule must be able to take the arguments of one of them.

    Raises:
        SpecError: the rule is not callable, can take the arguments of no overload of a key, or ends without a value on
            each way through it though every op that it is for has a result.
    """
    keys = tuple(keys)
    if not callable(rule):
        raise SpecError(
            f"{cls.__name__}: expected a function as the rule for {keys[0]}, got {rule!r} of type "
            f"{type(rule).__name__}; write `@{cls.__name__}.implements(...)` above `def rule(func, *args, **kwargs)`"
        )
    try:
        signature = inspect.signature(rule)
    except (TypeError, ValueError):
        signature = None  # a callable in C without a signature
    nothing, takes_all = returns_nothing(rule), signature is not None and _takes_all(signature)
    for key in keys:
        if signature is not None and not takes_all:
            _check_arguments(cls, key, rule, signature)
        if nothing and _has_results(key):
            raise SpecError(
                f"{cls.__name__}: the rule {_name(rule)} for {_name(key)} returns nothing, and callers expect a "
                f"result; end it with `return ...`"
            )


def _takes_all(signature: inspect.Signature) -> bool:
    """Whether a rule can be called with any arguments: ``rule(func, *args, **kwargs)``."""
    first, *rest = [p.kind for p in signature.parameters.values()] or [None]
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return first in named and rest == [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]


def _check_arguments(cls: type, key: Any, rule: Callable[..., Any], signature: inspect.Signature) -> None:
    called = inspect.unwrap(key) if isinstance(key, types.FunctionType) else key  # Tensor.__pow__: in C
    if [*signature.parameters][1:3] == ["types", "args"]:
        raise SpecError(
            f"{cls.__name__}: the rule {_name(rule)}{signature} has the parameters of a __torch_dispatch__, and a rule "
            f"is called as rule(func, *args, **kwargs) with the arguments of {_name(key)}"
        )
    if names := _parameters_taken_for_func(called, [*signature.parameters]):
        raise SpecError(
            f"{cls.__name__}: the rule for {_name(key)} is {_name(rule)}{signature}, whose first parameter is that of "
            f"{_name(key)}; a rule takes the function before its arguments: def rule(func, {', '.join(names)})"
        )
    calls = list(_calls(called))
    if calls and not any(_binds(signature, args, kwargs) for _, args, kwargs in calls):
        shown = " or ".join(dict.fromkeys(_show_call(called) for called, _, _ in calls[:3]))
        raise SpecError(
            f"{cls.__name__}: the rule for {_name(key)} is {_name(rule)}{signature}, and is called as rule(func, "
            f"*args, **kwargs) with the arguments of {shown}; those with a default are passed only where they differ "
            f"from it, so the rule gives them a default too"
        )


_FUNC = frozenset({"func", "function", "fn", "f", "op", "_", "_func"})


def _parameters_taken_for_func(key: Any, names: list[str]) -> list[str]:
    """Returns the parameters of a key, with defaults, if a rule has its names in their places, and none for `func`."""
    called = key if isinstance(key, types.FunctionType) else next(iter(_calls(key)), (key,))[0]
    parameters = inspect.signature(called).parameters if isinstance(called, types.FunctionType) else {}
    of_key = {name: str(p.replace(annotation=p.empty)) for name, p in parameters.items()}
    if isinstance(called, OpOverload):
        arguments = [a for a in schema_of(called).arguments if not a.kwarg_only]
        of_key = {a.name: a.name + f"={a.default_value!r}" * a.has_default_value() for a in arguments}
    is_shifted = any(one == other for one, other in zip(names[1:], of_key, strict=False))
    in_place = any(one == other for one, other in zip(names[1:], [*of_key][1:], strict=False))
    takes_func = not names or names[0] in _FUNC
    return [*of_key.values()] if in_place and not (is_shifted or takes_func) else []


def _has_results(key: Any) -> bool:
    """Whether every op of a key returns something."""
    ops = [key] if isinstance(key, OpOverload) else []
    ops = [*ops_of_packet(key)] if isinstance(key, OpOverloadPacket) else ops
    returns = isinstance(key, Family) or (bool(ops) and all(schema_of(op).returns for op in ops))
    return returns or is_a_function_of_tensors(key)


def is_a_function_of_tensors(key: Any) -> bool:
    """Whether a key is a function of torch or torch.nn.functional that returns something, or an in-place method."""
    name = getattr(key, "__name__", "")
    if name.endswith("_") and not name.endswith("__") and getattr(Tensor, name, None) is key:
        return True
    is_check = name.startswith(("_assert", "_check"))
    return not is_check and any(getattr(home, name, None) is key for home in (torch, nn.functional))


# What is called, the number of positional arguments, and the names of keyword arguments.
Call = tuple[Any, int, tuple[str, ...]]


def _show_call(called: Any) -> str:
    """Returns the text of the signature of an op, a family or a function."""
    if isinstance(called, OpOverload):
        return str(schema_of(called))
    if isinstance(called, Family):
        return called.call
    return f"{called.__qualname__}{inspect.signature(called)}"


def _calls(key: Any) -> Iterable[Call]:
    """Returns the calls of a key that a rule has to take: the smallest call of each overload."""
    if isinstance(key, OpOverload):
        return (_smallest(key),)
    if isinstance(key, OpOverloadPacket):
        return [_smallest(op) for op in ops_of_packet(key)]
    if isinstance(key, Family):
        return ((key, key.arguments, ()),)
    if isinstance(key, types.FunctionType):
        return _python_calls(key)
    if isinstance(key, _C_CALLABLES):
        return _calls_in_c(getattr(torch.ops.aten, key.__name__, None))
    return ()


@functools.cache
def _calls_in_c(packet: Any) -> tuple[Call, ...]:
    """Returns the calls of a function in C, which those of a packet are by their names."""
    # `torch.ops.aten.__eq__` is the comparison of the namespace.
    is_packet = isinstance(packet, OpOverloadPacket)
    # A call with `out=` has the arguments of one without it, so a rule that takes the former takes the latter.
    names = [name for name in packet.overloads() if not name.endswith("out")] if is_packet else []
    overloads = [getattr(packet, name) for name in names]
    # A method takes sizes as separate arguments too, x.view(2, 3), so the number of arguments is not known.
    if any(_takes_ints(op) for op in overloads):
        return ()
    return tuple(
        (called, n, keywords)
        for called, fewest, keywords in map(_smallest, overloads)
        for n in range(fewest, _count_positional(called) + 1)
    )


@functools.cache
def _smallest(op: OpOverload) -> Call:
    required = [a for a in schema_of(op).arguments if not a.has_default_value()]
    keywords = tuple(a.name for a in required if a.kwarg_only)
    return op, len(required) - len(keywords), keywords


def _count_positional(op: OpOverload) -> int:
    return sum(not a.kwarg_only for a in schema_of(op).arguments)


def _takes_ints(op: OpOverload) -> bool:
    kinds = [a.type for a in schema_of(op).arguments]
    return any("List[int]" in str(kind) for kind in kinds if kind.kind() in ("ListType", "OptionalType"))


def _python_calls(function: types.FunctionType) -> Iterator[Call]:
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return  # torch passes its arguments on in a form of its own
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    fewest = sum(p.default is p.empty for p in positional)
    keywords = tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty)
    for n in range(fewest, len(positional) + 1):
        yield function, n, keywords


def _binds(signature: inspect.Signature, args: int, kwargs: tuple[str, ...]) -> bool:
    try:
        signature.bind(None, *[None] * args, **dict.fromkeys(kwargs))
    except TypeError:
        return False
    return True


def _name(value: Any) -> str:
    if isinstance(value, OpOverload | OpOverloadPacket):
        return str(value)
    if isinstance(value, Family):
        return f"the family {value.name}"
    name = getattr(value, "__name__", "")
    if isinstance(value, types.BuiltinFunctionType) and getattr(torch, name, None) is value:
        return f"torch.{name}"
    return getattr(value, "__qualname__", None) or repr(value)
