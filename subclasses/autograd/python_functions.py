"""Groups of Python-level functions that are the same operation.

A rule for ``torch.sum`` covers ``x.sum()`` too, and a rule for ``torch.matmul`` covers ``x @ y``. Most operators need
no table: PyTorch implements ``x @ y`` with ``Tensor.matmul`` and ``1 - x`` with ``torch.rsub``. Functions of
``torch.nn.functional`` written in Python call ``torch`` functions, each of which is intercepted too. The groups
therefore cover synonyms, and the two ways to call one function, ``torch.f(x)`` and ``x.f()``. They also cover the few
operators that are functions of their own, such as ``x & y``.

A rule for a function of ``torch.nn.functional`` covers that function only: ``F.softmax`` calls ``Tensor.softmax``, and
not the other way round.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import OpOverload, aten_overload_names, nn_functions, tags_of

# Functions with another argument order than the method: torch.where(condition, x, y) is x.where(condition, y).
_OTHER_ARGUMENT_ORDER = frozenset({"where", "polygamma"})

# In-place methods that do not compute what the function does: x.bernoulli_() takes its probability from an argument.
_OTHER_MEANING = frozenset({"bernoulli_"})

_SYNONYMS = (
    ("absolute", "abs"),
    ("arccos", "acos"),
    ("arccosh", "acosh"),
    ("arcsin", "asin"),
    ("arcsinh", "asinh"),
    ("arctan", "atan"),
    ("arctan2", "atan2"),
    ("arctanh", "atanh"),
    ("clip", "clamp"),
    ("concat", "cat"),
    ("concatenate", "cat"),
    ("divide", "div"),
    ("fix", "trunc"),
    ("ger", "outer"),
    ("greater", "gt"),
    ("greater_equal", "ge"),
    ("less", "lt"),
    ("less_equal", "le"),
    ("moveaxis", "movedim"),
    ("multiply", "mul"),
    ("negative", "neg"),
    ("not_equal", "ne"),
    ("row_stack", "vstack"),
    ("subtract", "sub"),
    ("swapaxes", "transpose"),
    ("swapdims", "transpose"),
    ("true_divide", "div"),
    # The operators that PyTorch implements with a method of their own.
    ("__invert__", "bitwise_not"),
    ("__and__", "bitwise_and"),
    ("__or__", "bitwise_or"),
    ("__xor__", "bitwise_xor"),
    ("__lshift__", "bitwise_left_shift"),
    ("__rshift__", "bitwise_right_shift"),
    ("__iand__", "bitwise_and_"),
    ("__ior__", "bitwise_or_"),
    ("__ixor__", "bitwise_xor_"),
    ("__ilshift__", "bitwise_left_shift_"),
    ("__irshift__", "bitwise_right_shift_"),
)

# Functions of other modules that PyTorch documents as aliases of a function of ``torch``, by its name there.
_OF_MODULES: tuple[tuple[Any, dict[str, str]], ...] = (
    (
        torch.linalg,
        {"inv": "inverse", "householder_product": "orgqr"}
        | {n: n for n in ("det", "matmul", "matrix_exp", "matrix_power", "slogdet")},
    ),
    (
        torch.special,
        {
            "expit": "sigmoid",
            "gammainc": "igamma",
            "gammaincc": "igammac",
            "gammaln": "lgamma",
            "psi": "digamma",
        }
        | {"multigammaln": "mvlgamma"}
        | {n: n for n in ("digamma", "erf", "erfc", "erfinv", "exp2", "expm1", "i0", "log1p", "log_softmax")}
        | {n: n for n in ("logit", "logsumexp", "round", "sinc", "softmax", "xlogy")},
    ),
)


def _functions_named(name: str) -> Iterator[Any]:
    """Yields ``torch.name`` and ``Tensor.name`` if they exist and take the same arguments."""
    if name not in _OTHER_ARGUMENT_ORDER:
        for home in (torch, Tensor):
            function = getattr(home, name, None)
            if callable(function):
                yield function


def _collect_groups() -> dict[Any, list[Any]]:
    """Maps each function with equivalents to its group."""
    canonical = dict(_SYNONYMS)
    groups: dict[str, list[Any]] = {}
    for name in sorted({*dir(torch), *dir(Tensor)}):
        if not name.startswith("_") or name in canonical:
            groups.setdefault(canonical.get(name, name), []).extend(_functions_named(name))
    for module, names in _OF_MODULES:
        for name, canonical_name in names.items():
            groups[canonical_name].append(getattr(module, name))
    return {f: group for group in groups.values() if len(group) > 1 for f in group}


_groups = _collect_groups()


def twins(function: Callable[..., Any]) -> list[Any]:
    """Returns the other Python-level functions that compute the same result from the same arguments."""
    return [f for f in _groups.get(function, ()) if f is not function]


# Operators that write to their left operand, where Python calls a method of that name.
_WRITING_OPERATORS = frozenset(
    "__iadd__ __iand__ __idiv__ __ifloordiv__ __ilshift__ __imatmul__ __imod__ __imul__ __ior__ __ipow__ __irshift__ "
    "__isub__ __itruediv__ __ixor__ __setitem__".split()
)

# PyTorch has no derivative of these, though their results may be floating-point numbers of a declared class.
WITHOUT_DERIVATIVE = frozenset(
    "bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor".split()
)


def registering(cls: Any, op: OpOverload) -> str:
    """Returns a phrase that tells an author how to register a rule for an op."""
    name = op.overloadpacket.__name__
    if (function := name.strip("_")) not in WITHOUT_DERIVATIVE:
        return f"add one with @{cls.__name__}.implements(torch.ops.{op})"
    rule = f"@{cls.__name__}.implements(torch.{function})"
    if name.endswith("_"):
        return f"write x = torch.{function}(x, ...), with a rule for that function: {rule}"
    return f"add one for the function, {rule}: the op has no derivative"


def writes_of(function: Callable[..., Any]) -> Callable[[Any, Any], Sequence[Any]] | None:
    """Returns a function of a call's arguments that returns the tensors it writes to; None if the function writes none.

    These are ``x`` in ``x.mul_(y)``, ``x &= y``, ``F.relu_(x)`` and ``F.relu(x, inplace=True)``, and the tensors passed
    as ``out=``.
    """
    name = getattr(function, "__name__", "")
    if name in _WRITING_OPERATORS or (name.endswith("_") and not name.endswith("__")):
        return lambda args, kwargs: args[:1] or tuple(kwargs.values())[:1]
    if isinstance(function, types.FunctionType):
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        if "inplace" not in names:
            return None
        position = names.index("inplace")

        def inplace(args: Any, kwargs: Any) -> Sequence[Any]:
            is_inplace = args[position] if len(args) > position else kwargs.get("inplace")
            return (args[0] if args else kwargs.get(names[0]),) if is_inplace else ()

        return inplace
    if getattr(Tensor, name, None) is function:
        return None

    def outs(args: Any, kwargs: Any) -> Sequence[Any]:
        out = kwargs.get("out")
        return out if isinstance(out, list | tuple) else () if out is None else (out,)

    return outs


def in_place_forms(function: Callable[..., Any]) -> tuple[Any, ...]:
    """Returns the in-place functions of a function and its twins, such as ``Tensor.add_``, which ``x += y`` calls.

    Those that change sizes, such as ``Tensor.squeeze_``, are left out: they write no elements.
    """
    names = sorted({f"{f.__name__}_" for f in _groups.get(function, ())} - _OTHER_MEANING)
    functions = [f for n in names if not _changes_metadata(n) for f in _functions_named(n)]
    return tuple(dict.fromkeys([*functions, *(twin for f in functions for twin in twins(f))]))


def _changes_metadata(name: str) -> bool:
    packet: Any = getattr(torch.ops.aten, name, None)
    overloads = packet.overloads() if packet is not None else ()
    return any(torch.Tag.inplace_view in getattr(packet, o).tags for o in overloads)


def python_functions(op: OpOverload) -> tuple[Any, ...]:
    """Returns the Python-level functions that call a composite op; empty if there are none."""
    return _functions_of_packet(op.overloadpacket.__name__)


def _functions_of_packet(name: str) -> tuple[Any, ...]:
    homes = (torch, Tensor, nn_functions, torch.linalg, torch.special, torch.fft)
    functions = [getattr(home, name, None) for home in homes if name not in _OTHER_ARGUMENT_ORDER]
    for prefix, home in (("linalg_", torch.linalg), ("special_", torch.special), ("fft_", torch.fft)):
        if name.startswith(prefix):
            functions.append(getattr(home, name.removeprefix(prefix), None))
    seen = [f for f in functions if callable(f)]
    seen += [twin for f in seen for twin in twins(f)]
    return tuple(dict.fromkeys(seen))


def tagged_functions(tag: torch.Tag) -> tuple[Any, ...]:
    """Returns the Python-level functions of all ops with a tag, such as ``torch.Tag.pointwise``."""
    tagged: list[Any] = []
    for name, overloads in aten_overload_names().items():
        functions = _functions_of_packet(name)
        # An `out=` form has no tag alone.
        if functions and any(tag in tags_of(name, o) for o in overloads if not o.endswith("out")):
            tagged += functions
    return tuple(dict.fromkeys(tagged))
