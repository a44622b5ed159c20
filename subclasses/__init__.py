"""Tensor subclasses from declarations."""

from subclasses.errors import DispatchError, SpecError

__all__ = ["DispatchError", "SpecError"]
