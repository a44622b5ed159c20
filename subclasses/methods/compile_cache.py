"""The representation of a value in the key of AOTAutograd's cache.

The cache outlives the process, so the key must be the same in every process: no ``hash()``, no ids, no order of a set.
The key must change with everything that the compiled program depends on. That includes more than the metadata of the
value: an edited rule compiles to another program for the same Dynamo graph. The key therefore covers the text of the
class and the source files of its rules.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import inspect
import os
import pickle
import sys
import types
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import is_traceable_wrapper_subclass
from subclasses.layout import Layout, layout_of
from subclasses.rules.author_code import unwrapped
from subclasses.rules.registry import all_rules
from subclasses.spec.constants import constants_of

# ---- values ------------------------------------------------------------------------------------------------


def stable_hash(x: Tensor) -> str:
    """Returns a digest of the value's class, metadata and tensor properties, on which a compiled program depends."""
    return _digest(repr((_describe_layout(layout_of(x)), _describe_tensor(x))))


def _describe_layout(layout: Layout) -> str:
    nested = [(name, _describe_layout(inside)) for name, inside in layout.nested]
    cls = layout.cls
    facts = (fingerprint(cls), describe_value(layout.statics), layout.present, nested, layout.cotangent)
    return f"{cls.__module__}.{cls.__qualname__}{facts}"


def _describe_tensor(t: Tensor) -> tuple[Any, ...]:
    facts = (
        [str(s) for s in t.shape],
        [str(s) for s in t.stride()],
        str(t.storage_offset()),
        str(t.dtype),
        str(t.device),
        t.requires_grad,
        t.is_conj(),
        t.is_neg(),
        t.is_inference(),
    )
    if not is_traceable_wrapper_subclass(t):
        return facts
    names, _ = t.__tensor_flatten__()
    return (*facts, [(name, _describe_tensor(getattr(t, name))) for name in names])


def describe_value(value: Any) -> str:
    """Returns text for static metadata: the same for equal values in every process, different for other values."""
    type_name = f"{type(value).__module__}.{type(value).__qualname__}"
    match value:
        case enum.Enum():
            return f"{type_name}.{value.name}"
        case tuple():
            return f"{type_name}({', '.join(map(describe_value, value))})"
        case list():
            return f"{type_name}[{', '.join(map(describe_value, value))}]"
        case dict():
            items = [f"{describe_value(k)}: {describe_value(v)}" for k, v in value.items()]
            return f"{type_name}{{{', '.join(items)}}}"
        case frozenset():
            return f"{type_name}({', '.join(sorted(map(describe_value, value)))})"
        case types.FunctionType():
            return f"{value.__module__}.{value.__qualname__}:{_digest(describe_function(value))}"
        case type() | types.BuiltinFunctionType():
            return f"{value.__module__}.{value.__qualname__}"
        case _ if type(value) in _BUILT_IN:  # a class that inherits from one may have a `repr` of its own
            return f"{type_name}:{value!r}"
    if dataclasses.is_dataclass(value):
        fields = [(f.name, describe_value(getattr(value, f.name))) for f in dataclasses.fields(value)]
        return f"{type_name}{fields}"
    return f"{type_name}:{hashlib.blake2b(pickle.dumps(value)).hexdigest()}"


_BUILT_IN = (type(None), bool, int, float, complex, str, bytes)
_BUILT_IN += (torch.dtype, torch.device, torch.layout, torch.memory_format)  # type: ignore[assignment]


def describe_function(function: types.FunctionType) -> str:
    """Returns text for a function: its code, the defaults of its parameters, and the variables it closes over."""
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    values = [*(function.__defaults__ or ()), *cells]
    defaults = sorted((function.__kwdefaults__ or {}).items())
    code = function.__code__
    named = [(name, describe_value(value)) for name, value in defaults]
    return repr(
        (code.co_code, _stable_constants(code), code.co_names, list(map(describe_value, values)), named)
    )


# ---- classes -----------------------------------------------------------------------------------------------

# class -> (number of rules, digest). Registering a rule later makes a new digest.
_fingerprints: weakref.WeakKeyDictionary[type, tuple[int, str]] = weakref.WeakKeyDictionary()


def fingerprint(cls: type) -> str:
    """Returns a digest of the code of a class: its text, the files of its bases and rules, this package, torch."""
    rules = [*all_rules(cls), *_tabled_functions(cls)]
    known = _fingerprints.get(cls)
    if known is None or known[0] != len(rules):
        code = {*map(_code_digest, cls.__mro__), *(_code_digest(rule) for _, rule in rules)}
        keys = sorted(map(_name_of_key, (key for key, _ in rules)))
        constants = sorted((name, repr(c)) for name, c in constants_of(cls).items())
        text = repr(
            (getattr(cls, "__source__", ""), keys, constants, _versions(cls), _own_files(), sorted(code))
        )
        known = _fingerprints[cls] = len(rules), _digest(text)
    return known[1]


def _name_of_key(key: Any) -> str:
    """Returns text for the key of a rule, without addresses."""
    if isinstance(key, tuple | list | frozenset):
        return str(sorted(map(_name_of_key, key)))
    return getattr(key, "__qualname__", None) or (
        str(key) if " at 0x" not in str(key) else type(key).__name__
    )


# The methods in which a class written by hand looks up the rule of an op.
_DISPATCHING = ("__torch_dispatch__", "__torch_function__")


def _tabled_functions(cls: type) -> list[tuple[Any, Any]]:
    """Returns the functions in tables of a class written by hand, with their keys: its rules, from any file.

    A table is an attribute of the class or of a base, or a global that its ``__torch_dispatch__`` reads.
    """
    if hasattr(cls, "__spec__"):
        return []
    tables = [value for base in cls.__mro__ for value in vars(base).values()]
    for name in _DISPATCHING:
        method: Any = inspect.unwrap(getattr(getattr(cls, name), "__func__", None))  # type: ignore[arg-type]
        if isinstance(method, types.FunctionType):
            tables += [method.__globals__.get(n) for n in method.__code__.co_names]
    return [item for table in tables if isinstance(table, dict) for item in _functions_in(table, set())]


def _functions_in(table: dict[Any, Any], seen: set[int]) -> Iterator[tuple[Any, Any]]:
    if id(table) in seen:
        return
    seen.add(id(table))
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _functions_in(value, seen)
        elif isinstance(value, types.FunctionType):
            yield key, value


def _versions(cls: type) -> list[str]:
    """Returns the versions of torch and of the packages that define a class and its bases."""
    packages = {base.__module__.partition(".")[0] for base in cls.__mro__} | {"torch"}
    return [f"{p} {getattr(sys.modules.get(p), '__version__', '')}" for p in sorted(packages)]


def _code_digest(made: Any) -> str:
    """Returns a digest of the file that defines a class or function, or of its bytecode if there is no file."""
    if getattr(made, "__module__", "").split(".")[0] in ("torch", "builtins"):
        return ""
    made = unwrapped(made)
    try:
        path = inspect.getsourcefile(made)
    except (TypeError, OSError):  # built in, or defined at a prompt
        path = None
    if path and (state := _file_state(path)) is not None:
        return _file_digest(path, *state)
    code = getattr(made, "__code__", None)
    return _digest(repr((code.co_code, _stable_constants(code), code.co_names))) if code else repr(made)


def _file_state(path: str) -> tuple[int, int] | None:
    try:
        state = os.stat(path)
    except OSError:
        return None
    return state.st_mtime_ns, state.st_size


@functools.lru_cache(maxsize=1024)
def _file_digest(path: str, changed: int, size: int) -> str:
    """Returns a digest of a file in the state that was last written at `changed`, in nanoseconds."""
    return _digest(Path(path).read_text())


def _stable_constants(code: types.CodeType) -> list[Any]:
    """Returns constants without addresses: nested code objects are represented by their bytecode."""
    return [
        (c.co_code, _stable_constants(c), c.co_names) if isinstance(c, types.CodeType) else describe_value(c)
        for c in code.co_consts
    ]


@functools.cache
def _own_files() -> str:
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    return _digest("".join(f.read_text() for f in files))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
