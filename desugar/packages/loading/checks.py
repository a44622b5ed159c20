"""Checks arguments against the leaves of a program, one by one, and says what does not fit.

The generated entry of a package (:mod:`desugar.packages.loading.entry`) checks the usual call in C++. This is for all
others: those that fit none of the programs, whose error has to name the argument, and those that fit though a tensor
differs in something that makes no difference, such as the stride of a dimension of size 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from desugar import _torch as private
from desugar.errors import SignatureError
from desugar.ir.values import is_wrapper, take_apart
from desugar.packages.loading.assemble import layout_of_record
from desugar.packages.manifest.expressions import Extent, Symbol, symbols_in, text_of, value_of
from desugar.packages.manifest.records import (
    ConstantLeaf,
    IntLeaf,
    LayoutRecord,
    Leaf,
    SameLeaf,
    SymbolRecord,
    TensorFacts,
    TensorLeaf,
    UnusedLeaf,
    WrapperLeaf,
)
from subclasses.errors import one_of
from subclasses.layout import Layout, describe_metadata, field_name

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


@dataclass(slots=True)
class Checking:
    """The check of one call.

    Attributes:
        leaves: The leaves of the program's arguments.
        symbols: Its sizes that may change.
        guards: What has to hold of them.
        is_training: Whether the package has gradients.
        values: The values of the symbols that are known so far.
        tensors: The plain tensors of the arguments, in order.
        names: The expressions of the symbols that are known so far.
        later: Checks of expressions, once all symbols are known.
    """

    leaves: Sequence[Leaf]
    symbols: Sequence[SymbolRecord]
    guards: Sequence[Extent]
    is_training: bool
    values: dict[int, int] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    later: list[Callable[[], None]] = field(default_factory=list)

    def run(self, given: Mapping[int, Any], names: Mapping[int, str]) -> None:
        """Checks the leaves of a call.

        Args:
            given: The leaves.
            names: The expression of each leaf.

        Raises:
            SignatureError: One does not fit.
        """
        self._check_distinct(given, names)
        for number, leaf in enumerate(self.leaves):
            self._check_leaf(leaf, given[number], names.get(number, f"leaf {number}"), given, names)
        for check in self.later:
            check()
        known = [self.values[number] for number in range(len(self.symbols))]
        for number, symbol in enumerate(self.symbols):
            if symbol.low is not None and known[number] < symbol.low:
                advice = " (save a call with a smaller size too)" if known[number] >= 0 else ""
                raise SignatureError(self.names[number], f"at least {symbol.low}{advice}", str(known[number]))
            if symbol.high is not None and known[number] > symbol.high:
                raise SignatureError(self.names[number], f"at most {symbol.high}", str(known[number]))
        for guard in self.guards:
            if not _holds(guard, known):
                self._refuse_guard(guard, known)

    def _check_distinct(self, given: Mapping[int, Any], names: Mapping[int, str]) -> None:
        first: dict[int, int] = {}
        for number, leaf in enumerate(self.leaves):
            if isinstance(leaf, TensorLeaf | WrapperLeaf):
                other = first.setdefault(id(given[number]), number)
                if other != number and isinstance(given[number], Tensor):
                    raise SignatureError(
                        names.get(number, ""), f"another object than {names.get(other)}", "the same object"
                    )

    def _refuse_guard(self, guard: Extent, known: Sequence[int]) -> None:
        text = text_of(guard, lambda index: self.names[index])
        got = ", ".join(f"{self.names[n]} = {known[n]}" for n in sorted(symbols_in(guard)))
        raise SignatureError(self.names[min(symbols_in(guard))], f"sizes with {text}", got)

    def _check_leaf(
        self, leaf: Leaf, value: Any, name: str, leaves: Mapping[int, Any], names: Mapping[int, str]
    ) -> None:
        match leaf:
            case TensorLeaf() | WrapperLeaf():
                self._check_tensor(leaf, value, name)
            case IntLeaf(extent):
                if type(value) is not int:
                    raise SignatureError(name, "an int", _describe(value))
                self._match_extent(extent, value, name)
            case ConstantLeaf(constant):
                self._check_constant(constant, value, name)
            case SameLeaf(index):
                if value is not leaves[index]:
                    raise SignatureError(name, f"the same object as {names.get(index)}", "another one")
            case UnusedLeaf():
                if not isinstance(value, Tensor):
                    raise SignatureError(name, "a tensor", _describe(value))

    def _check_constant(self, constant: Any, value: Any, name: str) -> None:
        is_float = isinstance(constant, float)  # -0.0 == 0.0, and nan != nan
        is_same = repr(value) == repr(constant) if is_float else value == constant
        is_same = is_same and type(value) is type(constant)
        if not is_same:
            raise SignatureError(name, f"{constant!r:.80}, a constant of this program", _describe(value))

    # ................................................................................................ tensors

    def check_weight(self, leaf: TensorLeaf | WrapperLeaf, value: Tensor, name: str) -> None:
        """Checks a tensor that is to be a weight; whether it requires grad is its owner's choice."""
        with torch.no_grad():
            self._check_tensor(leaf, value, name, is_weight=True)

    def _check_tensor(
        self, leaf: TensorLeaf | WrapperLeaf, value: Any, name: str, *, is_weight: bool = False
    ) -> None:
        if isinstance(leaf, WrapperLeaf):
            self._check_wrapper(leaf, value, name)
        else:
            self._check_plain(leaf, value, name)
        if value.requires_grad and not leaf.requires_grad and not is_weight:
            raise SignatureError(
                name,
                "a tensor that does not require grad",
                "one that does: pass its detach(), or save a call with it",
            )
        if leaf.requires_grad and not value.requires_grad and not is_weight:
            raise SignatureError(name, "a tensor that requires grad", "one that does not")

    def _check_plain(self, leaf: TensorLeaf, value: Any, name: str) -> None:
        facts = leaf.facts
        if type(value) not in _PLAIN or private.is_functorch_wrapped_tensor(value) or value.is_neg():
            raise SignatureError(name, f"a plain tensor of {_words(facts)}", _describe(value))
        if value.layout is not torch.strided or value.is_conj() or value.dtype != facts.dtype:
            raise SignatureError(name, f"a tensor of {_words(facts)}", _describe(value))
        if value.device.type != facts.device.type:
            raise SignatureError(name, f"a tensor on {facts.device}", f"one on {value.device}")
        if value.dim() != len(facts.size):
            raise SignatureError(name, f"a tensor of {len(facts.size)} dimensions", _describe(value))
        for dim, extent in enumerate(facts.size):
            self._match_extent(extent, value.size(dim), f"{name}.size({dim})")
        self._check_strides(facts, value, name)
        self.tensors.append(value)

    def _check_strides(self, facts: TensorFacts, value: Tensor, name: str) -> None:
        for dim, extent in enumerate(facts.stride):
            if value.size(dim) > 1 and value.numel() > 0:
                self._match_extent(extent, value.stride(dim), f"{name}.stride({dim})")
            elif isinstance(extent, Symbol):
                self.values.setdefault(extent.index, value.stride(dim))
                self.names.setdefault(extent.index, f"{name}.stride({dim})")

    def _check_wrapper(self, leaf: WrapperLeaf, value: Any, name: str) -> None:
        cls = leaf.cls
        if type(value) is not cls:
            raise SignatureError(name, f"{one_of(cls)}", _describe(value))
        _, context = take_apart(value)
        expected = layout_of_record(leaf.context)
        is_same = context is expected if isinstance(leaf.context, LayoutRecord) else context == expected
        if not is_same:
            raise SignatureError(name, _show(expected, cls), _show(context, cls))
        if value.dtype != leaf.dtype:
            raise SignatureError(name, f"{one_of(cls)} of {leaf.dtype}", f"one of {value.dtype}")
        for dim, extent in enumerate(leaf.size):
            self._match_extent(extent, value.size(dim), f"{name}.size({dim})")
        for dynamic, extent in leaf.dynamics:
            self._match_extent(extent, getattr(value, dynamic), f"{name}.{dynamic}")
        for attribute, part in leaf.inner:
            self._check_tensor(part, getattr(value, attribute), f"{name}.{field_name(attribute)}")

    # .................................................................................................. sizes

    def _match_extent(self, extent: Extent, value: int, name: str) -> None:
        if isinstance(extent, Symbol) and extent.index not in self.values:
            self.values[extent.index], self.names[extent.index] = value, name
        elif isinstance(extent, int):
            if value != extent:
                raise SignatureError(name, str(extent), str(value))
        else:
            self.later.append(lambda: self._check_extent(extent, value, name))

    def _check_extent(self, extent: Extent, value: int, name: str) -> None:
        known = [self.values.get(number, 0) for number in range(len(self.symbols))]
        try:
            expected = value_of(extent, known)
        except ZeroDivisionError:
            expected = -1
        if value != expected:
            text = text_of(extent, lambda index: self.names[index])
            raise SignatureError(name, f"{text} = {expected}", str(value))


def _holds(guard: Extent, known: Sequence[int]) -> bool:
    try:
        return bool(value_of(guard, known))
    except ZeroDivisionError:
        return False


def _words(facts: TensorFacts) -> str:
    return f"{facts.dtype} with {len(facts.size)} dimensions on {facts.device.type}"


def _show(context: Any, cls: type) -> str:
    return (
        describe_metadata(context) if isinstance(context, Layout) else f"{cls.__name__} with {context!r:.100}"
    )


def _describe(value: Any) -> str:
    if isinstance(value, Tensor) and type(value) in _PLAIN:
        return f"one of {value.dtype} and size {tuple(value.shape)}"
    if is_wrapper(value):
        return f"{one_of(type(value))} of {value.dtype}"
    return f"{value!r:.80} of type {type(value).__name__}"
