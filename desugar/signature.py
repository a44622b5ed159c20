"""The check that a call fits a program, as straight-line text.

A signature holds what the program depends on: the structure of the arguments, the layout of each subclass, the
facts of each plain tensor (one C++ call checks dtype, device, sizes, strides, `requires_grad` and that no
tensor occurs twice), constants by value, the symbolic guards, and the state around the call (grad mode,
autocast, modules' `training`, the identity of parameter slots). What it proves, nothing after it checks again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from desugar import _torch as private
from desugar.fakes import fixed_extents, guard_expression
from desugar.inputs import Inputs
from desugar.listening import note_left_out
from desugar.memory import lie_alike, whole_storage
from desugar.modes import function_modes
from desugar.text import negated
from desugar.values import Constant, Plain, Same, Slot, Value, Wrapper
from subclasses import TensorSubclass
from subclasses.emit import Emitter

MISS = object()  # what a program's wrapper returns when the call does not fit its signature

# A tensor that guards speak of, where something is read of it, and its extents.
_GUARDED = re.compile(r"\b[to]\d\w*(?=\.)")
_EXTENT = re.compile(
    r"\b(?P<tensor>[to]\d\w*)\.(?P<extent>size|stride|storage_offset)\(\)(?:\[(?P<dim>\d+)\])?"
)

_SINGLETONS = (type(None), bool, type(Ellipsis), type(NotImplemented), torch.dtype, torch.layout, type)


# ------------------------------------------------------------------------------------- what it is made from


@dataclass(frozen=True, slots=True)
class State:
    """The state around a call that a program depends on.

    Attributes:
        inference: Whether inference mode is on.
        modules: Modules that ran or are reachable, with their `training` flag.
        slots: (module, "_parameters", "_buffers" or "_modules", name, content) of what they hold.
        hooks: (module, "_forward_hooks" or another kind, the hooks).
        cells: (closure cell, content) of the function.
        modes: The torch function modes in force (a default device is one).
    """

    inference: bool
    modules: tuple[tuple[nn.Module, bool], ...] = ()
    slots: tuple[tuple[nn.Module, str, str, Tensor | nn.Module | None], ...] = ()
    hooks: tuple[tuple[nn.Module, str, tuple[Any, ...]], ...] = ()
    cells: tuple[tuple[Any, Any], ...] = ()
    modes: tuple[Any, ...] = ()


@dataclass(slots=True)
class Names:
    """Names in the generated text: of leaves, of flat inputs, and of what guards speak of."""

    leaves: list[str] = field(default_factory=list)
    slots: dict[int, str] = field(default_factory=dict)


# ------------------------------------------------------------------------------------------------- emission


class SignatureEmitter:
    """Writes the checks of one program into a function that returns `MISS` when one fails."""

    def __init__(self, out: Emitter, inputs: Inputs, state: State) -> None:
        self.out, self.inputs, self.state = out, inputs, state
        self.miss = out.bind(MISS, "MISS")
        self.names = Names()
        self.guarded: list[tuple[str, Any, list[Any], list[Any]]] = []  # text, tensor, sizes, strides
        self.wrappers: dict[int, str] = {}  # id -> text of the wrappers met so far

    def emit(self, leaf_names: list[str], leaves: list[Any]) -> Names:
        """Writes everything; `leaf_names` hold the argument leaves of the call, `leaves` the traced ones."""
        self._emit_state()
        captured = [self.out.bind(tensor, "captured") for tensor in self.inputs.captured]
        self.names.leaves = leaf_names + captured
        live = [*leaves, *self.inputs.captured]
        for name, value, leaf in zip(self.names.leaves, self.inputs.values, live, strict=True):
            self._emit_leaf(name, value, leaf)
        self._emit_tensor_guards()
        self._emit_bases()
        self._emit_offsets()
        self._emit_symbols()
        return self.names

    def require(self, condition: str) -> None:
        """The call misses unless `condition` holds."""
        self.out.writeline(f"if {negated(condition)}:")
        with self.out.indent():
            self.out.writeline(f"return {self.miss}")

    # .............................................................................................. the state

    def _emit_state(self) -> None:
        check_state = self.out.bind(private.GlobalStateGuard().check, "same_global_state")
        is_inference = self.out.bind(torch.is_inference_mode_enabled, "is_inference_mode_enabled")
        self.require(f"{check_state}() and {is_inference}() is {self.state.inference} and {self._modes()}")
        for module, training in self.state.modules:
            name, size = self.out.bind(module, "module"), len(module._modules)
            children = f"len({name}._modules) == {size}" if size else f"not {name}._modules"
            self.require(f"{name}.training is {training} and {children}")
        for module, kind, hooks in self.state.hooks:
            found = f"{self.out.bind(module, 'module')}.{kind}"
            self.require(
                f"(*{found}.values(),) == {self.out.bind(hooks, 'hooks')}" if hooks else f"not {found}"
            )
        for module, kind, name, tensor in self.state.slots:
            held = self.out.bind(tensor, f"held_{name}") if tensor is not None else "None"
            self.require(f"{self.out.bind(module, 'module')}.{kind}.get({name!r}) is {held}")
        for cell, content in self.state.cells:
            held = self.out.bind(content, "cell_content")
            self.require(f"{self.out.bind(cell, 'cell')}.cell_contents is {held}")

    def _modes(self) -> str:
        """That the same torch function modes are in force."""
        if not self.state.modes:
            return f"not {self.out.bind(private.num_function_modes, 'num_function_modes')}()"
        return f"{self.out.bind(function_modes, 'function_modes')}() == {self.out.bind(self.state.modes, 'modes')}"

    # ................................................................................................. leaves

    def _emit_leaf(self, name: str, value: Value, leaf: Any) -> None:
        match value:
            case Plain():
                self._emit_plain(name, value, leaf)
            case Wrapper():
                self._emit_wrapper(name, value, leaf)
            case Same(_, index):
                self.require(f"{name} is {self.names.leaves[index]}")
            case Constant():
                self._emit_constant(name, leaf)

    def _emit_constant(self, name: str, constant: Any) -> None:
        if isinstance(constant, _SINGLETONS) or not _compares(constant):
            self.require(f"{name} is {self.out.bind(constant, 'constant')}")
            return
        kind = self.out.bind(type(constant), "kind")
        if isinstance(constant, (float, complex)):  # -0.0 == 0.0, and nan != nan
            self.require(f"type({name}) is {kind} and repr({name}) == {repr(constant)!r}")
            return
        self.require(f"type({name}) is {kind} and {name} == {self.out.bind(constant, 'constant')}")

    def _emit_plain(self, name: str, value: Plain, tensor: Tensor) -> None:
        if value.index in self.names.slots:
            self.require(f"{name} is {self.names.slots[value.index]}")
            note_left_out(
                self.out, f"dtype, sizes and strides of {name}: it is a tensor that is checked already"
            )
            return
        self.names.slots[value.index] = name
        fake = self.inputs.fake_items[value.index]
        self.guarded.append((name, tensor, fixed_extents(fake.size()), fixed_extents(fake.stride())))

    def _emit_wrapper(self, name: str, value: Wrapper, wrapper: Any) -> None:
        first = self.wrappers.setdefault(id(wrapper), name)
        if first != name:  # a wrapper inside of two others
            self.require(f"{name} is {first}")
            note_left_out(self.out, f"the insides of {name}: it is a wrapper that is checked already")
            return
        self.require(f"type({name}) is {self.out.bind(value.cls, value.cls.__name__)}")
        declared = issubclass(value.cls, TensorSubclass)
        if declared:
            self.require(f"{name}._layout is {self.out.bind(value.context, 'layout')}")
            self._note_layout(name, value)
        else:
            self._emit_context(name, value)
        sizes = [None if declared or not isinstance(extent, int) else extent for extent in value.size]
        strides = [None if declared or not isinstance(extent, int) else extent for extent in value.stride]
        self.guarded.append((name, wrapper, sizes, strides))
        for field_name, part in value.inner:
            inner = self.out.fresh_name(f"{name}_{field_name}")
            self.out.writeline(f"{inner} = {name}.{field_name}")
            self._emit_leaf(inner, part, getattr(wrapper, field_name))
        for field_name, extent in value.dynamics:
            if isinstance(extent, Slot):
                self._emit_dynamic(f"{self.inputs.origins[extent.index].text}", f"{name}.{field_name}")
            else:
                self.require(f"{name}.{field_name} == {extent}")

    def _note_layout(self, name: str, value: Wrapper) -> None:
        """What one identity test has proved: layouts are interned and immutable."""
        names = ", ".join(field for field, _ in value.inner)
        note_left_out(self.out, f"which inner tensors {name} has ({names}): they stand in its layout")
        if statics := value.cls.__spec__.statics:  # type: ignore[attr-defined]
            fixed = ", ".join(field.name for field in statics)
            note_left_out(self.out, f"equality of {fixed}: equal metadata is one and the same layout")
        plain = [field for field, part in value.inner if isinstance(part, Plain)]
        if plain:
            note_left_out(self.out, f"isinstance of {', '.join(plain)}: wrappers would stand in the layout")
        note_left_out(self.out, f"outer size and stride of {name}: computed from what is inside")

    def _emit_dynamic(self, text: str, value: str) -> None:
        """A dynamic int, under the name that guards and symbols speak of."""
        self.out.writeline(f"{text} = {value}")

    def _emit_context(self, name: str, value: Wrapper) -> None:
        """A class written by hand: its inner names and constant metadata, compared by value."""
        if value.fixed_flatten:
            return
        names, context = self.out.fresh_name("names"), self.out.fresh_name("context")
        expected = tuple(inner for inner, _ in value.inner)
        self.out.writeline(f"{names}, {context} = {name}.__tensor_flatten__()")
        same = (
            f"{context} is None"
            if value.context is None
            else f"{context} == {self.out.bind(value.context, 'context')}"
        )
        self.require(f"(*{names},) == {expected!r} and {same}")

    # ............................................................................................. C++ and symbols

    def _emit_tensor_guards(self) -> None:
        if not self.guarded:
            return
        guards = private.TensorGuards(
            *[tensor for _, tensor, _, _ in self.guarded],
            dynamic_dims_sizes=[sizes for _, _, sizes, _ in self.guarded],
            dynamic_dims_strides=[strides for _, _, _, strides in self.guarded],
        )
        check = self.out.bind(guards.check, "same_tensors")
        note_left_out(self.out, "dtype, size, stride and requires_grad one by one: one C++ call looks at all")
        self.require(f"{check}({', '.join(name for name, _, _, _ in self.guarded)})")

    def _emit_bases(self) -> None:
        """Inputs that overlap do so in the same way, and the storage they lie in is an input."""
        for base, slots in self.inputs.bases.items():
            members = ", ".join(self.names.slots[slot] for slot in slots)
            offsets = tuple(self.inputs.fake_items[slot].storage_offset() for slot in slots)
            nbytes = self.inputs.flat.items[base].untyped_storage().nbytes()
            self.require(f"{self.out.bind(lie_alike, 'lie_alike')}(({members}), {offsets}, {nbytes})")
            name = self.names.slots[base] = self.out.fresh_name("storage")
            whole = self.out.bind(whole_storage, "whole_storage")
            self.out.writeline(f"{name} = {whole}({self.names.slots[slots[0]]})")

    def _emit_offsets(self) -> None:
        if not self.inputs.fakes.offsets_matter:
            return
        for slot, name in self.names.slots.items():
            fake = self.inputs.fake_items[slot]
            if isinstance(fake, Tensor) and isinstance(offset := fake.storage_offset(), int):
                self.require(f"{name}.storage_offset() == {offset}")

    def _emit_symbols(self) -> None:
        expression = guard_expression(self.inputs.fakes)
        symbols: dict[str, str] = {}
        for slot, origin in self.inputs.origins.items():
            if origin.text is not None:
                self.names.slots[slot] = symbols[origin.text] = symbol = self.out.fresh_name(f"s{slot}")
                self.out.writeline(f"{symbol} = {self._by_names(origin.text)}")
        if expression:
            for name, function in private.SYMPY_INTERP.items():
                if f"{name}(" in expression:
                    self.out.bind(function, name)
            for module in (math, torch):
                if f"{module.__name__}." in expression:
                    self.out.bind(module, module.__name__)
            expression = _EXTENT.sub(lambda found: _extent(found, symbols), expression)
            expression = self._by_names(expression)
            if "/" in expression or "%" in expression:
                expression = self._undefined_misses(expression)
            self.require(expression)

    def _by_names(self, text: str) -> str:
        """A text about tensors as guards and symbols name them (`t3`, `o0_inner`), by their names here."""

        def name_of(found: re.Match[str]) -> str:
            name = found.group()
            if name in self.inputs.outer_names:
                leaf, path = self.inputs.outer_names[name]
                return ".".join([self.names.leaves[leaf], *path])
            slot = int(name[1:]) if name[1:].isdigit() else None
            return self.names.slots.get(slot, name) if slot is not None else name

        return _GUARDED.sub(name_of, text)

    def _undefined_misses(self, expression: str) -> str:
        """The name of the guards' answer; a division by a size that is 0 now is a miss."""
        answer = self.out.fresh_name("sizes_fit")
        self.out.writeline("try:")
        with self.out.indent():
            self.out.writeline(f"{answer} = {expression}")
        self.out.writeline("except ZeroDivisionError:")
        with self.out.indent():
            self.out.writeline(f"return {self.miss}")
        return answer


def _extent(found: re.Match[str], symbols: Mapping[str, str]) -> str:
    """An extent as guards write it (`t3.size()[0]`): the symbol that holds it already, or a shorter way to read it."""
    text = f"{found['tensor']}.{found['extent']}({found['dim'] or ''})"
    return symbols.get(text, text)


def _compares(constant: Any) -> bool:
    """Whether equality of two objects of this type says that they are interchangeable as constants."""
    known = (int, float, complex, str, bytes, torch.device, torch.Size, slice, range, frozenset)
    return isinstance(constant, known) or type(constant).__module__ == "enum"


class TrustedEmitter(SignatureEmitter):
    """Takes the arguments apart without a check: under Dynamo, whose guards have matched already."""

    def require(self, condition: str) -> None:
        """Dynamo's guards prove it."""

    def _emit_state(self) -> None:
        note_left_out(self.out, "the whole signature: Dynamo's guards have matched before this is called")

    def _emit_context(self, name: str, value: Wrapper) -> None: ...

    def _emit_tensor_guards(self) -> None: ...

    def _emit_dynamic(self, text: str, value: str) -> None:
        """`text` is an attribute path already."""
