"""Describes why Dynamo recompiles: Dynamo's text of the guard that failed, in the user's names, with both values.

Dynamo reports the first guard of the newest program that fails. A text about a tensor's size or dtype has both values.
Another text has the guard alone, so this module reads the actual values from the call's frame. The guards on the
metadata of a tensor subclass and on the state of rules do not name the user's variables. Their descriptions come from
a comparison with the earlier program.
"""

from __future__ import annotations

import contextlib
import re
import reprlib
import weakref
from collections.abc import Mapping
from types import BuiltinFunctionType, FunctionType
from typing import Any

from torch import Tensor, nn

from desugar import _torch as torch_private
from desugar.flatten.rule_state import PREFIX
from desugar.ir.values import Value, Wrapper, take_apart
from desugar.program import Program
from desugar.recording.listeners import CompilationOwner
from desugar.recording.user_names import readable
from subclasses import TensorSubclass
from subclasses.errors import one_of
from subclasses.layout import field_name

# --------------------------------------------------------------------------------------------------- the values

_STEP = re.compile(r"\.(size|stride|item)\(\)|\.(\w+)|\['([^']*)'\]|\[(\d+)\]")
_PATH = re.compile(rf"(?<![\w.'\"])(?:G\['(\w+)'\]|([A-Za-z_]\w*))((?:{_STEP.pattern})*)(?![\w(])")


def values_in(text: str, frame: Mapping[str, Any], scope: Mapping[str, Any]) -> dict[str, Any]:
    """Evaluates the paths of attributes, keys and indices in a text of Dynamo; leaves out a path that does not exist.

    Args:
        text: The text.
        frame: The local variables.
        scope: The global variables.
    """
    values = {}
    for path in _PATH.finditer(text):
        with contextlib.suppress(Exception):  # a user's own __getattr__ or __getitem__ may raise anything
            value = scope[path[1]] if path[1] else frame[path[2]]
            for method, attribute, key, index in _STEP.findall(path[3]):
                if method or attribute:
                    value = getattr(value, method or attribute)
                    value = value() if method else value
                else:
                    value = value[int(index) if index else key]
            values[path[0]] = value
    return values


class _Short(reprlib.Repr):
    """Formats a value in a few words: a tensor or module by its type, a function or class by its name."""

    def repr1(self, x: Any, level: int) -> str:
        if isinstance(x, Tensor | nn.Module):
            return one_of(type(x))
        if isinstance(x, type | FunctionType | BuiltinFunctionType):
            return x.__name__
        return super().repr1(x, level)


_short = _Short()
_short.maxstring = _short.maxother = 80
short = _short.repr


# -------------------------------------------------------------------------------------------------- the layouts


def compare_metadata(name: str, value: Value | None, leaf: Any) -> str | None:
    """Describes the first difference of a wrapper's metadata, or an inner wrapper's, from an earlier program's value.

    Returns None if the metadata is equal or the types differ.
    """
    if not isinstance(value, Wrapper) or type(leaf) is not value.cls:
        return None
    names, context = take_apart(leaf)
    if isinstance(leaf, TensorSubclass):
        fields = zip(type(leaf).__spec__.statics, value.context.statics, context.statics, strict=True)
        for static, expected, got in fields:
            if expected != got:
                return f"{name}.{static.name}: expected {expected!r}, got {got!r}"
    present = tuple(field for field, _ in value.inner)
    if present != names:
        expected, got = (", ".join(map(field_name, fields)) for fields in (present, names))
        return f"inner tensors of {name}: expected {expected}, got {got}"
    differences = (
        compare_metadata(f"{name}.{field_name(field)}", part, getattr(leaf, field))
        for field, part in value.inner
    )
    inside = next(filter(None, differences), None)
    if inside is None and value.context != context:
        return f"metadata of {name}: expected {short(value.context)}, got {short(context)}"
    return inside


# ------------------------------------------------------------------------------------------------- one failure

_programs: weakref.WeakValueDictionary[str, Program] = weakref.WeakValueDictionary()


def note_program(program: Program) -> None:
    """Records the program of Dynamo's compilation in progress, to compare later calls with it."""
    number = torch_private.CompileContext.current_compile_id()
    if number is not None:
        _programs[str(number)] = program


def describe_failure(owner: CompilationOwner | None, leaves: Mapping[str, Any]) -> str:
    """Returns why Dynamo recompiles a frame; an empty string for the first compilation of a frame.

    An error in the user's code (`__repr__`, `__eq__`, `__getattr__`) does not end the compilation: the result is then
    Dynamo's text.

    Args:
        owner: The owner of the call; None if unknown.
        leaves: User's name -> argument of the new graph.
    """
    reason = torch_private.recompile_reason()
    if reason is None or "BACKEND_MATCH" in reason:  # another backend compiled the frame before
        return ""
    number, _, guard = reason.partition(": ")
    what = None if owner is None else owner.what
    try:
        variables = ({}, {}) if owner is None else owner.variables(number)
        if guard.startswith("___check_metadata_"):
            return _changed_metadata(leaves, _programs.get(number))
        if state := re.match(rf"G\['({PREFIX}_\w+)'\]", guard):
            return _changed_state(variables[1].get(state[1]))
        return in_words(guard, what, variables)
    except Exception:  # noqa: BLE001 - the user's code may raise anything, and the compilation goes on
        return in_words(guard, what)


def _changed_metadata(leaves: Mapping[str, Any], earlier: Program | None) -> str:
    values = {} if earlier is None else dict(zip(earlier.names, earlier.inputs, strict=False))
    differences = (compare_metadata(name, values.get(name), leaf) for name, leaf in leaves.items())
    return next(filter(None, differences), "metadata of a tensor subclass")


def _changed_state(state: Any) -> str:
    reads = () if state is None else state.changed()
    parts = (f"; {read.name}: expected {short(read.value)}, got {short(read.now())}" for read in reads)
    return "a rule reads a value that has changed" + "".join(parts)


_MISMATCH = re.compile(
    r"tensor '(.+)' (size|stride|rank|dtype|requires_grad) mismatch(?: at index (\d+))?\. "
    r"expected (?:requires_grad=)?(\w+)(?:, actual (\w+))?"
)
_CLASS = r"<class '(?:[^']*\.)?(\w+)'>"  # the name, without the module
_TYPE = re.compile(  # PyTorch 2.13 has no expected type
    rf"expected type of '(.+)' to be (?:a tensor type, '|{_CLASS},) ?but found {_CLASS}"
)
_BY_ID = re.compile(rf"___check_(obj|type)_id\((.+?)(?:\.__code__)?, \d+\), type={_CLASS}")
_SAME = {"obj": "{} is the same {}", "type": "type({}) is {}"}


def in_words(
    reason: str, what: Any = None, variables: tuple[Mapping[str, Any], Mapping[str, Any]] = ({}, {})
) -> str:
    """Returns a recompilation reason of Dynamo in the user's names, with the actual values.

    Args:
        reason: Dynamo's text.
        what: The user's function or module, if known.
        variables: The initial local variables of the frame, and its global variables; empty if unknown.
    """
    guard = reason.partition("\nUser stack trace")[0].partition("  # ")[0].strip()
    if match := _MISMATCH.match(guard):
        path, fact, dim, expected, got = match.groups()
        if fact == "requires_grad":
            expected, got = bool(int(expected)), not int(expected)
        return f"{readable(path, what)}.{fact}{f'({dim})' if dim else ''}: expected {expected}, got {got}"
    if match := _TYPE.match(guard):
        path, expected, got = match.groups()
        return f"type of {readable(path, what)}: expected {expected or 'a tensor type'}, got {got}"
    guard = _BY_ID.sub(lambda match: _SAME[match[1]].format(*match.groups()[1:]), guard)
    values = values_in(guard, *variables)
    path, equals, expected = guard.partition(" == ")
    if equals and [*values] == [path]:
        return f"{readable(path, what)}: expected {expected}, got {short(values[path])}"
    now = ", ".join(f"{readable(path, what)} = {short(value)}" for path, value in values.items())
    return readable(guard, what) + (f"; now: {now}" if now else "")
