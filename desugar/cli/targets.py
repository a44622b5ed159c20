"""`MODULE:NAME` on a command line, to the object that it names."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn


class TargetError(ValueError):
    """What stands on the command line names nothing that can be used; says what was expected."""


def find_target(text: str, default_module: ModuleType | None = None) -> tuple[ModuleType, Any]:
    """The module and the object of `MODULE:NAME`; a module may be dotted or a file, a name may be dotted.

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
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            public = ", ".join(key for key in vars(module) if not key.startswith("_")) or "none"
            raise TargetError(f"{module.__name__} has no {name!r}; it has {public}")
        found = getattr(found, part)
    return module, found


def load_module(name: str) -> ModuleType:
    """A module by its dotted name from here, or by its file.

    Raises:
        TargetError: There is none. Errors of the module's own code pass through.
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
    """The function of `MODULE:NAME`, which is called with nothing and makes something.

    Raises:
        TargetError: It names something else.
    """
    factory = find_target(text, default_module)[1]
    if not callable(factory):
        raise TargetError(f"expected a function that makes a value, got {text}, a {type(factory).__name__}")
    if needed := _needed(factory):
        raise TargetError(f"{text} takes {', '.join(needed)}; expected a function that takes nothing")
    return factory


# ----------------------------------------------------------------------------------------------- arguments


def find_arguments(module: ModuleType, fn: Any, inputs: str | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments to call a function with: those that a function of the user's makes, or none.

    Raises:
        TargetError: The function needs arguments and nothing makes them.
    """
    if not callable(fn):
        raise TargetError(f"expected a function or module, got {type(fn).__name__}")
    name = getattr(fn, "__name__", "")
    if inputs is None and hasattr(module, f"{name}_inputs"):
        inputs = f"{name}_inputs"
    if inputs is None:
        if needed := _needed(fn):
            raise TargetError(
                f"it takes {', '.join(needed)}: name a function that makes a tuple of arguments (or a dict of "
                f"arguments by name) with --inputs, or call one {name or 'NAME'}_inputs in the same module"
            )
        return (), {}
    made = find_factory(inputs, module)()
    if isinstance(made, Mapping):
        return (), dict(made)
    return (tuple(made) if isinstance(made, tuple | list) else (made,)), {}


def _needed(fn: Any) -> list[str]:
    """Parameters without a default."""
    try:
        parameters = inspect.signature(fn.forward if isinstance(fn, nn.Module) else fn).parameters.values()
    except (TypeError, ValueError):  # a builtin tells nothing
        return []
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]
