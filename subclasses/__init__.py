"""Declares traceable wrapper subclasses of ``torch.Tensor`` and generates their methods."""

from subclasses.releases import lacking as _lacking

try:
    from subclasses.adoption.hooks import adopt
    from subclasses.base import TensorSubclass
    from subclasses.dispatch.coverage import Coverage, coverage
    from subclasses.errors import DispatchError, SpecError
    from subclasses.rules.families import arithmetic, comparisons, reductions
    from subclasses.spec.constants import constant
    from subclasses.spec.fields import Outer, dynamic, inner, static
    from subclasses.strict_mode import strict
except (AttributeError, ImportError) as _error:
    if (_lacks := _lacking(_error)) is not None:
        raise _lacks from _error
    raise

# The version of both packages; pyproject.toml reads this literal.
__version__ = "0.1.0"

__all__ = [
    "Coverage",
    "DispatchError",
    "Outer",
    "SpecError",
    "TensorSubclass",
    "adopt",
    "arithmetic",
    "comparisons",
    "constant",
    "coverage",
    "dynamic",
    "inner",
    "reductions",
    "static",
    "strict",
]
