"""Classes that are right, of kinds that the kit has to know: they keep every promise."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from subclasses import Outer, TensorSubclass, inner, static
from subclasses.testing import PATHS, examine
from subclasses.testing.runner import PROMISES


class OneHot(TensorSubclass, fallback="materialize"):
    """Rows that it makes of labels: no inner tensor is differentiable."""

    labels: Tensor = inner(dtype=torch.int64)
    count: int = static()

    @staticmethod
    def outer(labels, count):
        return Outer((*labels.shape, count), dtype=torch.float32)

    def materialize(self):
        return F.one_hot(self.labels, self.count).float()


def make_one_hot():
    return OneHot(torch.randint(0, 6, (4,)), count=6)


def test_a_class_of_integers_alone_keeps_all_promises():
    report = examine(make_one_hot, paths={})
    assert report.broken == [], report.details()


def test_compiled_gradients_of_a_class_of_integers_alone():
    others = {p.name for p in PROMISES} - {"compiled_gradients"}
    paths = {name: compile for name, compile in PATHS.items() if name == "torch.compile"}
    report = examine(make_one_hot, paths=paths, skip=others)
    assert [o.promise.name for o in report.of("kept")] == ["compiled_gradients"], report.details()
