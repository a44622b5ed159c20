"""Rules of both layouts for layers that treat each entry alike, and for the losses of classes.

What does not exist is 0 on the way in, so that no parameter's gradient reads it, and cut off on the way out, so that no
cotangent comes back from it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from subclasses.errors import DispatchError
from subclasses.ragged.margins import reduced


class Entrywise(NamedTuple):
    """How a layout hands its entries to a layer.

    Attributes:
        rows: ``(x)``: the outer dimensions that number the rows, and along which they differ.
        gaps: ``(x)``: whether entries may be stored that do not exist.
        clean: ``(x)``: what is stored, differentiable, with 0 for what does not exist.
        cut: ``(x, stored)``: what a layer made of that, for the same rows; no cotangent comes back from a gap.
        stored: ``(x)``: what is stored as it is, differentiable.
        wrap: ``(x, stored)``: what was made of that.
        shown: a value in the words of an error.
    """

    rows: Callable[[Any], tuple[int, int]]
    gaps: Callable[[Any], bool]
    clean: Callable[[Any], Tensor]
    cut: Callable[[Any, Tensor], Any]
    stored: Callable[[Any], Tensor]
    wrap: Callable[[Any, Tensor], Any]
    shown: Callable[[Any], str]


class Samples(NamedTuple):
    """How a layout hands its entries to a loss whose dimension 1 numbers classes.

    Attributes:
        clean: ``(x, fill)``: a table whose first dimension numbers samples, with ``fill`` for what does not exist.
        cut: ``(x, table, rows)``: what the loss made of each sample, with the rows at these outer dimensions.
        alongside: ``(func, x, y)``: ``y`` with its entries where those of ``x`` are, whose rows it has.
    """

    clean: Callable[[Any, float], Tensor]
    cut: Callable[[Any, Tensor, tuple[int, int]], Any]
    alongside: Callable[[Any, Any, Any], Any]


# ---- layers ----------------------------------------------------------------------------------------------------

NORMS = (F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm)
RANDOM = (F.dropout, F.alpha_dropout, F.rrelu, torch.dropout, torch.alpha_dropout, torch.rrelu)


def implement_entrywise(cls: Any, ways: Entrywise, multiply: Callable[[Any, Any, Any], Any]) -> None:
    """All rules of this module, for one layout; ``multiply`` as for the products."""
    implement_layers(cls, ways)
    implement_embedding(cls, ways)
    implement_products(cls, ways, multiply)


def implement_layers(cls: Any, ways: Entrywise) -> None:
    """The rules of ``linear``, norms over features and dropout."""

    def check_features(func: Any, x: Any, count: int) -> None:
        """Raises unless the last dimensions are those of an entry."""
        if max(ways.rows(x)) >= x.dim() - count:
            raise DispatchError(
                f"{func.__name__}: works along the last {count} dimensions, and {ways.shown(x)} has its rows along "
                f"one of them; swap them by transpose"
            )

    @cls.implements(F.linear)
    def _(func: Any, input: Any, weight: Tensor, bias: Tensor | None = None) -> Any:
        check_dense(func, cls, ways, weight, bias)
        check_features(func, input, 1)
        return ways.cut(input, func(ways.clean(input), weight, bias))

    @cls.implements(*NORMS)
    def _(func: Any, input: Any, normalized_shape: Any, *args: Any, **kwargs: Any) -> Any:
        check_dense(func, cls, ways, *args, *kwargs.values())
        check_features(func, input, len(normalized_shape))
        return ways.cut(input, func(ways.clean(input), normalized_shape, *args, **kwargs))

    @cls.implements(*RANDOM)
    def _(func: Any, input: Any, *args: Any, inplace: bool = False, **kwargs: Any) -> Any:
        stored = ways.stored(input)
        drawn = func(stored, *args, **kwargs)
        if drawn is stored:  # as in evaluation
            return input
        result = ways.wrap(input, drawn)
        return input.copy_(result) if inplace else result


def implement_embedding(cls: Any, ways: Entrywise) -> None:
    """The rule of ``embedding``."""

    @cls.implements(F.embedding)
    def _(  # noqa: PLR0913
        func: Any,
        input: Any,
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Any:
        check_dense(func, cls, ways, weight)
        if (max_norm is not None or scale_grad_by_freq) and ways.gaps(input):
            raise DispatchError(
                f"{func.__name__}: max_norm and scale_grad_by_freq look at every stored index of {ways.shown(input)}, "
                f"those that do not exist as well; use JaggedTensor.from_tensors(x.to_tensors())"
            )
        options = padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse
        return ways.cut(input, func(ways.clean(input), weight, *options))


def check_dense(func: Any, cls: Any, ways: Entrywise, *parameters: Any) -> None:
    """Raises unless the parameters of a layer are dense."""
    for p in parameters:
        if isinstance(p, cls):
            raise DispatchError(f"{func.__name__}: expected dense parameters, got {ways.shown(p)}")


# ---- products --------------------------------------------------------------------------------------------------


def implement_products(cls: Any, ways: Entrywise, multiply: Callable[[Any, Any, Any], Any]) -> None:
    """The rules of matrix products.

    Args:
        cls: the layout.
        ways: for products of each entry with one dense matrix or vector.
        multiply: ``(func, a, b)``: any other product, by a table for each row.
    """

    def is_dense(t: Tensor, *dims: int) -> bool:
        return not isinstance(t, cls) and t.dim() in dims

    @cls.implements(torch.bmm, torch.mm)
    def _(func: Any, input: Any, mat2: Any) -> Any:
        return torch.matmul(input, mat2)

    @cls.implements(torch.matmul)
    def _(func: Any, input: Any, other: Any) -> Any:
        if is_dense(other, 1, 2) and max(ways.rows(input)) < input.dim() - 1:
            return ways.cut(input, torch.matmul(ways.clean(input), other))
        if is_dense(input, 2):
            batch, ragged = ways.rows(other)
            if batch < other.dim() - 2 and ragged == other.dim() - 1:
                return ways.cut(other, torch.matmul(input, ways.clean(other)))
        return multiply(func, input, other)


# ---- losses of classes -----------------------------------------------------------------------------------------


def implement_class_losses(cls: Any, ways: Entrywise, samples: Samples) -> None:
    """The rules of ``cross_entropy`` and ``nll_loss``: the mean or sum over the entries that exist.

    Indices that do not exist are ignored ones, and PyTorch counts the others; probabilities are counted here.
    """

    def beside(func: Any, x: Any, target: Any, dims: int) -> Any:
        """The target as a ragged value with its entries where those of ``x``, of so many dimensions, are."""
        of_classes = target.is_floating_point()
        if not isinstance(target, cls):
            target = (x if of_classes else x.detach().select(1, 0)).like_dense(target)
        places = ways.rows(x) if of_classes else without_classes(ways.rows(x))
        if ways.rows(target) != places or target.dim() != dims - (not of_classes):
            raise DispatchError(
                f"{func.__name__}: {ways.shown(x)} and the target {ways.shown(target)} do not fit together; expected "
                f"logits [N, C] and a target [N], or logits [B, C, T] and a target [B, T]"
            )
        return samples.alongside(func, x, target)

    @cls.implements(F.cross_entropy, F.nll_loss)
    def _(  # noqa: PLR0913
        func: Any,
        input: Any,
        target: Any,
        weight: Tensor | None = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Any:
        if size_average is not None or reduce is not None:
            raise DispatchError(f"{func.__name__}: size_average and reduce are deprecated; use reduction")
        dims = input.dim()
        if not isinstance(input, cls) or dims < 2 or 1 in ways.rows(input):
            raise DispatchError(
                f"{func.__name__}: expected ragged logits [N, C] of merged dimensions, or [B, C, T], got "
                f"{ways.shown(input)} beside {ways.shown(target)}; write x.flatten(0, 1) or x.transpose(1, 2)"
            )
        target = beside(func, input, target, dims)
        of_classes = target.is_floating_point()
        counted_here = reduction == "none" or (of_classes and ways.gaps(input))
        smoothing = {"label_smoothing": label_smoothing} if func is F.cross_entropy else {}
        loss = func(
            samples.clean(input, 0),
            samples.clean(target, 0 if of_classes else ignore_index),
            weight=weight,
            ignore_index=ignore_index,
            reduction="none" if counted_here else reduction,
            **smoothing,
        )
        if not counted_here:
            return loss
        loss = samples.cut(input, loss, without_classes(ways.rows(input)))
        return reduced(func, loss, reduction)


def without_classes(rows: tuple[int, int]) -> tuple[int, int]:
    """Where the rows are once dimension 1 is gone."""
    batch, ragged = rows
    return batch - (batch > 1), ragged - (ragged > 1)
