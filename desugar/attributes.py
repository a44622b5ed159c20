"""Attributes that the function sets on modules while it is traced.

A function is traced twice, and what it computes there holds no data. So each run begins with the attributes that
the modules had before, effects of the last run stay, and an attribute that got a tensor of the trace is put back:
the function keeps tensors between its calls, which a program cannot.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from desugar.errors import DesugarError, StateKept, is_library_file
from desugar.inputs import is_traced

_TABLES = ("_parameters", "_buffers", "_modules")
_ABSENT = object()


class ModuleAttributes:
    """The attributes of the modules that a function runs, as they were before it ran."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._before: dict[int, tuple[nn.Module, dict[str, Any], dict[str, dict[str, Any]]]] = {}
        self._is_open = True
        self.stand_ins: Mapping[
            int, Tensor
        ] = {}  # id of what stands for a tensor from outside -> that tensor
        for module in modules:
            self._remember(module)

    @contextlib.contextmanager
    def restored_on_error(self) -> Iterator[None]:
        """For the time of a build; an error leaves the modules as they were, and later runs are not watched."""
        try:
            yield
        except BaseException:
            self.restore()
            raise
        finally:
            self._is_open = False
            self._before.clear()

    def note(self, module: nn.Module) -> None:
        """Remembers the attributes of a module that is called.

        Raises:
            StateKept: It is a lazy module, whose first call makes its parameters.
            DesugarError: It is a script with tensors of its own.
        """
        held = (*module.parameters(), *module.buffers()) if isinstance(module, torch.jit.ScriptModule) else ()
        if held:
            raise DesugarError(
                "a scripted module is called, whose parameters or buffers TorchScript reads where no trace sees it",
                instead="use the module that it was made from: what is compiled gains nothing from TorchScript",
            )
        self._remember(module)

    def _remember(self, module: nn.Module) -> None:
        if (
            self._is_open
            and id(module) not in self._before
            and not isinstance(module, torch.jit.ScriptModule)
        ):
            tables = {table: dict(getattr(module, table)) for table in _TABLES}
            if any(is_lazy(held) for table in tables.values() for held in table.values()):
                raise StateKept(
                    f"{type(module).__name__} has parameters that its first call makes",
                    instead="call it once before it is compiled",
                )
            self._before[id(module)] = module, dict(vars(module)), tables

    def restore(self) -> None:
        """Gives every module the attributes that it had."""
        for module, attributes, tables in self._before.values():
            for name in self._changed(module, attributes, tables):
                for table, held in (
                    (vars(module), attributes),
                    *((getattr(module, t), tables[t]) for t in tables),
                ):
                    table.pop(name, None)
                    if name in held:
                        table[name] = held[name]

    def check_kept(self) -> None:
        """Raises when a module now holds a tensor that was computed in the trace.

        What stands for a tensor from outside becomes that tensor: `self.buffer = op(..., out=self.buffer)`.

        Raises:
            StateKept: Naming module and attribute.
        """
        for module, attributes, tables in self._before.values():
            for table in (vars(module), *(getattr(module, table) for table in _TABLES)):
                table.update(
                    {n: self.stand_ins[id(held)] for n, held in table.items() if id(held) in self.stand_ins}
                )
            for name in self._changed(module, attributes, tables):
                if any(isinstance(leaf, Tensor) and is_traced(leaf) for leaf in _leaves(module, name)):
                    raise StateKept(
                        f"the function sets {type(module).__name__}.{name} to a tensor that it computes",
                        instead="make it before the compiled call, write into a buffer in place "
                        "(self.buffer.copy_(...)), or return it",
                        where=_assignment(type(module), name),
                    )

    @staticmethod
    def _changed(
        module: nn.Module, attributes: dict[str, Any], tables: dict[str, dict[str, Any]]
    ) -> list[str]:
        pairs = [(vars(module), attributes), *((getattr(module, table), tables[table]) for table in _TABLES)]
        return [
            name
            for now, before in pairs
            for name in {**now, **before}
            if now.get(name, _ABSENT) is not before.get(name, _ABSENT)
        ]


def _assignment(cls: type[nn.Module], name: str) -> str | None:
    """The last line of a class that assigns the attribute, where its text is there and the user's."""
    try:
        lines, first = inspect.getsourcelines(cls)
        file = inspect.getsourcefile(cls)
    except (OSError, TypeError):  # made in a shell, or by a program
        return None
    assigns = re.compile(rf"\.{re.escape(name)}\s*[-+*/@&|^%]*=(?!=)")
    found = [first + n for n, line in enumerate(lines) if assigns.search(line)]
    if not found or file is None or is_library_file(file):
        return None
    return f"{file}:{found[-1]}: {lines[found[-1] - first].strip()}"


def _leaves(module: nn.Module, name: str) -> list[Any]:
    return optree.tree_leaves(getattr(module, name, None), none_is_leaf=True)  # type: ignore[arg-type]
