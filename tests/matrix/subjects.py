"""The classes of the matrix: how plain tensors make a value, and which plain tensors the value represents.

An op on a value is judged by the same op on plain tensors. For a class that maps, these are its inner tensors. For one
that materializes, it is the tensor that it represents. A structure with rules of its own brings plain functions of its
inner tensors, one for each op.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from examples.classes.log_probability import LogProbability
from examples.classes.low_rank import LowRank
from examples.classes.quaternion import Quaternion
from subclasses.ragged import JaggedTensor
from tests.subclasses.subjects import Nested, Optional, Pair, Scaled, Tagged

Plain = tuple[Tensor, ...]


@dataclass(frozen=True)
class Subject:
    """One class, as the matrix tries it.

    Attributes:
        sizes: The sizes of the differentiable inner tensors.
        build: Makes a value of the inner tensors.
        read: Returns the plain tensors for which a value stands, as functions of the value.
        plain: Returns the same plain tensors from the inner tensors.
        copies: Whether a view of a value is a copy, and a write to a value is refused.
        kinds: The kinds of ops that the class has.
        own: For a structure with rules, the plain function of each op that it has; others are not tried.
    """

    name: str
    sizes: tuple[tuple[int, ...], ...]
    build: Callable[..., Any]
    read: Callable[[Any], Plain]
    plain: Callable[..., Plain] = lambda *inners: inners
    copies: bool = False
    kinds: frozenset[str] = frozenset()
    own: Mapping[str, Callable[..., Any]] = field(default_factory=dict)

    def inners(self, seed: int) -> Plain:
        """Returns leaves for the inner tensors, in float64, so that second derivatives can be compared."""
        make = torch.Generator().manual_seed(seed)
        return tuple(
            (torch.rand(size, dtype=torch.float64, generator=make) + 0.5).requires_grad_()
            for size in self.sizes
        )

    def has(self, op: Any) -> bool:
        """Whether an op is tried of this class."""
        if self.copies and op.name == "x[:, 1:3].mul_":
            return False  # a write to a copy
        return op.name in self.own if self.own else not self.kinds or op.kind in self.kinds


def _read_mapped(x: Any) -> Plain:
    return tuple(t for inner in x.unwrap() if inner is not None for t in _read(inner))


def _read(t: Any) -> Plain:
    return _read_mapped(t) if hasattr(type(t), "__spec__") else (t,)


def _materialized(x: Any) -> Plain:
    return (x.materialize(),) if hasattr(type(x), "__spec__") else (x,)


def _hamilton(p: Tensor, q: Tensor) -> Tensor:
    (a, b, c, d), (e, f, g, h) = p.unbind(-1), q.unbind(-1)
    return torch.stack(
        [
            a * e - b * f - c * g - d * h,
            a * f + b * e + c * h - d * g,
            a * g - b * h + c * e + d * f,
            a * h + b * g - c * f + d * e,
        ],
        -1,
    )


_ROWS = torch.tensor([0, 1, 1, 3])  # one row, an empty one, and one of two entries

SUBJECTS = [
    Subject("pair", ((3, 4), (3, 4)), Pair, _read_mapped),
    Subject("nested", ((3, 4),) * 3, lambda a, b, c: Nested(Pair(a, b), c), _read_mapped),
    Subject("tagged", ((3, 4),), lambda a: Tagged(a, tag="t", length=7), _read_mapped),
    Subject("optional", ((3, 4),), Optional, _read_mapped),
    Subject("scaled", ((3, 4), ()), Scaled, _materialized, lambda a, factor: (a * factor,), copies=True),
    Subject("low rank", ((3, 2), (2, 4)), LowRank, _materialized, lambda a, b: (a @ b,), copies=True),
    Subject(
        "jagged",
        ((3, 4),),
        lambda a: JaggedTensor(a, _ROWS),
        lambda x: (x.values,),
        kinds=frozenset({"pointwise", "pointwise of two", "pointwise write"}),
    ),
    Subject(
        "quaternion",
        ((3, 4),),
        Quaternion,
        lambda x: (x.unwrap("parts"),) if isinstance(x, Quaternion) else (x,),
        own={
            "x * y": _hamilton,
            "x * 2": lambda p, q: p * 2,
            "x + y": lambda p, q: p + q,
            "x - y": lambda p, q: p - 2 * q,
            "-x": lambda p, q: -p,
            "x[0]": lambda p, q: p[0],
            "abs": lambda p, q: torch.linalg.vector_norm(p, dim=-1),
            "unsqueeze": lambda p, q: p.unsqueeze(0),
            "clone": lambda p, q: p.clone(),
        },
    ),
    Subject(
        "log probability",
        ((3, 4),),
        LogProbability,
        lambda x: (x.unwrap("values"),) if isinstance(x, LogProbability) else (x,),
        own={
            "x * y": lambda p, q: p + q,
            "x / y": lambda p, q: p - q,
            "x + y": torch.logaddexp,
            "x * 2": lambda p, q: p + torch.tensor(2.0).log(),
            "sum(1)": lambda p, q: p.logsumexp(1),
            "transpose": lambda p, q: p.mT,
            "x[0]": lambda p, q: p[0],
            "reshape": lambda p, q: p.reshape(2, 6),
            "clone": lambda p, q: p.clone(),
        },
    ),
]
