"""Tensor subclasses from declarations."""

from subclasses.base import TensorSubclass
from subclasses.errors import DispatchError, SpecError
from subclasses.fields import Outer, dynamic, inner, static
from subclasses.strictness import strict

__all__ = ["DispatchError", "Outer", "SpecError", "TensorSubclass", "dynamic", "inner", "static", "strict"]
