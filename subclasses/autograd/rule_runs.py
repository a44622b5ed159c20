"""Runs of rules for ops where autograd records, for their derivatives.

A rule works with raw inner tensors. Where it runs for its derivative, the inner tensors of its operands are
differentiable functions, and so are those of what it makes on the way, as of a value in another unit that a method of
the class returns: reading them raw must not end the gradient.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import apply_function, skip_frames
from subclasses.autograd.history_errors import composite_error, refuse_tangents


class _Run(threading.local):
    is_recorded = False
    is_written = False


_RUN = _Run()


@contextlib.contextmanager
def _marked(mark: str) -> Iterator[None]:
    before = getattr(_RUN, mark)
    setattr(_RUN, mark, True)
    try:
        yield
    finally:
        setattr(_RUN, mark, before)


def recorded_rule() -> AbstractContextManager[None]:
    """Marks that a rule for an op runs where autograd records."""
    return _marked("is_recorded")


def in_recorded_rule() -> bool:
    """Whether a rule for an op runs where autograd records, in this thread."""
    return _RUN.is_recorded


def read_before_write() -> AbstractContextManager[None]:
    """Marks that a value is read which is written to next: what a backward needs of it is copied."""
    return _marked("is_written")


def saved(inners: Iterable[Tensor]) -> list[Tensor]:
    """Returns inner tensors without a derivative, such as a mask, as a backward keeps them."""
    return [t.clone() for t in inners] if _RUN.is_written else list(inners)


def keep_readable(x: Any, inners: Sequence[Tensor | None]) -> None:
    """Lets a value that such a rule made hold the differentiable functions themselves, for raw reads."""
    for name, t in zip(type(x).__spec__.attributes, inners, strict=True):
        if t is not None and t.requires_grad:
            x.__dict__[name] = t


class Read(torch.autograd.Function):
    """Inner tensors of a value, with the derivatives of what its rule computes; views, as those of Unwrap are."""

    jvp = staticmethod(refuse_tangents)

    @staticmethod
    def forward(raw: tuple[Tensor, ...], *parts: Tensor) -> tuple[Tensor, ...]:
        """Returns the inner tensors that the value holds; `parts` are the same as the rule computes them again."""
        return tuple([t[...] if t.__class__ is Tensor else torch.ops.aten.alias.default(t) for t in raw])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keeps nothing; an absent cotangent stays absent."""
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        """Returns the cotangents for `parts`."""
        return None, *cotangents

    @staticmethod
    def vmap(info: Any, in_dims: Any, raw: tuple[Tensor, ...], *parts: Tensor) -> tuple[Any, Any]:
        """Reads batched inner tensors, whose batch dims are those of the results."""
        return apply_function(Read, raw, *parts), tuple(None for _ in parts)


def hook_rule(t: Tensor, made: Any) -> None:
    """Lets the node of a tensor that a rule made give gradients by the rule, and not by PyTorch's formula.

    Args:
        t: the tensor, plain or a value.
        made: has the sources of the gradients, and ``pull_back``, which computes them.
    """
    node: Any = t.grad_fn
    edges = [apply_function(_Probe, s).grad_fn.next_functions[0] for s in made.sources]
    places = [next((i for i, e in enumerate(node.next_functions) if e == edge), None) for edge in edges]
    rules = node.metadata.setdefault(_RULES, {})  # output -> (made, places)
    if not rules:
        node.register_hook(partial(_by_rules, rules))
    rules[t.output_nr] = made, places


class _Probe(torch.autograd.Function):
    """Leads to where a tensor's gradient goes; PyTorch's way there is a view, for which a class may have a rule."""

    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        """Returns any tensor."""
        return torch.zeros(())


_RULES = "the rules that made its outputs"


def _by_rules(
    rules: dict[int, Any], by_formula: tuple[Any, ...], gradients: tuple[Any, ...]
) -> tuple[Any, ...] | None:
    """Replaces the gradients of a node by those of the rules for its outputs."""
    found: dict[int, Any] = {}
    for number, gradient in enumerate(gradients):
        if gradient is None:
            continue
        made, places = rules.get(number, (None, [None]))
        if None in places:
            raise composite_error()
        for place, one in zip(places, made.pull_back(gradient), strict=True):
            before = found.get(place)
            found[place] = one if before is None else before if one is None else before + one
    return tuple([None if g is None else found.get(i) for i, g in enumerate(by_formula)]) if found else None


skip_frames(_by_rules)
