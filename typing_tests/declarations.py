"""The types of a declared class, as `make lint` checks them with pyright.

An error that is expected carries an ignore, and pyright reports an ignore that ignores nothing.
"""

# pyright: strict, reportUnnecessaryTypeIgnoreComment=true, reportPrivateUsage=false
from __future__ import annotations

from typing import Any, assert_type

import torch
import torch.nn.functional as F
from torch import Tensor

import subclasses
from subclasses import Coverage, DispatchError, Outer, SpecError, TensorSubclass, dynamic, inner, static


class Weight(TensorSubclass, size_from="qdata", dtype_from="scale", fallback="materialize"):
    qdata: Tensor = inner(dtype=torch.int8)
    scale: Tensor = inner()
    zero: Tensor | None = inner(optional=True, default=None)
    axis: int = static(default=0)
    length: int = dynamic()

    def materialize(self) -> Tensor:
        return self.qdata.to(self.scale.dtype) * self.scale

    @staticmethod
    def outer(qdata: Tensor, length: int) -> Outer:
        return Outer((length, *qdata.shape))


class Child(Weight, fallback="error", decompose=[torch.ops.aten.silu.default]):
    note: str = static(default="")


q, s = torch.ones(2, 2, dtype=torch.int8), torch.ones(2, 1)

# ---- the constructor ---------------------------------------------------------------------------------------

w = Weight(q, s, length=3)
assert_type(w, Weight)
assert_type(Weight(q, s, None, axis=1, length=3), Weight)
assert_type(Child(q, s, s, length=3, note="n"), Child)

Weight(q, length=3)  # pyright: ignore[reportCallIssue] - the scale is missing
Weight(q, s)  # pyright: ignore[reportCallIssue] - so is the length
Weight(q, s, None, 1, length=3)  # pyright: ignore[reportCallIssue] - metadata is given by keyword
Weight(q, 1.0, length=3)  # pyright: ignore[reportArgumentType]
Weight(q, s, length="3")  # pyright: ignore[reportArgumentType]
Weight(q, s, length=3, axes=1)  # pyright: ignore[reportCallIssue]

# ---- attributes --------------------------------------------------------------------------------------------

assert_type(w.qdata, Tensor)
assert_type(w.zero, Tensor | None)
assert_type(w.axis, int)
assert_type(w.length, int)
assert_type(w.shape, torch.Size)
assert_type(w.unwrap("scale"), Tensor)
assert_type(w.unwrap(), tuple[Any, ...])
assert_type(w.materialize(), Tensor)

assert_type(w.detach(), Weight)
assert_type(w.clone(), Weight)
assert_type(w * 2, Any)
assert_type(2 / w, Any)

w.unwrap(1)  # pyright: ignore[reportArgumentType]

# ---- rules -------------------------------------------------------------------------------------------------


@Weight.implements(F.linear, torch.ops.aten.mul.Tensor, torch.ops.aten.add, torch.Tag.pointwise)
def rule(func: Any, x: Tensor, w: Weight, bias: Tensor | None = None) -> Tensor:
    return func(x, w.unwrap("scale"), bias)


assert_type(rule(F.linear, s, w), Tensor)

# ---- keywords, coverage, errors ----------------------------------------------------------------------------


class Wrong(TensorSubclass, fallback="maps"):  # pyright: ignore[reportArgumentType, reportGeneralTypeIssues]
    a: Tensor = inner()


assert_type(subclasses.coverage(Weight), Coverage)
assert_type(subclasses.coverage(Weight).counts, dict[str, int])
not_found: type[NotImplementedError] = DispatchError
wrong: type[TypeError] = SpecError

with subclasses.strict():
    pass

# The generated methods have their text, as README shows.
for method in (Weight.__tensor_flatten__, Weight.__tensor_unflatten__, Weight.__torch_dispatch__):
    assert_type(method.__source__, Any)
