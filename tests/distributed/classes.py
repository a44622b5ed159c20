"""The declared classes that the cases distribute."""

from __future__ import annotations

from torch import Tensor

from subclasses import TensorSubclass, inner


class Pair(TensorSubclass, fallback="map"):
    """Two tensors of one size; each op runs on both."""

    first: Tensor = inner()
    second: Tensor = inner()


class Scaled(TensorSubclass, fallback="materialize", trainable=True):
    """A matrix whose rows are scaled; both are trained."""

    matrix: Tensor = inner()
    scale: Tensor = inner()

    def materialize(self) -> Tensor:
        return self.matrix * self.scale
