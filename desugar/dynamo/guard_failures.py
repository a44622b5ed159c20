"""Describes why Dynamo recompiles: which guard of the newest program failed, and both values, in the user's names.

Dynamo reports the text of the first guard that fails. Some of these texts hold both values. Others hold the guard
alone; then this module reads the actual value from the call's frame. The text of a guard on the metadata of a tensor
subclass names no tensor. Then this module compares the layouts of the earlier program and of the call. For a mode,
Dynamo reports the name without values. This module reads the present value; a switch had the opposite value before.
"""

from __future__ import annotations

import functools
import re
import reprlib
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from desugar import _torch as private
from desugar.flatten.rule_state import PREFIX, RuleState
from desugar.ir.values import Value, Wrapper, is_wrapper, take_apart
from desugar.program import Program
from desugar.recording.listeners import Caller
from desugar.recording.user_names import readable
from subclasses import TensorSubclass
from subclasses.errors import one_of
from subclasses.layout import field_name

# --------------------------------------------------------------------------------------------------- the values

UNKNOWN = type("Unknown", (), {"__repr__": lambda self: "?"})()
_ROOT = re.compile(r"G\['(\w+)'\]|(\w+)")
_STEP = re.compile(r"\.(size|stride)\(\)\[(\d+)\]|\.(\w+)|\['([^']*)'\]|\[(\d+)\]")


def find_value(path: str, frame: Mapping[str, Any], scope: Mapping[str, Any]) -> Any:
    """Evaluates a Dynamo expression with local variables `frame` and global variables `scope`.

    Returns `UNKNOWN` if it is not a path of attributes, keys and indices, or if a step does not exist or raises.
    """
    root = _ROOT.match(path)
    if root is None:
        return UNKNOWN
    value, position = (scope.get(root[1], UNKNOWN) if root[1] else frame.get(root[2], UNKNOWN)), root.end()
    while position < len(path) and value is not UNKNOWN:
        step = _STEP.match(path, position)
        if step is None:
            return UNKNOWN
        try:
            value = _take_step(value, step)
        except Exception:  # noqa: BLE001 - a user's own __getattr__ or __getitem__ may raise anything
            return UNKNOWN
        position = step.end()
    return value


def _take_step(value: Any, step: re.Match[str]) -> Any:
    extents, dim, attribute, key, index = step.groups()
    if extents is not None:
        return getattr(value, extents)(int(dim))
    if attribute is not None:
        return getattr(value, attribute)
    return value[key if key is not None else int(index)]


def unless_unknown(read: Callable[[Any], Any], value: Any) -> Any:
    """Returns `read(value)`; `UNKNOWN` if the value is unknown or `read` raises."""
    if value is UNKNOWN:
        return UNKNOWN
    try:
        return read(value)
    except Exception:  # noqa: BLE001 - a user's own __len__ or keys may raise anything
        return UNKNOWN


def short(value: Any) -> str:
    """Formats a value in a few words: a tensor by its type, a function and a class by its name."""
    if isinstance(value, Tensor):
        return f"{one_of(type(value))}"
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, FunctionType):
        return value.__qualname__.replace("<locals>.", "")
    if isinstance(value, BuiltinFunctionType):  # such as torch.sin, whose type has no name of torch's
        return value.__name__
    return _REPR.repr(value)


# Reads only the beginning of a long list, and survives an error in the `__repr__` of an item.
_REPR = reprlib.Repr()
_REPR.maxlist = _REPR.maxtuple = _REPR.maxdict = _REPR.maxset = 10
_REPR.maxstring = _REPR.maxother = 80


# -------------------------------------------------------------------------------------------------- the layouts


def value_named(name: str, program: Program | None) -> Value | None:
    """Returns the value of an argument of a program, or of an inner tensor of one, by the user's name."""
    if program is None:
        return None
    for known, value in zip(program.names, program.inputs, strict=False):
        if name == known:
            return value
        if name.startswith(f"{known}."):
            for field in name.removeprefix(f"{known}.").split("."):
                value = dict(value.inner).get(field) if isinstance(value, Wrapper) else None
            return value
    return None


def compare_metadata(name: str, value: Value, leaf: Any) -> str | None:
    """Describes the first difference of a wrapper's metadata, or an inner wrapper's, from an earlier program's value.

    Returns None if the metadata is equal or the types differ.
    """
    if not isinstance(value, Wrapper) or not is_wrapper(leaf) or type(leaf) is not value.cls:
        return None
    names, context = take_apart(leaf)
    if isinstance(leaf, TensorSubclass):
        fields = zip(type(leaf).__spec__.statics, value.context.statics, context.statics, strict=True)
        for static, expected, got in fields:
            if expected != got:
                return f"{name}.{static.name}: expected {expected!r}, got {got!r}"
    present = tuple(field for field, _ in value.inner)
    if present != names:
        expected, got = (", ".join(map(field_name, found)) for found in (present, names))
        return f"inner tensors of {name}: expected {expected}, got {got}"
    found = (
        compare_metadata(f"{name}.{field_name(field)}", part, getattr(leaf, field))
        for field, part in value.inner
    )
    inside = next(filter(None, found), None)
    if inside is None and value.context != context:
        return f"metadata of {name}: expected {short(value.context)}, got {short(context)}"
    return inside


# ------------------------------------------------------------------------------------------------- one failure

_programs: weakref.WeakValueDictionary[str, Program] = weakref.WeakValueDictionary()


@dataclass(frozen=True, slots=True)
class Failure:
    """A call for which Dynamo recompiles.

    Attributes:
        what: The user's function or module, if known.
        leaves: User's name -> argument of the new graph.
        frame: The initial local variables of the frame; empty if unknown.
        scope: The global variables of the frame; empty if unknown.
        earlier: The program whose guard failed; None if unknown or deleted.
    """

    what: Any = None
    leaves: Mapping[str, Any] = field(default_factory=dict)
    frame: Mapping[str, Any] = field(default_factory=dict)
    scope: Mapping[str, Any] = field(default_factory=dict)
    earlier: Program | None = None

    def name(self, text: str) -> str:
        """Translates a Dynamo expression into the user's names."""
        return readable(text, self.what)

    def find(self, path: str) -> Any:
        """Returns the value of a Dynamo expression in this call; `UNKNOWN` if it cannot be evaluated."""
        return find_value(path, self.frame, self.scope)

    def expected(self, name: str, expected: str, value: Any) -> str:
        """Formats the expected and the actual value; leaves out an actual value that is `UNKNOWN`."""
        return f"{name}: expected {expected}" + ("" if value is UNKNOWN else f", got {short(value)}")


def note_program(program: Program) -> None:
    """Records the program of Dynamo's compilation in progress, to compare later calls with it."""
    number = private.CompileContext.current_compile_id()
    if number is not None:
        _programs[str(number)] = program


def describe_failure(caller: Caller | None, leaves: Mapping[str, Any]) -> str:
    """Returns why Dynamo recompiles a frame; an empty string for the first compilation of a frame.

    An error in the user's code (`__repr__`, `__eq__`, `__getattr__`) does not end the compilation: the result is then
    Dynamo's text.

    Args:
        caller: The owner of the call; None if unknown.
        leaves: User's name -> argument of the new graph.
    """
    reason = private.recompile_reason()
    if reason is None or "BACKEND_MATCH" in reason:  # another backend compiled the frame before
        return ""
    number, _, guard = reason.partition(": ")
    what = None if caller is None else caller.what
    try:
        frame, scope = ({}, {}) if caller is None else caller.variables(number)
        return in_words(guard, Failure(what, leaves, frame, scope, _programs.get(number)))
    except Exception:  # noqa: BLE001 - the user's code may raise anything, and the compilation goes on
        return readable(guard.partition("\nUser stack trace")[0], what)


def in_words(reason: str, failure: Failure) -> str:
    """Describes a recompilation reason of Dynamo, by the first pattern that matches its text.

    Returns Dynamo's text in the user's names where no pattern matches.
    """
    guard = reason.partition("\nUser stack trace")[0].partition("  # ")[0].strip()
    for pattern, words in _PATTERNS:
        found = pattern.match(guard)
        if found is not None:
            return _fill(words, found, failure) if isinstance(words, str) else words(found, failure)
    return failure.name(guard)


# ---------------------------------------------------------------------------------------------- kinds of guards

_SCALARS = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
    "Byte": "uint8",
    "Bool": "bool",
}


def _fill(words: str, found: re.Match[str], failure: Failure) -> str:
    """Fills the groups of a pattern into a text; the group `name` is a Dynamo expression."""
    groups = found.groupdict().items()
    return words.format(
        **{key: failure.name(text) if key == "name" else _SCALARS.get(text, text) for key, text in groups}
    )


def _dispatch_keys(found: re.Match[str], failure: Failure) -> str:
    wanted, actual = ({key.strip() for key in keys.split(",")} for keys in found.groups()[1:])
    missing, added = wanted - actual, actual - wanted
    kinds = ["an ordinary tensor", "a tensor made in inference mode"]
    # An inference tensor lacks the keys of autograd, and differs in no other key.
    for absent, other, (expected, got) in ((missing, added, kinds), (added, missing, kinds[::-1])):
        if not other and all(key.startswith(("Autograd", "ADInplaceOrView")) for key in absent):
            return f"{failure.name(found[1])}: expected {expected}, got {got}"
    expected, got = (", ".join(sorted(keys)) or "none" for keys in (missing, added))
    return f"dispatch keys of {failure.name(found[1])}: expected {expected}, got {got}"


def _tensor_type(found: re.Match[str], failure: Failure) -> str:
    name, got = failure.name(found[1]), found[3].rpartition(".")[2]
    if found[2] is not None:  # since 2.15
        return f"type of {name}: expected {found[2].rpartition('.')[2]}, got {got}"
    value = value_named(name, failure.earlier)
    expected = value.cls.__name__ if isinstance(value, Wrapper) else "Tensor"
    return f"type of {name}: expected {'Parameter' if expected == got else expected}, got {got}"


def _type(found: re.Match[str], failure: Failure) -> str:
    value = failure.find(found[1])
    got = UNKNOWN if value is UNKNOWN else type(value)
    return failure.expected(f"type of {failure.name(found[1])}", found[2].rpartition(".")[2], got)


def _identity(found: re.Match[str], failure: Failure) -> str:
    path = found[1].removesuffix(".__code__")
    kind = {"code": "function", "builtin_function_or_method": "function", "NoneType": "None"}.get(
        found[2], found[2]
    )
    expected = "None" if kind == "None" else f"the same {kind.rpartition('.')[2]} as before"
    return failure.expected(failure.name(path), expected, failure.find(path))


# The parameters of the function that calls a compiled module.
_OF_CALLS = {"args": "position", "kwargs": "name"}


def _length(found: re.Match[str], failure: Failure) -> str:
    value, name = failure.find(found[1]), failure.name(found[1])
    words = f"len({name})"
    if isinstance(failure.what, nn.Module) and name in _OF_CALLS:
        words = f"number of arguments passed by {_OF_CALLS[name]}"
    return failure.expected(words, found[2], unless_unknown(len, value))


def _keys(found: re.Match[str], failure: Failure) -> str:
    name, keys = failure.name(found[1]), unless_unknown(list, failure.find(found[1]))
    if found[2] is None:
        return failure.expected(f"keys of {name}", found[3], keys)
    return failure.expected(
        f"key {found[2]} of {name}", found[3], unless_unknown(lambda k: k[int(found[2])], keys)
    )


def _contains(found: re.Match[str], failure: Failure) -> str:
    is_in = found[1] is None
    return f"{found['key']} in {failure.name(found['name'])}: expected {is_in}, got {not is_in}"


def _same(found: re.Match[str], failure: Failure) -> str:
    if found[2] == "None":
        return failure.expected(failure.name(found[1]), "None", failure.find(found[1]))
    return f"{failure.name(found[0])}: expected True, got False"


def _duplicates(found: re.Match[str], failure: Failure) -> str:
    names = [failure.name(name) for name in re.findall(r'"([^"]+)"', found[1])]
    return f"{' is '.join(names)}: expected False, got True"


def _equal(found: re.Match[str], failure: Failure) -> str:
    return failure.expected(failure.name(found[1]), found[2], failure.find(found[1]))


def _sizes(found: re.Match[str], failure: Failure) -> str:
    """Describes a condition on sizes and ints, with the value of each expression in it."""
    paths = dict.fromkeys(_PATH.findall(found[0]))
    values = [
        f"{failure.name(path)} = {failure.find(path)}" for path in paths if failure.find(path) is not UNKNOWN
    ]
    return f"expected {failure.name(found[0])}" + (f", got {', '.join(values)}" if values else "")


def _metadata(found: re.Match[str], failure: Failure) -> str:
    for name, leaf in failure.leaves.items():
        value = value_named(name, failure.earlier)
        if value is not None and (words := compare_metadata(name, value, leaf)):
            return words
    return "metadata of a tensor subclass"


_PATH = re.compile(r"(?<![\w.'\"])(?:[A-Za-z_]\w*)(?:\.\w+(?:\(\))?|\[(?:'[^']*'|\d+)\])*(?![\w(])")
_TENSOR = r"tensor '(?P<name>.+)' "


def _state_of_rules(found: re.Match[str], failure: Failure) -> str:
    state = failure.scope.get(found[1])
    changed = state.changed() if isinstance(state, RuleState) else []
    parts = (failure.expected(read.name, short(read.value), read.now()) for read in changed)
    return "a rule reads a value that has changed" + "".join(f"; {part}" for part in parts)


_EXPECTED = r"expected (?P<expected>-?\w+), actual (?P<got>-?\w+)"
_PATTERNS: list[tuple[re.Pattern[str], str | Callable[[re.Match[str], Failure], str]]] = [
    (
        re.compile(_TENSOR + r"(?P<kind>size|stride) mismatch at index (?P<dim>\d+)\. " + _EXPECTED),
        "{name}.{kind}({dim}): expected {expected}, got {got}",
    ),
    (re.compile(rf"G\['({PREFIX}_\w+)'\]\.is_unchanged == True"), _state_of_rules),
    (re.compile(_TENSOR + r"rank mismatch\. " + _EXPECTED), "{name}.dim(): expected {expected}, got {got}"),
    (re.compile(_TENSOR + r"dtype mismatch\. " + _EXPECTED), "{name}.dtype: expected {expected}, got {got}"),
    (
        re.compile(_TENSOR + r"requires_grad mismatch\. expected requires_grad=0"),
        "{name}.requires_grad: expected False, got True",
    ),
    (
        re.compile(_TENSOR + r"requires_grad mismatch\. expected requires_grad=1"),
        "{name}.requires_grad: expected True, got False",
    ),
    (
        re.compile(
            _TENSOR + r"Tensor device index mismatch\. .* to be (?P<expected>-?\d+), actual (?P<got>-?\d+)"
        ),
        "{name}.device.index: expected {expected}, got {got}",
    ),
    (
        re.compile(
            _TENSOR
            + r"dispatch key set mismatch\. expected DispatchKeySet\((.*)\), actual DispatchKeySet\((.*)\)"
        ),
        _dispatch_keys,
    ),
    (
        re.compile(
            r"expected type of '(.+)' to be (?:a tensor type, '|<class '(.+)'>,) ?but found <class '(.+)'>"
        ),
        _tensor_type,
    ),
    (re.compile(r"___check_type_id\((.+), \d+\), type=<class '(.+?)'>"), _type),
    (re.compile(r"___check_obj_id\((.+), \d+\), type=<class '(.+?)'>"), _identity),
    (re.compile(r"___check_metadata_"), _metadata),
    (re.compile(r"GLOBAL_STATE changed: (.*)"), lambda found, failure: describe_modes(found[1])),
    (re.compile(r"___check_torch_function_mode_stack"), "another mode: torch function modes"),
    (re.compile(r".*Duplicate tensors? found.*?(\[.*\])"), _duplicates),
    (
        re.compile(r"_has_dynamo_dim_marking is present"),
        "a tensor has marked dimensions, and had none",
    ),
    (re.compile(r"Unable to find|Unexpected recompilation"), "no guard fails any more"),
    (re.compile(r"(not )?___dict_contains\((?P<key>.+?), (?P<name>.+)\)$"), _contains),
    (re.compile(r"(not )?\w+\.__contains__\((?P<name>.+), (?P<key>.+)\)$"), _contains),
    (re.compile(r"list\(dict\.keys\((.+)\)\)(?:\[(\d+)\])? == (.+)$"), _keys),
    # Dynamo reports either the mismatch (!=) or the guard (==); the number is the expected length in both.
    (re.compile(r"len\((.+)\) [!=]= (\d+)$"), _length),
    (re.compile(r"([^\s=]+) is ([^\s=]+)$"), _same),
    (re.compile(r"(?=.*(?:size\(\)|stride\(\)|[<>%]))(?:[^'\"]|\['[^']*'\])+$"), _sizes),
    (re.compile(rf"({_PATH.pattern}) == (.+)$"), _equal),
]


# ---- modes of PyTorch --------------------------------------------------------------------------------------

_READERS: dict[str, tuple[str, Callable[[], Any]]] = {
    "grad_mode": ("gradients", torch.is_grad_enabled),
    "autocast_cache_enabled": ("cache of autocast", torch.is_autocast_cache_enabled),
    "deterministic_algorithms": ("deterministic algorithms", torch.are_deterministic_algorithms_enabled),
    "deterministic_algorithms_warn_only": (
        "deterministic algorithms only warn",
        torch.is_deterministic_algorithms_warn_only_enabled,
    ),
    "num_threads": ("number of threads", torch.get_num_threads),
    "default_dtype": ("default dtype", torch.get_default_dtype),
}
for _device in ("cpu", "cuda", "xpu", "mps", "mtia", "hpu"):
    _READERS |= {
        f"autocast({_device})_enabled": (
            f"autocast on {_device}",
            functools.partial(torch.is_autocast_enabled, _device),
        ),
        f"autocast({_device})_dtype": (
            f"dtype of autocast on {_device}",
            functools.partial(torch.get_autocast_dtype, _device),
        ),
    }


def describe_modes(names: str) -> str:
    """Describes the modes that differ.

    Args:
        names: Dynamo's names of the modes, separated by spaces.
    """
    return "; ".join(map(_describe, names.split()))


def _describe(name: str) -> str:
    if name not in _READERS:
        return f"another mode: {name}"
    words, read = _READERS[name]
    return _values(words, read())


def _values(words: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"{words}: expected {'off' if value else 'on'}, got {'on' if value else 'off'}"
    return f"{words}: expected another value, got {str(value).removeprefix('torch.')}"
