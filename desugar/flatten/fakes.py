"""Fake tensors for the plain inner tensors of a call.

The trace uses, for each plain tensor of a call, a fake tensor with the same dtype, device, size and stride. Dynamo
makes the fakes of the arguments of its graphs, where a size that may change from call to call is a symbol. The fakes
that this module makes have constant sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import SymInt, Tensor

from desugar import _torch as private
from desugar.errors import DesugarError
from desugar.ir.abstract_values import is_unknown
from desugar.ir.values import inner_names, is_wrapper
from subclasses._torch import disabled_torch_function_impl
from subclasses._torch_tracing import has_no_memory
from subclasses.errors import one_of

# -------------------------------------------------------------------------------------------- making fakes


@dataclass(slots=True)
class Fakes:
    """Makes fake tensors in one shape environment.

    Attributes:
        env: The shape environment.
        mode: The fake mode.
    """

    env: Any = field(default_factory=lambda: private.ShapeEnv(duck_shape=False, specialize_zero_one=True))
    mode: Any = None

    def __post_init__(self) -> None:
        if self.mode is None:
            self.mode = private.FakeTensorMode(shape_env=self.env)

    def tensor(self, real: Tensor) -> Tensor:
        """Makes a fake of a plain tensor, with constant sizes and without autograd metadata.

        Raises:
            DesugarError: The tensor is of a kind that the pass does not support (sparse, quantized, lazily conjugated).
        """
        check_plain(real)
        with torch.no_grad():
            fake = self.mode.from_tensor(bare_alias(real), static_shapes=True)
        fake.item_memo = None
        return fake

    def canonical(self, extent: SymInt) -> SymInt:
        """Returns the symbol by which the trace replaced the equal symbol `extent`; else `extent` itself.

        Inductor names the input after the returned symbol.
        """
        node = extent.node
        if node._expr == node.expr:
            return extent
        return node.shape_env.create_symintnode(node.expr, hint=node.hint)


def bare_alias(real: Tensor) -> Tensor:
    """Returns a tensor over the same memory that has no autograd state.

    The result is not a view, not a parameter, not part of an autograd graph, and has no `.grad`.
    """
    if not real._is_view() and not real.requires_grad and type(real) is Tensor and real.grad is None:
        return real
    with torch.no_grad():
        blank = torch.empty(0, dtype=real.dtype, device=real.device)
        return blank.set_(real.untyped_storage(), real.storage_offset(), real.size(), real.stride())


def check_nested(leaf: object) -> None:
    """Raises `DesugarError` for one of PyTorch's nested tensors, whose sizes a layout cannot describe."""
    if isinstance(leaf, Tensor) and leaf.is_nested:
        raise DesugarError(
            "expected strided tensors, got one of PyTorch's nested tensors, whose sizes are not ints",
            instead="pass or return its values and offsets, or a JaggedTensor (subclasses.ragged)",
        )


def check_plain(real: Tensor) -> None:
    """Raises `DesugarError` for a plain tensor that is not an ordinary strided tensor."""
    check_nested(real)
    kinds = {
        f"a {real.layout} tensor": real.layout is not torch.strided,
        "a quantized tensor": real.is_quantized,
        "a lazily conjugated or negated tensor": real.is_conj() or real.is_neg(),
    }
    unsupported = next((kind for kind, is_one in kinds.items() if is_one), None)
    if unsupported is not None:
        raise DesugarError(
            f"expected strided tensors, got {unsupported}",
            instead="convert it first (to_dense(), dequantize(), resolve_conj(), resolve_neg(), to_padded_tensor())",
        )
    check_class(real)


def check_class(real: Tensor) -> None:
    """Raises `DesugarError` for a tensor that a program cannot use because of its class.

    Such a tensor belongs to a functorch transform that has ended. Or its class has no `__tensor_flatten__` but a
    `__torch_function__`, which a program would not call.
    """
    if private.is_dead_tensor_wrapper(real):
        raise DesugarError(
            "an argument is a tensor of a functorch transform that has ended",
            instead="pass its detach(), or return tensors from the transformed function",
        )
    cls = type(real)
    if cls is not Tensor and cls.__torch_function__ is not disabled_torch_function_impl:
        raise DesugarError(
            f"expected plain tensors and wrapper subclasses, got {one_of(cls)}: its class cannot be flattened "
            "(no __tensor_flatten__) and has a __torch_function__, which a program would not call",
            instead="pass x.as_subclass(torch.Tensor) and make the result one of the class again",
        )


def check_memory(leaves: Iterable[Any]) -> None:
    """Raises `DesugarError` for a tensor whose memory does not hold its values, inner tensors included.

    The memory of a lazily negated tensor holds the negated values. The zeros that a derivative of `sgn` returns have
    no memory.
    """
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            continue
        if is_wrapper(leaf):
            check_memory(getattr(leaf, name) for name in inner_names(leaf))
        elif leaf.is_neg():
            raise DesugarError(
                f"expected tensors with their values in memory, got a lazily negated one of size {tuple(leaf.shape)} "
                "(the imag of a conjugated tensor, for instance)",
                instead="call resolve_neg() on it before the compiled function",
                stock_is_wrong=True,
            )
        elif has_no_memory(leaf):
            raise DesugarError(
                f"expected tensors with their values in memory, got zeros of size {tuple(leaf.shape)} without any (a "
                "derivative of sgn or of another step, for instance)",
                instead="pass their clone()",
                stock_is_wrong=True,
            )


# ------------------------------------------------------------------------------------------------- extents


def fixed_extents(extents: Sequence[Any]) -> list[int | None]:
    """Returns sizes or strides in the form that the C++ check of tensors expects: None in place of a symbol."""
    return [None if is_unknown(extent) else extent for extent in extents]


def is_symbolic(fake: Any) -> bool:
    """Returns whether an int is a symbol, or a fake tensor has a symbol in its size, stride or storage offset."""
    if isinstance(fake, Tensor):
        extents: Sequence[Any] = (*fake.size(), *fake.stride(), fake.storage_offset())
        return any(map(is_unknown, extents))
    return is_unknown(fake)


def hint(extent: Any) -> int:
    """Returns the value that an int had in the traced call.

    For an unbacked int, which depends on data, every symbol in it counts as 64.
    """
    if not isinstance(extent, SymInt):
        return extent
    known, expression = extent.node.hint, extent.node.expr
    return int(expression.xreplace(dict.fromkeys(expression.free_symbols, 64))) if known is None else known


def same_ints(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Returns whether two sizes or strides have the same expressions; adds no guard."""
    return [_expression(extent) for extent in one] == [_expression(extent) for extent in other]


def _expression(extent: Any) -> Any:
    return extent.node.expr if isinstance(extent, SymInt) else extent
