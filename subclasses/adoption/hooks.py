"""``adopt``: the hooks of ``torch.compile`` and of loading, for a class of another library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from subclasses.adoption.contexts import ADOPTED, is_adopted, is_constant
from subclasses.adoption.flatten_purity import flattens_to_constants
from subclasses.adoption.flattening import Adoption
from subclasses.adoption.unflattening import building_unflatten
from subclasses.base import TensorSubclass
from subclasses.errors import SpecError, check_keyword, one_of
from subclasses.methods.compile_cache import stable_hash
from subclasses.serialize import allow_class

Class = TypeVar("Class", bound=type[Tensor])


def adopt(cls: Class, *, to_plain: Callable[[Any], Tensor] | None = None) -> Class:
    """Adds to a class written by hand the hooks of PyTorch that it lacks; its own hooks stay.

    The class is changed in place and returned, so that all values that its library makes have the hooks, also older
    values. A class that was adopted is returned as it is, if ``to_plain`` is the same or omitted.

    - ``__tensor_flatten__`` returns its names and metadata from a table, if the class's own method is proved to depend
      on attributes of the value alone. A dict or a list of metadata becomes a constant one: hashable, and equal
      metadata is one object. So guards compare identities, and the class may be an inner tensor of another.
    - ``__tensor_unflatten__`` builds a value by one call, if the class's own method only makes a wrapper that holds
      the inner tensors. The first value of a kind (metadata, dtypes, devices) is the proof.
    - ``__metadata_guard__`` compares constant metadata by identity, which also distinguishes ``1`` and ``True``.
    - ``_stable_hash_for_caching`` is a key for compiled programs on disk. It changes with the files of the class and
      its bases, the version of its package, and its metadata. PyTorch's own key does not contain the code.
    - ``__coerce_same_metadata_as_tangent__`` makes a gradient of the class plain, by ``to_plain``, if a compiled
      function was traced with a plain gradient.
    - ``torch.load(weights_only=True)`` may load the class. The user allows other types in its metadata with
      :func:`torch.serialization.add_safe_globals`.

    Two things are required of the class: a list or dict that is an attribute of the class is not modified in place, and
    ``__tensor_unflatten__`` has no effect besides its result.

    Args:
        cls: a traceable wrapper subclass.
        to_plain: returns the plain tensor that a gradient of the class represents, such as ``Cls.dequantize``.
            Default: the method ``dequantize`` or ``materialize`` that the class itself has, if any.

    Raises:
        SpecError: ``cls`` is not such a class, or is declared with ``TensorSubclass``, which has all of this. Also if
            ``to_plain`` is not a function, or differs from the ``to_plain`` of an earlier adoption.
    """
    _check(cls)
    check_keyword(
        to_plain is None or callable(to_plain),
        f"adopt: to_plain= takes a function from {one_of(cls)} to a plain tensor, such as {cls.__name__}.dequantize",
        to_plain,
    )
    if is_adopted(cls):
        _check_same_conversion(cls, to_plain)
        return cls
    to_plain = to_plain or _own_conversion(cls)
    missing = {name: hook for name, hook in _hooks(cls, to_plain).items() if not hasattr(cls, name)}
    adoption, unflatten = None, classmethod(building_unflatten(cls))
    if flattens_to_constants(cls):
        # The method is as cheap as can be, and nothing of its result needs a guard.
        missing.pop("__metadata_guard__", None)
    else:
        adoption = Adoption(cls, guards_identity="__metadata_guard__" in missing)
        cls.__tensor_flatten__ = adoption.build()  # type: ignore[attr-defined]
    cls.__tensor_unflatten__ = unflatten  # type: ignore[attr-defined]
    for name, hook in missing.items():
        setattr(cls, name, hook)
    setattr(cls, ADOPTED, adoption)
    setattr(cls, _CONVERSION, to_plain and staticmethod(to_plain))
    allow_class(cls)
    return cls


def _check(cls: Any) -> None:
    """Checks that a class can be adopted.

    Raises:
        SpecError: it cannot.
    """
    if not isinstance(cls, type) or not issubclass(cls, Tensor):
        shown = cls.__name__ if isinstance(cls, type) else f"{one_of(type(cls))}"
        raise SpecError(
            f"adopt: expected a class derived from torch.Tensor, got {shown}", code="adopt-refused"
        )
    if issubclass(cls, TensorSubclass):
        raise SpecError(
            f"adopt: {cls.__name__} is declared with TensorSubclass and has all hooks", code="adopt-refused"
        )
    missing = [n for n in ("__tensor_flatten__", "__tensor_unflatten__") if not hasattr(cls, n)]
    if missing:
        raise SpecError(
            f"adopt: {cls.__name__} has no {' and no '.join(missing)}, so PyTorch's compilers do not know its inner "
            "tensors",
            code="adopt-refused",
            hint="define both, or declare the class with TensorSubclass",
        )


# The attribute of an adopted class that holds its ``to_plain``.
_CONVERSION = "_adopted_conversion"


def _check_same_conversion(cls: Any, to_plain: Callable[[Any], Tensor] | None) -> None:
    """Checks that a second adoption of a class has the same ``to_plain``.

    Raises:
        SpecError: it has another, and programs that were compiled since use the first.
    """
    known = getattr(cls, _CONVERSION)
    if to_plain is not None and to_plain != known:
        how = "without to_plain=" if known is None else f"with to_plain={known!r}"
        raise SpecError(
            f"adopt: {cls.__name__} is adopted already, {how}, got to_plain={to_plain!r}",
            code="adopt-refused",
            hint="adopt it once, with the function that converts its gradients",
        )


def _hooks(cls: Any, to_plain: Callable[[Any], Tensor] | None) -> dict[str, Any]:
    """Returns the hooks of an adopted class by name."""

    def __metadata_guard__(cls: Any, saved: Any, now: Any) -> bool:
        if is_constant(saved) and is_constant(now):
            return saved is now
        return bool(saved == now)

    def __coerce_same_metadata_as_tangent__(self: Any, metadata: Any, expected_type: Any = None) -> Any:
        return to_plain(self) if expected_type is Tensor and to_plain is not None else None

    return {
        "__metadata_guard__": classmethod(__metadata_guard__),
        "__coerce_same_metadata_as_tangent__": __coerce_same_metadata_as_tangent__,
        "_stable_hash_for_caching": stable_hash,
    }


def _own_conversion(cls: Any) -> Callable[[Any], Tensor] | None:
    """Returns the method of a class that returns the plain tensor that a value represents, if it has one."""
    names = ("dequantize", "materialize")  # every Tensor has a `dequantize`
    return next(
        (f for n in names if (f := getattr(cls, n, None)) and f is not getattr(Tensor, n, None)), None
    )
