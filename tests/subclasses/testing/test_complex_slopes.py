"""Gradients of a class that shows complex numbers and holds real ones are compared with differences too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from subclasses import Outer, TensorSubclass, inner
from subclasses.testing import examine
from subclasses.testing.runner import PROMISES


class Polar(TensorSubclass, fallback="materialize"):
    """Complex numbers by magnitude and phase."""

    radius: Tensor = inner()
    phase: Tensor = inner()

    @staticmethod
    def outer(radius, phase):
        return Outer(
            radius.shape, dtype=torch.complex64 if radius.dtype == torch.float32 else torch.complex128
        )

    def materialize(self):
        return torch.complex(self.radius * self.phase.cos(), self.radius * self.phase.sin())


@pytest.mark.parametrize("detaches", [True, False])
def test_a_rule_that_detaches_one_of_two_is_found(detaches):
    cls = type("Ruled", (Polar,), {})

    @cls.implements(torch.ops.aten.neg.default)
    def _(func, x):
        return cls(-x.radius, x.phase.detach() if detaches else x.phase.clone())

    others = {p.name for p in PROMISES} - {"read_gradients"}
    report = examine(lambda: cls(torch.rand(4, 6) + 0.5, torch.randn(4, 6)), paths={}, skip=others)
    (outcome,) = (o for o in report.outcomes if o.promise.name == "read_gradients")
    assert outcome.state == ("broken" if detaches else "kept"), outcome
    if detaches:
        assert "the gradient of radius, phase through -x is wrong" in outcome.detail
