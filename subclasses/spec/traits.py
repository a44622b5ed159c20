"""The kind of a class, and traits that follow from it, which ops, autograd and optimizers read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from subclasses.errors import SpecError, check_keyword

# A value is one plain tensor, stored in another way; or its inner tensors.
KINDS = ("representation", "structure")


@dataclass(frozen=True)
class Traits:
    """Traits of a class that ops, autograd and optimizers read.

    Attributes:
        is_representation: Whether a value is the plain tensor that it materializes to.
        has_cotangents: Whether the cotangents of the class have a class of their own. A cotangent of a ragged class is
            a value.
        is_mapped: Whether an op without a rule runs on each inner tensor.
        trainable: Whether an optimizer steps the inner tensors of a Parameter.
        pulls_back: Whether a plain gradient of the outer size is converted to a cotangent, by ``wrap_cotangent``, whose
            default is the derivative of ``materialize``. Otherwise a mapped class passes it to each inner tensor.
    """

    is_representation: bool
    has_cotangents: bool
    is_mapped: bool
    trainable: bool
    pulls_back: bool

    @property
    def meets_plain_cotangents(self) -> bool:
        """Whether autograd may add a plain gradient to a cotangent of the class; ragged classes have a rule for it."""
        return self.pulls_back and self.has_cotangents

    @property
    def has_leaf_cotangents(self) -> bool:
        """Whether the gradient of a leaf is a cotangent, and not a plain tensor or a value."""
        return self.has_cotangents and (self.trainable or not self.is_representation)


def traits_of(cls: Any, *, wraps: bool) -> Traits:
    """Returns the traits of a class with a declaration.

    Args:
        cls: The class.
        wraps: Whether its author defines ``wrap_cotangent``.
    """
    spec = cls.__spec__
    is_mapped = spec.fallback == "map"
    has_cotangents = not cls._is_ragged
    is_representation = has_cotangents and spec.kind == KINDS[0]
    pulls_back = wraps or (spec.has_materialize and not is_mapped)
    return Traits(is_representation, has_cotangents, is_mapped, spec.trainable, pulls_back)


def default_kind(fallback: Any, has_materialize: bool) -> str:
    """Returns the kind of a class that does not declare it."""
    return KINDS[0] if has_materialize and fallback != "map" else KINDS[1]


def check_kind(spec: Any) -> None:
    """Raises SpecError unless the fallback and the methods of a declaration allow its kind."""
    check_keyword(spec.kind in KINDS, f"{spec.name}: expected kind in {KINDS}", spec.kind)
    if spec.kind == KINDS[1]:
        return
    if spec.fallback == "map":
        raise SpecError(
            f'{spec.name}: kind="representation" with fallback="map": an op runs on each inner tensor, so a value is '
            f"its inner tensors",
            code="keyword-conflict",
            hint="leave kind out",
        )
    if not spec.has_materialize:
        raise SpecError(
            f'{spec.name}: kind="representation" needs a method `materialize(self) -> Tensor` that returns the plain '
            f"tensor which a value represents",
            code="materialize-missing",
        )
