"""Describes Dynamo's guards in the user's names.

Dynamo builds the guards of a frame after the backend has returned. So `take_guards` collects them when a compilation
ends, and `TakenGuards.describe` formats them later. Guards on the internals of Python and PyTorch are counted together,
since they fail only if somebody patches these. Examples: a builtin is the same object, a module's `_parameters` is a
dict, an object has no method of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from torch import fx

from desugar import _torch as torch_private
from desugar.dynamo.implied_guards import is_implied_by_others
from desugar.explain.collecting.effects import with_inner
from desugar.explain.records import Guard, Leaf, Program, SourceLine
from desugar.explain.text import count, leaf_text
from desugar.ir.values import is_wrapper
from desugar.recording.listeners import Recording
from desugar.recording.user_names import readable
from desugar.user_code import is_users_file

# ---------------------------------------------------------------------------------------------- Dynamo's guards


@dataclass(frozen=True, slots=True)
class TakenGuards:
    """The guards of one compilation; Dynamo fills them in after the compilation has ended.

    Attributes:
        what: The function or module that the user compiled.
        guards: Dynamo's own records; empty for a program that Dynamo does not guard.
        sizes: Conditions on sizes as Dynamo writes them, each with the user's line; filled when guards are built.
        leaves: The records of arguments and inner tensors, by the user's names.
        files: Files of the user's lines.
    """

    what: Any
    guards: tuple[Any, ...]
    sizes: list[str]
    leaves: Mapping[str, Leaf]
    files: tuple[str, ...]

    def describe(self) -> tuple[Guard, ...]:
        """Returns the guards, each text once."""
        if not self.guards:
            alike = (
                "types, metadata, dtypes and modes are what they were, and so is which arguments share memory"
            )
            return Guard(alike), *(Guard(text) for text in self.sizes)
        by_text: dict[str, Guard] = {}
        inner_workings = []
        for guard in sorted(self.guards):
            if _is_about_inner_workings(guard):
                inner_workings.append(guard)
                continue
            texts = list(dict.fromkeys(self._texts(guard)))
            for text in texts:
                _add(by_text, Guard(text, _place(guard), self._name(guard), _checks(guard, len(texts))))
        for text in self.sizes:
            _add(by_text, self._of_size(text))
        if inner_workings:
            text = f"{count(len(inner_workings), 'guard')} on builtins, modules and the like: nobody has patched them"
            by_text[text] = Guard(text, checks=sum(map(_checks, inner_workings)))
        return tuple(by_text.values())

    def _name(self, guard: Any) -> str:
        """Returns the user's name of the guarded object; empty for a mode."""
        name, kind = readable(guard.name, self.what), guard.create_fn_name()
        if kind == "EMPTY_NN_MODULE_HOOKS_DICT":
            return name.rpartition(".")[0]
        return "" if kind in _MODES else name.removesuffix("._modules")

    def _texts(self, guard: Any) -> Iterator[str]:
        name, kind = readable(guard.name, self.what), guard.create_fn_name()
        if kind == "TENSOR_MATCH":
            if not name.endswith("_carrier"):  # the carrier of a dynamic int is not a tensor of the user's
                yield f"{name}: {leaf_text(self.leaves[name]) if name in self.leaves else 'a tensor as it was'}"
        elif kind == "TENSOR_SUBCLASS_METADATA_MATCH":
            yield from _metadata(name, self.leaves.get(name))
        elif kind == "EMPTY_NN_MODULE_HOOKS_DICT":
            yield from {f"{name.rpartition('.')[0]} has no hooks" for _ in guard.code_list or ()}
        elif kind in _MODES:
            yield "modes are what they were: gradients, autocast, determinism, defaults, torch function modes"
        elif kind != "SHAPE_ENV":
            yield from (_in_words(code, self.what) for code in guard.code_list or ())

    def _of_size(self, text: str) -> Guard:
        """Returns the guard of a condition on sizes."""
        return Guard(readable(text.partition("  # ")[0].strip(), self.what), self._place_of_size(text))

    def _place_of_size(self, text: str) -> SourceLine | None:
        """Returns the user's line that guarded a size; Dynamo shortens the file name from the left."""
        match = _SIZE_LINE.search(text)
        if match is None or "0/1 specialization" in text:  # its line is the first that uses the size
            return None
        whole = next((file for file in self.files if file.endswith(match["file"])), None)
        return None if whole is None else SourceLine(whole, int(match["number"]), match["line"].strip())


def _checks(guard: Any, texts: int = 1) -> int:
    """Returns how many of Dynamo's checks each text of a guard covers; Dynamo may list a check twice."""
    return max(len(set(guard.code_list or ())) // max(texts, 1), 1)


def _add(by_text: dict[str, Guard], guard: Guard) -> None:
    """Adds a guard; if an earlier guard has the same text, the checks are added to the earlier guard."""
    known = by_text.get(guard.text)
    by_text[guard.text] = guard if known is None else replace(known, checks=known.checks + guard.checks)


_MODES = frozenset(
    {
        "GRAD_MODE",
        "DETERMINISTIC_ALGORITHMS",
        "GLOBAL_STATE",
        "TORCH_FUNCTION_STATE",
        "DEFAULT_DEVICE",
        "AUTOGRAD_SAVED_TENSORS_HOOKS",
    }
)
_SIZE_LINE = re.compile(r"  # (?P<line>.*?)  # (?P<file>\S+):(?P<number>\d+) in ")
_INNER = re.compile(r"^G\['__(?:import_torch_|builtins_dict_)|\._(?:modules|parameters|buffers)$|\.__dict__$")
_ABOUT_VALUES = re.compile("CONSTANT|EQUALS|SEQUENCE|DICT|SET|ID_MATCH|BOOL|NONE|RANGE|HASATTR")


def _is_about_inner_workings(guard: Any) -> bool:
    if guard.create_fn_name() in ("MODULE_MATCH", "BUILTIN_MATCH", "NOT_PRESENT_IN_GENERIC_DICT"):
        return True
    return guard.create_fn_name() != "DICT_KEYS_MATCH" and _INNER.search(guard.name) is not None


def _place(guard: Any) -> SourceLine | None:
    """Returns the user's line that read a value; None for a tensor or a mode, which any line reads."""
    if _ABOUT_VALUES.match(guard.create_fn_name()) is None:
        return None
    frames = [frame for frame in guard.user_stack or () if is_users_file(frame.filename)]
    if not frames:
        return None
    return SourceLine(frames[-1].filename, frames[-1].lineno or 0, (frames[-1].line or "").strip())


# Dynamo's text of a guard -> its meaning.
_CODES = [
    (re.compile(pattern), meaning)
    for pattern, meaning in {
        r"^___check_type_id\((.+), \d+\), type=<class '(?:.*\.)?(.+?)'>$": r"type(\1) is \2",
        r"^___check_obj_id\((.+), \d+\), type=<class 'NoneType'>$": r"\1 is None",
        r"^___check_obj_id\((.+?)(?:\.__code__)?, \d+\), type=<class 'code'>$": r"\1 is the same function",
        r"^___check_obj_id\((.+?)(?:\.__code__)?, \d+\), type=<class '(?:.*\.)?(.+?)'>$": r"\1 is the same \2",
        r"^list\(dict\.keys\((.+)\)\) == (.+)$": r"[*\1] == \2",
        r"^(.+)\.__tensor_flatten__\(\)\[0\] == (.+)$": r"the inner tensors of \1 are \2",
        r"^(not )?___dict_contains\((.+?), (.+)\)$": r"\2 \1in \3",
        r"^(not )?\w+\.__contains__\((.+), (.+)\)$": r"\3 \1in \2",
    }.items()
]


def _metadata(name: str, leaf: Leaf | None) -> Iterator[str]:
    if leaf is None:
        yield f"the metadata of {name} is unchanged"
        return
    yield f"{name} has the inner tensors {', '.join(inner.name for inner in leaf.inner)}"
    yield from (f"{name}.{field} == {value}" for field, value in leaf.metadata)


def _in_words(code: str, what: Any) -> str:
    """Returns the meaning of a guard, in the user's names."""
    matches = ((pattern.match(code), meaning) for pattern, meaning in _CODES)
    return readable(next((match.expand(meaning) for match, meaning in matches if match), code), what)


def take_guards(recording: Recording, record: Program) -> TakenGuards:
    """Returns the guards of a compilation that has just ended, without the guards that `desugar.compile` filters out.

    Args:
        recording: The compilation, whose arguments are still alive.
        record: Its record.
    """
    context = torch_private.CompileContext.try_get()
    sizes = [str(guard.expr) for guard in recording.mode.shape_env.guards]
    if recording.guards:
        sizes = [] if context is None else context.shape_env_guards
    wrappers = {} if isinstance(recording.fn, fx.GraphModule) else _wrappers(recording)
    remaining = tuple(
        guard
        for guard in recording.guards
        if not is_implied_by_others(
            SimpleNamespace(guard_type=guard.create_fn_name(), name=guard.name), wrappers
        )
    )
    leaves = {
        name: leaf for one in (*record.inputs, *record.captured) for name, leaf in _with_inner(one.name, one)
    }
    return TakenGuards(
        recording.fn, remaining, sizes, leaves, tuple(source.file for source in record.sources)
    )


def _wrappers(recording: Recording) -> dict[str, Any]:
    """Returns the wrappers among the arguments and inside them, by Dynamo's names."""
    named = zip(torch_private.source_names(recording.graph), recording.args, strict=True)
    return {name: leaf for name, leaf in with_inner(list(named)) if is_wrapper(leaf)}


def _with_inner(name: str, leaf: Leaf) -> Iterator[tuple[str, Leaf]]:
    yield name, leaf
    for inner in leaf.inner:
        yield from _with_inner(f"{name}.{inner.name}", inner)
