"""Finds the object that `MODULE:NAME` on a command line names."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from subclasses.errors import one_of

Call = tuple[tuple[Any, ...], dict[str, Any]]


class TargetError(ValueError):
    """The command line names no usable object; the message has the expected form."""


def find_target(text: str, default_module: ModuleType | None = None) -> tuple[ModuleType, Any]:
    """Returns the module and the object of `MODULE:NAME`; a module may be dotted or a file, a name may be dotted.

    Raises:
        TargetError: There is no such module or name, or the text has another form.
    """
    module_name, colon, name = text.rpartition(":")
    if not colon and default_module is not None:
        module = default_module
    elif not colon or not module_name or not name:
        raise TargetError(
            f"expected MODULE:NAME, such as package.module:function or file.py:function, got {text!r}"
        )
    else:
        module = load_module(module_name)
    target_object: Any = module
    for part in name.split("."):
        if not hasattr(target_object, part):
            public = ", ".join(key for key in vars(module) if not key.startswith("_")) or "none"
            raise TargetError(
                f"{module.__name__} has no {name!r}; it has {public}. An import does not run the lines below "
                'if __name__ == "__main__": a name that they define belongs at the top level of the module'
            )
        target_object = getattr(target_object, part)
    return module, target_object


def load_module(name: str) -> ModuleType:
    """Imports a module by its dotted name, relative to the working directory, or by its file.

    Raises:
        TargetError: There is no such module. Errors of the module's own code propagate.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    if not name.endswith(".py"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            raise TargetError(
                f"there is no module {name!r} below {here} or among what is installed"
            ) from error
    path = Path(name).resolve()
    if not path.is_file():
        raise TargetError(f"there is no file {name!r}")
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def find_factory(text: str, default_module: ModuleType | None = None) -> Any:
    """Returns the function of `MODULE:NAME`, which returns a value and has no required parameter.

    Raises:
        TargetError: `MODULE:NAME` is another kind of object.
    """
    factory = find_target(text, default_module)[1]
    if not callable(factory):
        raise TargetError(f"expected a function that makes a value, got {text}, {one_of(type(factory))}")
    if needed := needed_by(factory):
        raise TargetError(f"{text} takes {', '.join(needed)}; expected a function that takes nothing")
    return factory


# ----------------------------------------------------------------------------------------------- arguments


def find_calls(module: ModuleType, fn: Any, inputs: str | None, name: str) -> list[Call]:
    """Returns the arguments of calls of a function, from a factory of the user's; no arguments without a factory.

    The factory returns the arguments of one call: a tuple, a list, one value, or a dict of arguments by name. For
    several calls it yields them, or returns a list of tuples (or of dicts).

    Args:
        module: Where the function is.
        fn: The function or module.
        inputs: The name of the factory; by default `NAME_inputs`, if the module has it.
        name: The name of the function in the module.

    Raises:
        TargetError: The function needs arguments and there is no factory, or the arguments do not fit.
    """
    if not callable(fn):
        raise TargetError(f"expected a function or module, got {type(fn).__name__}")
    inputs = inputs or inputs_beside(module, name)
    if inputs is None:
        if needed := needed_by(fn):
            raise TargetError(
                f"it takes {', '.join(needed)}: name a function that makes a tuple or dict of arguments with --inputs, "
                f"or call one {name}_inputs in the same module"
            )
        return [((), {})]
    calls = [_call(made) for made in _each(find_factory(inputs, module)())]
    if not calls:
        raise TargetError(f"{inputs} made no arguments; expected the arguments of at least one call")
    for args, kwargs in calls:
        _check_fits(fn, name, inputs, args, kwargs)
    return calls


def _check_fits(fn: Any, name: str, inputs: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    signature = signature_of(fn)
    try:
        if signature is not None:
            signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TargetError(
            f"{inputs} makes arguments that {name}{signature} does not take: {error}; a tuple is the arguments by "
            f"position, a dict those by name, a list of them several calls"
        ) from error


def inputs_beside(module: ModuleType, name: str) -> str | None:
    """Returns the name of the factory of a function's arguments in a module; None if there is none."""
    return f"{name}_inputs" if hasattr(module, f"{name}_inputs") else None


def _each(made: Any) -> list[Any]:
    if isinstance(made, Iterator):
        return list(made)
    if isinstance(made, list) and made and all(type(part) in (tuple, dict) for part in made):
        return made
    return [made]


def _call(made: Any) -> Call:
    if isinstance(made, Mapping):
        return (), dict(made)
    return (tuple(made) if isinstance(made, tuple | list) else (made,)), {}


def needed_by(fn: Any) -> list[str]:
    """Returns the parameters of a function, or of a module's forward, that have no default."""
    signature = signature_of(fn)
    parameters = () if signature is None else signature.parameters.values()
    return [
        p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]


def signature_of(fn: Any) -> inspect.Signature | None:
    """Returns the signature of a function, or of a module's forward; None for a builtin that has none."""
    try:
        return inspect.signature(fn.forward if isinstance(fn, nn.Module) else fn)
    except (TypeError, ValueError):
        return None
