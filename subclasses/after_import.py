"""Import hooks: runs a function on a module that is slow to import once something else imports it."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from typing import Any


def after_import(name: str, then: Callable[[Any], None]) -> None:
    """Calls ``then`` with the module called ``name``: immediately if it is imported, else after its import."""
    module = sys.modules.get(name)
    if module is None:
        sys.meta_path.insert(0, _Finder(name, then))
    else:
        then(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module through the finders after it, and calls a function once the module has executed.

    The finder removes itself from ``sys.meta_path`` when it finds the module.
    """

    def __init__(self, name: str, then: Callable[[Any], None]) -> None:
        self.name, self.then = name, then

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                self.then(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
