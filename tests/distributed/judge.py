"""Compares the results of a case on a rank with its results elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import optree
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


@dataclass
class Record:
    """The results of a run."""

    facts: list[Any] = field(default_factory=list)  # types, placements and sizes on this rank
    own: list[Any] = field(default_factory=list)  # the values on this rank
    whole: list[Any] = field(default_factory=list)  # the values that they are parts of

    def add(self, result: Any) -> None:
        """Notes one result while it is as it is; a collective if it is distributed."""
        for leaf in optree.tree_leaves(result, none_is_leaf=True):
            for facts, value in _parts(leaf):
                self.facts.append(facts)
                self.own += [] if value is None else [value]
            complete = _full_tensor(leaf) if isinstance(leaf, DTensor) else leaf
            self.whole += [value for _, value in _parts(complete) if value is not None]


def record(results: Iterable[Any]) -> Record:
    """Runs a case."""
    found = Record()
    for result in results:
        found.add(result)
    return found


class RanksDisagree(Exception):
    """The ranks have different sizes or placements of one tensor."""


def _full_tensor(x: DTensor) -> Tensor:
    """The whole of it, where all ranks would send and receive the same."""
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, f"size {tuple(x.shape)}, {x.placements}, {x.dtype}")
    if len(set(said)) > 1:
        raise RanksDisagree(" and ".join(said))
    return x.full_tensor()


def _parts(x: Any) -> Iterator[tuple[Any, Any]]:
    """Yields each layer of a result from the outside in: its facts, and its value if it is not a wrapper."""
    x = x.wait() if isinstance(x, AsyncCollectiveTensor) else x
    if not isinstance(x, Tensor):
        yield type(x).__name__, x
        return
    facts = type(x).__name__, tuple(x.shape), x.dtype, x.requires_grad
    if isinstance(x, DTensor):
        yield (*facts, x.placements, tuple(x.device_mesh.shape)), None
        yield from _parts(x._local_tensor.detach())
    elif is_traceable_wrapper_subclass(x):
        names, context = x.__tensor_flatten__()
        yield (*facts, str(context)), None
        for name in names:
            yield from _parts(getattr(x, name).detach())
    else:
        yield ("Tensor", *facts[1:]), x.detach().clone()


def difference(got: list[Any], want: list[Any], tolerance: float) -> str:
    """Says which values differ; empty if none do. Dtypes may."""
    if len(got) != len(want):
        return f"{len(got)} values, expected {len(want)}"
    differences = (_difference(g, w, tolerance) for g, w in zip(got, want, strict=True))
    return next(filter(None, differences), "")


def _difference(got: Any, want: Any, tolerance: float) -> str:
    if not isinstance(got, Tensor) or not isinstance(want, Tensor):
        return "" if got == want else f"{got!r}, expected {want!r}"
    if got.shape != want.shape:
        return f"size {tuple(got.shape)}, expected {tuple(want.shape)}"
    same = torch.allclose(got.double(), want.double(), tolerance, tolerance, equal_nan=True)
    return "" if same else "other numbers"


def difference_of_facts(got: list[Any], want: list[Any]) -> str:
    """Says where types, placements or sizes differ; empty if they do not."""
    if len(got) != len(want):
        return f"{len(got)} parts, expected {len(want)}"
    return next((f"{g}, expected {w}" for g, w in zip(got, want, strict=True) if g != w), "")
