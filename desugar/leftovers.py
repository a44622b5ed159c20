"""Tensors of a trace that outlive it, because the function put them somewhere: refused, for they hold no data."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from types import FrameType

from torch import Tensor
from torch.autograd.function import FunctionCtx

from desugar.errors import DesugarError
from desugar.outputs import Outputs, replayed_views
from subclasses.autograd import Primal


def check_leftovers(made: Iterable[weakref.ref[Tensor]], outputs: Outputs) -> None:
    """Raises when a list, a hook's store or a cache of the user's holds a tensor of the trace that has ended.

    Args:
        made: What torch functions gave in the trace.
        outputs: Its results; the views among them are held to be taken again.
    """
    expected = {id(view) for view in replayed_views(outputs)}
    if not _others(made, expected):
        return
    gc.collect()
    left = _others(made, expected)
    inside = {id(tensor.__dict__) for tensor in left}
    for tensor in left:
        holders = _holders(tensor, left, inside)
        if holders:
            raise DesugarError(
                f"a tensor of size {tuple(tensor.shape)} that the function computes is kept for later "
                f"(in a {' or '.join(holders)}; by a hook, for instance), and holds no data after a trace",
                instead="return it, or run this part in eager mode; what is kept now is to be cleared",
            )


def _holders(tensor: Tensor, left: list[Tensor], inside: set[int]) -> list[str]:
    """The types of the Python objects that hold a tensor.

    One that only C++ holds, as the views of a result hold what they were taken from, is no user's; nor is what is
    inside of it, or noted for a backward.
    """
    found: set[str] = set()
    held_by = gc.get_referrers(tensor)
    for holder in held_by:  # a generator would be one of the referrers
        if holder is not left and id(holder) not in inside and not _is_for_a_backward(holder, {id(held_by)}):
            found.add(type(holder).__name__)
    return sorted(found)


def _is_for_a_backward(holder: object, ours: set[int], depth: int = 3) -> bool:
    """Whether an object belongs to a node of an autograd graph, and to nothing else."""
    if isinstance(holder, (FunctionCtx, Primal)):
        return True
    if depth == 0 or not isinstance(holder, (list, tuple, dict)):
        return False
    owners = gc.get_referrers(holder)
    is_owned = False
    for owner in owners:
        if id(owner) in ours or type(owner) is FrameType:
            continue
        if not _is_for_a_backward(owner, {*ours, id(owners)}, depth - 1):
            return False
        is_owned = True
    return is_owned


def _others(made: Iterable[weakref.ref[Tensor]], expected: set[int]) -> list[Tensor]:
    alive = [tensor for ref in made if (tensor := ref()) is not None]
    return [tensor for tensor in alive if id(tensor) not in expected]
