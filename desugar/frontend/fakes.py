"""Fake tensors for the plain inner tensors of a call, and the symbols of their sizes.

Every plain tensor that reaches a program is replaced by a fake one with the same dtype, device, size and
stride. A size that may change from call to call is a symbol of its own: sizes that are equal by chance stay
separate (`duck_shape=False`), so that a program is not tied to the chance. What the trace then assumes of the
symbols (equal, at least 2, divisible by 8, ...) the shape environment records, and `size_guards` gives it back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import SymInt, Tensor

from desugar import _torch as private
from desugar.errors import DesugarError
from desugar.ir.values import inner_names, is_wrapper
from subclasses._torch import disabled_torch_function_impl

# -------------------------------------------------------------------------------------------- making fakes


@dataclass(frozen=True, slots=True)
class SizeSymbol:
    """A symbolic int of the trace and the text that reads its value at run time (`t3.size(0)`)."""

    value: SymInt
    text: str


@dataclass(slots=True)
class Fakes:
    """Makes fakes under one shape environment and remembers what the guards are about.

    Attributes:
        env: The symbols.
        mode: The fake mode.
        guarded: Names and values that guards may speak of.
        real_of: Where what the guards speak of comes from at run time, by name.
        symbols: What each symbol stands for.
        offsets_matter: Whether the function reads a storage offset (:mod:`desugar.frontend.storage_offsets`).
    """

    env: Any = field(default_factory=lambda: private.ShapeEnv(duck_shape=False, specialize_zero_one=True))
    mode: Any = None
    guarded: list[tuple[str, Any]] = field(default_factory=list)
    real_of: dict[str, Any] = field(default_factory=dict)
    symbols: dict[Any, SizeSymbol] = field(default_factory=dict)
    offsets_matter: bool = False

    def __post_init__(self) -> None:
        if self.mode is None:
            self.mode = private.FakeTensorMode(shape_env=self.env)

    def tensor(self, real: Tensor, name: str, *, is_dynamic: bool = False) -> Tensor:
        """A fake of a plain tensor, without autograd metadata.

        Args:
            real: A strided plain tensor.
            name: How guards name it (`a3.values`).
            is_dynamic: Its sizes are symbols.

        Raises:
            DesugarError: For a layout that the pass does not take (sparse, quantized, lazily conjugated).
        """
        check_plain(real)
        source = private.LocalSource(name)
        context = symbolic_context(real.dim(), is_dynamic)
        with torch.no_grad():
            fake = self.mode.from_tensor(bare_alias(real), symbolic_context=context, source=source)
        fake.item_memo = None  # of one number torch keeps the value in a symbol, which no guard here is about
        self.guarded.append((name, fake))
        for dim, extent in enumerate(fake.size()):
            self._note(extent, f"{name}.size({dim})")
        for dim, extent in enumerate(fake.stride()):
            self._note(extent, f"{name}.stride({dim})")
        self._note(fake.storage_offset(), f"{name}.storage_offset()")
        return fake

    def integer(self, value: int, name: str) -> int | SymInt:
        """A symbol for an int that may change (0 and 1 stay constants, as sizes do)."""
        source = private.LocalSource(name)
        symbol = self.env.create_symbol(value, source=source, dynamic_dim=private.DimDynamic.DYNAMIC)
        symbolic = self.env.create_symintnode(symbol, hint=value, source=source)
        self.guarded.append((name, symbolic))
        self._note(symbolic, name)
        return symbolic

    def canonical(self, extent: SymInt) -> SymInt:
        """The symbol that stands for this one, if they were found to be equal: Inductor names the input after it."""
        node = extent.node
        if node._expr == node.expr:
            return extent
        return node.shape_env.create_symintnode(node.expr, hint=node.hint)

    def _note(self, extent: int | SymInt, text: str) -> None:
        if not isinstance(extent, SymInt):
            return
        expression = extent.node.expr
        if expression.is_symbol and expression not in self.symbols:
            self.symbols[expression] = SizeSymbol(extent, text)


def bare_alias(real: Tensor) -> Tensor:
    """The same memory as a tensor that is neither view, parameter nor part of an autograd graph, without `.grad`."""
    if not real._is_view() and not real.requires_grad and type(real) is Tensor and real.grad is None:
        return real
    with torch.no_grad():
        blank = torch.empty(0, dtype=real.dtype, device=real.device)
        return blank.set_(real.untyped_storage(), real.storage_offset(), real.size(), real.stride())


def check_nested(leaf: object) -> None:
    """Raises for PyTorch's own nested tensors, whose sizes layouts do not know."""
    if isinstance(leaf, Tensor) and leaf.is_nested:
        raise DesugarError(
            "expected strided tensors, got one of PyTorch's nested tensors, whose sizes are no ints",
            instead="pass or return its values and offsets, or a JaggedTensor (subclasses.ragged)",
        )


def check_plain(real: Tensor) -> None:
    """Raises `DesugarError` for a plain tensor that is not an ordinary strided one."""
    odd = None
    check_nested(real)
    if real.layout is not torch.strided:
        odd = f"a {real.layout} tensor"
    elif real.is_quantized:
        odd = "a quantized tensor"
    elif real.is_conj() or real.is_neg():
        odd = "a lazily conjugated or negated tensor"
    if odd:
        raise DesugarError(
            f"expected strided tensors, got {odd}",
            instead="convert it first (to_dense(), dequantize(), resolve_conj(), resolve_neg(), to_padded_tensor())",
        )
    check_class(real)


def check_class(real: Tensor) -> None:
    """Raises for a tensor of a transform that is over, and for one whose class a program cannot take apart or call."""
    if private.is_dead_tensor_wrapper(real):
        raise DesugarError(
            "an argument is a tensor of a functorch transform that has ended",
            instead="pass its detach(), or return tensors from the transformed function",
        )
    cls = type(real)
    if cls is not Tensor and cls.__torch_function__ is not disabled_torch_function_impl:
        raise DesugarError(
            f"expected plain tensors and wrapper subclasses, got a {cls.__name__}: its class cannot be taken apart "
            "(no __tensor_flatten__) and has a __torch_function__, which a program would not call",
            instead="pass x.as_subclass(torch.Tensor) and make the result one of the class again",
        )


def check_memory(leaves: Iterable[Any]) -> None:
    """Raises for tensors whose memory is the negative of what they hold, where a compiled graph would read it."""
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            continue
        if is_wrapper(leaf):
            check_memory(getattr(leaf, name) for name in inner_names(leaf)[0])
        elif leaf.is_neg():
            raise DesugarError(
                f"expected tensors with their values in memory, got a lazily negated one of size {tuple(leaf.shape)} "
                "(the imag of a conjugated tensor, for instance)",
                instead="call resolve_neg() on it before the compiled function",
                stock_is_wrong=True,
            )


def symbolic_context(ndim: int, is_dynamic: bool) -> Any:
    """The symbolic context in which all sizes are symbols, or none is."""
    kind = private.DimDynamic.DYNAMIC if is_dynamic else private.DimDynamic.STATIC
    return private.StatelessSymbolicContext(dynamic_sizes=[kind] * ndim)


# -------------------------------------------------------------------------------------------------- guards


@dataclass(frozen=True, slots=True)
class SizeGuards:
    """What a trace assumed of its symbols, as PyTorch's shape environment tells it.

    Attributes:
        env: The shape environment.
        expression: Its guards; None if nothing was assumed.
        origins: Where what the guards speak of comes from, in the order that the environment expects.
    """

    env: Any
    expression: str | None
    origins: tuple[Any, ...]

    def hold(self, leaves: Sequence[Any]) -> bool:
        """Whether the guards hold for other argument leaves."""
        if self.expression is None:
            return True
        try:
            found = [origin.find(leaves) for origin in self.origins]
            return bool(self.env.evaluate_guards_expression(self.expression, found))
        except ZeroDivisionError:  # by a size that is 0 now
            return False


def size_guards(fakes: Fakes) -> SizeGuards:
    """What the trace assumed of the symbols in its arguments."""
    symbolic = [(name, fake) for name, fake in fakes.guarded if is_symbolic(fake)]
    expression = None
    if symbolic:
        expression = fakes.env.produce_guards_expression([fake for _, fake in symbolic], ignore_static=False)
    return SizeGuards(fakes.env, expression, tuple(fakes.real_of[name] for name, _ in symbolic))


def fixed_extents(extents: Sequence[Any]) -> list[int | None]:
    """Sizes or strides as a C++ check takes them; None for those that are symbols."""
    return [None if isinstance(extent, SymInt) else extent for extent in extents]


def is_symbolic(fake: Any) -> bool:
    """Whether a fake tensor or int has a symbol in its size, stride or offset."""
    if isinstance(fake, Tensor):
        extents: Sequence[Any] = (*fake.size(), *fake.stride(), fake.storage_offset())
        return any(isinstance(extent, SymInt) for extent in extents)
    return isinstance(fake, SymInt)


def hint(extent: Any) -> int:
    """The value an int had in the call that was traced; some value for one that depends on data."""
    if not isinstance(extent, SymInt):
        return extent
    known, expression = extent.node.hint, extent.node.expr
    return int(expression.xreplace(dict.fromkeys(expression.free_symbols, 64))) if known is None else known


def same_ints(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two sizes or strides are the same expressions; asks for no guard."""
    return [_expression(extent) for extent in one] == [_expression(extent) for extent in other]


def _expression(extent: Any) -> Any:
    return extent.node.expr if isinstance(extent, SymInt) else extent
