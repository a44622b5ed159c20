"""Tensors of a trace that outlive it, because the function put them somewhere: refused, for they hold no data."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable

from torch import Tensor

from desugar.errors import DesugarError
from desugar.outputs import Outputs, replayed_views


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
    inside of it.
    """
    held_by = (
        holder for holder in gc.get_referrers(tensor) if holder is not left and id(holder) not in inside
    )
    return sorted({type(holder).__name__ for holder in held_by})


def _others(made: Iterable[weakref.ref[Tensor]], expected: set[int]) -> list[Tensor]:
    alive = [tensor for ref in made if (tensor := ref()) is not None]
    return [tensor for tensor in alive if id(tensor) not in expected]
