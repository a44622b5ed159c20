"""A declared class, of a module that can be imported where a program is loaded."""

from __future__ import annotations

from torch import Tensor

from subclasses import TensorSubclass, inner, static


class Pair(TensorSubclass, fallback="map"):
    first: Tensor = inner()
    second: Tensor = inner()
    tag: str = static(default="")
